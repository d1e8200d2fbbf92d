// Few rows: the blocks of a cluster have a part of a row each. They send the maxima of some lanes each, as slots, to
// all of them, so that one threshold serves the whole row. What reaches it goes to the first block, which writes the
// result.
#pragma once

#include "../../hopper.cuh"
#include "by_blocks.cuh"

namespace jaxsoft::cuda {

// What the threads of a block share, beside keys and maxima. Other blocks write to the slots, and to the sums and the
// counts of the first block.
struct OfCluster {
  float slots[TopKClusters::most_slots];      // maxima of the same number of lanes each, of all blocks
  float2 sums[TopKClusters::most_warps];      // s and c of the sums of all warps, relative to m
  int counts[TopKClusters::most_blocks];      // of the keys that the blocks have sent
  Together together;                          // what the kernel with a block for each row shares, but for its slots
  float threshold, m;                               // of the row
  int reaching;                               // slots that reach the threshold
  float2 sum;                                 // of the row, in the first block
};

// The threshold of a row and its maximum, by a warp, from `slots` slots.
template <class T, int of_lane>
__device__ void find_threshold_of_slots(OfCluster& shared, int slots, int k) {
  float taken[of_lane], m = -infinity<float>();
#pragma unroll
  for (int g = 0; g < of_lane; g++) {
    const int slot = g * 32 + threadIdx.x % 32;
    taken[g] = slot < slots ? shared.slots[slot] : -infinity<float>();
    m = max(m, taken[g]);
  }
  m = of_order(__reduce_max_sync(kAllLanes, order_of(m)));
  int reaching;
  const float threshold = threshold_by_bisection<T, 32>(taken, k, reaching);
  if (threadIdx.x % 32 == 0) shared.m = m, shared.threshold = threshold, shared.reaching = reaching;
}

// Merges what the blocks have put into the first block's memory: their keys, without gaps, into `keys`, and the sums of
// their warps into shared.sum. Returns the number of keys. All threads of the first block call it.
__device__ inline int merge_blocks(OfCluster& shared, unsigned blocks, const Key* sent, int room, Key* keys) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int own = lane < blocks ? shared.counts[lane] : 0;
  for (unsigned block = warp; block < blocks; block += warps) {
    const int first = __reduce_add_sync(kAllLanes, lane < block ? own : 0), count = shared.counts[block];
    for (int i = lane; i < count; i += 32) keys[first + i] = sent[block * room + i];
  }
  if (warp == warps - 1) {
    Sum<float> sum;
    for (unsigned i = lane; i < blocks * warps; i += 32)
      sum = combine<float>(sum, Sum<float>{shared.sums[i].x, shared.sums[i].y});
    sum = reduce_lanes<float>(sum, 32);
    if (lane == 0) shared.sum = {sum.s, sum.c};
  }
  const int count = __reduce_add_sync(kAllLanes, own);
  __syncthreads();
  return count;
}

// Finds the keys of a block of which more reach the row's threshold than there is room for, as in rows that ascend. A
// threshold for the block is higher, but if its largest elements are in few threads as well, the k largest are searched
// for. `top` is the thread's maximum, and m that of the row. All threads of the block call it.
template <class T>
__device__ __noinline__ void gather_crowded(const Arguments<T>& args, int k, const Split& split, Together& together,
                                            const float* maxima, int groups, int of_group, uint16_t* found,
                                            float threshold, float top, float m, Key* keys, int room) {
  Gathered& gathered = together.gathered;
  int reaching;
  const float higher = 2 * k <= static_cast<int>(blockDim.x)
                           ? threshold_of_block<T>(top, k, enough_for(k), together, reaching)
                           : threshold;
  if (higher > threshold) {
    const auto elements = part_of_row<Elements<T>>(args, blockIdx.x, split, true);
    const Tiles<T> tiles{elements, static_cast<int>(threadIdx.x / 32), static_cast<int>(blockDim.x / 32)};
    threshold = higher;
    if (threadIdx.x == 0) gathered.count = 0;
    __syncthreads();
    const bool fits = tiles.collect(threshold, maxima, groups, of_group, found, TopKCode::most_found,
                                    [&](Key key) { return append(key, gathered, keys, room); });
    if (!fits && tiles.lane() == 0) atomicAdd(&gathered.count, room + 1);
    __syncthreads();
    if (gathered.count <= room) return;
  }
  find_by_block(args, k, split, gathered, maxima, groups, of_group, threshold, m, keys, room);
}

// A row by the blocks of a cluster. `width` lanes share a slot. In shared memory lie the block's keys, those that the
// blocks have sent, the same without gaps, the maxima of the block's groups, and the groups found.
template <class T>
__global__ void __launch_bounds__(TopKClusters::threads, TopKClusters::blocks)
    top_k_by_clusters(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, TopKSizes sizes,
                      int width, Split split) {
  if constexpr (kHopperCode) {
    extern __shared__ Key all[];
    __shared__ OfCluster shared;
    arrive_at_cluster();  // no block may store to another one that has not begun
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, k = to.k;
    const int of_block = sizes.room, room = TopKClusters::room(k);  // keys that are found, and that are sent
    const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster();
    const auto elements = part_of_row<Elements<T>>(args, blockIdx.x, split, true);
    const Tiles<T> tiles{elements, warp, warps};
    Key *const sent = all + of_block, *const merged = sent + blocks * room;
    auto* const all_maxima = reinterpret_cast<float*>(merged + blocks * room);
    auto* const maxima = all_maxima + warp * sizes.groups * 32;
    auto* const found =
        reinterpret_cast<uint16_t*>(all_maxima + warps * sizes.groups * 32) + warp * TopKCode::most_found;
    if (threadIdx.x == 0) shared.together.gathered = {}, shared.together.low = ~0u, shared.together.high = 0;

    const Running<float> part = tiles.fold(maxima, sizes.tiles);
    float top = reduce_maximum(part.m, width);
    const int slots_of_warp = 32 / width, slots = blocks * warps * slots_of_warp;
    wait_for_cluster();
    for (int start = 0; start < slots_of_warp * blocks; start += 32) {
      const int slot = (start + lane) >> (__ffs(blocks) - 1);
      const float value = __shfl_sync(kAllLanes, top, slot * width % 32);
      if (slot < slots_of_warp)
        *in_block(&shared.slots[(rank * warps + warp) * slots_of_warp + slot], lane & (blocks - 1)) = value;
    }
    publish_to_cluster();
    wait_for_cluster();
    // One warp finds the threshold. The others have their sums meanwhile, and it has its own later, when others wait as
    // well.
    State<float, false> of_warp;
    auto reduce = [&] {
      for (int mask = width; mask < 32; mask *= 2) top = max(top, __shfl_xor_sync(kAllLanes, top, mask));
      of_warp = {top, reduce_lanes<T>(part.seen_from(top), 32)};
    };
    if (warp == 0) {
      if (slots <= 32 * 2) find_threshold_of_slots<T, 2>(shared, slots, k);
      else if (slots <= 32 * 8) find_threshold_of_slots<T, 8>(shared, slots, k);
      else find_threshold_of_slots<T, TopKClusters::most_slots / 32>(shared, slots, k);
    } else {
      reduce();
    }
    __syncthreads();
    const float threshold = shared.threshold, m = shared.m;
    Gathered& gathered = shared.together.gathered;
    const int groups = tiles.groups(sizes.tiles);
    if (shared.reaching > enough_for(k) && threshold > -infinity<float>()) {  // many are equal
      int before = 0;  // slots of the parts before, each of which has an element that reaches the threshold
      for (int i = lane; i < static_cast<int>(rank) * warps * slots_of_warp; i += 32)
        before += shared.slots[i] >= threshold;
      before = __reduce_add_sync(kAllLanes, before);
      leave_out_ties_of_block(threshold, k - before, sizes.tiles * Tiles<T>::group_elements, of_block, sizes.tiles == 1,
                              maxima, groups, shared.together.reaching);
    }
    const bool fits = tiles.collect(threshold, maxima, groups, sizes.tiles, found, TopKCode::most_found,
                                    [&](Key key) { return append(key, gathered, all, of_block); });
    if (!fits && lane == 0) atomicAdd(&gathered.count, of_block + 1);
    if (warp == 0) reduce();
    const Sum<float> sum = seen_from<T>(m, of_warp);
    if (lane == 0) *in_block(&shared.sums[rank * warps + warp], 0) = {sum.s, sum.c};
    __syncthreads();
    if (gathered.count > of_block)
      gather_crowded(args, k, split, shared.together, maxima, groups, sizes.tiles, found, threshold, part.m, m, all,
                     of_block);
    if (gathered.count > room) cut<T>(gathered, all, gathered.count, k, order_of(threshold), elements.n);
    Key* const to_first = in_block(sent + rank * room, 0);
    for (int i = threadIdx.x; i < gathered.count; i += blockDim.x) to_first[i] = all[i];
    if (threadIdx.x == 0) *in_block(&shared.counts[rank], 0) = gathered.count;
    publish_to_cluster();
    if (rank != 0) return;
    wait_for_cluster();

    int count = merge_blocks(shared, blocks, sent, room, merged);
    if (count > max(enough_for(k), TopKCode::ranked)) {
      cut<T>(gathered, merged, count, k, order_of(threshold), args.n);
      count = gathered.count;
    }
    const State<float, false> state{m, {shared.sum.x, shared.sum.y}};
    write_largest(args, to, elements.index, state, count, merged);
  }
}

}  // namespace jaxsoft::cuda
