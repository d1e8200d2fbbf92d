// The pieces of work of the backward kernel: a block of keys with all queries of one head that attend to it. Which tiles
// of queries these are, and in which order pieces are taken.
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
  CUtensorMap key_result, value_result;  // the gradients, where they are in 16 bits
  int batch, queries, keys, heads, key_heads, group, size;
  int key_blocks, query_tiles;
  unsigned pieces;  // of work
  int processors;  // multiprocessors of the device
  int heads_in_turn;  // of how many heads pieces are taken in turn, at most
  int* heads_in_turn_of_segments;  // the same where there are segments, which are not known before
  bool deterministic;
  float scale, scale2;  // scale2 is for exponents of 2
  float cap;
  LimitOperands limits;
  Segments query_segments, key_segments;
  SegmentRange* segments;      // (B, blocks of keys): what counts for a block, if there are segments
  QueryTiles* tiles;           // (B, blocks of keys): where there are segments, the tiles of queries of a block
  unsigned char* tile_is_met;  // (B, tiles): likewise, whether a tile is among those of any block
  float* sums;         // (turns, tiles, queries of a tile * padded head size): the gradient by queries, unscaled
  float* numbers;      // (B * N, tiles, 2, queries of a tile): lse in base 2, then delta
  // (turns, blocks of keys, blocks of threads that share them), for both parts that each adds: the end of the tiles to
  // which it has been added.
  int2* ends;
  // Where heads share keys (group.cuh), both (B * K, blocks of keys, parts): the sums of the gradients by keys and values
  // of some heads, and of how many.
  float* group_sums;
  unsigned* summed;
  unsigned long long* counter;  // of pieces that have been taken
  unsigned* added;     // (turns): of how many parts of blocks of keys all has been added
  // In any order: (turns), how many parts of sums have been cleared, of as many as there are blocks of keys, and how many
  // turns lie between a block of keys and the sums that it clears.
  unsigned* cleared;
  int cleared_ahead;
  void *query_gradient, *key_gradient, *value_gradient;
  bool adds_query, adds_key, adds_value;  // whether those in f32 are added to what is there
};

// Of how many heads pieces of work are taken in turn, where blocks of keys of a head wait for each other. Pieces that are
// taken at the same time then belong to many heads, but not to more than the cache holds. A block of keys goes over
// `tiles` of queries, and so many `blocks` go over the `tiles_in_cache`. (TFLOP/s: heads of 64, 2K, on an H100, 335 with
// one head at a time, 430 with 15 in turn. Heads of 256, on an H200, 2K, 428 with one, 490 with four, 500 with six; 8K,
// 541 with one, 510 with two; causal 8K, 497 with one, 477 with four, 435 with six.) The bits of the results do not
// depend on it.
template <int size>
__host__ __device__ int heads_in_turn(const BackwardCall& call, double tiles, double tiles_in_cache, double blocks) {
  using Plan = BackwardPlan<size>;
  const double of_head = 8. * tiles_in_cache * Plan::queries * size;  // bytes of queries, cotangents, and sums
  const double at_once = call.processors / Plan::blocks;              // pieces of work
  const double by_waits = ceil(Plan::stagger * at_once / tiles);
  const double by_cache = Plan::cache * double(1 << 20) / of_head - at_once / blocks;
  const double most = call.batch * call.heads, count = by_waits < by_cache ? by_waits : by_cache;
  return static_cast<int>(count < 1 ? 1 : count < most ? count : most);
}

// A head, by its turn. Between those that share keys there are as many others as possible: each adds to what the last
// has of the gradients by keys and values.
struct BackwardHead {
  int batch, head, key_head;
  __device__ BackwardHead(const BackwardCall& call, int turn)
      : batch(turn / call.heads),
        head(turn % call.heads % call.key_heads * call.group + turn % call.heads / call.key_heads),
        key_head(turn % call.heads % call.key_heads) {}
};

// Of which head a piece of work is, by its turn, and which block of keys. Pieces that are taken one after the other
// belong to some heads in turn: as many as `heads_in_turn`, or a little less, so that no few are left at the end.
struct BackwardPlace {
  int turn, block;
  __device__ BackwardPlace(const BackwardCall& call, unsigned piece, unsigned heads_in_turn) {
    const unsigned heads = call.batch * call.heads, times = (heads + heads_in_turn - 1) / heads_in_turn;
    unsigned count = heads / times, first = 0;
    const unsigned longer = heads % times, of_longer = longer * (count + 1);  // those with a head more come first
    if (piece < of_longer * call.key_blocks) count++;
    else first = of_longer, piece -= of_longer * call.key_blocks;
    first += piece / (count * call.key_blocks) * count;
    piece %= count * call.key_blocks;
    turn = first + piece % count;
    block = piece / count;
    if (call.deterministic) block = call.key_blocks - 1 - block;  // see copy.cuh
  }
};

// A piece of work, which the thread that takes it describes, and the others read in shared memory. `may_be_segmented`
// says whether the call may have segments.
template <int head_size, bool may_be_segmented>
struct BackwardWork {
  static constexpr int size = head_size;
  using Plan = BackwardPlan<size>;
  bool there;  // else there are no more
  int turn, batch, head, key_head, block;
  AttentionLimits limits;
  QueryTiles tiles, tiles_of_next;  // the latter those of the next block of keys
  SegmentRange segment;             // of the block, if the call has segments

  __device__ void set(const BackwardCall& call, unsigned piece) {
    there = piece < call.pieces;
    if (!there) return;
    const bool any_segments = has_segments(call);
    const BackwardPlace place(
        call, piece, any_segments && call.deterministic ? *call.heads_in_turn_of_segments : call.heads_in_turn);
    const BackwardHead of_turn(call, place.turn);
    turn = place.turn, block = place.block;
    batch = of_turn.batch, head = of_turn.head, key_head = of_turn.key_head;
    limits = {call, batch};
    tiles = range(call, block), tiles_of_next = range(call, block + 1);
    if (any_segments) segment = call.segments[batch * call.key_blocks + block];
  }
  __device__ static bool has_segments(const BackwardCall& call) { return may_be_segmented && call.segments; }
  // Which of the heads that share keys.
  __device__ int of_group(const BackwardCall& call) const { return head - key_head * call.group; }
  __device__ bool last_of_group(const BackwardCall& call) const { return of_group(call) == call.group - 1; }
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
__device__ void for_pieces(Shared& shared, Visit visit) {
  constexpr bool in_pairs = Shared::Plan::blocks > 1;
  for (SlotPlace<BackwardCode::work_slots> place;; place.advance()) {
    shared.work_full[place.slot].wait(place.parity);
    const typename Shared::Work work = shared.works[place.slot];
    Barrier& empty = shared.work_empty[place.slot];
    if constexpr (by_warps && in_pairs) empty.arrive_as_warp_in(0);
    else if constexpr (by_warps) empty.arrive_as_warp();
    else if constexpr (in_pairs) empty.arrive_in(0);
    else empty.arrive();
    if (!work.there) return;
    visit(work);
  }
}

}  // namespace jaxsoft::cuda
