// Which tiles of queries a block of keys goes over, where there are segments.
//
// The kernel relies on it that both ends of these ranges rise with the block: then the blocks that add to a tile follow
// each other, and each knows whom to wait for. Segments may lie in any order, so ranges are widened until it is so. For
// documents that are packed one after the other nothing is widened, and their tiles begin where they do.
#pragma once

#include "work.cuh"

namespace jaxsoft::cuda {

// Makes each number the greatest, or the least, of those up to it. All threads of a block call it. `carry` has room for
// a number of each warp.
template <bool greatest, class Number>
__device__ void accumulate(Number number, int count, int* carry) {
  const int share = (count + blockDim.x - 1) / blockDim.x;
  const int begin = min(static_cast<int>(threadIdx.x) * share, count), end = min(begin + share, count);
  auto better = [](int a, int b) { return greatest ? max(a, b) : min(a, b); };
  constexpr int worst = greatest ? INT32_MIN : INT32_MAX;
  int best = worst;
  for (int i = begin; i < end; i++) best = better(best, number(i));
  best = combine_before(best, worst, better, carry);
  for (int i = begin; i < end; i++) number(i) = best = better(best, number(i));
  __syncthreads();
}

// Makes both ends of ranges rise, where blocks without tiles begin past the end, and end at 0.
__device__ inline void widen(BlockTiles* tiles, int blocks, int* carry) {
  accumulate<true>([&](int i) -> int& { return tiles[i].tiles.end; }, blocks, carry);
  accumulate<false>([&](int i) -> int& { return tiles[blocks - 1 - i].tiles.begin; }, blocks, carry);
}

// The number of the tile that begins at a query; -1 if none does.
__device__ inline int find_tile(const int* begins, int tiles, int query) {
  int first = 0, last = tiles;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (begins[middle] < query) first = middle + 1;
    else last = middle;
  }
  return first < tiles && begins[first] == query ? first : -1;
}

// Finds these ranges, and from how many turns pieces of work are taken alternately. A block of threads for each element
// of the batch.
template <int size, int threads>
__global__ void __launch_bounds__(threads, 1) find_tile_ranges(const __grid_constant__ BackwardCall call) {
  wait_for_last_kernel();  // which finds what counts for blocks
  constexpr int queries = BackwardPlan<size>::queries;
  __shared__ int carry[32], by_pieces;
  const int batch = blockIdx.x, blocks = call.key_blocks;
  const AttentionLimits limits(call, batch);
  const SegmentRange* const segments = call.segments + batch * blocks;
  BlockTiles* const tiles = call.tiles + batch * blocks;
  const int* const begins = call.query_begins.of(batch);
  const BlockTiles none{{call.query_tiles, 0}, 0, false};
  // If tiles begin where segments do, the queries of each block of keys have to be one segment's. Then their tiles
  // follow each other, all but the last one full.
  if (threadIdx.x == 0) by_pieces = true;
  __syncthreads();
  auto tiles_of = [](const ElementRange& range) { return (range.end - range.begin + queries - 1) / queries; };
  auto of_piece = [&](const SegmentRange& keys) -> BlockTiles {
    if (keys.all.empty()) return none;
    const int first = keys.of_one() ? find_tile(begins, call.query_tiles, keys.first.begin) : -1;
    if (first < 0) return none;
    const int end = first + tiles_of(keys.first);
    if (begins[end] != keys.first.end) return none;
    return {{first, end}, keys.first.begin - first * queries, true};
  };
  for (int i = threadIdx.x; i < blocks; i += threads) {
    tiles[i] = of_piece(segments[i]);
    if (!tiles[i].of_one && !segments[i].all.empty()) by_pieces = false;
  }
  __syncthreads();
  if (by_pieces) {
    widen(tiles, blocks, carry);
    for (int i = threadIdx.x; i < blocks; i += threads) {
      const ElementRange own = segments[i].first;
      const QueryTiles found = tiles[i].tiles;
      if (!tiles[i].of_one) {
        // Blocks without queries may lie between segments, but not between the pieces of one.
        if (found.length() > 0) by_pieces = false;
        tiles[i].tiles = {0, 0};
      } else if (found.begin * queries + tiles[i].first_query != own.begin || found.length() != tiles_of(own)) {
        by_pieces = false;
      }
    }
  }
  __syncthreads();
  if (!by_pieces) {
    begin_at_multiples(call.query_begins, batch, call.queries);
    for (int i = threadIdx.x; i < blocks; i += threads) {
      const ElementRange own = segments[i].all;
      tiles[i] = own.empty() ? none : BlockTiles{{own.begin / queries, (own.end + queries - 1) / queries}, 0, false};
    }
    __syncthreads();
    widen(tiles, blocks, carry);
  }
  for (int i = threadIdx.x; i < blocks; i += threads) {
    const ElementRange own = segments[i].own;
    const QueryTiles within = BackwardWork<size, true>::range(limits, own.begin, own.end, tiles[i].first_query);
    const QueryTiles both{max(tiles[i].tiles.begin, within.begin), min(tiles[i].tiles.end, within.end)};
    tiles[i].tiles = both.length() > 0 ? both : QueryTiles{0, 0};
  }
  __syncthreads();
  // Blocks of a segment are taken from the last to the first (copy.cuh), and long segments before short ones, in four
  // classes, so that the last pieces of work are short. Where blocks of different segments add to the same tiles, all
  // are taken from the last to the first.
  __shared__ int longest;
  if (threadIdx.x == 0) longest = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < blocks; i += threads)
    if (by_pieces) atomicMax(&longest, tiles_of(segments[i].first));
  __syncthreads();
  int* const order = call.order + batch * blocks;
  const int share = (blocks + threads - 1) / threads;
  const int begin = min(static_cast<int>(threadIdx.x) * share, blocks), end = min(begin + share, blocks);
  auto class_of = [&](int block) {
    const int times = by_pieces ? longest / max(tiles_of(segments[block].first), 1) : 0;
    return times < 2 ? 0 : times < 4 ? 1 : times < 8 ? 2 : 3;
  };
  for (int of_class = 0, taken = 0; of_class < 4; of_class++) {
    int own = 0, all;
    for (int i = begin; i < end; i++) own += class_of(blocks - 1 - i) == of_class;
    int next = taken + combine_before(own, 0, [](int a, int b) { return a + b; }, carry, &all);
    taken += all;
    for (int i = begin; i < end; i++)
      if (class_of(blocks - 1 - i) == of_class) order[next++] = blocks - 1 - i;
  }
  __syncthreads();
  // As if a head were one segment, with as many blocks of keys as its tiles of queries fill. Under a causal rule, where
  // blocks hardly wait for each other, it is the longest one of a part, and else one of mean length. (H200, 16
  // documents of random lengths in 32K, heads of 128, TFLOP/s without a causal rule and with one, of all parts
  // together: 502 and 379 by the mean, 420 and 459 by the longest.)
  constexpr int parts = BackwardCode::order_parts;
  __shared__ int total[parts], met_blocks[parts], most[parts];
  if (threadIdx.x < parts) total[threadIdx.x] = met_blocks[threadIdx.x] = 0, most[threadIdx.x] = 1;
  __syncthreads();
  for (int i = threadIdx.x; i < blocks; i += threads) {
    const int length = tiles[order[i]].tiles.length(), part = i / ((blocks + parts - 1) / parts);
    if (length > 0) atomicAdd(&total[part], length), atomicAdd(&met_blocks[part], 1), atomicMax(&most[part], length);
  }
  __syncthreads();
  if (threadIdx.x < parts) {
    const int part = threadIdx.x;
    const double mean = static_cast<double>(max(total[part], 1)) / max(met_blocks[part], 1);
    const double length = call.limits.right == kNoLimit ? mean : most[part];
    const double of_blocks = max(1., length * queries / BackwardPlan<size>::keys);
    const int together = turns_together<size>(call, mean, length, of_blocks);
    atomicMax(call.turns_together_of_parts + part, 4 * together < 3 * call.turns ? together : call.turns);
  }
  unsigned char* const met = call.tile_is_met + batch * call.query_tiles;
  for (int tile = threadIdx.x; tile < call.query_tiles; tile += threads) met[tile] = false;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < blocks; i += threads / 32)
    for (int tile = tiles[i].tiles.begin + threadIdx.x % 32; tile < tiles[i].tiles.end; tile += 32) met[tile] = true;
}

// The launch before is that of find_segment_ranges.
template <int size>
cudaError_t launch_tile_ranges(const BackwardCall& call, cudaStream_t stream) {
  constexpr int threads = 1024;
  return launch_kernel(find_tile_ranges<size, threads>, call.batch, threads, 0, stream, true, call);
}

}  // namespace jaxsoft::cuda
