// Row operations over an axis that is not the last. How they work is explained in columns/kernel.cuh.
//
//   columns/tuning.cuh    the sizes that decide, as data
//   columns/plan.cuh      the choice of a tile, on the host; this file, the launch
//   columns/tile.cuh      a tile, and its arrays in shared memory
//   columns/place.cuh     which of a tile's elements and columns a thread has
//   columns/slots.cuh     a thread's part of shared memory; columns/access.cuh, what it loads and stores at once
//   columns/reduce.cuh, exchange.cuh, write.cuh    the three phases of a tile
//   columns/kernel.cuh    all of it together
#pragma once

#include "../../attributes.cuh"
#include "../../counter.cuh"
#include "../../devices.cuh"
#include "kernel.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda {

// How many tiles a kernel works on at once on a device: the number of clusters that run at the same time or, without
// clusters, of blocks, divided by those that share n. The device is asked once for each number of blocks and share. The
// result is 0 if it does not know clusters of this size.
template <template <class> class Op, class T, int width, bool straddles>
cudaError_t tiles_at_once(const ColumnsDevice& device, const cudaLaunchConfig_t& config, Tile tile, int* tiles) {
  auto kernel = columns<Op, T, width, straddles>;
  constexpr int shares = 16;  // more than blocks ever share a multiprocessor
  static Devices<(ColumnsCode::most_blocks + 1) * shares> known;
  return known.once(tile.blocks * shares + tile.share, tiles, [&](int* found) {
    constexpr auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.of_block)) return e;
    if (auto e = cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared)) return e;
    if (config.numAttrs > 0) {
      if (auto e = find_clusters(kernel, config, found)) return e;
    } else {
      const size_t bytes = config.dynamicSmemBytes;
      if (auto e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(found, kernel, tile.threads, bytes)) return e;
      *found = std::max<int>(1, *found * device.processors / tile.blocks);
    }
    return cudaSuccess;
  });
}

// `tiles` is how many there are. Refused with cudaErrorInvalidClusterSize where the device does not know such clusters.
template <template <class> class Op, class T, int width, bool straddles>
cudaError_t launch_tile(const Arguments<T>& args, const ColumnsDevice& device, Tile tile, int64_t tiles, int few_tiles,
                        void* workspace, cudaStream_t stream) {
  cudaLaunchAttribute attribute = in_clusters_of(tile.blocks);
  const auto bytes = static_cast<size_t>(device.shared(tile.share));
  const bool clustered = Op<T>::reduces && tile.blocks > 1;  // blocks that only share n need not be a cluster
  cudaLaunchConfig_t config{dim3(tile.blocks), dim3(tile.threads), bytes, stream, &attribute, clustered};
  int at_once = 0;
  if (auto e = tiles_at_once<Op, T, width, straddles>(device, config, tile, &at_once)) return e;
  if (at_once == 0) return cudaErrorInvalidClusterSize;
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(tiles, at_once) * tile.blocks));
  // A kernel that writes nothing copies its next tile before a counter would have said which.
  const bool many = Op<T>::reduces && Op<T>::writes && tiles > int64_t(few_tiles) * at_once;
  unsigned long long* counter = nullptr;
  if (auto e = clear_counter(many, workspace, stream, &counter)) return e;
  const TileLayout<ColumnsKind<Op, T, width, straddles>> layout(tile);
  return cudaLaunchKernelEx(&config, columns<Op, T, width, straddles>, args, tile, layout, counter);
}

template <template <class> class Op, class T, int width, bool straddles = false>
cudaError_t launch_tiles(const Arguments<T>& args, void* workspace, cudaStream_t stream) {
  ColumnsDevice device;
  if (auto e = device.read()) return e;
  const ColumnsTuning& tuning = columns_tuning(device.major);
  const TilePlanner<ColumnsKind<Op, T, width, straddles>> planner{args, device, tuning};
  unsigned most_blocks = Op<T>::reduces ? tuning.most_cluster_blocks : ColumnsCode::most_blocks;
  for (;;) {
    const Tile tile = planner.choose(most_blocks);
    const auto error = launch_tile<Op, T, width, straddles>(args, device, tile, planner.tiles(tile.across),
                                                            tuning.few_tiles, workspace, stream);
    if (!is_refused(error)) return error;
    most_blocks = tile.blocks / 2;
  }
}

// `workspace` has room for the counter, or is null.
template <template <class> class Op, class T>
cudaError_t launch_columns(const Arguments<T>& args, void* workspace, cudaStream_t stream) {
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  constexpr int size = Pack<T>::size, least_straddled = 32;  // the fewest columns for which pairs are worth their cost
  if (aligned(args.a) && aligned(args.b) && aligned(args.out)) {
    if (args.inner % size == 0) return launch_tiles<Op, T, size>(args, workspace, stream);
    if constexpr (size > 2)
      if (args.inner % 2 == 0) return launch_tiles<Op, T, 2>(args, workspace, stream);
    if constexpr (sizeof(T) == 2)
      if (args.inner >= least_straddled) return launch_tiles<Op, T, 2, true>(args, workspace, stream);
  }
  return launch_tiles<Op, T, 1>(args, workspace, stream);
}

}  // namespace jaxsoft::cuda
