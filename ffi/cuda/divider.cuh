// Division by a number that only the host knows, without a division.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxsoft::cuda {

// Divides numbers below 2^31 by a multiplication and a shift (Granlund, Montgomery, *Division by invariant integers
// using multiplication*, 1994).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;
  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    while ((uint64_t(1) << shift) < by) shift++;
    multiplier = static_cast<uint32_t>((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  __device__ uint32_t quotient(uint32_t x) const { return (__umulhi(x, multiplier) + x) >> shift; }
};

}  // namespace jaxsoft::cuda
