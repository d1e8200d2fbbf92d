// The pieces of work of the backward kernel: a block of keys with all queries that attend to it, of one head or some
// heads that share keys. Which tiles of queries these are, and in which order pieces are taken.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../hopper.cuh"
#include "../limits.cuh"
#include "../score_kind.h"
#include "../segments.cuh"
#include "../soft_cap.cuh"
#include "tiles.h"

namespace jaxsoft::cuda {

// Some tiles of queries, one after the other.
struct QueryTiles {
  int begin, end;
  __device__ int length() const { return end - begin; }
  __device__ bool has(int tile) const { return begin <= tile && tile < end; }
  // The same, counted from the last of all.
  __device__ QueryTiles from_last(int last) const { return {last + 1 - end, last + 1 - begin}; }
};

// The tiles of queries of a block of keys, where there are segments.
struct BlockTiles {
  QueryTiles tiles;
  int first_query;  // where tile 0 would begin, if those before the block's were full
  bool of_one;      // whether they have no queries of other segments
};
static_assert(sizeof(BlockTiles) == 16);  // as the workspace is divided

// A call as the kernels read it.
struct BackwardCall {
  CUtensorMap query, key, value, cotangent;
  CUtensorMap key_result, value_result;  // the gradients, where they are in 16 bits
  int batch, queries, keys, heads, key_heads, group, size, value_size;
  int heads_of_piece;  // a divisor of the group
  int turns;           // how many times so many heads there are in the batch
  int key_blocks, query_tiles;  // where there are segments, at most
  unsigned pieces;  // of work
  int processors;  // multiprocessors of the device
  int turns_together;  // from how many turns at most pieces are taken alternately
  int reversed;  // how many turns, the last ones, are gone over the other way round
  int* turns_together_of_parts;  // the same where there are segments, for each part of `order`
  bool deterministic;
  float scale, scale2;  // scale2 is for exponents of 2
  SoftCap soft_cap;
  LimitOperands limits;
  Segments query_segments, key_segments;
  SegmentRange* segments;      // (B, blocks of keys): what counts for a block, if there are segments
  BlockTiles* tiles;           // (B, blocks of keys): likewise, the tiles of queries of a block
  BlockBegins key_begins, query_begins;  // likewise, of the blocks of keys and of the tiles of queries
  int* order;                  // (B, blocks of keys): likewise, the blocks as they are taken
  unsigned char* tile_is_met;  // (B, tiles): likewise, whether a tile is among those of any block
  // (turns, heads of a piece, tiles, queries of a tile * padded head size): the gradient by queries, unscaled
  float* sums;
  float* numbers;      // (B * N, tiles, 2, queries of a tile): lse in base 2, then delta
  // (turns, heads of a piece, blocks of keys, blocks of threads that share them), for both parts that each adds: the
  // end of the tiles to which it has been added.
  int2* ends;
  // Where pieces of work share keys (group.cuh), both (B * K, blocks of keys, parts): the sums of the gradients by keys
  // and values of some, and of how many.
  float* group_sums;
  unsigned* summed;
  unsigned long long* counter;  // of pieces that have been taken
  unsigned* added;     // (turns): of how many parts of blocks of keys all has been added
  // In any order: (turns), how many parts of sums have been cleared, of as many as there are blocks of keys, and how
  // many turns lie between a block of keys and the sums that it clears.
  unsigned* cleared;
  int cleared_ahead;
  void *query_gradient, *key_gradient, *value_gradient;
  bool adds_query, adds_key, adds_value;  // whether those in f32 are added to what is there
  // The queries of a tile of so many.
  __device__ ElementRange queries_of(int batch, int tile, int count) const {
    if (segments) return query_begins.block(batch, tile);
    return {tile * count, min(tile * count + count, queries)};
  }
};

// How many heads a piece of work has, of those that share keys. Several pieces have to add up their gradients by keys
// (group.cuh), which takes the time of two tiles. But the shorter pieces are, the less time passes at the end, when not
// all multiprocessors have one, and the fewer sums have to stay in the cache. (H200, heads of 128, 32/8, with a window
// of 1024 keys: one head at a time takes 1.18 times as long as four.)
template <int size>
int heads_of_piece(const BackwardCall& call) {
  using Plan = BackwardPlan<size>;
  constexpr int enough_tiles = 48, enough_pieces = 6;  // the latter of each multiprocessor
  double keys = call.keys;  // of a query
  if (call.limits.right != kNoLimit) keys /= 2;
  if (call.limits.left != kNoLimit) keys = std::min(keys, double(call.limits.left) + Plan::keys);
  if (call.query_segments.data) keys /= 8;  // they are not known here
  const double tiles = keys / call.keys * call.query_tiles;
  const double pieces = double(call.batch) * call.heads * call.key_blocks, at_once = call.processors / Plan::blocks;
  int heads = 1;
  for (int more = 2; more <= call.group && heads * tiles < enough_tiles; more++)
    if (call.group % more == 0 && pieces >= enough_pieces * at_once * more) heads = more;
  return heads;
}

// From how many turns pieces of work are taken alternately, where blocks of keys of a head wait for each other. Pieces
// that are taken at the same time then belong to many heads, but not to more than the cache holds. A block of keys goes
// over `tiles` of queries, and so many `blocks` go over the `tiles_in_cache`. (TFLOP/s by turns of one head: heads of
// 64, 2K, on an H100, 335 with one, 430 with 15. Heads of 256, on an H200, 2K, 428 with one, 490 with four, 500 with
// six; 8K, 541 with one, 510 with two; causal 8K, 497 with one, 477 with four, 435 with six.) The bits of the results
// depend on it only as `reversed_turns` does.
template <int size>
__host__ __device__ int turns_together(const BackwardCall& call, double tiles, double tiles_in_cache, double blocks) {
  using Plan = BackwardPlan<size>;
  // Bytes of queries, cotangents, and sums.
  const double of_turn = 8. * tiles_in_cache * Plan::queries * call.heads_of_piece * size;
  const double at_once = call.processors / Plan::blocks;  // pieces of work
  const double by_waits = ceil(Plan::stagger * at_once / (tiles * call.heads_of_piece));
  const double by_cache = BackwardCode::cache * double(1 << 20) / of_turn - at_once / blocks;
  const double count = by_waits < by_cache ? by_waits : by_cache;
  return static_cast<int>(count < 1 ? 1 : count < call.turns ? count : call.turns);
}

// How many turns, the last ones, are reversed: they have the blocks of keys from the first to the last, and the tiles
// of queries from the last to the first. Under a causal rule, blocks of keys go over the fewer tiles the later they
// are. In the order in which blocks of a head wait the least for each other, the longest piece of work of a turn is its
// last, and at the end multiprocessors would be without work for half the time of one. Of a reversed turn the shortest
// is the last. They are as many as are taken together, or as it takes to occupy all multiprocessors. If there are no
// others, none is reversed: blocks of a head that begin at the same time, with the same tile, wait for each other.
template <int size>
int reversed_turns(const BackwardCall& call) {
  const bool longest_last = call.limits.right != kNoLimit && call.limits.left == kNoLimit;
  if (!call.deterministic || !longest_last || call.segments) return 0;
  const int at_once = call.processors / BackwardPlan<size>::blocks;
  const int last = std::max(call.turns_together, (at_once + call.key_blocks - 1) / call.key_blocks);
  return last < call.turns ? last : 0;
}

// The heads of a turn: the first, and as many as a piece of work has. Between turns that share keys there are as many
// others as possible: each adds to what the last has of the gradients by keys and values.
struct BackwardHeads {
  int batch, key_head, first;
  __device__ BackwardHeads(const BackwardCall& call, int turn) {
    const int of_batch = call.heads / call.heads_of_piece, within = turn % of_batch;
    batch = turn / of_batch, key_head = within % call.key_heads;
    first = key_head * call.group + within / call.key_heads * call.heads_of_piece;
  }
};

// Of which turn a piece of work is, and which block of keys. Pieces are taken alternately from some turns: as many as
// `turns_together` says, or a few less, so that no few are left at the end; and at last from all that are reversed.
// Where there are segments, each part of the order of a turn's blocks is taken from all turns before the next part.
struct BackwardPlace {
  int turn, rank, block;  // the rank is among the turn's blocks, in the order in which they are taken
  bool reversed;
  __device__ BackwardPlace(const BackwardCall& call, unsigned piece, bool in_parts) {
    unsigned turns = call.turns - call.reversed, turns_together = call.turns_together, blocks = call.key_blocks;
    unsigned first = 0, first_rank = 0;
    if (in_parts) {
      constexpr unsigned parts = BackwardCode::order_parts;
      const unsigned share = (blocks + parts - 1) / parts, part = piece / (turns * share);
      piece %= turns * share;
      first_rank = part * share, blocks = min(share, blocks - first_rank);
      turns_together = call.turns_together_of_parts[part];
    }
    reversed = piece >= turns * blocks;
    if (reversed) {
      piece -= turns * blocks;
      first = turns, turns = turns_together = call.reversed;
    }
    const unsigned times = (turns + turns_together - 1) / turns_together;
    unsigned count = turns / times;
    const unsigned longer = turns % times, of_longer = longer * (count + 1);  // those with one more come first
    if (piece < of_longer * blocks) count++;
    else first += of_longer, piece -= of_longer * blocks;
    first += piece / (count * blocks) * count;
    piece %= count * blocks;
    turn = first + piece % count;
    rank = first_rank + piece / count;
    block = call.deterministic && !reversed ? call.key_blocks - 1 - rank : rank;  // see copy.cuh
  }
};

// What segments leave to a block of keys.
struct KeysOfSegments {
  SegmentRange range;
  BlockTiles tiles;
};
struct NoSegments {};

// A piece of work, which the thread that takes it describes, and the others read in shared memory. `may_be_segmented`
// says whether the call may have segments.
template <int head_size, bool may_be_segmented>
struct BackwardWork {
  static constexpr int size = head_size;
  using Plan = BackwardPlan<size>;
  bool there;  // else there are no more
  int turn, batch, first_head, key_head, block;
  int before_block;  // the block of keys that adds to each tile before this one: the next, or if reversed, the last
  int last_tile;     // of all, if they are counted from there, as `tiles` are in a reversed turn; else 0
  AttentionLimits limits;
  QueryTiles tiles, tiles_before;  // the latter those of `before_block`
  // What segments leave to the block. Of a call without any its keys alone are known, and the rest is 0.
  std::conditional_t<may_be_segmented, KeysOfSegments, NoSegments> segments;

  __device__ void set(const BackwardCall& call, unsigned piece) {
    there = piece < call.pieces;
    if (!there) return;
    const bool any_segments = has_segments(call);
    const BackwardPlace place(call, piece, any_segments && call.deterministic);
    const BackwardHeads heads(call, place.turn);
    turn = place.turn, batch = heads.batch;
    block = any_segments ? call.order[batch * call.key_blocks + place.rank] : place.block;
    first_head = heads.first, key_head = heads.key_head;
    limits = {call, batch};
    tiles = range(call, block);
    before_block = place.reversed ? block - 1 : block + 1;
    tiles_before = before_block < 0 ? QueryTiles{0, 0} : range(call, before_block);
    last_tile = place.reversed ? call.query_tiles - 1 : 0;
    if (place.reversed) tiles = tiles.from_last(last_tile), tiles_before = tiles_before.from_last(last_tile);
    if constexpr (may_be_segmented) {
      segments = {}, segments.range.own = {block * Plan::keys, call.keys};
      if (!any_segments) return;
      const int of_batch = batch * call.key_blocks + block;
      segments = {call.segments[of_batch], call.tiles[of_batch]};
      limits.keys = min(limits.keys, segments.range.own.end);
    }
  }
  // The block's keys are from the first up to this end, if that is not past a full block's.
  __device__ int first_key() const {
    if constexpr (may_be_segmented) return segments.range.own.begin;
    else return block * Plan::keys;
  }
  __device__ int end_key(const BackwardCall& call) const {
    if constexpr (may_be_segmented) return segments.range.own.end;
    else return call.keys;
  }
  // Whether fewer than 64 keys from this one on are the block's, and others come after them.
  __device__ bool are_fewer(const BackwardCall& call, int key) const {
    return may_be_segmented && end_key(call) < min(key + 64, call.keys);
  }
  // The first query of a tile that has a number among `tiles`.
  __device__ int query(int number) const { return tile(number) * Plan::queries + first_query(); }
  // Whether a thread that adds to sums signals so after a tile.
  __device__ bool is_signalled(int tile) const {
    constexpr int of_signal = BackwardCode::tiles_of_signal;
    return (tile - tiles.begin) % of_signal == of_signal - 1 || tile + 1 == tiles.end;
  }
  // The tile of queries that has a number among `tiles`.
  __device__ int tile(int number) const { return abs(last_tile - number); }
  __device__ static bool has_segments(const BackwardCall& call) { return may_be_segmented && call.segments; }
  // How many tiles all heads of the piece have.
  __device__ int steps(const BackwardCall& call) const { return tiles.length() * call.heads_of_piece; }
  // Where a head of the piece is among those of all turns.
  __device__ int64_t head_of_turns(const BackwardCall& call, int of_piece) const {
    return int64_t(turn) * call.heads_of_piece + of_piece;
  }
  // How many pieces before have the same keys, and whether none comes after.
  __device__ int before(const BackwardCall& call) const {
    return (first_head - key_head * call.group) / call.heads_of_piece;
  }
  __device__ bool last_of_group(const BackwardCall& call) const {
    return first_head + call.heads_of_piece == (key_head + 1) * call.group;
  }
  // The tiles with a valid score. For each tile these are blocks that follow each other.
  __device__ QueryTiles range(const BackwardCall& call, int of_block) const {
    if (!has_segments(call)) return range(limits, of_block * Plan::keys, (of_block + 1) * Plan::keys, 0);
    return of_block < call.key_blocks ? call.tiles[batch * call.key_blocks + of_block].tiles : QueryTiles{0, 0};
  }
  // Those within limits, of the keys [begin, end), where tile 0 begins at a query.
  __device__ static QueryTiles range(const AttentionLimits& limits, int begin, int end, int from) {
    end = min(end, limits.keys);
    const int first = limits.first_query(begin), last = limits.last_query(end);
    if (begin >= end || first >= last) return {0, 0};
    return {(first - from) / Plan::queries, (last - from + Plan::queries - 1) / Plan::queries};
  }
  // Where tile 0 begins, as BlockTiles has it.
  __device__ int first_query() const {
    if constexpr (may_be_segmented) return segments.tiles.first_query;
    else return 0;
  }
  // The tiles of which no score with the keys [key, key + 64) is masked, but for those of queries past the end. They
  // are counted as `tiles` are.
  __device__ QueryTiles unmasked(const BackwardCall& call, int key) const {
    ElementRange queries = limits.queries_of_all(key, key + 64);
    bool to_end = false;
    if constexpr (may_be_segmented) {
      if (call.segments) {
        const ElementRange inner = segments.range.inner();
        queries = {max(queries.begin, inner.begin), min(queries.end, inner.end)};
        // Of queries past the end of a segment, weights are 0, if tiles have no other's.
        to_end = segments.tiles.of_one && queries.end == segments.range.first.end;
      }
    }
    const int begin = queries.begin - first_query(), end = queries.end - first_query();
    const QueryTiles found{(begin + Plan::queries - 1) / Plan::queries,
                           (end + (to_end ? Plan::queries - 1 : 0)) / Plan::queries};
    return last_tile > 0 ? found.from_last(last_tile) : found;
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
