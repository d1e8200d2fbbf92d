// Vectors of the instruction set that a kernel is compiled for.
//
// They are the vector types of GCC and Clang. A file with kernels is compiled once for each instruction set, each time
// with another JAXSOFT_ISA. All names live in the namespace JAXSOFT_ISA and no template of the standard library is
// used, so that the linker can never hand code with AVX-512 instructions to the baseline build.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define JAXSOFT_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define JAXSOFT_VECTOR_BYTES 32
#else
#define JAXSOFT_VECTOR_BYTES 16
#endif

namespace JAXSOFT_ISA {

#define JAXSOFT_VECTOR(name, element, bytes) typedef element name __attribute__((vector_size(bytes)))
JAXSOFT_VECTOR(F32, float, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(I32, int32_t, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(U32, uint32_t, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(U16, uint16_t, JAXSOFT_VECTOR_BYTES / 2);  // as many lanes as F32
JAXSOFT_VECTOR(F32Half, float, JAXSOFT_VECTOR_BYTES / 2);
JAXSOFT_VECTOR(F64, double, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(I64, int64_t, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(U64, uint64_t, JAXSOFT_VECTOR_BYTES);
JAXSOFT_VECTOR(U8OfF32, uint8_t, JAXSOFT_VECTOR_BYTES / 4);  // as many lanes as F32, and as F64
JAXSOFT_VECTOR(U8OfF64, uint8_t, JAXSOFT_VECTOR_BYTES / 8);
#undef JAXSOFT_VECTOR

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Loads the first `count` lanes from p; the others are those of `rest`. Nothing past p + count is touched.
template <class V, class T>
inline V load_first(const T* p, int64_t count, V rest) {
#if defined(__AVX512F__)
  const auto mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 8) return (V)_mm512_mask_loadu_pd((__m512d)rest, mask, p);
  if constexpr (sizeof(T) == 4) return (V)_mm512_mask_loadu_ps((__m512)rest, mask, p);
  if constexpr (sizeof(T) == 2) return (V)_mm256_mask_loadu_epi16((__m256i)rest, mask, p);
  if constexpr (sizeof(T) == 1 && sizeof(V) == 16) return (V)_mm_mask_loadu_epi8((__m128i)rest, mask, p);
#elif defined(__AVX2__)
  static const int32_t lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  if constexpr (sizeof(T) >= 4) {
    __m256i mask;
    memcpy(&mask, lanes + 8 - count * sizeof(T) / 4, sizeof mask);
    const __m256 first = _mm256_maskload_ps((const float*)p, mask);
    return (V)_mm256_blendv_ps((__m256)rest, first, (__m256)mask);
  }
#endif
  memcpy(&rest, p, count * sizeof(T));
  return rest;
}
// Stores the first `count` lanes of v. Nothing past p + count is touched.
template <class V, class T>
inline void store_first(T* p, V v, int64_t count) {
#if defined(__AVX512F__)
  const auto mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(p, mask, (__m512d)v);
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, mask, (__m512)v);
  if constexpr (sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, mask, (__m256i)v);
#endif
  memcpy(p, &v, count * sizeof(T));
}

// Widens bytes to lanes. GCC would convert a whole vector element by element.
#if defined(__AVX512F__)
inline I32 widen(U8OfF32 bytes) { return (I32)_mm512_cvtepu8_epi32((__m128i)bytes); }
inline I64 widen(U8OfF64 bytes) { return (I64)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(bits<int64_t>(bytes))); }
#elif defined(__AVX2__)
inline I32 widen(U8OfF32 bytes) { return (I32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits<int64_t>(bytes))); }
inline I64 widen(U8OfF64 bytes) { return (I64)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bits<int32_t>(bytes))); }
#else
inline I32 widen(U8OfF32 bytes) { return __builtin_convertvector(bytes, I32); }
inline I64 widen(U8OfF64 bytes) { return __builtin_convertvector(bytes, I64); }
#endif

// A mask: all bits of a lane are set where the bool at p is true, or everywhere if p is null, but not past `count`.
template <class U8, class Mask>
inline Mask load_mask(const bool* p, int64_t count) {
  U8 raw = U8{} + 1;
  if (count >= (int64_t)sizeof raw) {
    if (p) memcpy(&raw, p, sizeof raw);
  } else {
    raw = load_first(p ? p : (const bool*)&raw, count, U8{});
  }
  return widen(raw) != 0;
}
inline I32 load_mask(const bool* p, int64_t count, F32) { return load_mask<U8OfF32, I32>(p, count); }
inline I64 load_mask(const bool* p, int64_t count, F64) { return load_mask<U8OfF64, I64>(p, count); }

// One bit for each lane of a comparison.
template <class Mask>
inline uint32_t lane_bits(Mask mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof mask[0] == 4) return _mm512_movepi32_mask((__m512i)mask);
  else return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if constexpr (sizeof mask[0] == 4) return _mm256_movemask_ps((__m256)mask);
  else return _mm256_movemask_pd((__m256d)mask);
#else
  uint32_t bits = 0;
  for (unsigned i = 0; i < sizeof mask / sizeof mask[0]; i++) bits |= (mask[i] & 1u) << i;
  return bits;
#endif
}

// Keeps the compiler from fusing a product with an addition that follows. The maximum m is one of the rounded products
// x * scale. If x * scale - m were fused, its product would not be rounded, and the difference would be wrong by the
// rounding error. Where f32 scores are beyond 2^31, that is more than exp can take.
template <class V>
inline V rounded(V product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#else
  asm("" : "+w"(product));
#endif
  return product;
}

inline F32 maximum(F32 a, F32 b) { return b > a ? b : a; }  // a NaN in b is passed over
inline F64 maximum(F64 a, F64 b) { return b > a ? b : a; }

// Adds to a sum in f64, so that the length of a row costs no accuracy.
inline F64 plus(F64 sum, F64 v) { return sum + v; }
inline F64 plus(F64 sum, F32 v) {
  F32Half low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, (const char*)&v + sizeof low, sizeof high);
  return sum + (__builtin_convertvector(low, F64) + __builtin_convertvector(high, F64));
}

// Folds the upper half of a vector onto the lower one until 16 bytes are left.
template <class Scalar, class V, class Fold>
inline Scalar reduce(V v, Fold fold) {
  if constexpr (sizeof(V) > 16) {
    typedef Scalar Half __attribute__((vector_size(sizeof(V) / 2)));
    Half low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char*)&v + sizeof low, sizeof high);
    return reduce<Scalar>((Half)fold(low, high), fold);
  } else {
    Scalar r = v[0];
    for (unsigned i = 1; i < sizeof(V) / sizeof(Scalar); i++) r = fold(r, (Scalar)v[i]);
    return r;
  }
}
template <class Scalar, class V>
inline Scalar reduce_max(V v) {
  return reduce<Scalar>(v, [](auto a, auto b) { return b > a ? b : a; });
}
inline double reduce_sum(F64 v) {
  return reduce<double>(v, [](auto a, auto b) { return a + b; });
}

}  // namespace JAXSOFT_ISA
