// The pieces of work of the backward kernel: a block of keys of one key head with all queries that attend to it. Which
// tiles of queries these are, and in which order pieces are taken.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../attention.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda {

// Which scores need a look.
enum class BackwardKind { plain, limited, capped };

// A call as the kernels read it.
struct BackwardCall {
  CUtensorMap query, key, value, cotangent;
  int batch, queries, keys, heads, key_heads, group, size;
  int key_blocks, query_tiles;
  bool deterministic, descending;
  float scale, scale2;  // scale2 is for exponents of 2
  float cap;
  int left, right;  // 2^30 where there is no limit
  OfBatch query_lengths, key_lengths, offset;
  float* sums;         // (B * N, tiles, queries of a tile * padded head size): the gradient by queries, unscaled
  float* numbers;      // (B * N, tiles, 2, queries of a tile): lse in base 2, then delta
  unsigned* turns;     // (B * N, tiles, groups): how many blocks of keys have added to a tile
  unsigned long long* counter;  // of tickets
  void *query_gradient, *key_gradient, *value_gradient;
};

__device__ inline int of_batch(const OfBatch& numbers, int batch, int most) {
  return numbers.data ? min(max(numbers.data[batch * numbers.step], 0), most) : most;
}

// A range of tiles of queries.
struct TileRange {
  int begin, end;
  __device__ int length() const { return end - begin; }
  __device__ bool has(int tile) const { return begin <= tile && tile < end; }
};

// A piece of work.
template <int size>
struct BackwardWork {
  using Plan = BackwardPlan<size>;
  int batch, key_head, block;
  int key_end;         // keys from there on do not count
  int least, most;     // scores count where least <= key - query <= most
  TileRange tiles, tiles_of_next;  // the latter those of the next block of keys

  __device__ BackwardWork(const BackwardCall& call, unsigned ticket) {
    block = ticket % call.key_blocks;
    if (call.descending) block = call.key_blocks - 1 - block;
    ticket /= call.key_blocks;
    key_head = ticket % call.key_heads;
    batch = ticket / call.key_heads;
    key_end = of_batch(call.key_lengths, batch, call.keys);
    const int query_end = of_batch(call.query_lengths, batch, call.queries);
    const int offset = call.offset.data ? call.offset.data[batch * call.offset.step] : 0;
    constexpr int far = 1 << 30;
    // Offsets may be any numbers: differences that no pair of indices has are as good as infinite ones.
    const long long first = static_cast<long long>(offset) - call.left, last = static_cast<long long>(offset) + call.right;
    least = call.left == far ? -far : static_cast<int>(min(max(first, -static_cast<long long>(far)), static_cast<long long>(far)));
    most = call.right == far ? far : static_cast<int>(min(max(last, -static_cast<long long>(far)), static_cast<long long>(far)));
    tiles = range(block, query_end);
    tiles_of_next = range(block + 1, query_end);
  }
  // The tiles of which some score counts.
  __device__ TileRange range(int of_block, int query_end) const {
    const int begin = of_block * Plan::keys, end = min(begin + Plan::keys, key_end);
    if (begin >= end) return {0, 0};
    const int first = max(begin - most, 0), last = min(end - least, query_end);  // key - query <= most, >= least
    if (first >= last) return {0, 0};
    return {first / Plan::queries, (last + Plan::queries - 1) / Plan::queries};
  }
  // Whether some score of the keys [key, key + 64) and this tile does not count.
  __device__ bool masked(int tile, int key) const {
    const int query = tile * Plan::queries;
    return key - (query + Plan::queries - 1) < least || key + 63 - query > most || key + 64 > key_end;
  }
};

}  // namespace jaxsoft::cuda
