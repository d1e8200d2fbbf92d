// Vectors, number formats and exp for the CPU kernels.
//
// Everything here is written with the vector types of GCC and Clang, whose width is fixed by the instruction set
// that the file is compiled for. rows.cc is compiled once for each instruction set, each time with another
// JAXSOFT_ISA; all names live in the namespace JAXSOFT_ISA, and no template of the standard library is used, so
// that the linker can never hand code with AVX-512 instructions to the baseline build.
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
JAXSOFT_VECTOR(U8OfF32, uint8_t, JAXSOFT_VECTOR_BYTES / 4);  // as many lanes as F32, as F64
JAXSOFT_VECTOR(U8OfF64, uint8_t, JAXSOFT_VECTOR_BYTES / 8);
#undef JAXSOFT_VECTOR

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// A 16-bit number in memory. Arithmetic is in f32.
struct BFloat16 { uint16_t raw; };
struct Float16 { uint16_t raw; };

inline F32 widen(U16 raw, BFloat16) { return bits<F32>(__builtin_convertvector(raw, U32) << 16); }

inline U16 narrow(F32 x, BFloat16) {  // to nearest, ties to even; a NaN stays a NaN
  U32 u = bits<U32>(x);
  U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
#if defined(__AVX512F__)  // without the detour through a vector of comparisons that GCC takes
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  return (U16)_mm512_cvtepi32_epi16(_mm512_mask_mov_epi32((__m512i)rounded, nan, _mm512_set1_epi32(0x7fc0)));
#else
  U32 quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector(x != x ? quiet : rounded, U16);
#endif
}

#if defined(__AVX512F__)
inline F32 widen(U16 raw, Float16) { return (F32)_mm512_cvtph_ps((__m256i)raw); }
inline U16 narrow(F32 x, Float16) { return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
inline F32 widen(U16 raw, Float16) { return (F32)_mm256_cvtph_ps((__m128i)raw); }
inline U16 narrow(F32 x, Float16) { return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline F32 widen(U16 raw, Float16) {
  U32 u = __builtin_convertvector(raw, U32), magnitude = u & 0x7fffu, sign = (u & 0x8000u) << 16;
  // No f32 below the normal numbers may take part: XLA's threads treat those as 0.
  F32 subnormal = __builtin_convertvector(bits<I32>(magnitude), F32) * 0x1p-24f;
  U32 normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000u;
  U32 result = magnitude < 0x400u ? bits<U32>(subnormal) : normal;
  result = magnitude >= 0x7c00u ? special : result;
  return bits<F32>(sign | result);
}
inline U16 narrow(F32 x, Float16) {  // to nearest, ties to even
  U32 u = bits<U32>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  U32 normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Adding 0.5 lets the floating-point unit round a subnormal: its last place is then 2^-24.
  U32 subnormal = bits<U32>(bits<F32>(a) + 0.5f) - 0x3f000000u;
  U32 result = a < 0x38800000u ? subnormal : normal;
  result = a >= 0x477ff000u ? (U32{} + 0x7c00u) : result;
  result = a > 0x7f800000u ? (U32{} + 0x7e00u) : result;
  return __builtin_convertvector(sign | result, U16);
}
#endif

// The first `count` elements at p and the rest of `rest`, and v's first elements to p. Nothing past them is touched.
template <class V, class T>
inline V load_first(const T* p, int64_t count, V rest) {
#if defined(__AVX512F__)
  const auto mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 8) return (V)_mm512_mask_loadu_pd((__m512d)rest, mask, p);
  if constexpr (sizeof(T) == 4) return (V)_mm512_mask_loadu_ps((__m512)rest, mask, p);
  if constexpr (sizeof(T) == 2) return (V)_mm256_mask_loadu_epi16((__m256i)rest, mask, p);
  if constexpr (sizeof(T) == 1 && sizeof(V) == 16) return (V)_mm_mask_loadu_epi8((__m128i)rest, mask, p);
#elif defined(__AVX2__)
  static const int32_t marks[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  if constexpr (sizeof(T) >= 4) {
    __m256i mask;
    memcpy(&mask, marks + 8 - count * sizeof(T) / 4, sizeof mask);
    const __m256 first = _mm256_maskload_ps((const float*)p, mask);
    return (V)_mm256_blendv_ps((__m256)rest, first, (__m256)mask);
  }
#endif
  memcpy(&rest, p, count * sizeof(T));
  return rest;
}
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

// Lanes<T>: how elements of type T are loaded into vectors of the type that they are computed in, and stored.
// A partial load fills the lanes past `count` with `fill`.
template <class T>
struct Lanes16 {
  typedef F32 V;
  typedef float Scalar;
  static constexpr int64_t lanes = sizeof(F32) / sizeof(float);
  static V load(const T* p) {
    U16 raw;
    memcpy(&raw, p, sizeof raw);
    return widen(raw, T{});
  }
  static void store(T* p, V v) {
    U16 raw = narrow(v, T{});
    memcpy(p, &raw, sizeof raw);
  }
  static V load_part(const T* p, int64_t count, float fill) {
    return widen(load_first(p, count, narrow(V{} + fill, T{})), T{});
  }
  static void store_part(T* p, V v, int64_t count) { store_first(p, narrow(v, T{}), count); }
};

template <class T, class Vector>
struct LanesNative {
  typedef Vector V;
  typedef T Scalar;
  static constexpr int64_t lanes = sizeof(V) / sizeof(T);
  static V load(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(T* p, V v) { memcpy(p, &v, sizeof v); }
  static V load_part(const T* p, int64_t count, T fill) { return load_first(p, count, V{} + fill); }
  static void store_part(T* p, V v, int64_t count) { store_first(p, v, count); }
};

template <class T> struct Lanes;
template <> struct Lanes<BFloat16> : Lanes16<BFloat16> {};
template <> struct Lanes<Float16> : Lanes16<Float16> {};
template <> struct Lanes<float> : LanesNative<float, F32> {};
template <> struct Lanes<double> : LanesNative<double, F64> {};

// Loads a vector where `count` elements are left, at least one.
template <class T>
inline typename Lanes<T>::V load(const T* p, int64_t count, typename Lanes<T>::Scalar fill) {
  return count >= Lanes<T>::lanes ? Lanes<T>::load(p) : Lanes<T>::load_part(p, count, fill);
}

// Bytes as lanes. GCC takes a wide conversion apart, element by element.
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

// The lanes whose bool is true, as all bits; those past `count` are not. Without bools, all others are.
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

// A bit for each lane of a comparison.
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

// A product that is rounded before anything is added to it. Fused with what follows, x * scale - m would not be the
// score of which m is the maximum: of scores past 1e9 the two differ by more than exp can take.
template <class V>
inline V rounded(V product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#else
  asm("" : "+w"(product));
#endif
  return product;
}

// x, or the limit that it is beyond; a NaN stays. Of constants GCC makes comparisons, which take twice as long.
template <class V>
inline V clamped(V x, V low, V high) {
#if defined(__AVX512F__)
  if constexpr (sizeof x[0] == 4) return (V)_mm512_max_ps((__m512)low, _mm512_min_ps((__m512)high, (__m512)x));
  else return (V)_mm512_max_pd((__m512d)low, _mm512_min_pd((__m512d)high, (__m512d)x));
#elif defined(__AVX2__)
  if constexpr (sizeof x[0] == 4) return (V)_mm256_max_ps((__m256)low, _mm256_min_ps((__m256)high, (__m256)x));
  else return (V)_mm256_max_pd((__m256d)low, _mm256_min_pd((__m256d)high, (__m256d)x));
#else
  x = x > high ? high : x;
  return x < low ? low : x;
#endif
}

// exp, within 1 unit in the last place, gradual underflow and NaN included: x = n log 2 + r, |r| <= log(2)/2, and
// exp(r) = 1 + r + r^2 P(r), where P is the Chebyshev interpolation of (exp(r) - 1 - r) / r^2 on that interval
// (its error relative to exp(r): 1.0e-8 for f32, 9.7e-17 for f64). 2^n is applied by an instruction for
// that, or as two factors, as n may lie outside the exponents that one of them can have. `exp_of_rest` is exp(r).
inline F32 exp_of_rest(F32 x, F32 n) {
  F32 r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  F32 p = r * 0x1.6d1109p-10f + 0x1.120b6ep-7f;
  p = p * r + 0x1.555519p-5f;
  p = p * r + 0x1.5554dcp-3f;
  p = p * r + 0x1p-1f;
  return p * (r * r) + r + 1.0f;
}
inline F32 exp(F32 x) {
  x = clamped(x, F32{} - 105.0f, F32{} + 89.0f);
  const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  F32 t = x * 0x1.715476p0f + round;
  F32 n = t - round, p = exp_of_rest(x, n);
#if defined(__AVX512F__)
  return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  I32 e = bits<I32>(t) - bits<int32_t>(round);
  I32 e1 = e >> 1, e2 = e - e1;
  return p * bits<F32>((e1 + 127) << 23) * bits<F32>((e2 + 127) << 23);
#endif
}

inline F64 exp(F64 x) {
  x = clamped(x, F64{} - 750.0, F64{} + 710.0);
  const double round = 0x1.8p52;
  F64 t = x * 0x1.71547652b82fep0 + round;
  F64 n = t - round;
  F64 r = (x - n * 0x1.62e42fefa0000p-1) - n * 0x1.cf79abc9e3b3ap-40;
  F64 p = r * 0x1.b3848ca9b1b6ep-26 + 0x1.28da951ff5a73p-22;
  p = p * r + 0x1.71dbc8cd404e5p-19;
  p = p * r + 0x1.a01977bb1c123p-16;
  p = p * r + 0x1.a01a0274bd48ap-13;
  p = p * r + 0x1.6c16c18a18cefp-10;
  p = p * r + 0x1.11111110f56e5p-7;
  p = p * r + 0x1.5555555551058p-5;
  p = p * r + 0x1.5555555555596p-3;
  p = p * r + 0x1.0000000000003p-1;
  p = p * (r * r) + r + 1.0;
#if defined(__AVX512F__)
  return (F64)_mm512_scalef_pd((__m512d)p, (__m512d)n);
#else
  I64 e = bits<I64>(t) - bits<int64_t>(round);
  I64 e1 = e >> 1, e2 = e - e1;
  return p * bits<F64>((e1 + 1023) << 52) * bits<F64>((e2 + 1023) << 52);
#endif
}

// exp of x <= 0 as a term of a sum, or of NaN: what f32 has only below its normal numbers is 0. 2^n has one factor then.
inline F32 exp_term(F32 x) {
  const float round = 0x1.8p23f;
  F32 t = x * 0x1.715476p0f + round;
  F32 n = t - round;
  F32 p = exp_of_rest(x, n) * bits<F32>((bits<I32>(t) << 23) + bits<int32_t>(1.0f));
  return x < -87.33f ? F32{} : p;
}
inline F64 exp_term(F64 x) { return exp(x); }

inline F32 maximum(F32 a, F32 b) { return b > a ? b : a; }  // a NaN in b is passed over
inline F64 maximum(F64 a, F64 b) { return b > a ? b : a; }

// Widens to double before adding, so that the length of a row costs no accuracy.
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
