// Exponentials of different accuracy: of results, and of the terms of a sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

namespace jaxsoft::cuda {

constexpr double kLog2E = 0x1.71547652b82fep0;

__device__ inline float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(x) as exactly as results of type T need it. The hardware's approximation is enough for 16 bits.
template <class T, class A>
__device__ A exponential(A x) {
  if constexpr (sizeof(T) == 2) return exp2_approximately(x * A(kLog2E));
  else if constexpr (sizeof(T) == 4) return expf(x);
  else return exp(x);
}

// exp(x - from), as a term of a sum. The hardware's approximation is enough for f32 here: it errs most where |x - from|
// is large, and there the term is small.
//
// `shifted` saves the subtraction: the term is 2^(x log2(e) - shift), and the product is exact before the shift is
// subtracted. The shift itself is rounded, which multiplies all terms by the same number, exp(from - from). `Running`
// divides by that number in the end. It could overflow where |from| is 2^20 or more, and `may_shift` refuses that.
template <class A>
__device__ bool may_shift(A from) {
  return sizeof(A) == 4 && fabs(from) < A(0x1p20);
}
// The term is a power of 2 in f32, and of e in f64. This is its exponent.
template <bool shifted, class A>
__device__ A exponent(A x, A from) {
  if constexpr (sizeof(A) == 8) return x - from;
  else if constexpr (shifted) return fmaf(x, A(kLog2E), -(from * A(kLog2E)));
  else return (x - from) * A(kLog2E);
}
template <class A>
__device__ A power(A exponent) {
  if constexpr (sizeof(A) == 8) return exp(exponent);
  else return exp2_approximately(exponent);
}
template <class A>
constexpr double kLogBase = sizeof(A) == 8 ? 1 : 0x1.62e42fefa39efp-1;  // the logarithm of the base

template <bool shifted, class A>
__device__ A exponential_term(A x, A from) {
  return power(exponent<shifted>(x, from));
}
template <class A>
__device__ A exponential_term(A x, A from) {
  return may_shift(from) ? exponential_term<true>(x, from) : exponential_term<false>(x, from);
}

// exp(x) / kUnit<T>. The caller multiplies the unit back with its next factor. The approximation flushes results below
// the least normal f32 to 0; in these units the smallest results of bf16 are above that.
template <class T> constexpr double kUnit = std::is_same<T, __nv_bfloat16>::value ? 0x1p-32 : 1;
template <class T> constexpr int kUnitExponent = std::is_same<T, __nv_bfloat16>::value ? -32 : 0;
template <class T, class A>
__device__ A exponential_in_units(A x) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) return exp2_approximately(fmaf(x, A(kLog2E), 32.f));
  else return exponential<T>(x);
}

}  // namespace jaxsoft::cuda
