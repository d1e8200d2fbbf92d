// Few rows: each in the registers of a cluster of blocks. Every operand is read once, and there is nothing to set up as
// in a persistent kernel.
//
// The blocks exchange their states by Hopper's st.async, which stores into another block's shared memory and counts at
// a barrier there. Every block then merges all states, in the same order.
#pragma once

#include <cstring>

#include "../attributes.cuh"
#include "../devices.cuh"
#include "../hopper.cuh"
#include "compiled.cuh"
#include "reduce.cuh"
#include "row.cuh"

namespace jaxsoft::cuda {

// A cluster has a row, and a block at most blockDim.x * kPacks packs of it.
template <template <class> class Op, class T, class Form, int kPacks>
__global__ void __launch_bounds__(Clustered::threads) clustered(const __grid_constant__ Arguments<T> args) {
  if constexpr (kChosenHere<Strategy::clustered, Op<T>, T, Form, kPacks>) {
    struct alignas(16) State {
      uint64_t words[2];
    };
    __shared__ State states[Clustered::most_blocks];
    __shared__ Barrier arrived;
    const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster(), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      arrived.init(1);
      show_barriers();
    }
    __syncwarp();  // the compiler lets the whole warp initialise the barrier, and racecheck sees every lane do it
    if (threadIdx.x == 0) arrived.arrive_expecting(blocks * sizeof(State));
    __syncwarp();
    arrive_at_cluster();

    const int64_t index = blockIdx.x / blocks;
    Row<Op, T, Form> row(args, index);
    const int shift = __ffs(blocks) - 1, end = row.window.packs * (rank + 1) >> shift;
    const int first = (row.window.packs * rank >> shift) + threadIdx.x;
    Pack<T> pa[kPacks], pb[kPacks];
    row.load(first, blockDim.x, end, pa, pb);
    auto part = reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); }, [&](const auto& of_thread) {
      auto whole = reduce_threads<T>(of_thread);
      wait_for_cluster();
      State state{};
      memcpy(&state, &whole, sizeof whole);
      if (threadIdx.x < blocks) send(state, &states[rank], arrived, lane);
      arrived.wait(0);
      memcpy(&whole, &states[lane % blocks], sizeof whole);
      return reduce_lanes<T>(whole, blocks);
    });
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0 && rank == 0);
    if constexpr (Op<T>::writes) {
#pragma unroll
      for (int k = 0; k < kPacks; k++) {
        int at = first + k * blockDim.x;
        if (at < end) row.write(at, values, pa[k], pb[k]);
      }
    }
  }
}

template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_clustered(const Arguments<T>& args, int64_t packs, int blocks, cudaStream_t stream) {
  auto kernel = clustered<Op, T, Form, kPacks>;
  cudaLaunchAttribute attribute = in_clusters_of(static_cast<unsigned>(blocks));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Clustered::threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  static Devices<Clustered::most_blocks + 1> clusters_at_once;
  if (auto e = clusters_at_once.once(blocks, &clusters, [&](int* found) {
        return find_clusters(kernel, config, found);
      }))
    return e;
  if (clusters == 0) return cudaErrorInvalidClusterSize;
  int64_t part = (packs + blocks - 1) / blocks;
  int64_t threads = ((part + kPacks - 1) / kPacks + 31) / 32 * 32;
  config.gridDim = dim3(static_cast<unsigned>(args.rows * blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace jaxsoft::cuda
