// The soft cap of scores, cap tanh(u), where u is a scaled product over the cap.
#pragma once

#include <cmath>

#include "../exponential.cuh"

namespace jaxsoft::cuda {

// tanh(u) in some unit as a product times a polynomial of its square, which takes no exponentials. The terms are those
// that err least, relative to tanh(u), for |u| up to a limit. It rises with the product everywhere.
template <int degree>
struct CapPolynomial {
  // Of products that it is for, and of what becomes of them. If it is for none, all products are beyond.
  float largest_square = -1, largest = NAN;
  float terms[degree + 1] = {};
  CapPolynomial() = default;
  CapPolynomial(const double (&of_tanh)[degree + 1], double limit, double unit, double ratio) {
    double power = ratio;
    for (int i = 0; i <= degree; i++, power *= ratio * ratio) {
      terms[i] = static_cast<float>(of_tanh[i] * power * unit);
      if (!std::isnormal(terms[i])) return;  // then it is for no products
    }
    const auto square = static_cast<float>(limit * limit / (ratio * ratio));
    if (std::isnormal(square)) largest_square = square, largest = static_cast<float>(std::tanh(limit) * unit);
  }
  // What to multiply a product by, of which this is the square. `last` is the last term.
  __device__ float factor(float square, float last) const {
    float sum = last;
#pragma unroll
    for (int i = degree - 1; i >= 0; i--) sum = fmaf(sum, square, terms[i]);
    return sum;
  }
};

struct SoftCap {
  float cap = 0;    // 0 if there is none
  float ratio = 0;  // u is a product times it
  // For |u| up to 0.25, with an error of 4.0e-7 before rounding, and up to 0.65, with one of 1.6e-7.
  CapPolynomial<2> far_below;
  CapPolynomial<4> below;
  SoftCap() = default;
  // The polynomials give tanh(u) in this unit.
  SoftCap(float cap, float scale, double unit)
      : cap(cap),
        ratio(scale / cap),
        far_below({0x1.fffff2b95859cp-1, -0x1.55376212ac84fp-2, 0x1.06ff09c9257d6p-3}, 0.25, unit, scale / double(cap)),
        below({0x1.fffffad90f732p-1, -0x1.55508721dfdfcp-2, 0x1.105728025a6bbp-3, -0x1.a608e6c1ff156p-5,
               0x1.df3c1bf54245ap-7},
              0.65, unit, scale / double(cap)) {}

  // The logistic function of -2 u, which is (1 - tanh(u)) / 2, of any product. The hardware's tanh errs by 5e-4.
  __device__ float logistic(float product) const {
    float result;
    const float of_exponential = 1 + exp2_approximately(product * (2 * float(kLog2E) * ratio));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(of_exponential));
    return result;
  }
};

}  // namespace jaxsoft::cuda
