// Long rows: a block goes through a row, or a part of one, of which a second kernel merges the parts.
//
// The threshold is about the k-th largest of the threads' maxima. If there are not threads enough to tell the k largest
// apart, each warp finds a threshold for its share of them, k divided by the number of warps, from groups of its
// elements: at least k elements of all warps reach the least of these thresholds.
#pragma once

#include "exact.cuh"
#include "ties.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// Writes a row's results by the threads of a block, from the keys in the buffer, of which all threads see all.
template <class T>
__device__ void write_largest(const Arguments<T>& args, const Largest<T>& to, int64_t index,
                              const typename StateOf<T>::Part& state, int count, const Key* keys) {
  const T* row = args.a + index * args.n;
  StateOf<T>::finish(state, args, index, threadIdx.x == 0);
  const SoftmaxOfRow softmax(state.m, state.s());
  copy_first(args, to, index, blockDim.x);
  if (!softmax.exists) return write_first(args, to, index, softmax, blockDim.x);
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank < to.k) write_element(args, to, index * to.k + rank, element_of(key, row), index_in(key), softmax);
  });
}

// Writes the keys and the state of a part of a row to the workspace.
template <class T>
__device__ void write_part(const typename StateOf<T>::Part& state, int count, const Key* keys, int k,
                           Key* keys_of_parts, typename StateOf<T>::Part* states) {
  if (threadIdx.x == 0) states[blockIdx.x] = state;
  keys_of_parts += int64_t(blockIdx.x) * k;
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank < k) keys_of_parts[rank] = key;
  });
  for (int i = count + threadIdx.x; i < k; i += blockDim.x) keys_of_parts[i] = 0;
}

// What the warps of a block share.
struct Together {
  Gathered gathered;
  uint32_t low, high;  // orders: the threshold is between them
  uint32_t slots[TopKCode::warps];
  uint8_t reaching[TopKClusters::threads / 32][32];  // groups of a step of a warp that reach the threshold
};

// A threshold that at least k of the threads' maxima reach, and at most `enough` unless some are equal. `found` becomes
// the number of those that do. `together.low` and `high` are ~0 and 0. All threads of the block call it.
template <class T>
__device__ float threshold_of_block(float top, int k, int enough, Together& together, int& found) {
  const uint32_t own = order_of(top), least = __reduce_min_sync(kAllLanes, own > kLeastOrder ? own : ~0u);
  const uint32_t high = __reduce_max_sync(kAllLanes, own);
  if (threadIdx.x % 32 == 0) atomicMin(&together.low, least), atomicMax(&together.high, high);
  found = __syncthreads_count(own > kLeastOrder);
  if (k == 1 && found > 0) {
    found = __syncthreads_count(own >= together.high);
    return of_order(together.high);
  }
  if (found < k) return -infinity<float>();
  return of_order(greatest_order<T>(together.low, together.high, k, enough, found,
                                    [&](uint32_t order) { return __syncthreads_count(own >= order); }));
}
// The least of the thresholds for the warps' shares. Only warps with a whole tile have one.
template <class T>
__device__ float threshold_of_shares(const Tiles<T>& tiles, const float* maxima, int groups, int k,
                                     Together& together) {
  const int full = min(tiles.warps, tiles.from.window.packs / Tiles<T>::length);
  uint32_t slot = full > 0 ? ~0u : kLeastOrder;
  int found;
  if (tiles.warp < full) slot = order_of(threshold_of_warp<T>(maxima, groups, (k + full - 1) / full, found));
  if (tiles.lane() == 0) together.slots[tiles.warp] = slot;
  __syncthreads();
  return of_order(__reduce_min_sync(kAllLanes, tiles.lane() < tiles.warps ? together.slots[tiles.lane()] : ~0u));
}

// Puts a warp's keys that are not 0 at the end of the buffer, as far as there is room. Returns whether there was.
__device__ inline bool append(Key key, Gathered& gathered, Key* keys, int room) {
  const int lane = threadIdx.x % 32;
  const unsigned all = __ballot_sync(kAllLanes, key > 0);
  int first = 0;
  if (lane == 0) first = atomicAdd(&gathered.count, __popc(all));
  first = __shfl_sync(kAllLanes, first, 0);
  const int place = first + __popc(all & ((1u << lane) - 1));
  if (key > 0 && place < room) keys[place] = key;
  return first + __popc(all) <= room;
}

// Finds exactly the k largest elements. All threads of the block call it.
template <class T>
__device__ __noinline__ void find_by_block(const Arguments<T>& args, int k, const Split& split, Gathered& gathered,
                                           const float* maxima, int groups, int together, float threshold, float top,
                                           Key* keys, int room) {
  const auto elements = part_of_row<Elements<T>>(args, blockIdx.x, split, true);
  const Tiles<T> tiles{elements, static_cast<int>(threadIdx.x / 32), static_cast<int>(blockDim.x / 32)};
  auto sum = [&](int number) {
    number = __reduce_add_sync(kAllLanes, number);
    __syncthreads();  // all have read the last sum
    if (threadIdx.x == 0) gathered.count = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicAdd(&gathered.count, number);
    __syncthreads();
    return gathered.count;
  };
  const ExactSearch<T, decltype(sum)> search{tiles, maxima, groups, together, k, sum};
  const Key least = search.least(threshold, top);
  __syncthreads();
  if (threadIdx.x == 0) gathered.count = 0;
  __syncthreads();
  search.collect(least, [&](Key key) { append(key, gathered, keys, room); });
  __syncthreads();
}

// A row, or a part of one, by a block. In shared memory, the maxima of the groups follow the keys.
template <class T>
__global__ void __launch_bounds__(TopKCode::threads, TopKCode::blocks)
    top_k_by_blocks(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, TopKSizes sizes,
                    Key* keys_of_parts, typename StateOf<T>::Part* states, Split split) {
  using State = typename StateOf<T>::Part;
  extern __shared__ Key all[];
  __shared__ Together together;
  __shared__ State of_warps[TopKCode::warps];
  if (split.parts > 1) let_next_kernel_start();  // the one that merges
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, k = to.k;
  const auto elements = part_of_row<Elements<T>>(args, blockIdx.x, split, true);
  const Tiles<T> tiles{elements, warp, warps};
  auto* const all_maxima = reinterpret_cast<float*>(all + sizes.room);
  auto* const maxima = all_maxima + warp * sizes.groups * 32;
  auto* const found = reinterpret_cast<uint16_t*>(all_maxima + warps * sizes.groups * 32) + warp * TopKCode::most_found;
  if (threadIdx.x == 0) together.gathered = {}, together.low = ~0u, together.high = 0;
  __syncthreads();

  const Running<float> part = tiles.fold(maxima, sizes.tiles);
  const State of_warp = reduce_lanes<T>(part, 32);
  if (lane == 0) of_warps[warp] = of_warp;
  const int groups = tiles.groups(sizes.tiles);
  // A threshold that a few more reach would let through too much of whole rows that ascend or descend, as few warps
  // have their largest elements.
  const int enough = split.parts == 1 ? k : enough_for(k);
  int reaching = INT_MAX;
  const float threshold = 2 * k <= static_cast<int>(blockDim.x)
                              ? threshold_of_block<T>(part.m, k, enough, together, reaching)
                              : threshold_of_shares(tiles, maxima, groups, k, together);
  if (reaching > enough_for(k) && threshold > -infinity<float>())  // many are equal, or may be
    leave_out_ties_of_block(threshold, k, sizes.tiles * Tiles<T>::group_elements, sizes.room, sizes.tiles == 1, maxima,
                            groups, together.reaching);
  const bool fits = tiles.collect(threshold, maxima, groups, sizes.tiles, found, TopKCode::most_found,
                                  [&](Key key) { return append(key, together.gathered, all, sizes.room); });
  if (!fits && lane == 0) atomicAdd(&together.gathered.count, sizes.room + 1);
  const State state = reduce_lanes<T>(lane < warps ? of_warps[lane] : State(), 32);
  __syncthreads();
  int count = together.gathered.count;
  if (count > sizes.room) {
    find_by_block(args, k, split, together.gathered, maxima, groups, sizes.tiles, threshold, state.m, all, sizes.room);
    count = together.gathered.count;
  } else if (count > max(enough_for(k), TopKCode::ranked)) {
    cut<T>(together.gathered, all, count, k, order_of(threshold), elements.n);
    count = together.gathered.count;
  }
  if (split.parts == 1) return write_largest(args, to, elements.index, state, count, all);
  write_part<T>(state, count, all, k, keys_of_parts, states);
}

// Finds, by a warp, an order from which on there are at least k keys of all parts. The keys of a part are in descending
// order. The first k / parts keys of every part, rounded up, are at least k together, so the least order among them is
// one answer. That of the k-th key of any part is another. The greatest of these orders is returned.
__device__ inline uint32_t order_of_parts(const Key* keys_of_parts, unsigned parts, int k) {
  const int of_each = (k + parts - 1) / parts;
  uint32_t low = kLeastOrder, least = ~0u;
  for (unsigned part = threadIdx.x % 32; part < parts; part += 32) {
    least = min(least, order_in(keys_of_parts[part * k + of_each - 1]));
    low = max(low, order_in(keys_of_parts[part * k + k - 1]));
  }
  return max(__reduce_max_sync(0xffffffffu, low), __reduce_min_sync(0xffffffffu, least));
}

// Merges the parts of a row, by a block.
template <class T>
__global__ void __launch_bounds__(TopKCode::merge_threads)
    top_k_merge(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to,
                const Key* keys_of_parts, const typename StateOf<T>::Part* states, unsigned parts) {
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  const int64_t index = blockIdx.x;
  const int k = to.k, count = static_cast<int>(parts) * k, lane = threadIdx.x % 32;
  keys_of_parts += index * count, states += index * parts;
  if (threadIdx.x == 0) gathered.count = 0;
  __syncthreads();
  wait_for_last_kernel();
  int i = threadIdx.x;
  Key key = i < count ? keys_of_parts[i] : 0;
  typename StateOf<T>::Part state;
  for (unsigned part = lane; part < parts; part += 32) state = combine<T>(state, states[part]);

  uint32_t low = kLeastOrder;
  if (count > TopKCode::ranked) low = order_of_parts(keys_of_parts, parts, k);
  while (i < count) {
    if (order_in(key) >= low) keys[place_for_key(gathered)] = key;
    i += blockDim.x;
    if (i < count) key = keys_of_parts[i];
  }
  state = reduce_lanes<T>(state, 32);
  __syncthreads();
  const int left = gathered.count;
  if (left > max(enough_for(k), TopKCode::ranked)) cut<T>(gathered, keys, left, k, low, args.n);
  write_largest(args, to, index, state, gathered.count, keys);
}

}  // namespace jaxsoft::cuda
