// A counter from which persistent blocks take what they do next: multiprocessors are not equally fast, and what is
// dealt out in advance waits for the slowest.
#pragma once

#include <cuda_runtime.h>

namespace jaxsoft::cuda {

// The counter's value before 1 is added. Asynchronous until the value is used.
__device__ inline unsigned long long take(unsigned long long* counter) {
  unsigned long long value;
  asm volatile("atom.global.relaxed.gpu.add.u64 %0, [%1], 1;" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

// Where there is enough to take to be `worth` the time, and a workspace, *counter becomes a counter there, at 0.
inline cudaError_t clear_counter(bool worth, void* workspace, cudaStream_t stream, unsigned long long** counter) {
  *counter = worth ? static_cast<unsigned long long*>(workspace) : nullptr;
  return *counter ? cudaMemsetAsync(*counter, 0, sizeof **counter, stream) : cudaSuccess;
}

}  // namespace jaxsoft::cuda
