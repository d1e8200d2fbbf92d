// Few rows: each in the registers of a cluster of blocks, with nothing that a persistent kernel has to set up.
//
// The blocks' states are exchanged by Hopper's st.async, which stores into another block's shared memory and completes
// bytes at a barrier there; every block then merges all of them, in the same order.
#pragma once

#include "ring.cuh"

namespace jaxsoft::cuda {

struct Clustered {
  static constexpr int most_blocks = 16;
  static constexpr int threads = 512;  // of a block, at most
};

// A cluster a row; blockDim.x * kPacks packs a block.
template <template <class> class Op, class T, class Form, int kPacks>
__global__ void __launch_bounds__(Clustered::threads) clustered(const __grid_constant__ Arguments<T> args) {
#if __CUDA_ARCH__ >= 900
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
  __syncwarp();  // the compiler lets the warp make the barrier as one, so to racecheck every lane does
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
#endif
}

template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_clustered(const Arguments<T>& args, int64_t packs, int blocks, cudaStream_t stream) {
  auto kernel = clustered<Op, T, Form, kPacks>;
  static Devices<> prepared;
  if (auto e = prepared.once([&] {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      }))
    return e;
  int64_t part = (packs + blocks - 1) / blocks;
  int64_t threads = ((part + kPacks - 1) / kPacks + 31) / 32 * 32;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows * blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace jaxsoft::cuda
