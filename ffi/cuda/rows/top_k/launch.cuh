// The k largest elements of rows, their softmax and the rows' state (m, s), in one read and one kernel.
//
// The elements that a thread has, or those of one tile of them, form groups. About the k-th largest of the groups'
// maxima is a threshold: at least k elements reach it, and hardly more. What reaches it is put into shared memory, as
// keys that are ordered by value and then by index. Which place a key gets there is up to chance, but which keys are
// the k largest is not: the number of greater ones is a key's place in the result. Where many elements are equal to the
// threshold, only groups that come early are looked at for them. Where too many reach it even so, as the largest are in
// a few groups, the least of the k largest keys is searched for exactly.
//
// Short rows stay in the registers of some lanes meanwhile. Of the others, only the groups that reach the threshold are
// read again, which is little. They have a warp each, if there are very many, or a block. Few rows have a cluster of
// blocks each, which exchange maxima and keys. Where clusters cannot do it, rows are split over blocks, whose k largest
// keys, in order, and states wait in the workspace for a second launch.
//
//   top_k/launch.cuh     this file: the choice of a kernel and its launch, compiled by element type (top_k.cu.in)
//   top_k/tuning.h       the sizes that decide, as data; top_k/plan.h, which kernel they choose
//   top_k/keys.cuh       keys; top_k/buffer.cuh, a block's buffer of them
//   top_k/thresholds.cuh thresholds; top_k/masks.cuh, the elements that reach one; top_k/results.cuh, what is written
//   top_k/short.cuh      the kernel for short rows
//   top_k/tiles.cuh      the one read of longer rows; top_k/ties.cuh, what is left out of those with few different
//                        values; top_k/exact.cuh, the exact search
//   top_k/by_warps.cuh   the kernel for many rows; top_k/by_blocks.cuh, that for long ones, and the one that merges
//   top_k/by_clusters.cuh  the kernel for few rows
#pragma once

#include <algorithm>
#include <iterator>

#include "../../attributes.cuh"
#include "../../devices.cuh"
#include "../top_k.cuh"
#include "by_blocks.cuh"
#include "by_clusters.cuh"
#include "by_warps.cuh"
#include "plan.h"
#include "short.cuh"

namespace jaxsoft::cuda {

// Places in a part of a row are counted in ints, some way beyond its end.
constexpr int64_t kMostOfPart = int64_t(1) << 30;

// The shared memory that a warp needs for the maxima of its groups, and for a list of those that reach the threshold.
inline size_t memory_of_groups(int groups, int most_found) {
  return groups * 32 * sizeof(float) + most_found * sizeof(uint16_t);
}

template <class T>
cudaError_t launch_by_warps(const Arguments<T>& args, const Largest<T>& to, int64_t packs, cudaStream_t stream) {
  const int64_t blocks = (args.rows + TopKCode::rows - 1) / TopKCode::rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int room = TopKCode::room_of_warp(to.k);
  const int tiles = static_cast<int>((packs + TopKCode::warp_packs - 1) / TopKCode::warp_packs);
  const size_t bytes = TopKCode::rows * ((room + to.k) * sizeof(Key) + memory_of_groups(tiles, room));
  top_k_by_warps<T><<<static_cast<unsigned>(blocks), 32 * TopKCode::rows, bytes, stream>>>(args, to, tiles, room);
  return cudaGetLastError();
}

inline TopKSizes choose_sizes(int64_t packs, int warps, int k) {
  const int64_t of_step = warps * TopKCode::warp_packs, tiles = (packs + of_step - 1) / of_step;  // of a warp
  const int64_t together = (tiles + TopKCode::most_groups - 1) / TopKCode::most_groups;
  return {static_cast<int>((tiles + together - 1) / together), static_cast<int>(together),
          TopKCode::room_of_block(k)};
}

// Prepares the kernel, and finds how many clusters of choice number `choice` the device can hold at once, where blocks
// take as much shared memory as the launch says or somewhat more.
template <class T>
cudaError_t find_clusters_at_once(int choice, cudaLaunchConfig_t config, int* found) {
  static Devices<2 * std::size(kClusterChoices)> known;
  const bool usual = config.dynamicSmemBytes <= TopKClusters::usual_memory;
  return known.once(2 * choice + usual, found, [&](int* found) {
    Device device;
    int bytes = 0;
    *found = 0;
    if (auto e = device.read()) return e;
    if (auto e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.ordinal)) return e;
    bytes = std::min<int>(bytes - static_cast<int>(sizeof(OfCluster)), TopKClusters::most_memory);
    const int needed = usual ? TopKClusters::usual_memory : TopKClusters::most_memory;
    if (bytes < needed) return cudaSuccess;
    const auto kernel = top_k_by_clusters<T>;
    if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    config.dynamicSmemBytes = needed;
    return find_clusters(kernel, config, found);
  });
}

// Launches a cluster for each of few rows. Refused with cudaErrorInvalidClusterSize for other rows, and where the
// device has no room for a cluster, as a part of a GPU (MIG) may not have.
template <class T>
cudaError_t launch_by_clusters(const Arguments<T>& args, const Largest<T>& to, const TopKRows& call,
                               const Device& device, cudaStream_t stream) {
  if (device.major < 9) return cudaErrorInvalidClusterSize;
  for (int choice = 0; choice < static_cast<int>(std::size(kClusterChoices)); choice++) {
    const auto [blocks, warps, most] = kClusterChoices[choice];
    const int width = lanes_of_slot(kClusterChoices[choice], call, device.processors);
    if (width == 0) continue;
    const Split split(call.packs, blocks);
    const TopKSizes sizes = choose_sizes(split.packs, warps, call.k);
    const size_t bytes = (sizes.room + 2 * blocks * TopKClusters::room(call.k)) * sizeof(Key) +
                         warps * memory_of_groups(sizes.groups, TopKCode::most_found);
    cudaLaunchAttribute attribute = in_clusters_of(blocks);
    cudaLaunchConfig_t config{dim3(blocks), dim3(32 * warps), bytes, stream, &attribute, 1};
    int at_once = 0;
    if (auto e = find_clusters_at_once<T>(choice, config, &at_once)) return e;
    if (at_once == 0) continue;
    config.gridDim = dim3(static_cast<unsigned>(args.rows * blocks));
    return cudaLaunchKernelEx(&config, top_k_by_clusters<T>, args, to, sizes, width, split);
  }
  return cudaErrorInvalidClusterSize;
}

template <class T>
cudaError_t launch_merge(const Arguments<T>& args, const Largest<T>& to, const Key* keys,
                         const typename StateOf<T>::Part* states, unsigned parts, bool overlaps, cudaStream_t stream) {
  const int count = static_cast<int>(parts) * to.k;
  const int threads = std::clamp((count + 31) / 32 * 32, TopKCode::least_merge_threads, TopKCode::merge_threads);
  const auto rows = static_cast<unsigned>(args.rows);
  cudaLaunchAttribute attribute = overlapping();
  const cudaLaunchConfig_t config{dim3(rows), dim3(threads), count * sizeof(Key), stream, &attribute, overlaps};
  return cudaLaunchKernelEx(&config, top_k_merge<T>, args, to, keys, states, parts);
}

template <class T>
cudaError_t run_top_k(const Arguments<T>& args, const Largest<T>& to, void* workspace, int64_t bytes,
                      cudaStream_t stream) {
  using State = typename StateOf<T>::Part;
  Device device;
  if (auto e = device.read()) return e;
  const TopKTuning& tuning = top_k_tuning(device.major);
  static_assert(sizeof(Key) == TopKCode::key_bytes && sizeof(State) == TopKCode::state_bytes);
  const int64_t of_row = packs_of_row(args.n, sizeof(T), rows_are_whole(args));
  const TopKRows call{args.rows, of_row, to.k, sizeof(T)};
  if (!to.first) {  // which these kernels do not write
    if (is_short(call)) return launch_short(args, to, of_row, stream);
    if (is_for_warps(call, tuning, device.processors)) return launch_by_warps(args, to, of_row, stream);
  }
  const cudaError_t error = launch_by_clusters(args, to, call, device, stream);
  if (!is_refused(error)) return error;
  const Split split(of_row, parts_of_row(call, tuning, device.processors, bytes));
  const int64_t blocks = args.rows * split.parts;
  if (blocks > INT32_MAX || args.n / split.parts > kMostOfPart) return cudaErrorInvalidValue;
  const int64_t packs = std::min(of_row, split.packs);  // of a part
  const int warps = static_cast<int>(std::clamp<int64_t>(packs / TopKCode::warp_packs, 1, TopKCode::warps));
  const TopKSizes sizes = choose_sizes(packs, warps, to.k);
  const size_t memory = sizes.room * sizeof(Key) + warps * memory_of_groups(sizes.groups, TopKCode::most_found);
  auto* keys = static_cast<Key*>(workspace);
  auto* states = reinterpret_cast<State*>(keys + (split.parts > 1 ? blocks * to.k : 0));
  top_k_by_blocks<T>
      <<<static_cast<unsigned>(blocks), 32 * warps, memory, stream>>>(args, to, sizes, keys, states, split);
  if (auto e = cudaGetLastError()) return e;
  if (split.parts == 1) return cudaSuccess;
  return launch_merge<T>(args, to, keys, states, split.parts, tuning.overlaps, stream);
}

}  // namespace jaxsoft::cuda
