// Which tiles of queries a block of keys goes over, where there are segments.
//
// The kernel relies on it that both ends of these ranges rise with the block: then the blocks that add to a tile follow
// each other, and each knows whom to wait for. Segments may lie in any order, so ranges are widened until it is so. For
// documents that are packed one after the other nothing is widened.
#pragma once

#include "work.cuh"

namespace jaxsoft::cuda {

// Makes each number the greatest, or the least, of those up to it. All threads of a block call it. `carry` is in memory
// that they share, with room for a number of each.
template <bool greatest, class Number>
__device__ void accumulate(Number number, int count, int* carry) {
  const int share = (count + blockDim.x - 1) / blockDim.x;
  const int begin = min(static_cast<int>(threadIdx.x) * share, count), end = min(begin + share, count);
  auto better = [](int a, int b) { return greatest ? max(a, b) : min(a, b); };
  int best = greatest ? INT32_MIN : INT32_MAX;
  for (int i = begin; i < end; i++) best = better(best, number(i));
  carry[threadIdx.x] = best;
  __syncthreads();
  for (unsigned step = 1; step < blockDim.x; step *= 2) {
    const int before = threadIdx.x < step ? best : carry[threadIdx.x - step];
    __syncthreads();
    carry[threadIdx.x] = best = better(best, before);
    __syncthreads();
  }
  best = threadIdx.x > 0 ? carry[threadIdx.x - 1] : greatest ? INT32_MIN : INT32_MAX;
  for (int i = begin; i < end; i++) number(i) = best = better(best, number(i));
  __syncthreads();
}

// Finds these ranges, and from how many turns pieces of work are taken alternately. A block of threads for each element
// of the batch.
template <int size, int threads = 256>
__global__ void __launch_bounds__(threads) find_tile_ranges(const __grid_constant__ BackwardCall call) {
  constexpr int queries = BackwardPlan<size>::queries;
  __shared__ int carry[threads];
  const int batch = blockIdx.x, blocks = call.key_blocks;
  const AttentionLimits limits(call, batch);
  const SegmentRange* const segments = call.segments + batch * blocks;
  QueryTiles* const tiles = call.tiles + batch * blocks;
  for (int i = threadIdx.x; i < blocks; i += threads) {
    const ElementRange own = segments[i].all;
    tiles[i] = {own.empty() ? call.query_tiles : own.begin / queries, (own.end + queries - 1) / queries};
  }
  __syncthreads();
  accumulate<true>([&](int i) -> int& { return tiles[i].end; }, blocks, carry);
  accumulate<false>([&](int i) -> int& { return tiles[blocks - 1 - i].begin; }, blocks, carry);
  for (int i = threadIdx.x; i < blocks; i += threads) {
    const QueryTiles within = BackwardWork<size, true>::range(limits, i);
    const QueryTiles both{max(tiles[i].begin, within.begin), min(tiles[i].end, within.end)};
    tiles[i] = both.length() > 0 ? both : QueryTiles{0, 0};
  }
  __syncthreads();
  // As if a head were one segment, with as many blocks of keys as its tiles of queries fill. Under a causal rule, where
  // blocks hardly wait for each other, it is the longest one, and else one of mean length. (H200, 16 documents of
  // random lengths in 32K, heads of 128, TFLOP/s without a causal rule and with one: 502 and 379 by the mean, 420 and
  // 459 by the longest.)
  __shared__ int total, met_blocks, most;
  if (threadIdx.x == 0) total = met_blocks = 0, most = 1;
  __syncthreads();
  for (int i = threadIdx.x; i < blocks; i += threads) {
    const int length = tiles[i].length();
    if (length > 0) atomicAdd(&total, length), atomicAdd(&met_blocks, 1), atomicMax(&most, length);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const double mean = static_cast<double>(max(total, 1)) / max(met_blocks, 1);
    const double length = call.limits.right == kNoLimit ? mean : most;
    const double of_blocks = max(1., length * queries / BackwardPlan<size>::keys);
    atomicMax(call.turns_together_of_segments, turns_together<size>(call, mean, length, of_blocks));
  }
  unsigned char* const met = call.tile_is_met + batch * call.query_tiles;
  for (int tile = threadIdx.x; tile < call.query_tiles; tile += threads) met[tile] = false;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < blocks; i += threads / 32)
    for (int tile = tiles[i].begin + threadIdx.x % 32; tile < tiles[i].end; tile += 32) met[tile] = true;
}

}  // namespace jaxsoft::cuda
