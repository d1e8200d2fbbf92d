// The pieces of work of the backward kernel: a block of keys of one key head with all queries that attend to it. Which
// tiles of queries these are, and in which order pieces are taken.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../../hopper.cuh"
#include "../limits.cuh"
#include "../segments.cuh"
#include "tiles.h"

namespace jaxsoft::cuda {

// Which scores need a look: none, those near limits, also those of segments, and all.
enum class BackwardKind { plain, limited, segmented, capped };
template <BackwardKind kind>
constexpr bool may_have_segments = kind >= BackwardKind::segmented;

// Some tiles of queries, one after the other.
struct QueryTiles {
  int begin, end;
  __device__ int length() const { return end - begin; }
  __device__ bool has(int tile) const { return begin <= tile && tile < end; }
};

// A call as the kernels read it.
struct BackwardCall {
  CUtensorMap query, key, value, cotangent;
  int batch, queries, keys, heads, key_heads, group, size;
  int key_blocks, query_tiles;
  unsigned pieces;  // of work
  int processors;  // multiprocessors of the device
  int heads_in_turn;  // of how many key heads pieces are taken in turn
  int* heads_in_turn_of_segments;  // the same where there are segments, which are not known before
  bool deterministic;
  float scale, scale2;  // scale2 is for exponents of 2
  float cap;
  LimitOperands limits;
  Segments query_segments, key_segments;
  SegmentRange* segments;      // (B, blocks of keys): what counts for a block, if there are segments
  QueryTiles* tiles;           // (B, blocks of keys): where there are segments, the tiles of queries of a block
  unsigned char* tile_is_met;  // (B, tiles): likewise, whether a tile is among those of any block
  float* sums;         // (B * N, tiles, queries of a tile * padded head size): the gradient by queries, unscaled
  float* numbers;      // (B * N, tiles, 2, queries of a tile): lse in base 2, then delta
  // (B * N, blocks of keys, blocks of threads that share them), for both parts that each adds: the end of the tiles to
  // which it has been added.
  int2* ends;
  unsigned long long* counter;  // of tickets
  unsigned* added;     // (B * K): of how many parts of blocks of keys all has been added
  unsigned* cleared;   // (B * K): how many parts of the sums have been cleared, of as many as there are blocks of keys
  int cleared_ahead;   // how many key heads lie between a block of keys and the sums that it clears, in any order
  void *query_gradient, *key_gradient, *value_gradient;
  bool adds_query, adds_key, adds_value;  // whether those in f32 are added to what is there
};

// Of how many key heads pieces of work are taken in turn, where blocks of keys of a head wait for each other. Pieces
// that are taken at the same time then belong to many heads, but not to more than the cache holds. A block of keys
// goes over `tiles` of queries, and so many `blocks` go over the `tiles_in_cache`. (TFLOP/s: heads of 64, 2K, on an
// H100, 335 with one head at a time, 430 with 15 in turn. Heads of 256, on an H200, 2K, 428 with one, 490 with four,
// 500 with six; 8K, 541 with one, 510 with two; causal 8K, 497 with one, 477 with four, 435 with six.) The bits of the
// results do not depend on it.
template <int size>
__host__ __device__ int heads_in_turn(const BackwardCall& call, double tiles, double tiles_in_cache, double blocks) {
  using Plan = BackwardPlan<size>;
  // Bytes of queries, cotangents, and sums.
  const double of_head = 8. * tiles_in_cache * Plan::queries * call.group * size;
  const double at_once = call.processors / Plan::blocks;  // pieces of work
  const double by_waits = ceil(Plan::stagger * at_once / (tiles * call.group));
  const double by_cache = Plan::cache * double(1 << 20) / of_head - at_once / blocks;
  const double most = call.batch * call.key_heads, count = by_waits < by_cache ? by_waits : by_cache;
  return static_cast<int>(count < 1 ? 1 : count < most ? count : most);
}

// Which block of keys, and of which key head of all in the batch, a piece of work is. Pieces that are taken one after
// the other belong to some heads in turn.
struct BackwardPlace {
  int key_head, block;
  __device__ BackwardPlace(const BackwardCall& call, unsigned ticket, unsigned heads_in_turn) {
    const unsigned heads = call.batch * call.key_heads, of_heads = heads_in_turn * call.key_blocks;
    const unsigned first = ticket / of_heads * heads_in_turn;
    const unsigned count = min(heads_in_turn, heads - first);
    ticket %= of_heads;
    key_head = first + ticket % count;
    block = ticket / count;
    if (call.deterministic) block = call.key_blocks - 1 - block;  // see copy.cuh
  }
};

// A piece of work.
// `segmented` says whether the call may have segments.
template <int head_size, bool segmented>
struct BackwardWork {
  static constexpr int size = head_size;
  using Plan = BackwardPlan<size>;
  int batch, key_head, block;
  AttentionLimits limits;
  QueryTiles tiles, tiles_of_next;  // the latter those of the next block of keys
  SegmentRange segment;             // of the block, if the call has segments

  __device__ BackwardWork(const BackwardCall& call, unsigned ticket)
      : BackwardWork(call, BackwardPlace(call, ticket, heads_in_turn(call))) {}
  __device__ BackwardWork(const BackwardCall& call, const BackwardPlace& place)
      : batch(place.key_head / call.key_heads),
        key_head(place.key_head % call.key_heads),
        block(place.block),
        limits(call, batch),
        tiles(range(call, block)),
        tiles_of_next(range(call, block + 1)),
        segment(has_segments(call) ? call.segments[batch * call.key_blocks + block] : SegmentRange{}) {}
  __device__ static bool has_segments(const BackwardCall& call) { return segmented && call.segments; }
  __device__ static int heads_in_turn(const BackwardCall& call) {
    return has_segments(call) && call.deterministic ? *call.heads_in_turn_of_segments : call.heads_in_turn;
  }
  // A head of queries, of all in the batch.
  __device__ int64_t head(const BackwardCall& call, int of_group) const {
    return int64_t(batch) * call.heads + key_head * call.group + of_group;
  }
  // The tiles with a valid score. For each tile these are blocks that follow each other.
  __device__ QueryTiles range(const BackwardCall& call, int of_block) const {
    if (!has_segments(call)) return range(limits, of_block);
    return of_block < call.key_blocks ? call.tiles[batch * call.key_blocks + of_block] : QueryTiles{0, 0};
  }
  // Those within limits.
  __device__ static QueryTiles range(const AttentionLimits& limits, int of_block) {
    const int begin = of_block * Plan::keys, end = min(begin + Plan::keys, limits.keys);
    const int first = limits.first_query(begin), last = limits.last_query(end);
    if (begin >= end || first >= last) return {0, 0};
    return {first / Plan::queries, (last + Plan::queries - 1) / Plan::queries};
  }
  // Whether some score of the keys [key, key + 64) and this tile is masked, but for those of queries past the end.
  __device__ bool masked(const BackwardCall& call, int tile, int key) const {
    const int query = tile * Plan::queries, end = query + Plan::queries;
    const bool of_segments = has_segments(call) && (query < segment.inner().begin || end > segment.inner().end);
    return of_segments || limits.exclude_some(key, key + 64, query, end);
  }
};

// Calls `visit(work)` for each of the pieces of work of the block or the pair, of whole warps or of single threads.
template <bool by_warps, class Shared, class Visit>
__device__ void for_pieces(const BackwardCall& call, Shared& shared, Visit visit) {
  constexpr bool in_pairs = Shared::Plan::blocks > 1;
  for (SlotPlace<BackwardCode::ticket_slots> ticket_place;; ticket_place.advance()) {
    shared.ticket_full[ticket_place.slot].wait(ticket_place.parity);
    const unsigned ticket = *static_cast<volatile unsigned*>(&shared.tickets[ticket_place.slot]);
    Barrier& empty = shared.ticket_empty[ticket_place.slot];
    if constexpr (by_warps && in_pairs) empty.arrive_as_warp_in(0);
    else if constexpr (by_warps) empty.arrive_as_warp();
    else if constexpr (in_pairs) empty.arrive_in(0);
    else empty.arrive();
    if (ticket >= call.pieces) return;
    visit(typename Shared::Work(call, ticket));
  }
}

}  // namespace jaxsoft::cuda
