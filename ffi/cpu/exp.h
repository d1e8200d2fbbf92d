// exp of vectors.
#pragma once

#include "simd.h"

namespace JAXSOFT_ISA {

// x, limited to the interval [low, high]; a NaN stays NaN. Written as comparisons, this would take twice as long.
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

// exp is within 1 unit in the last place, and right for NaN and where it underflows gradually. x = n log 2 + r with
// |r| <= log(2)/2, and exp(r) = 1 + r + r^2 P(r), where P is the Chebyshev interpolation of (exp(r) - 1 - r) / r^2 on
// that interval; its error relative to exp(r) is 1.0e-8 for f32 and 9.7e-17 for f64. 2^n is applied by an instruction
// for it, or as two factors, as n may lie outside the exponents that one factor can have.

// exp(r), given n.
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

// exp(x) as a term of a sum: x is at most 0, or NaN. Below f32's normal numbers it is 0, so that 2^n is one factor.
inline F32 exp_term(F32 x) {
  const float round = 0x1.8p23f;
  F32 t = x * 0x1.715476p0f + round;
  F32 n = t - round;
  F32 p = exp_of_rest(x, n) * bits<F32>((bits<I32>(t) << 23) + bits<int32_t>(1.0f));
  return x < -87.33f ? F32{} : p;
}
inline F64 exp_term(F64 x) { return exp(x); }

}  // namespace JAXSOFT_ISA
