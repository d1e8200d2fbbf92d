// Asynchronous copies into shared memory of what a thread loads at once (Ampere's cp.async): no registers wait for it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxsoft::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 4, 8 or 16 bytes, at a multiple of their number. Only the thread itself sees them without a barrier.
template <int bytes>
__device__ void copy_access(void* to, const void* from) {
  const uint32_t shared = shared_address(to);
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(bytes) : "memory");
}
// Until all that the thread copies is there.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace jaxsoft::cuda
