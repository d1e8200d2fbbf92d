// The arithmetic of scores with extras: a product that is rounded, and the soft cap.
#pragma once

#include "../exponential.cuh"

namespace jaxsoft::cuda {

// A product that the compiler may not fuse with an addition.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The soft cap, cap * tanh(x / cap). The approximation for 16 bits errs by 2^-21 of the cap. Where |x| is less than a
// quarter of the cap, the first four terms of the series take its place, which err by 2^-21 of x. So the error is at
// most 2^-19 of the value, less than 16 bits resolve. Caps are from 1e-30 to 1e30, as the losses allow.
template <class T, class A>
__device__ A soft_cap(A x, A cap) {
  if constexpr (sizeof(T) == 2) {
    const A u = x * (1 / cap), v = u * u;
    const A y = cap - __fdividef(2 * cap, 1 + exp2_approximately(2 * A(kLog2E) * fabs(u)));
    const A series = x + x * (v * (v * (A(2.0 / 15) - v * A(17.0 / 315)) - A(1.0 / 3)));
    return v < A(1.0 / 16) ? series : x < 0 ? -y : y;  // NaN stays NaN
  } else {
    return cap * tanh(x / cap);
  }
}
// The derivative of the soft cap. For 16 bits it errs by at most 2^-16 of itself, where |x| is less than 40 caps.
template <class T, class A>
__device__ A cap_slope(A x, A cap) {
  if constexpr (sizeof(T) == 2) {
    const A e = exp2_approximately(-2 * A(kLog2E) * fabs(x * (1 / cap)));
    return __fdividef(4 * e, (1 + e) * (1 + e));
  } else {
    const A e = exp(-2 * fabs(x) / cap);
    return 4 * e / ((1 + e) * (1 + e));
  }
}

}  // namespace jaxsoft::cuda
