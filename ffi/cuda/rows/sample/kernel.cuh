// The kernel: a cluster of blocks, or one block, draws a token of a row.
#pragma once

#include "../sample.cuh"
#include "bracket.cuh"
#include "select.cuh"

namespace jaxsoft::cuda {

// The options of a row. Out of their range, top-p and min-p leave at least one token.
struct Options {
  float scale;  // NaN where the temperature has no meaning
  float p, min_p;
  uint32_t k;

  template <class T>
  __device__ Options(const Sampling<T>& call, int64_t row) {
    // The scale is finite, and so far above 0 that it is normal. Temperatures below 1e-25 are not told apart.
    const float temperature = call.temperature[row];
    const bool greedy = temperature == 0;
    scale = greedy ? 1.f : temperature > 0 ? min(max(1 / temperature, 0x1p-126f), 1e25f) : nanf("");
    p = call.top_p[row];
    p = p > 0 ? p : 0.f;
    min_p = min(call.min_p[row], 1.f);
    k = greedy ? 1 : call.k;
  }
};

// The part p of a mass, rounded as products of f32 are; at least one unit.
__device__ inline Mass part_of_mass(float p, Mass mass) {
  return max(__float2ull_rn(p * __ull2float_rn(mass)), Mass(1));
}

// The order of the row's largest element, all ones for NaN, for all threads of the cluster.
__device__ inline uint32_t top_of_row(uint32_t of_thread, unsigned blocks, SampleShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t of_warp = __reduce_max_sync(kWholeWarp, of_thread);
  if (lane == 0) shared.warp_tops[warp] = of_warp;
  __syncthreads();
  if (warp == 0) {
    const uint32_t of_block = __reduce_max_sync(kWholeWarp, lane < SampleCode::warps ? shared.warp_tops[lane] : 0);
    if (lane == 0) shared.top = of_block;
  }
  synchronize_row();
  return __reduce_max_sync(kWholeWarp, lane < blocks ? *in_block_of_row(&shared.top, lane) : 0);
}

// What a warp's lanes add up to is written to the first block's tables.
struct Totals {
  Mass left = 0, above = 0, total = 0;  // see SampleShared
  __device__ void write(unsigned block, SampleShared& shared) {
    left = sum_of_warp(left), above = sum_of_warp(above), total = sum_of_warp(total);
    if (threadIdx.x % 32 != 0) return;
    const unsigned warp = block * SampleCode::warps + threadIdx.x / 32;
    *in_block_of_row(&shared.left[warp], 0) = left;
    *in_block_of_row(&shared.above[warp], 0) = above;
    *in_block_of_row(&shared.total[warp], 0) = total;
  }
};

// The sum of a table, for each warp.
__device__ inline Mass sum_of_table(const Mass* table, int size) {
  Mass sum = 0;
  for (int i = threadIdx.x % 32; i < size; i += 32) sum += table[i];
  return sum_of_warp(sum);
}

// Draws from the elements whose keys are `end` or more and whose weights are min_p or more, of which the first block's
// table has each warp's mass. This is the first element at which the mass up to it, in the order of indices, exceeds the
// part u of all.
template <class T, int held>
__device__ void draw(const Sampling<T>& call, int64_t index, const RowPart<T, held>& part, const Weights& weights,
                     const Keys<T>& keys, const Options& options, Key end, int warps, SampleShared& shared) {
  const int lane = threadIdx.x % 32;
  const int own = (warps + 31) / 32;  // warps of a lane
  Mass mine = 0;
  for (int i = lane * own; i < min(warps, (lane + 1) * own); i++) mine += shared.left[i];
  Mass until = scan_of_warp(mine);
  const Mass all = __shfl_sync(kWholeWarp, until, 31);
  // The random numbers are multiples of 2^-23: together they are a whole number of 46 bits.
  const float2 u = reinterpret_cast<const float2*>(call.uniform)[index];
  const Mass random = Mass(u.x * 0x1p23f) << 23 | Mass(u.y * 0x1p23f);
  const Mass target = __umul64hi(random << 18, all);
  const int lane_of = __ffs(__ballot_sync(kWholeWarp, until > target)) - 1;
  Mass before = __shfl_sync(kWholeWarp, until - mine, lane_of);
  int warp = lane_of * own;
  while (before + shared.left[warp] <= target) before += shared.left[warp++];

  for (int start = 0; start < part.of_warp; start += SampleCode::threads) {
    const int offset = start + threadIdx.x, i = warp * part.of_warp + offset;
    const Pack<T> pack = part.fetch(offset < part.of_warp ? i : part.window.packs);
    const int first = i * Pack<T>::size - part.window.head;
    auto mass_of = [&](int k) -> Mass {
      const float x = pack.get(k), weight = weights(x);
      const bool left = weights.bin(x) < SampleCode::bins && !(weight < options.min_p) && keys(x, first + k) >= end;
      return left ? Weights::mass(weight) : 0;
    };
    Mass mass = 0;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) mass += mass_of(k);
    Mass tile;
    Mass until = before + scan_of_block(mass, shared.warps, tile);
    if (until - mass <= target && target < until) {
      until -= mass;
#pragma unroll
      for (int k = 0; k < Pack<T>::size; k++) {
        const Mass next = until + mass_of(k);
        if (until <= target && target < next) {
          call.token[index] = first + k;
          call.probability[index] = expf((pack.get(k) - weights.m) * weights.scale) / Weights::from_mass(all);
        }
        until = next;
      }
    }
    before += tile;
    if (target < before) return;
  }
}

template <class T, int held>
__global__ void __launch_bounds__(SampleCode::threads, SampleCode::blocks)
    sample_rows(const __grid_constant__ Sampling<T> call) {
  extern __shared__ __align__(16) unsigned char memory[];
  SampleShared& shared = *reinterpret_cast<SampleShared*>(memory);
  const unsigned block = block_of_row(), blocks = blocks_of_row();
  const int64_t index = blockIdx.x / blocks;
  const RowPart<T, held> part(call.logits + index * call.n, call.n, block, blocks);
  const Options options(call, index);
  for (int i = threadIdx.x; i < SampleCode::bins; i += SampleCode::threads) shared.counts[i] = 0;

  const uint32_t top = top_of_row(part.top_order(), blocks, shared);
  const float m = of_order(top);
  if (top == ~0u || !isfinite(m) || isnan(options.scale)) {  // there is no distribution
    if (block == 0 && threadIdx.x == 0) call.token[index] = 0, call.probability[index] = nanf("");
    synchronize_row();  // others may still read this block's memory
    return;
  }
  const Weights weights(m, options.scale);
  const Keys<T> keys(call.n);
  const bool filters = options.k < call.n || options.p < 1;
  Bracket bracket{SampleCode::bins, SampleCode::bins, Bracket::no_bin};
  if (filters) {
    count_by_bins(part, weights, shared);
    synchronize_row();
    bracket = find_bracket(options.k, options.p, call.n, block, blocks, shared);
  }
  Totals totals;
  Key end = 0;
  int candidates = static_cast<int>(bracket.count);
  if (bracket.count > SampleCode::room) {
    // Too many to be put in order: the ends are found in the row itself.
    auto one = [](float) { return Mass(1); };
    auto mass = [&](float x) { return Weights::mass(weights(x)); };
    if (bracket.in_last > 0)
      end = end_in_row(part, weights, keys, end, options.k, one, blocks, shared);
    if (options.p < 1) {
      Mass total = 0;
      part.for_elements([&](float x, uint32_t i) {
        if (weights.bin(x) < SampleCode::bins && keys(x, i) >= end) total += mass(x);
      });
      Mass of_block;
      scan_of_block(total, shared.warps, of_block);
      if (threadIdx.x == 0) shared.found_rest = of_block;
      synchronize_row();
      const int lane = threadIdx.x % 32;
      total = sum_of_warp(lane < blocks ? *in_block_of_row(&shared.found_rest, lane) : Mass(0));
      synchronize_row();
      end = end_in_row(part, weights, keys, end, part_of_mass(options.p, total), mass, blocks, shared);
    }
    candidates = 0;
    part.for_elements([&](float x, uint32_t i) {
      const float weight = weights(x);
      if (weights.bin(x) < SampleCode::bins && keys(x, i) >= end && !(weight < options.min_p))
        totals.left += Weights::mass(weight);
    });
  } else {
    if (threadIdx.x == 0) shared.placed = bracket.before;
    __syncthreads();
    Key* const places = in_block_of_row(shared.keys, 0);
    const uint32_t limit = min(bracket.last, SampleCode::bins);
    part.for_packs([&](const Pack<T>& pack, int first) {
      Weights::Parts left, above, total;
#pragma unroll
      for (int k = 0; k < Pack<T>::size; k++) {
        const float x = pack.get(k), weight = weights(x);
        const uint32_t bin = weights.bin(x);
        const bool is_candidate = bracket.is_candidate(bin);
        if (is_candidate) places[atomicAdd(&shared.placed, 1u)] = keys(x, first + k);
        total.add(weight, bin < limit && !is_candidate);
        above.add(weight, bin < bracket.begin);
        left.add(weight, bin < bracket.begin && !(weight < options.min_p));
      }
      left.move_to(totals.left), above.move_to(totals.above), total.move_to(totals.total);
    });
  }
  totals.write(block, shared);
  synchronize_row();
  if (block != 0) return;

  const int warps = blocks * SampleCode::warps;
  if (candidates > 0) {
    auto one = [](Key) { return Mass(1); };
    auto mass = [&](Key key) { return Weights::mass(weights(keys.value(key))); };
    const int key_bits = 32 - kFree<T> + keys.index_bits;
    if (bracket.in_last > 0) {
      const uint32_t above = candidates - bracket.in_last;  // candidates of bins before the last
      const uint32_t need = options.k - bracket.before_last + above;
      end = end_among_candidates(candidates, end, key_bits, need, one, shared);
    }
    if (options.p < 1) {
      Mass total = 0;
      for (int i = threadIdx.x; i < candidates; i += SampleCode::threads)
        if (shared.keys[i] >= end) total += mass(shared.keys[i]);
      Mass of_candidates;
      scan_of_block(total, shared.warps, of_candidates);
      const Mass enough = part_of_mass(options.p, sum_of_table(shared.total, warps) + of_candidates);
      const Mass above = sum_of_table(shared.above, warps);
      end = end_among_candidates(candidates, end, key_bits, enough > above ? enough - above : 1, mass, shared);
    }
    for (int i = threadIdx.x; i < candidates; i += SampleCode::threads) {
      const Key key = shared.keys[i];
      const float weight = weights(keys.value(key));
      if (key >= end && !(weight < options.min_p))
        atomicAdd(&shared.left[part.warp_of(keys.index(key))], Weights::mass(weight));
    }
    __syncthreads();
  }
  draw(call, index, part, weights, keys, options, end, warps, shared);
}

// Launches the kernel with clusters of so many blocks.
template <class T, int held>
cudaError_t launch_sample(const Sampling<T>& call, unsigned blocks, cudaStream_t stream);

}  // namespace jaxsoft::cuda
