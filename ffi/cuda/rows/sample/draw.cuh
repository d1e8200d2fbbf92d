// The end of a draw: the token, in the range of the row that has it.
#pragma once

#include "bracket.cuh"

namespace jaxsoft::cuda {

// Ends a draw when each thread has gone over packs from `first` on, at most `each` of them, in which the elements that
// are left have `mass` together, and `until` with all before them. The lanes of the warp whose thread has the token go
// over that thread's elements. All threads of the block call it.
template <class T, class IsLeft>
__device__ void draw_of_thread(const Sampling<T>& call, int64_t index, const RowPart<T>& part, const Weights& weights,
                               IsLeft is_left, int first, int each, Mass until, Mass mass, const Range& range) {
  const Mass target = range.target;
  const unsigned with = __ballot_sync(kWholeWarp, until - mass <= target && target < until);
  if (!with) return;
  const int lane = threadIdx.x % 32, source = __ffs(with) - 1;
  constexpr int size = Pack<T>::size;
  Mass before = __shfl_sync(kWholeWarp, until - mass, source);
  const int begin = __shfl_sync(kWholeWarp, first, source) * size - part.window.head, stop = begin + each * size;
#pragma unroll 1
  for (int start = begin; start < stop; start += 32) {
    const int i = start + lane;
    mass = 0;
    float x = 0;
    if (i >= 0 && i < min(stop, part.window.n)) {
      x = widen(part.row[i]);
      if (const float weight = weights(x); is_left(x, weight, i)) mass = Weights::mass(weight);
    }
    until = before + scan_of_warp(mass, min(stop - start, 32));
    if (until - mass <= target && target < until) {
      call.token[index] = i;
      call.probability[index] = weights.probability(x, range.all);
    }
    before = __shfl_sync(kWholeWarp, until, 31);
  }
}

// Draws from the elements whose keys are `end` or more and whose weights are min_p or more, of which the first block's
// tables have each warp's mass. This is the first element at which the mass up to it, in the order of indices, exceeds
// the part u of all.
template <class T>
__device__ void draw(const Sampling<T>& call, int64_t index, const RowPart<T>& part, const Weights& weights,
                     const Keys<T>& keys, const Options& options, Key end, int of_lane, SampleShared& shared) {
  // One warp finds the range, as all warps together would take longer.
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    auto left_in = [&](int place) { return shared.left[place] + shared.candidates[place]; };
    Mass mine = 0;
#pragma unroll 4
    for (int i = 0; i < of_lane; i++) mine += left_in(i * 32 + lane);
    const Mass until_mine = scan_of_warp(mine), all = __shfl_sync(kWholeWarp, until_mine, 31);
    const Mass target = options.target(all);
    const int with = __ffs(__ballot_sync(kWholeWarp, until_mine > target)) - 1;
    const Mass before_lane = __shfl_sync(kWholeWarp, until_mine - mine, with);
    const Mass of_warp = lane < of_lane ? left_in(lane * 32 + with) : 0;
    const Mass until_warp = before_lane + scan_of_warp(of_warp, of_lane);
    const int warp_with = __ffs(__ballot_sync(kWholeWarp, until_warp > target)) - 1;
    if (lane == warp_with)
      shared.range = {with * of_lane + lane, target, until_warp - of_warp, all};
  }
  __syncthreads();
  const Range range = shared.range;
  const int warp = range.warp;
  const Mass target = range.target;
  // Each thread has some packs of the range that follow each other.
  constexpr int size = Pack<T>::size;
  const int packs = part.of_warp(), each = (packs + SampleCode::threads - 1) / SampleCode::threads;
  const int first = warp * packs + min(static_cast<int>(threadIdx.x) * each, packs);
  const int last = min(first + each, (warp + 1) * packs);
  auto is_left = [&](float x, float weight, int i) { return !(weight < options.min_p) && keys(x, i) >= end; };
  Mass mass = 0, tile;
  if (packs * size <= SampleCode::threads) {  // an element for each thread, which takes less time
    const int i = warp * packs * size - part.window.head + static_cast<int>(threadIdx.x);
    float x = 0;
    if (threadIdx.x < packs * size && i >= 0 && i < part.window.n) {
      x = widen(part.row[i]);
      if (const float weight = weights(x); is_left(x, weight, i)) mass = Weights::mass(weight);
    }
    const Mass until = range.before + scan_of_block(mass, shared.warps[2], tile);
    if (until - mass <= target && target < until) {
      call.token[index] = i;
      call.probability[index] = weights.probability(x, range.all);
    }
    return;
  }
#pragma unroll 1
  for (int p = first; p < last; p++) {
    const Pack<T> pack = part.fetch(p);
    Weights::Parts parts;
#pragma unroll
    for (int k = 0; k < size; k++) {
      const float x = pack.get(k), weight = weights(x);
      parts.add(is_left(x, weight, p * size - part.window.head + k) ? weight : 0.f);
    }
    parts.move_to(mass);
  }
  const Mass until = range.before + scan_of_block(mass, shared.warps[2], tile);
  draw_of_thread(call, index, part, weights, is_left, first, each, until, mass, range);
}

}  // namespace jaxsoft::cuda
