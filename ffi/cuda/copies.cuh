// Asynchronous copies into shared memory by single threads (cp.async, from Ampere on). They take no registers while
// they are in flight.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxsoft::cuda {

// The address that PTX instructions on shared memory take.
__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 4, 8 or 16 bytes. Both addresses must be multiples of that number. Until the next barrier, only the thread
// that has copied may read them.
template <int bytes>
__device__ void copy_access(void* to, const void* from) {
  const uint32_t shared = shared_address(to);
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(bytes) : "memory");
}
// Waits until all copies of the calling thread are complete.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace jaxsoft::cuda
