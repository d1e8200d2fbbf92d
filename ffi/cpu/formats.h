// The number formats of arrays: how f16, bf16, f32 and f64 are loaded from memory as vectors, and stored.
#pragma once

#include "simd.h"

namespace JAXSOFT_ISA {

// Numbers of 16 bits in memory. Arithmetic is in f32.
struct BFloat16 { uint16_t raw; };
struct Float16 { uint16_t raw; };

inline F32 widen(U16 raw, BFloat16) { return bits<F32>(__builtin_convertvector(raw, U32) << 16); }

inline U16 narrow(F32 x, BFloat16) {  // to nearest, ties to even; a NaN stays a NaN
  U32 u = bits<U32>(x);
  U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
#if defined(__AVX512F__)  // GCC would first make a vector of the comparison's results
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

// Lanes<T> loads elements of type T into vectors of the type that they are computed in, and stores them. A partial load
// fills the lanes past `count` with `fill`.
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

// Loads a vector, or part of one where fewer elements are left: `count` is at least 1.
template <class T>
inline typename Lanes<T>::V load(const T* p, int64_t count, typename Lanes<T>::Scalar fill) {
  return count >= Lanes<T>::lanes ? Lanes<T>::load(p) : Lanes<T>::load_part(p, count, fill);
}

}  // namespace JAXSOFT_ISA
