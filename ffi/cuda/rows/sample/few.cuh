// The short way, for rows in which few elements may be left by the filters, as with a small k, or where a few elements
// have most of the mass.
//
// A bar is found below which no element is left: each block finds how large some of the largest of its groups of
// elements are, a group being what a few threads have, and so many blocks have all of these at or above the bar that
// they are k together. At least k elements are then at or above it, and mostly not many more, unless equal or sorted elements lie
// together. They go to the first block, which puts them in order by comparing each with each. If they are too many, or
// have less of the mass than top-p asks for, the row goes the long way, on which it gives the same token.
#pragma once

#include "options.cuh"

namespace jaxsoft::cuda {

// What the bar must leave.
struct FewSought {
  uint32_t rank = 0;   // of a block's bar among its groups; 0 if the row goes the long way
  uint32_t place = 0;  // of the row's bar among those of its blocks
  bool all_count;      // whether top-p is of the mass of all elements, rather than that of the k largest

  __device__ FewSought(const Options& options, uint32_t n, unsigned blocks) {
    all_count = options.k >= n && options.p < 1;
    const uint32_t sought = all_count ? SampleCode::sought_by_mass : options.k;
    if (sought > min(SampleCode::most_sought, n) || (!all_count && options.k >= n)) return;
    // Somewhat more than its share of each block lets the blocks with the lowest bars be passed over.
    rank = blocks > 1 ? (sought * 5 / 4 + blocks - 1) / blocks : sought;
    place = (sought + rank - 1) / rank;
  }
};

// What a row's blocks find together in the first read.
struct Top {
  uint32_t top, bar;  // orders; all ones if an element is NaN
  bool few;           // whether the elements from the bar on may be all that matter
};

// Finds these from the order of each thread's largest element. All threads of the cluster call it.
template <class T>
__device__ Top find_top(uint32_t of_thread, const RowPart<T>& part, const FewSought& sought, float p, float scale,
                        unsigned block, unsigned blocks, SampleShared& shared) {
  const int lane = threadIdx.x % 32;
  // Threads of a group, of which each compares the group's largest element with those of as many groups as it has part.
  const int of_group = sought.rank > SampleCode::few_groups / 2 ? SampleCode::threads / SampleCode::groups
                                                                : SampleCode::threads / SampleCode::few_groups;
  const int groups = SampleCode::threads / of_group, part_of_groups = groups / of_group;
  uint32_t own = of_thread;
#pragma unroll 1
  for (int step = 1; step < of_group; step *= 2) own = max(own, __shfl_xor_sync(kWholeWarp, own, step));
  if (lane % of_group == 0) shared.groups[threadIdx.x / of_group] = own;
  if (threadIdx.x == 0) shared.summary = {};
  __syncthreads();
  {
    uint32_t above = 0, equal = 0;
    const uint2* others = reinterpret_cast<const uint2*>(&shared.groups[lane % of_group * part_of_groups]);
#pragma unroll 4
    for (int i = 0; i < part_of_groups / 2; i++) {
      const uint2 some = others[i];
      above += (some.x > own) + (some.y > own), equal += (some.x == own) + (some.y == own);
    }
    uint32_t both = above << 16 | equal;
#pragma unroll 1
    for (int step = 1; step < of_group; step *= 2) both += __shfl_xor_sync(kWholeWarp, both, step);
    above = both >> 16, equal = both & 0xffff;
    if (lane % of_group == 0) {
      if (above == 0) atomicMax(&shared.summary.top, own);
      if (above < sought.rank && sought.rank <= above + equal) atomicMax(&shared.summary.bar, own);
    }
  }
  __syncthreads();
  constexpr float unit = 1 << 16;  // sums of whole numbers are the same on every run
  if (sought.all_count) {
    // How much of the mass is likely to be below the bar, by a sample.
    const Summary found = shared.summary;
    const float m = of_order(found.top), bar = of_order(found.bar);
    if (isfinite(m)) {
      const Weights weights(m, scale);
      uint32_t peak = 0, rest = 0;
      const Pack<T> pack = part.sample();
#pragma unroll
      for (int k = 0; k < Pack<T>::size; k++)
        if (const float x = pack.get(k); x < bar) rest += __float2uint_rn(weights(x) * unit);
      if (lane % of_group == 0 && own >= found.bar) peak = __float2uint_rn(weights(of_order(own)) * unit);
      peak = __reduce_add_sync(kWholeWarp, peak), rest = __reduce_add_sync(kWholeWarp, rest);
      if (lane == 0) atomicAdd(&shared.summary.peak, peak), atomicAdd(&shared.summary.rest, rest);
    }
    __syncthreads();
  }
  if (blocks > 1) {
    wait_for_start_of_row();
    if (threadIdx.x < blocks)
      send_to_block(shared.summary, &shared.summaries[block], shared.summaries_sent, threadIdx.x);
    wait_for_sent(shared.summaries_sent);
  }

  Summary of_block{};
  if (lane < blocks) of_block = blocks > 1 ? shared.summaries[lane] : shared.summary;
  Top found{__reduce_max_sync(kWholeWarp, of_block.top), of_block.bar, sought.rank > 0};
  if (blocks > 1) {
    uint32_t above = 0, equal = 0;
#pragma unroll 4
    for (unsigned b = 0; b < blocks; b++) {
      const uint32_t other = __shfl_sync(kWholeWarp, of_block.bar, b);
      above += other > of_block.bar, equal += other == of_block.bar;
    }
    const bool has = lane < blocks && above < sought.place && sought.place <= above + equal;
    found.bar = __reduce_max_sync(kWholeWarp, has ? of_block.bar : 0);
  } else {
    found.bar = __shfl_sync(kWholeWarp, found.bar, 0);
  }
  if (sought.all_count) {
    const float m = of_order(found.top), own = of_order(of_block.top);
    const float factor = isfinite(own) && isfinite(m) ? Weights(m, scale)(own) : 0.f;
    const uint32_t peak = __reduce_add_sync(kWholeWarp, __float2uint_rn(of_block.peak * factor));
    const uint32_t rest = __reduce_add_sync(kWholeWarp, __float2uint_rn(of_block.rest * factor));
    found.few = peak * (1 - p) >= p * rest * part.steps;
  }
  return found;
}

template <class T>
__device__ Mass mass_of_chosen(const Pack<T>& pack, uint32_t chosen, const Weights& weights) {
  Weights::Parts parts;
  Mass sum = 0;
#pragma unroll 1
  for (; chosen; chosen &= chosen - 1) parts.add(weights(element(pack, __ffs(chosen) - 1)));
  parts.move_to(sum);
  return sum;
}

// Gathers the elements from the bar on in the first block's memory, and tells all blocks what there is. `all_count`:
// the mass of all elements is added up.
template <bool all_count, class T>
__device__ void gather_few(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys, float bar,
                           unsigned block, unsigned blocks, SampleShared& shared) {
  Mass total = 0, above = 0;
  part.for_packs([&](const Pack<T>& pack, int first) {
    if constexpr (all_count) {
      Weights::Parts parts;
#pragma unroll
      for (int k = 0; k < Pack<T>::size; k++) parts.add(weights(pack.get(k)));
      parts.move_to(total);
    }
    if (!(pack.maximum() >= bar)) return;
    uint32_t chosen = 0;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++)
      if (const float x = pack.get(k); x >= bar && weights.counts(x)) chosen |= 1u << k;
    if (all_count) above += mass_of_chosen(pack, chosen, weights);
    put_keys(pack, chosen, first, keys, SampleShared::of_block, shared);
  });
  if (all_count) {
    total = sum_of_warp(total), above = sum_of_warp(above);
    if (threadIdx.x % 32 == 0) shared.warps[0][threadIdx.x / 32] = total, shared.warps[1][threadIdx.x / 32] = above;
  }
  __syncthreads();
  if (block != 0) {  // the keys go to the first block together, as single stores to other blocks are slow
    Key* const places = in_block_of_row(&shared.keys[block * SampleShared::of_block], 0);
    const uint32_t count = min(shared.placed, SampleShared::of_block);
    for (uint32_t i = threadIdx.x; i < count; i += SampleCode::threads) places[i] = shared.keys[i];
  }
  if (threadIdx.x < 32) {
    FewOfBlock few{};
    few.count = shared.placed;
    if (all_count) {
      const int warp = threadIdx.x % SampleCode::warps;
      const bool counts = threadIdx.x < SampleCode::warps;
      few.total = sum_of_warp(counts ? shared.warps[0][warp] : 0);
      few.above = sum_of_warp(counts ? shared.warps[1][warp] : 0);
    }
    if (threadIdx.x < blocks) *in_block_of_row(&shared.few_of_block[block], threadIdx.x) = few;
  }
  synchronize_row();
}

// Whether what has been gathered is all that matters, and not too much. The same for all blocks.
__device__ inline bool few_suffice(bool all_count, float p, unsigned blocks, const SampleShared& shared, Mass& total) {
  const int lane = threadIdx.x % 32;
  FewOfBlock few{};
  if (lane < blocks) few = shared.few_of_block[lane];
  const uint32_t most = __reduce_max_sync(kWholeWarp, few.count), count = __reduce_add_sync(kWholeWarp, few.count);
  if (count == 0 || most > SampleShared::of_block || count > SampleCode::most_few) return false;
  if (!all_count) return true;
  total = sum_of_warp(few.total);
  return sum_of_warp(few.above) >= part_of_mass(p, total);
}

// Draws from what has been gathered. All threads of the first block call it. `total` is the mass of all elements, where
// top-p is of that.
template <class T>
__device__ void draw_from_few(const Sampling<T>& call, int64_t index, const Weights& weights, const Keys<T>& keys,
                              const Options& options, bool all_count, Mass total, unsigned blocks,
                              SampleShared& shared) {
  constexpr int share = 4;  // threads of an element
  constexpr int rank_bits = 52;  // from this bit on, a sum of masses has a number of elements
  constexpr Mass one = Mass(1) << rank_bits;
  Few& few = shared.few_elements;
  const int part = threadIdx.x % share, warp = threadIdx.x / 32;
  uint32_t count = 0, own_count = 0, first = 0;
  for (int b = 0; b < static_cast<int>(blocks); b++) {
    if (b == warp) first = count, own_count = shared.few_of_block[b].count;
    count += shared.few_of_block[b].count;
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x % 32; i < own_count; i += 32) {
    const Key key = shared.keys[warp * SampleShared::of_block + i];
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
    if (!all_count) total = shared.found_rest;
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
