// The arithmetic of scores with extras: a product that is rounded, and the soft cap.
#pragma once

#include "../exponential.cuh"

namespace jaxsoft::cuda {

// A product that the compiler may not fuse with an addition.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The soft cap, cap * tanh(x / cap). The approximation for 16 bits errs by 2^-22 of the cap, less than they resolve.
template <class T, class A>
__device__ A soft_cap(A x, A cap) {
  if constexpr (sizeof(T) == 2) {
    const A y = cap - 2 * cap / (1 + exp2_approximately(2 * A(kLog2E) * fabs(x) / cap));
    return x < 0 ? -y : y;  // NaN stays NaN
  } else {
    return cap * tanh(x / cap);
  }
}
// The derivative of the soft cap.
template <class A>
__device__ A cap_slope(A x, A cap) {
  const A e = exp(-2 * fabs(x) / cap);
  return 4 * e / ((1 + e) * (1 + e));
}

}  // namespace jaxsoft::cuda
