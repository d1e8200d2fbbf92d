// A row in the registers of a cluster of blocks. Every operand is read once, and there is nothing to set up as in a
// persistent kernel: few rows begin at once, and of many rows a multiprocessor has the parts of several, of which one
// is read while another is written.
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
template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
__global__ void __launch_bounds__(Clustered::bound(layout == Layout::whole), Clustered::blocks(layout == Layout::whole))
    clustered(const __grid_constant__ Arguments<T> args) {
  if constexpr (kChosenHere<Strategy::clustered, Op<T>, T, Form, kPacks>) {
    struct alignas(16) State {
      uint64_t words[2];
    };
    __shared__ State states[Clustered::most_blocks];
    __shared__ Barrier arrived;
    const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster(), lane = threadIdx.x % 32;
    const int64_t index = blockIdx.x / blocks;
    Row<Op, T, Form, layout> row(args, index);
    const int shift = __ffs(blocks) - 1, end = row.window.packs * (rank + 1) >> shift;
    const int first = (row.window.packs * rank >> shift) + threadIdx.x;
    Pack<T> pa[kPacks], pb[kPacks];
    row.load(first, blockDim.x, end, pa, pb);

    if (threadIdx.x == 0) {
      arrived.init(1);
      show_barriers();
    }
    __syncwarp();  // the compiler lets the whole warp initialise the barrier, and racecheck sees every lane do it
    if (threadIdx.x == 0) arrived.arrive_expecting(blocks * sizeof(State));
    __syncwarp();
    arrive_at_cluster();
    auto merge_blocks = [&](auto part) {
      wait_for_cluster();
      State state{};
      memcpy(&state, &part, sizeof part);
      if (threadIdx.x < blocks) send(state, &states[rank], arrived, lane);
      arrived.wait(0);
      memcpy(&part, &states[lane % blocks], sizeof part);
      return reduce_lanes<T>(part, blocks);
    };
    typename Op<T>::Part part;
    if constexpr (Op<T>::separates_maximum && kPacks > 4) {  // in one pass it would need too many registers
      __shared__ Accumulator<T> shared[3][32];
      part = merge_blocks(reduce_registers<Op<T>>(pa, pb, row.form, end - first, blockDim.x, shared));
    } else {
      part = reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); }, [&](const auto& of_thread) {
        return merge_blocks(reduce_threads<T>(of_thread));
      });
    }
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

template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
cudaError_t launch_clustered(const Arguments<T>& args, int64_t packs, int blocks, cudaStream_t stream) {
  auto kernel = clustered<Op, T, Form, kPacks, layout>;
  cudaLaunchAttribute attribute = in_clusters_of(static_cast<unsigned>(blocks));
  cudaLaunchConfig_t config{dim3(blocks), dim3(Clustered::threads), 0, stream, &attribute, 1};
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
