// The soft cap of vectors, cap * tanh(x / cap), and its derivative.
//
// With u = x / cap and e = exp(-2 |u|), tanh(|u|) is (1 - e) / (1 + e). Where |u| is small, 1 - e would lose the digits
// of u, so there the result is x + x u^2 P(u^2), where P is the Chebyshev interpolation of (tanh(u) / u - 1) / u^2 for
// |u| < 0.35. Its error relative to the result is 1.7e-9 for f32 and 3.6e-17 for f64. NaN stays NaN.
#pragma once

#include "exp.h"

namespace JAXSOFT_ISA {

// P of v = u^2.
inline F32 tanh_rest(F32 v) {
  F32 p = v * 0x1.450690p-6f - 0x1.b8dc36p-5f;
  p = p * v + 0x1.110f20p-3f;
  return p * v - 0x1.555554p-2f;
}
inline F64 tanh_rest(F64 v) {
  F64 p = v * 0x1.fd1540a741a01p-12 - 0x1.786403676bff8p-10;
  p = p * v + 0x1.d68f7d66ea3cep-9;
  p = p * v - 0x1.226d3ceec2115p-7;
  p = p * v + 0x1.664f44a989999p-6;
  p = p * v - 0x1.ba1ba1b298019p-5;
  p = p * v + 0x1.111111110e445p-3;
  return p * v - 0x1.5555555555550p-2;
}

// exp(-2 |u|).
template <class V>
inline V exp_of_twice(V u) {
  return exp((u < 0 ? u : -u) * 2);
}

template <class V, class S>
inline V soft_cap(V x, S cap) {
  const V u = x * (1 / cap), v = u * u, e = exp_of_twice(u);
  const V y = cap * ((1 - e) / (1 + e));
  return v < (S)(0.35 * 0.35) ? x + x * v * tanh_rest(v) : x < 0 ? -y : y;
}

template <class V, class S>
inline V soft_cap_slope(V x, S cap) {
  const V e = exp_of_twice(x * (1 / cap));
  return 4 * e / ((1 + e) * (1 + e));
}

}  // namespace JAXSOFT_ISA
