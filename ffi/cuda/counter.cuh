// Numbers in device memory by which blocks that run at the same time know of each other: a counter from which
// persistent blocks take their next piece of work, and numbers that say how far others are. Multiprocessors are not
// equally fast, so work that is scheduled statically ends when the slowest of them ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxsoft::cuda {

// Adds 1 to the counter and returns its value from before, modulo 2^31. The thread goes on until it uses the value. Of
// an ordinary addition the compiler would make one for all threads of the warp that are there, and wait for it at once.
__device__ inline unsigned take(unsigned long long* counter) {
  unsigned value;
  asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// What a thread has written before it stores or adds a `released` number is seen by a thread that has loaded that
// number `acquired`.
template <class V>
__device__ V load_acquired(const V* from) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  V value;
  if constexpr (sizeof(V) == 8)
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];"
                 : "=l"(reinterpret_cast<uint64_t&>(value)) : "l"(from) : "memory");
  else
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                 : "=r"(reinterpret_cast<uint32_t&>(value)) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_released(int* to, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline void add_released(unsigned* to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Puts a counter that starts at 0 into the workspace, and its address into *counter. *counter becomes null where there
// is no workspace, or where there is too little work for a counter to be `worth` its time.
inline cudaError_t clear_counter(bool worth, void* workspace, cudaStream_t stream, unsigned long long** counter) {
  *counter = worth ? static_cast<unsigned long long*>(workspace) : nullptr;
  return *counter ? cudaMemsetAsync(*counter, 0, sizeof **counter, stream) : cudaSuccess;
}

}  // namespace jaxsoft::cuda
