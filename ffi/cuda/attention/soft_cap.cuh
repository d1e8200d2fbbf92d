// The soft cap of scores, cap tanh(u), where u is a scaled product over the cap.
#pragma once

#include "../exponential.cuh"

namespace jaxsoft::cuda {

// Far below the cap, a capped score is u times a polynomial of u^2, which takes no exponentials. The polynomial is the
// one of its degree that errs least, relative to tanh(u), for |u| up to 0.65: by 1.9e-7.
struct SoftCap {
  static constexpr int degree = 4;
  static constexpr float far_below = 0.65f;  // up to this |u|
  float cap = 0;                 // 0 if there is none
  float ratio = 0;               // u is a product times it
  float terms[degree + 1] = {};  // for results in base 2
  SoftCap() = default;
  SoftCap(float cap, float scale) : cap(cap), ratio(scale / cap) {
    constexpr double of_tanh[] = {1, -0x1.5552012fb947ep-2, 0x1.107257b155897p-3, -0x1.a7711614cf561p-5,
                                  0x1.e55b494bdae11p-7};
    for (int i = 0; i <= degree; i++) terms[i] = static_cast<float>(of_tanh[i] * cap * kLog2E);
  }
  // What to multiply u by, for the score in base 2.
  __device__ float factor(float square) const {
    float sum = terms[degree];
#pragma unroll
    for (int i = degree - 1; i >= 0; i--) sum = fmaf(sum, square, terms[i]);
    return sum;
  }

  // The logistic function of -2 u, which is (1 - tanh(u)) / 2, of any product. The hardware's tanh errs by 5e-4.
  __device__ float logistic(float product) const {
    float result;
    const float of_exponential = 1 + exp2_approximately(product * (2 * float(kLog2E) * ratio));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(of_exponential));
    return result;
  }
};

}  // namespace jaxsoft::cuda
