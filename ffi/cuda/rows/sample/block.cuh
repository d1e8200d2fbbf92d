// What the blocks of a cluster, and the threads of a block, do together: barriers, access to each other's shared
// memory, sums and scans.
#pragma once

#include "../../hopper.cuh"
#include "tuning.h"

namespace jaxsoft::cuda {

// A sum of weights in units of 2^-octaves. Sums of whole numbers are exact in any order, and so are the same for every
// number of blocks and threads that a row is cut over.
using Mass = unsigned long long;

// The block's number in its cluster, and the number of blocks there. Before Hopper every block is alone.
__device__ inline unsigned block_of_row() {
  if constexpr (kHopperCode) return block_in_cluster();
  else return 0;
}
__device__ inline unsigned blocks_of_row() {
  if constexpr (kHopperCode) return blocks_of_cluster();
  else return 1;
}

// The whole part of a / b, for small numbers, for which an approximate quotient is near enough.
__device__ inline unsigned small_quotient(unsigned a, unsigned b) {
  return static_cast<unsigned>(__fdividef(a + 0.5f, static_cast<float>(b)));
}

// A barrier for all threads of the cluster. What they have written to shared memory before is seen by all after it.
__device__ inline void synchronize_row() {
  if constexpr (kHopperCode) {
    publish_to_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
}

// Waits until the bytes that are sent to a barrier have come. That takes less time than a barrier of the cluster, which
// waits for all that the threads have written anywhere.
__device__ inline void wait_for_sent(const Barrier& arrived) {
  if constexpr (kHopperCode) arrived.wait(0);
}
// Sends a value to the same variable in another block of a cluster of several.
template <class V>
__device__ void send_to_block(const V& value, V* variable, const Barrier& arrived, unsigned block) {
  if constexpr (kHopperCode) send(value, variable, arrived, block);
}

// The same variable in the shared memory of another block of the cluster.
template <class V>
__device__ V* in_block_of_row(V* variable, unsigned block) {
  if constexpr (kHopperCode) return in_block(variable, block);
  else return variable;
}

constexpr unsigned kWholeWarp = 0xffffffffu;

// The sum of the warp's values, in three pieces, each of which is summed up at once.
__device__ inline Mass sum_of_warp(Mass value) {
  constexpr int bits = 22;
  constexpr uint32_t piece = (1 << bits) - 1;
  const Mass low = __reduce_add_sync(kWholeWarp, static_cast<uint32_t>(value) & piece);
  const Mass middle = __reduce_add_sync(kWholeWarp, static_cast<uint32_t>(value >> bits) & piece);
  const Mass high = __reduce_add_sync(kWholeWarp, static_cast<uint32_t>(value >> 2 * bits));
  return low + (middle << bits) + (high << 2 * bits);
}

// The sum of the values of this lane and of those before it. Only the first `lanes` need it.
template <class V>
__device__ V scan_of_warp(V value, int lanes = 32) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= lanes) break;
    const V before = __shfl_up_sync(kWholeWarp, value, step);
    if (threadIdx.x % 32 >= step) value += before;
  }
  return value;
}

// The sum of the values of this thread and of those before it, and that of all threads. `warps` has a place for each
// warp of the block, and is not in use by threads that have not come here.
template <class V>
__device__ V scan_of_block(V value, V* warps, V& all) {
  value = scan_of_warp(value);
  if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = value;
  __syncthreads();
  const V other = threadIdx.x % 32 < SampleCode::warps ? warps[threadIdx.x % 32] : V(0);
  const V until = scan_of_warp(other);
  all = __shfl_sync(kWholeWarp, until, SampleCode::warps - 1);
  return __shfl_sync(kWholeWarp, until - other, threadIdx.x / 32) + value;
}

// The sum of all threads' values. `warps` is as above.
__device__ inline Mass sum_of_block(Mass value, Mass* warps) {
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < SampleCode::warps ? warps[threadIdx.x % 32] : Mass(0));
}

}  // namespace jaxsoft::cuda
