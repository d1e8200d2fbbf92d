// Rows of some length, of which a warp goes through one, and there are enough for all warps. Nothing is shared between
// warps, so that none waits for another.
#pragma once

#include "exact.cuh"
#include "ties.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// Finds exactly the k largest elements of a row.
template <class T>
__device__ __noinline__ void find_by_warp(const Arguments<T>& args, int64_t index, int k, const float* maxima,
                                          int groups, float threshold, float top, Key* keys) {
  const Elements<T> row(args, index);
  const Tiles<T> tiles{row, 0, 1};
  auto sum = [](int number) { return __reduce_add_sync(kAllLanes, number); };
  const ExactSearch<T, decltype(sum)> search{tiles, maxima, groups, 1, k, sum};
  int count = 0;
  search.collect(search.least(threshold, top), [&](Key key) {
    const unsigned all = __ballot_sync(kAllLanes, key > 0);
    if (key > 0) keys[count + __popc(all & ((1u << tiles.lane()) - 1))] = key;
    count += __popc(all);
  });
  __syncwarp();
}

// A row by each warp. `groups`: of a lane, at most: a row that begins late in its first pack has one more than others
// may.
template <class T>
__global__ void __launch_bounds__(32 * TopKCode::rows, TopKCode::row_blocks)
    top_k_by_warps(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, int groups,
                   int room) {
  extern __shared__ Key shared[];
  const int k = to.k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * TopKCode::rows + warp;
  if (index >= args.rows) return;
  Key *const keys = shared + warp * (room + k), *const sorted = keys + room;
  auto* const all_maxima = reinterpret_cast<float*>(shared + TopKCode::rows * (room + k));
  auto* const maxima = all_maxima + warp * groups * 32;
  auto* const found = reinterpret_cast<uint16_t*>(all_maxima + TopKCode::rows * groups * 32) + warp * room;

  const Elements<T> row(args, index);
  const Tiles<T> tiles{row, 0, 1};
  const auto part = tiles.fold(maxima, 1);
  const int own = tiles.groups(1);
  int reaching;
  const float threshold = threshold_of_warp<T>(maxima, own, k, reaching);
  if (reaching >= 2 * k && threshold > -infinity<float>())  // with fewer that are equal this takes longer than it saves
    leave_out_ties_of_warp(threshold, k, Tiles<T>::group_elements, room, maxima, own);
  int count = 0;
  const bool fits = tiles.collect(threshold, maxima, own, 1, found, room, [&](Key key) {
    const unsigned all = __ballot_sync(kAllLanes, key > 0);
    const int place = count + __popc(all & ((1u << lane) - 1));
    if (key > 0 && place < room) keys[place] = key;
    count += __popc(all);
    return count <= room;
  });
  const auto state = reduce_lanes<T>(part, 32);
  __syncwarp();
  const SoftmaxOfRow softmax(state.m, state.s());
  if (softmax.exists && (!fits || count > room))
    find_by_warp(args, index, k, maxima, own, threshold, state.m, keys), count = k;
  count = min(count, room);
  if (count > max(enough_for(k), TopKCode::ranked_of_warp)) {
    const Key least = least_of_largest<T>(keys, count, k, order_of(threshold), row.n);
    count = keep_from(least, keys, count);
  }
  sort_largest(keys, count, k, sorted);
  __syncwarp();
  StateOf<T>::finish(state, args, index, lane == 0);
  if (!softmax.exists) return write_first<true>(args, to, index, softmax, 32);
  for (int j = lane; j < k; j += 32)
    write_element<true>(args, to, index * k + j, element_of(sorted[j], row.a), index_in(sorted[j]), softmax);
}

}  // namespace jaxsoft::cuda
