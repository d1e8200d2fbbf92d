// The first histogram: how many elements are in each bin of weights, and what follows for the ends of top-k and top-p.
//
// An element's bin says what it weighs up to a factor r. So the counts bound the mass from the largest element down to
// each bin, and, what is sharper for top_p near 1, the mass from each bin down to the smallest element. The bins where
// neither bound tells on which side of the end of top-p they are have the candidates. top-k ends in one bin.
#pragma once

#include "few.cuh"

namespace jaxsoft::cuda {

// Counts elements, given their places. The counts must be 0. A place is a float that counts up by one bit for each bin,
// so that an addition and a shift make the bin's address of it.
struct Counter {
  uint32_t base;  // where the count would be if the place were 0.0
  __device__ explicit Counter(SampleShared& shared)
      : base(shared_address(shared.counts) - bits<uint32_t>(Weights::border(0)) * 4) {}
  __device__ void add(float place) const {
    const uint32_t word = bits<uint32_t>(fminf(place, Weights::border(SampleCode::bins)));
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(base + word * 4) : "memory");
  }
};

// Counts the block's elements by bins.
template <class T>
__device__ void count_by_bins(const RowPart<T>& part, const Weights& weights, SampleShared& shared) {
  const Counter counter(shared);
  part.template for_packs<Way::back>([&](const Pack<T>& pack) {
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) counter.add(weights.place(pack.get(k)));
  });
}

// What the masses of a thread's elements are together: of those from the threshold on, and of all.
struct Survey {
  Mass above = 0, total = 0;
};

// The same, where top-p is of the mass of all elements. That is added up, too, and the elements from the threshold on
// are gathered: additions to the counts leave time for this.
template <class T>
__device__ Survey count_and_weigh(const RowPart<T>& part, const Weights& weights, const Keys<T>& keys, float threshold,
                                  const FewPlaces& places, SampleShared& shared) {
  Survey found;
  const Counter counter(shared);
  part.template for_chosen<Way::back>(
      [&](const Pack<T>& pack) {
        Weights::Parts total;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; k++) {
          const float x = pack.get(k);
          counter.add(weights.place(x));
          total.add(weights(x));
        }
        total.move_to(found.total);
        return chosen_from(threshold, pack, weights, places, shared);
      },
      [&](uint32_t count) { return atomicAdd(&shared.placed_few, count); },
      [&](float x, uint32_t index, uint32_t place) {
        found.above += Weights::mass(weights(x));
        places.put(keys(x, index), place, shared);
      });
  return found;
}

// Four counts at a time: what is sent takes time by the number of stores.
__device__ inline uint4* quad_of(uint32_t* counts, unsigned i) { return &reinterpret_cast<uint4*>(counts)[i]; }

// Adds up the counts of all blocks, of which there are several, for all of them: each block does so for a part of the
// bins, for which this sends it the counts. All threads of the cluster call it, after a barrier of the block.
__device__ inline void send_counts(unsigned block, unsigned blocks, SampleShared& shared) {
  static_assert(SampleCode::bins == 4 * SampleCode::threads);
  const unsigned part = CountsOfRow::quads_of_block(blocks), owner = small_quotient(threadIdx.x, part);
  send_to_block(*quad_of(shared.counts, threadIdx.x),
                quad_of(shared.row.sent, block * part + threadIdx.x - owner * part), shared.counts_sent, owner);
}

// Adds them up when they have come, and sends the sums.
__device__ inline void send_sums(unsigned block, unsigned blocks, SampleShared& shared) {
  const unsigned part = CountsOfRow::quads_of_block(blocks), own = CountsOfRow::quads_of_block(block, blocks);
  wait_for_sent(shared.counts_sent);
  for (unsigned i = threadIdx.x; i < 4 * own; i += SampleCode::threads) {
    uint32_t sum = 0;
#pragma unroll 4
    for (unsigned b = 0; b < blocks; b++) sum += shared.row.sent[4 * b * part + i];
    shared.row.all[4 * block * part + i] = sum;
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < own * blocks; i += SampleCode::threads) {
    const unsigned other = small_quotient(i, own), place = block * part + i - other * own;
    if (other != block)
      send_to_block(*quad_of(shared.row.all, place), quad_of(shared.row.all, place), shared.sums_sent, other);
  }
}

// Finds the bracket from the counts of the block and of all blocks. All threads call it, after a barrier. Where top-p
// is of the mass of all elements, `total`, it must leave `enough` of it.
__device__ inline Bracket find_bracket(uint32_t k, float p, uint32_t n, bool by_mass, Mass enough, Mass total,
                                       const uint32_t* all_counts, SampleShared& shared) {
  constexpr int own = SampleCode::bins / SampleCode::threads;  // bins of a thread
  constexpr uint32_t bins = SampleCode::bins;
  constexpr float octaves_of_bin = SampleCode::octaves_of_bin;
  static_assert(own == 4);
  const uint32_t first = threadIdx.x * own;
  const uint4 quad = *reinterpret_cast<const uint4*>(&all_counts[first]);
  const uint32_t counts[own] = {quad.x, quad.y, quad.z, quad.w};
  float weight[own], mass = 0;
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < own; i++) {
    weight[i] = exp2_approximately(-octaves_of_bin * (first + i));
    mass += counts[i] * weight[i], count += counts[i];
  }
  Bracket& bracket = shared.bracket;  // in which the threads add up what they find
  Bracket found;
  if (threadIdx.x == 0) {
    bracket.begin = bracket.end = 0, bracket.last = Bracket::no_bin, bracket.before_last = bracket.in_last = 0;
    bracket.count = bracket.own = 0;
  }
  float whole;
  const float mass_before = scan_of_block(mass, shared.float_warps, whole) - mass;
  uint32_t count_before = 0, all = 0;
  if (k < n) count_before = scan_of_block(count, shared.count_warps, all) - count;
  // What follows is for the few threads in whose bins something ends. The others wait at the barriers, so that their
  // warps take no time.
  if (k < all) {
    if (count_before < k && k <= count_before + count) {
      float until = mass_before;
      uint32_t number = count_before;
#pragma unroll
      for (int i = 0; i < own; i++) {
        if (number < k && k <= number + counts[i]) {
          bracket.last = first + i, bracket.before_last = number, bracket.in_last = counts[i];
          bracket.mass = until + (k - number) * weight[i];
        }
        number += counts[i], until += counts[i] * weight[i];
      }
    }
    __syncthreads();
    whole = bracket.mass;
  }
  const uint32_t last = bracket.last, limit = min(last, bins - 1);  // the last bin that may matter
  if (p < 1) {
    // Every mass by counts is within a factor r of the true one, up to rounding: one unit of mass for each element,
    // and that of the sums here, and of p times the mass.
    const float r = exp2_approximately(0.51f * octaves_of_bin), inverse = exp2_approximately(-0.51f * octaves_of_bin);
    constexpr float unit = 1.f / (1ull << SampleCode::octaves);
    const float rounded = whole * 4e-6f + n * unit;
    // What top-p leaves, and the rest, are each in a range, or known.
    float low = p * whole * inverse, high = p * whole * r;
    float rest_low = (1 - p) * whole * inverse, rest_high = (1 - p) * whole * r;
    if (by_mass)
      low = high = __ull2float_rn(enough) * unit, rest_low = rest_high = __ull2float_rn(total - enough) * unit;
    // Up to which mass by counts top-p has certainly not ended, and from which on it certainly has. `whole` is known by
    // counts, too.
    const float not_yet = max((low - rounded) * inverse, whole - (rest_high + 2 * rounded) * r);
    const float ended = min((high + rounded) * r, whole - (rest_low - 2 * rounded) * inverse);
    uint32_t bins_not_yet = 0, bins_not_ended = 0;
    float until = mass_before;
#pragma unroll
    for (int i = 0; i < own; i++) {
      until += counts[i] * weight[i];
      const bool matters = first + i <= limit;
      const float mass_until = first + i == last ? whole : until;
      bins_not_yet += matters && mass_until < not_yet, bins_not_ended += matters && mass_until <= ended;
    }
    bins_not_yet = __reduce_add_sync(kWholeWarp, bins_not_yet);
    bins_not_ended = __reduce_add_sync(kWholeWarp, bins_not_ended);
    if (threadIdx.x % 32 == 0) {
      if (bins_not_yet > 0) atomicAdd(&bracket.begin, bins_not_yet);
      if (bins_not_ended > 0) atomicAdd(&bracket.end, bins_not_ended);
    }
    __syncthreads();
    found.begin = bracket.begin, found.end = min(bracket.end, limit) + 1;
  } else {
    found.begin = found.end = min(last, bins);
  }
  found.last = last, found.before_last = bracket.before_last, found.in_last = bracket.in_last;
  if ((first < found.end && found.begin < first + own) || (first <= last && last < first + own)) {
    uint32_t candidates = 0, of_block = 0;
#pragma unroll
    for (int i = 0; i < own; i++)
      if (found.is_candidate(first + i)) candidates += counts[i], of_block += shared.counts[first + i];
    atomicAdd(&bracket.count, candidates), atomicAdd(&bracket.own, of_block);
  }
  __syncthreads();
  found.count = bracket.count, found.own = bracket.own;
  return found;
}

}  // namespace jaxsoft::cuda
