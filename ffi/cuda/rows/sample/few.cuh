// The short way, for rows in which few elements may be left by the filters, as with a small k, or where a few elements
// have most of the mass.
//
// A threshold is found below which no element is left: each block finds how large some of the largest of its groups of
// elements are, a group being what a few threads have, and so many blocks have all of these at or above the threshold
// that they are k together. At least k elements are then at or above it, and mostly not many more, unless equal or
// sorted elements lie together. They go to the first block, which puts them in order by comparing each with each. If
// they are too many, or have less of the mass than top-p asks for, the row goes the long way, on which it gives the
// same token.
#pragma once

#include <algorithm>

#include "options.cuh"

namespace jaxsoft::cuda {

// Which threshold is sought: one that leaves as many elements as are needed.
struct ThresholdRank {
  uint32_t rank = 0;   // of a block's threshold among its groups; 0 if the row goes the long way
  uint32_t place = 0;  // of the row's threshold among those of its blocks

  ThresholdRank() = default;
  // The last ones of a row's blocks may have few elements or none, and a threshold that is too low: `full` are the
  // others.
  ThresholdRank(uint32_t sought, uint32_t n, int blocks, int full) {
    if (sought > std::min(SampleCode::most_sought, n)) return;
    // Somewhat more than its share of each block lets the blocks with the lowest thresholds be passed over.
    rank = blocks > 1 ? (sought * 5 / 4 + blocks - 1) / blocks : sought;
    rank = std::max(rank, (sought + full - 1) / full);
    place = (sought + rank - 1) / rank;
  }
};

// Those of the rows of a call.
struct ThresholdRanks {
  ThresholdRank of_k;     // where top-k leaves k elements
  ThresholdRank of_one;   // where it leaves one, as of a row whose temperature is 0
  ThresholdRank of_mass;  // where top-p is of the mass of all elements
};

// The n-th largest of 16 words, where words of the same value count one by one; by a warp.
__device__ inline uint32_t nth_largest(const uint32_t (&words)[16], uint32_t nth) {
  const uint32_t own = threadIdx.x % 16, value = words[own];
  const uint32_t half = threadIdx.x % 32 / 16;  // of the words, with which the lane compares
  uint32_t before = 0;
#pragma unroll
  for (uint32_t i = 0; i < 2; i++) {
    const uint32_t begin = half * 8 + i * 4;
    const uint4 some = reinterpret_cast<const uint4*>(words)[half * 2 + i];
    before += some.x > value || (some.x == value && begin < own);
    before += some.y > value || (some.y == value && begin + 1 < own);
    before += some.z > value || (some.z == value && begin + 2 < own);
    before += some.w > value || (some.w == value && begin + 3 < own);
  }
  before += __shfl_xor_sync(kWholeWarp, before, 16);
  return __shfl_sync(kWholeWarp, value, __ffs(__ballot_sync(kWholeWarp, before + 1 == nth)) - 1);
}

// What a row's blocks find together in the first read: the orders of the largest element, which is all ones if one is
// NaN, and of the threshold, which has a meaning if there is one.
struct Top {
  uint32_t top, threshold;
};

// The same of a block, from the order of each thread's largest element. All threads of the block call it. The result is
// for the first warp, or for all where the block is alone.
__device__ inline Top top_of_block(uint32_t of_thread, uint32_t rank, bool alone, SampleShared& shared) {
  const int lane = threadIdx.x % 32;
  if (rank <= SampleCode::rank_by_warps) {
    const uint32_t of_warp = __reduce_max_sync(kWholeWarp, of_thread);
    if (lane == 0) shared.groups[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x >= 32 && !alone) return {};
    static_assert(SampleCode::warps == 16);
    const auto& of_warps = reinterpret_cast<const uint32_t(&)[SampleCode::warps]>(shared.groups);
    return {__reduce_max_sync(kWholeWarp, of_warps[lane % SampleCode::warps]),
            rank > 0 ? nth_largest(of_warps, rank) : 0};
  }
  // Each thread of a group compares the group's largest element with those of as many groups as it has part.
  constexpr int of_group = SampleCode::threads / SampleCode::groups, part = SampleCode::groups / of_group;
  const int group = threadIdx.x / of_group, first = threadIdx.x % of_group * part;
  uint32_t own = of_thread;
#pragma unroll
  for (int step = 1; step < of_group; step *= 2) own = max(own, __shfl_xor_sync(kWholeWarp, own, step));
  if (threadIdx.x % of_group == 0) shared.groups[group] = own;
  __syncthreads();
  uint32_t before = 0;
#pragma unroll 4
  for (int i = 0; i < part; i += 2) {
    const uint2 some = *reinterpret_cast<const uint2*>(&shared.groups[first + i]);
    before += some.x > own || (some.x == own && first + i < group);
    before += some.y > own || (some.y == own && first + i + 1 < group);
  }
#pragma unroll
  for (int step = 1; step < of_group; step *= 2) before += __shfl_xor_sync(kWholeWarp, before, step);
  if (threadIdx.x % of_group == 0) {
    if (before == 0) shared.top = own;
    if (before + 1 == rank) shared.threshold = own;
  }
  __syncthreads();
  return {shared.top, shared.threshold};
}

// Finds top and threshold of the row. All threads of the cluster call it.
__device__ inline Top find_top(uint32_t of_thread, const ThresholdRank& sought, unsigned block, unsigned blocks,
                               SampleShared& shared) {
  const Top of_block = top_of_block(of_thread, sought.rank, blocks == 1, shared);
  if (blocks == 1) return of_block;
  const unsigned lane = threadIdx.x % 32, other = lane % SampleCode::most_blocks;
  if constexpr (kHopperCode) wait_for_cluster();  // a block may not have begun before
  if (threadIdx.x < 32 && other < blocks) {
    const bool sends_top = lane < SampleCode::most_blocks;
    send_to_block(sends_top ? of_block.top : of_block.threshold,
                  sends_top ? &shared.tops[block] : &shared.thresholds[block], shared.tops_sent, other);
  }
  wait_for_sent(shared.tops_sent);
  return {__reduce_max_sync(kWholeWarp, shared.tops[other]),
          sought.rank > 0 ? nth_largest(shared.thresholds, sought.place) : 0};
}

// Where the elements from the threshold on go: each block has its share of the first block's memory.
struct FewPlaces {
  unsigned block, blocks;
  uint32_t room = small_quotient(SampleCode::few_room, blocks);  // elements of each block

  // Whether the block has found more than there is room for. Then the row goes the long way, and no more need be found.
  __device__ bool crowded(SampleShared& shared) const {
    return *static_cast<volatile uint32_t*>(&shared.placed_few) > room;
  }
  // Elements count even if there is no room for them.
  __device__ void put(Key key, uint32_t place, SampleShared& shared) const {
    if (place >= room) return;
    Key* const to = &shared.few_keys[block * room + place];
    if (block == 0) *to = key;
    else send_to_block(key, to, shared.few_keys_sent, 0);
  }
};

// The elements of a pack from the threshold on, a bit each. None are chosen where more than there is room for are
// found.
template <class T>
__device__ __forceinline__ uint32_t chosen_from(float threshold, const Pack<T>& pack, const Weights& weights,
                                                const FewPlaces& places, SampleShared& shared) {
  uint32_t chosen = 0;
  if (!(pack.maximum() >= threshold) || places.crowded(shared)) return chosen;
#pragma unroll
  for (int k = 0; k < Pack<T>::size; k++)
    if (const float x = pack.get(k); x >= threshold && weights.counts(x)) chosen |= 1u << k;
  return chosen;
}

// Gathers the elements from the threshold on.
template <class T>
__device__ void gather_few(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys, float threshold,
                           const FewPlaces& places, SampleShared& shared) {
  part.template for_chosen<Way::back>(
      [&](const Pack<T>& pack) { return chosen_from(threshold, pack, weights, places, shared); },
      [&](uint32_t count) { return atomicAdd(&shared.placed_few, count); },
      [&](float x, uint32_t index, uint32_t place) { places.put(keys(x, index), place, shared); });
}

// Tells all blocks what has been gathered. The masses are those of the thread's elements. All threads of the cluster
// call it, and there is a barrier of the block in it.
__device__ inline void send_few(Mass above, Mass total, bool by_mass, const FewPlaces& places, SampleShared& shared) {
  const int lane = threadIdx.x % 32;
  if (by_mass) {
    above = sum_of_warp(above), total = sum_of_warp(total);
    if (lane == 0) shared.warps[0][threadIdx.x / 32] = above, shared.warps[1][threadIdx.x / 32] = total;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  FewOfBlock few{shared.placed_few, 0, 0};
  if (by_mass) {
    few.above = sum_of_warp(lane < SampleCode::warps ? shared.warps[0][lane] : 0);
    few.total = sum_of_warp(lane < SampleCode::warps ? shared.warps[1][lane] : 0);
  }
  if (places.blocks == 1) {
    if (lane == 0) shared.few_of_block[0] = few;
  } else if (threadIdx.x < places.blocks) {
    send_to_block(few, &shared.few_of_block[places.block], shared.few_sent, threadIdx.x);
  }
}

// Waits for what all blocks have gathered. The result is that of a block for each lane. All threads of the cluster call
// it.
__device__ inline FewOfBlock wait_for_few(const FewPlaces& places, SampleShared& shared) {
  const int lane = threadIdx.x % 32;
  if (places.blocks == 1) __syncthreads();
  else wait_for_sent(shared.few_sent);
  FewOfBlock few{};
  if (lane < places.blocks) few = shared.few_of_block[lane];
  if (places.block == 0 && places.blocks > 1) {
    const auto count = static_cast<uint32_t>(few.count);
    const uint32_t sent = __reduce_add_sync(kWholeWarp, lane > 0 ? min(count, places.room) : 0);
    if (threadIdx.x == 0) shared.few_keys_sent.arrive_expecting(sent * sizeof(Key));
    wait_for_sent(shared.few_keys_sent);
  }
  return few;
}

// Whether what has been gathered is all that matters, and not too much. The same for all blocks. `enough` is what top-p
// leaves of the mass of all elements, where it is of that.
__device__ inline bool few_suffice(const FewOfBlock& of_block, bool by_mass, Mass enough, const FewPlaces& places) {
  const auto own = static_cast<uint32_t>(of_block.count);
  const uint32_t most = __reduce_max_sync(kWholeWarp, own), count = __reduce_add_sync(kWholeWarp, own);
  if (count == 0 || most > places.room || count > SampleCode::most_few) return false;
  return !by_mass || sum_of_warp(of_block.above) >= enough;
}

// Draws from what has been gathered. All threads of the first block call it.
template <class T>
__device__ void draw_from_few(const Sampling<T>& call, int64_t index, const Weights& weights, const Keys<T>& keys,
                              const Options& options, const FewOfBlock& of_block, bool by_mass, Mass total,
                              const FewPlaces& places, SampleShared& shared) {
  constexpr int share = 4;  // threads of an element
  constexpr int rank_bits = 52;  // from this bit on, a sum of masses has a number of elements
  constexpr Mass one = Mass(1) << rank_bits;
  Few& few = shared.few_elements;
  const int part = threadIdx.x % share, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A warp puts the elements of one block beside those of the others.
  const auto from_block = static_cast<uint32_t>(of_block.count);
  uint32_t count = __reduce_add_sync(kWholeWarp, from_block);
  const uint32_t own_count = __shfl_sync(kWholeWarp, from_block, warp);
  const uint32_t first = __reduce_add_sync(kWholeWarp, lane < warp ? from_block : 0);
#pragma unroll 1
  for (uint32_t i = lane; i < own_count; i += 32) {
    const Key key = shared.few_keys[warp * places.room + i];
    few.elements[first + i] = {key, one + Weights::mass(weights(keys.value(key)))};
  }
  if (threadIdx.x == 0) shared.found_count = 0;
  __syncthreads();
  const uint32_t k = min(options.k, count);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (count * share + 31) / 32 * 32; i += SampleCode::threads) {
    const uint32_t own = i / share;
    const Key key = own < count ? few.elements[own].x : ~Key(0);
    Mass until = 0;
#pragma unroll 4
    for (uint32_t j = part; j < count; j += share)
      if (const ulonglong2 other = few.elements[j]; other.x >= key) until += other.y;
#pragma unroll
    for (int step = 1; step < share; step *= 2) until += __shfl_xor_sync(kWholeWarp, until, step);
    if (part == 0 && own < count) {
      few.until[own] = until;
      if (until >> rank_bits == k) shared.found_rest = until % one;
    }
  }
  __syncthreads();
  // What is left, in any order.
  if (threadIdx.x < count) {
    if (!by_mass) total = shared.found_rest;
    const Mass enough = options.p < 1 ? part_of_mass(options.p, total) : ~Mass(0);
    const auto [key, counted] = few.elements[threadIdx.x];
    const Mass until = few.until[threadIdx.x], mass = counted % one;
    if (until >> rank_bits <= k && until % one - mass < enough && !(weights(keys.value(key)) < options.min_p))
      few.left[atomicAdd(&shared.found_count, 1u)] = {key, mass};
  }
  __syncthreads();
  count = shared.found_count;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (count * share + 31) / 32 * 32; i += SampleCode::threads) {
    const uint32_t own = i / share;
    const ulonglong2 element = few.left[min(own, count - 1)];
    const uint32_t at = keys.index(element.x);
    Mass until = 0, all = 0;
#pragma unroll 4
    for (uint32_t j = part; j < count; j += share) {
      const ulonglong2 other = few.left[j];
      all += other.y;
      if (keys.index(other.x) <= at) until += other.y;
    }
#pragma unroll
    for (int step = 1; step < share; step *= 2)
      until += __shfl_xor_sync(kWholeWarp, until, step), all += __shfl_xor_sync(kWholeWarp, all, step);
    const Mass target = options.target(all);
    if (part == 0 && own < count && until - element.y <= target && target < until) {
      call.token[index] = static_cast<int32_t>(at);
      call.probability[index] = weights.probability(keys.value(element.x), all);
    }
  }
}

}  // namespace jaxsoft::cuda
