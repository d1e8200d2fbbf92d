// A counter in device memory, from which persistent blocks take their next piece of work. Multiprocessors are not
// equally fast, so work that is dealt out in advance ends when the slowest of them ends.
#pragma once

#include <cuda_runtime.h>

namespace jaxsoft::cuda {

// Adds 1 to the counter and returns its value from before, modulo 2^31. The thread goes on until it uses the value. Of
// an ordinary addition the compiler would make one for all threads of the warp that are there, and wait for it at once.
__device__ inline unsigned take(unsigned long long* counter) {
  unsigned value;
  asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Puts a counter that starts at 0 into the workspace, and its address into *counter. *counter becomes null where there
// is no workspace, or where there is too little work for a counter to be `worth` its time.
inline cudaError_t clear_counter(bool worth, void* workspace, cudaStream_t stream, unsigned long long** counter) {
  *counter = worth ? static_cast<unsigned long long*>(workspace) : nullptr;
  return *counter ? cudaMemsetAsync(*counter, 0, sizeof **counter, stream) : cudaSuccess;
}

}  // namespace jaxsoft::cuda
