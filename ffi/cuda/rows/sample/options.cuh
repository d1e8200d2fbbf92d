// The options of a row, and what follows from them.
#pragma once

#include "../sample.cuh"
#include "shared.cuh"

namespace jaxsoft::cuda {

// The options of a row. Out of their range, top-p and min-p leave at least one token.
struct Options {
  float temperature, p, min_p;
  uint32_t k;
  float2 u;  // the random numbers

  // Only starts to read.
  template <class T>
  __device__ Options(const Sampling<T>& call, int64_t row)
      : temperature(call.temperature.at(row)), p(call.top_p.at(row)), min_p(call.min_p.at(row)), k(call.k),
        u(reinterpret_cast<const float2*>(call.uniform)[row]) {}
  __device__ void wait() {
    p = p > 0 ? p : 0.f;
    min_p = min(min_p, 1.f);
    k = temperature == 0 ? 1 : k;
  }
  // 1 / temperature: finite, and so far above 0 that it is normal. Temperatures below 1e-25 are not told apart. NaN
  // where the temperature has no meaning.
  __device__ float scale() const {
    return temperature == 0 ? 1.f : temperature > 0 ? min(max(1 / temperature, 0x1p-126f), 1e25f) : nanf("");
  }
  // The part of a mass that the random numbers are. They are multiples of 2^-23: together a whole number of 46 bits.
  __device__ Mass target(Mass all) const {
    const Mass random = Mass(uint32_t(u.x * 0x1p23f)) << 23 | uint32_t(u.y * 0x1p23f);
    return __umul64hi(random << 18, all);
  }
};

// The part p of a mass, rounded as products of f32 are; at least one unit.
__device__ inline Mass part_of_mass(float p, Mass mass) {
  return max(__float2ull_rn(p * __ull2float_rn(mass)), Mass(1));
}

}  // namespace jaxsoft::cuda
