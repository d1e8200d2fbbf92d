// Where a filter ends: the greatest key from which on the keys have a given mass or number together.
//
// The keys between two bounds are put into bins, one for each thread, and the bin in which the mass is reached gives the
// next bounds.
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

  // Narrows the bounds to one bin, given the mass in each thread's bin. All threads of the block call it.
  __device__ void narrow(Mass mass, SampleShared& shared) {
    // Bins are scanned from the last on, so thread t takes the bin that is as far from the end as t is from the start.
    Mass all;
    const Mass until = scan_of_block(mass, shared.warps, all);
    const unsigned bin = SampleCode::threads - 1 - threadIdx.x;
    if (until - mass < need && need <= until) {
      shared.found_low = low + (Key(bin) << shift());
      shared.found_rest = need - (until - mass);
    }
    __syncthreads();
    const Key width = Key(1) << shift();
    low = shared.found_low, need = shared.found_rest, high = low + (width - 1);
  }
};

// The value of a lane and the lanes that hold another key, where few of a warp are left: the greatest key from which on
// their masses reach `need`.
__device__ inline Key end_among_few(Key key, Mass mass, Mass need) {
  Mass until = 0;
  for (int lane = 0; lane < 32; lane++) {
    const Key other = __shfl_sync(kWholeWarp, key, lane);
    const Mass of_other = __shfl_sync(kWholeWarp, mass, lane);
    if (other >= key) until += of_other;
  }
  Key found = until >= need && mass ? key : 0;  // the greatest
#pragma unroll
  for (int step = 16; step > 0; step /= 2) found = max(found, __shfl_xor_sync(kWholeWarp, found, step));
  return found;
}

// The end of a filter among the candidates, of which those from `from` on count. mass_of(key) is what a key adds. Their
// mass must reach `need`. All threads of the block call it, after a barrier.
template <class MassOf>
__device__ Key end_among_candidates(int count, Key from, int key_bits, Mass need, MassOf mass_of,
                                    SampleShared& shared) {
  const int shift = max(key_bits - 32, 0);
  uint32_t low = ~0u, high = 0;
  if (threadIdx.x == 0) shared.low = ~0u, shared.high = 0, shared.found_count = 0;
  shared.sums[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < count; i += SampleCode::threads) {
    const Key key = shared.keys[i];
    if (key < from) continue;
    low = min(low, uint32_t(key >> shift)), high = max(high, uint32_t(key >> shift));
  }
  low = __reduce_min_sync(kWholeWarp, low), high = __reduce_max_sync(kWholeWarp, high);
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMin(&shared.low, low), atomicMax(&shared.high, high);
  __syncthreads();
  Search search{max(Key(shared.low) << shift, from), (Key(shared.high) << shift) | ((Key(1) << shift) - 1), need};
  for (;;) {
    for (int i = threadIdx.x; i < count; i += SampleCode::threads) {
      const Key key = shared.keys[i];
      if (search.has(key)) atomicAdd(&shared.sums[search.bin(key)], mass_of(key));
    }
    __syncthreads();
    const bool exact = search.shift() == 0;
    const Mass mass = shared.sums[SampleCode::threads - 1 - threadIdx.x];
    search.narrow(mass, shared);
    if (exact) return search.low;
    shared.sums[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < count; i += SampleCode::threads) {
      const Key key = shared.keys[i];
      if (!search.has(key)) continue;
      const uint32_t place = atomicAdd(&shared.found_count, 1u);
      if (place < SampleCode::few) shared.few[place] = key;
    }
    __syncthreads();
    const uint32_t found = shared.found_count;
    if (found <= SampleCode::few) {
      const Key key = threadIdx.x % 32 < found ? shared.few[threadIdx.x % 32] : 0;
      const Key end = end_among_few(key, key ? mass_of(key) : 0, search.need);
      __syncthreads();
      return end;
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.found_count = 0;
  }
}

// Adds to the bins of a warp's lanes. Where many lanes have the same bin, as equal elements do, one adds for all.
__device__ inline void add_to_bins(Mass* sums, bool active, unsigned bin, Mass mass) {
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
template <class T, int held, class MassOf>
__device__ Key end_in_row(const RowPart<T, held>& part, const Weights& weights, const Keys<T>& keys, Key from,
                          Mass need, MassOf mass_of, unsigned blocks, SampleShared& shared) {
  Search search{from, keys(weights.m, 0), need};
  for (;;) {
    shared.sums[threadIdx.x] = 0;
    __syncthreads();
    part.for_elements([&](float x, uint32_t index) {
      const Key key = keys(x, index);
      const bool counts = weights.bin(x) < SampleCode::bins && search.has(key);
      add_to_bins(shared.sums, counts, search.bin(key), counts ? mass_of(x) : 0);
    });
    synchronize_row();
    Mass mass = 0;
    for (unsigned b = 0; b < blocks; b++) mass += *in_block_of_row(&shared.sums[SampleCode::threads - 1 - threadIdx.x], b);
    const bool exact = search.shift() == 0;
    search.narrow(mass, shared);
    synchronize_row();
    if (exact) return search.low;
  }
}

}  // namespace jaxsoft::cuda
