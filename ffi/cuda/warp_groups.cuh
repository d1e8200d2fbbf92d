// Warp groups: four warps that multiply together on Hopper's tensor cores. Here is what lets the groups of a block have
// different roles: registers that move between them, and barriers for some of the block's threads.
#pragma once

#include <cuda_runtime.h>

#include "anywhere.h"
#include "devices.cuh"

namespace jaxsoft::cuda {

// Whether the code is being compiled for a GPU that has products of warp groups: for sm_90a. PTX for sm_90 has none.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWarpGroupCode = true;
#else
constexpr bool kWarpGroupCode = false;
#endif

// The number of a thread's warp group, which the compiler knows to be the same for all of a warp.
__device__ inline int warp_group() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpGroup, 0); }

// Gives registers back, or takes them, so that each thread of the warp group has `count`, a multiple of 8 from 24 to
// 240. All threads of the group call it. Whoever takes waits until enough have been given back. A block begins with as
// many as it was compiled for.
template <int count>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// One of the block's 16 named barriers, of which 0 is __syncthreads. `threads` of them arrive, in whole warps, of which
// some wait. What those that arrive have written to shared memory before is seen by those that wait.
struct NamedBarrier {
  int id, threads;
  __device__ void wait() const { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
  __device__ void arrive() const { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
  // Waits, and returns whether it is `so` for any of the threads.
  __device__ bool any(bool so) const {
    unsigned found;
    asm volatile(
        "{\n\t.reg .pred own, all;\n\tsetp.ne.u32 own, %1, 0;\n\tbar.red.or.pred all, %2, %3, own;\n\t"
        "selp.u32 %0, 1, 0, all;\n\t}"
        : "=r"(found) : "r"(unsigned(so)), "r"(id), "r"(threads) : "memory");
    return found;
  }
};

// What a kernel that is only asked for its attributes says of the code that runs here: with products of warp groups it
// has other bounds than without.
constexpr int kThreadsWithWarpGroups = 256;
template <int = 0>
__global__ void __launch_bounds__(kWarpGroupCode ? kThreadsWithWarpGroups : kThreadsWithWarpGroups / 2)
    warp_group_kernel() {}

// An error where the kernels that run on the current device were compiled without products of warp groups.
inline cudaError_t need_warp_groups() {
  static Devices<> known;
  int threads = 0;
  if (auto e = known.once(0, &threads, [](int* of_kernel) {
        cudaFuncAttributes attributes;
        const cudaError_t error = cudaFuncGetAttributes(&attributes, warp_group_kernel<>);
        *of_kernel = attributes.maxThreadsPerBlock;
        return error;
      }))
    return e;
  return threads == kThreadsWithWarpGroups ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace jaxsoft::cuda
