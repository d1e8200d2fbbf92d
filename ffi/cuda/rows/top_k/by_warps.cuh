// Rows of some length, of which a warp goes through one, and there are enough for all warps. Nothing is shared between
// warps, so that none waits for another.
#pragma once

#include "gather.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// Finds the k largest elements of a row by a queue. Returns the number of keys in it.
template <class T>
__device__ __noinline__ int gather_by_warp(const Arguments<T>& args, int64_t index, int k, Key* keys, int room) {
  const Elements<T> row(args, index);
  const Tiles<T> tiles{row, 0, 1};
  Gatherer<T> gatherer{tiles, k, keys, room, nullptr};
  gatherer.gather();
  return gatherer.count;
}

// A row by each warp. `groups`: of a lane.
template <class T>
__global__ void __launch_bounds__(32 * TopKCode::rows, TopKCode::row_blocks)
    top_k_by_warps(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, int groups,
                   int room) {
  extern __shared__ Key queues[];
  const int k = to.k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * TopKCode::rows + warp;
  if (index >= args.rows) return;
  Key *const keys = queues + warp * (room + k), *const sorted = keys + room;
  auto* const maxima = reinterpret_cast<float*>(queues + TopKCode::rows * (room + k)) + warp * groups * 32;

  const Elements<T> row(args, index);
  const Tiles<T> tiles{row, 0, 1};
  const auto part = tiles.fold(maxima, 1);
  const float bar = bar_of_warp<T>(maxima, groups, k);
  int count = 0;
  tiles.collect(bar, maxima, groups, 1, [&](Key key) {
    const unsigned all = __ballot_sync(kAllLanes, key > 0);
    const int place = count + __popc(all & ((1u << lane) - 1));
    if (key > 0 && place < room) keys[place] = key;
    count += __popc(all);
    return count <= room;
  });
  const auto state = reduce_lanes<T>(part, 32);
  __syncwarp();
  if (count > room) count = gather_by_warp(args, index, k, keys, room);
  if (count > max(enough_for(k), TopKCode::ranked_of_warp)) {
    const Key least = least_of_largest<T>(keys, count, k, kLeastOrder, row.n);
    count = keep_from(least, keys, count, keys);
  }
  sort_largest<32>(keys, count, k, sorted);
  __syncwarp();
  StateOf<T>::finish(state, args, index, lane == 0);
  const SoftmaxOfRow softmax(state.m, state.s());
  if (!softmax.exists) return write_first(args, to, index, softmax, 32);
  for (int j = lane; j < k; j += 32)
    write_element(args, to, index * k + j, element_of(sorted[j], row.a), index_in(sorted[j]), softmax);
}

}  // namespace jaxsoft::cuda
