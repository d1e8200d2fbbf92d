// Where a filter ends: the greatest key from which on the keys have a given mass or number together.
//
// The keys between two bounds are put into bins, one for each thread, and the bin in which the mass is reached gives
// the next bounds.
#pragma once

#include "shared.cuh"

namespace jaxsoft::cuda {

// The bounds of a search, both included, and the mass that keys from the answer up to `high` must have.
struct Search {
  Key low, high;
  Mass need;

  __device__ int shift() const { return max(64 - __clzll(static_cast<long long>(high - low)) - bits_of_bins, 0); }
  __device__ bool has(Key key) const { return key >= low && key <= high; }
  __device__ unsigned bin(Key key) const { return static_cast<unsigned>((key - low) >> shift()); }
  static constexpr int bits_of_bins = 9;
  static_assert(1 << bits_of_bins == SampleCode::threads);

  // Narrows the bounds to one bin, given the mass in that of each thread, from the last bin on. All threads of the
  // block call it.
  __device__ void narrow(Mass mass, SampleShared& shared) {
    Mass all;
    const Mass until = scan_of_block(mass, shared.warps[0], all);
    if (until - mass < need && need <= until) {
      shared.found = low + (Key(own_bin()) << shift());
      shared.found_rest = need - (until - mass);
    }
    __syncthreads();
    const Key width = Key(1) << shift();
    low = shared.found, need = shared.found_rest, high = low + (width - 1);
  }
  __device__ static unsigned own_bin() { return SampleCode::threads - 1 - threadIdx.x; }
};

// The end of a filter among a few keys, by one warp: the greatest from which on the masses reach `need`. Keys below
// `from` are masked.
template <class MassOf>
__device__ Key end_among_few(const Key* keys, int count, Key from, Mass need, MassOf mass_of) {
  const int lane = threadIdx.x % 32;
  const Key key = lane < count ? keys[lane] : 0;
  const Mass mass = lane < count && key >= from ? mass_of(key) : 0;
  Mass until = 0;
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    const Mass of_other = __shfl_sync(kWholeWarp, mass, i);
    if (keys[i] >= key) until += of_other;
  }
  const unsigned has = __ballot_sync(kWholeWarp, mass > 0 && until >= need && until - mass < need);
  return has ? __shfl_sync(kWholeWarp, key, __ffs(has) - 1) : 0;
}

// The end of a filter among the candidates in some bins, from the key `from` on. mass_of(key) is what a
// key adds. Their mass must reach `need`. All threads of the block call it, after a barrier.
template <class T, class MassOf>
__device__ Key end_among_candidates(int count, Key from, const Weights& weights, const Keys<T>& keys, uint32_t begin,
                                    uint32_t end, Mass need, MassOf mass_of, SampleShared& shared) {
  shared.bins.clear(threadIdx.x);
  __syncthreads();
  // Bounds that are a bin away from where elements of these bins may be. Rounding moves no element beyond them.
  Search search{max(keys(weights.at(end + 0.5f), keys.mask()), from), keys(weights.at(begin - 1.5f), 0), need};
  for (;;) {
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += SampleCode::threads) {
      const Key key = shared.keys[i];
      if (search.has(key)) shared.bins.add(search.bin(key), mass_of(key));
    }
    if (threadIdx.x == 0) shared.found_count = 0;
    __syncthreads();
    const bool exact = search.shift() == 0;
    search.narrow(shared.bins[Search::own_bin()], shared);
    if (exact) return search.low;
    shared.bins.clear(threadIdx.x);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += SampleCode::threads) {
      const Key key = shared.keys[i];
      if (!search.has(key)) continue;
      const uint32_t place = atomicAdd(&shared.found_count, 1u);
      if (place < SampleCode::few) shared.few[place] = key;
    }
    __syncthreads();
    const int found = static_cast<int>(shared.found_count);
    if (found <= SampleCode::few) {
      if (threadIdx.x < 32) {
        const Key end = end_among_few(shared.few, found, from, search.need, mass_of);
        if (threadIdx.x == 0) shared.found = end;
      }
      __syncthreads();
      return shared.found;
    }
    __syncthreads();  // before the count is 0 again
  }
}

// Adds to the bins of a warp's lanes. Where many lanes have the same bin, as equal elements do, one adds for all.
__device__ inline void add_to_bins(Mass* sums, bool active, unsigned bin, Mass mass) {
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    const unsigned here = __ballot_sync(kWholeWarp, active);
    if (!here) return;
    const unsigned common = __shfl_sync(kWholeWarp, bin, __ffs(here) - 1);
    const unsigned group = __ballot_sync(kWholeWarp, active && bin == common);
    if (__popc(group) < 4) break;
    const bool in_group = group >> threadIdx.x % 32 & 1;
    const Mass together = sum_of_warp(in_group ? mass : Mass(0));
    if (threadIdx.x % 32 == __ffs(group) - 1) atomicAdd(&sums[common], together);
    active = active && !in_group;
  }
  if (active) atomicAdd(&sums[bin], mass);
}

// The same among all elements of the row, where there are too many candidates. mass_of(x) is what an element adds. All
// threads of the cluster call it.
template <class T, class MassOf>
__device__ Key end_in_row(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys, Key from,
                          Mass need, MassOf mass_of, unsigned blocks, SampleShared& shared) {
  Search search{from, keys(weights.m, 0), need};
  for (;;) {
    shared.sums[threadIdx.x] = 0;
    __syncthreads();
    part.for_elements([&](float x, uint32_t index) {
      const Key key = keys(x, index);
      const bool counts = weights.counts(x) && search.has(key);
      add_to_bins(shared.sums, counts, search.bin(key), counts ? mass_of(x) : 0);
    });
    synchronize_row();
    Mass mass = 0;
    for (unsigned b = 0; b < blocks; b++) mass += *in_block_of_row(&shared.sums[Search::own_bin()], b);
    const bool exact = search.shift() == 0;
    search.narrow(mass, shared);
    synchronize_row();
    if (exact) return search.low;
  }
}

}  // namespace jaxsoft::cuda
