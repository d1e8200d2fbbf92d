// The sizes of tiles in the backward kernel, by the sizes of heads, and how it divides the workspace.
#pragma once

#include <cstdint>

#include "../../anywhere.h"
#include "../blocks.h"
#include "../head_sizes.h"

namespace jaxsoft::cuda {

// Numbers that all sizes of heads share.
struct BackwardCode {
  static constexpr int groups = 2;                            // warp groups that multiply
  static constexpr int threads = (groups + 1) * kWarpGroup;   // and one that copies
  static constexpr int registers = 240, copy_registers = 24;  // of a thread of either
  static constexpr int work_slots = 2;                        // pieces of work that are known at a time
  static constexpr int tiles_of_signal = 2, cache = 49;
  static constexpr int order_parts = 4;  // of the order in which blocks of keys are taken where there are segments
};

// A tile of scores, and how many tiles of queries and of cotangents a block has room for. What bounds them is
// registers: of each thread, a gradient by keys takes half the size of heads, scores, slopes and a part of the gradient
// by queries half the queries of a tile each, and rounded weights and slopes a quarter. `slopes_in_registers` says
// where the product with queries takes slopes from. Shared memory is read less if it is from registers, for which 128
// leaves no room. Heads of 64 are bound by the reads of shared memory as well, so tiles are as long as registers allow.
//
// `keys` are those of a piece of work, and so many `blocks` share it (pair.cuh is about two). What they add to the
// gradient by queries has `added_parts`.
//
// If the order of additions matters, a block signals after each `tiles_of_signal` tiles that it has added to them,
// which takes a microsecond, and blocks of keys of one head should begin `stagger` tiles one after the other. What
// blocks read and add to should stay in the cache, of which there are `cache` MiB. The last three are by measurement.
// (H200, 8K, TFLOP/s. Heads of 128, without a causal rule and with one: 584 and 551; with a signal for each tile, 565
// and 518; with a stagger of 2.5 in 40 MiB, which are two turns together and not four, 507 and 542. Heads of 192 with
// values of 128: 509 and 490; with a signal for each tile, 463 and 468. Heads of 256: 533 and 530; 521 and 532.)
//
// Of a pair of blocks `slopes_by_values` says whether the warp group that has the gradient by values multiplies slopes
// and keys as well. Then the one that makes slopes does not wait for that. (Heads of 192 with values of 128, 8K without
// a causal rule and with one, TFLOP/s: 444 and 421 without it, 467 and 479 with it.) Heads of 256 leave no registers
// for it.
template <int size_of_values, int queries_of_tile, int blocks_of_piece, int slots_of_cotangents>
struct BackwardPlanOf {
  static constexpr int value_size = size_of_values, queries = queries_of_tile, keys = 128, blocks = blocks_of_piece;
  static constexpr int added_parts = 2 * blocks, query_slots = 2, cotangent_slots = slots_of_cotangents;
  static constexpr double stagger = blocks == 1 ? 4 : 1.9;
};
template <int size>
struct BackwardPlan;
template <>
struct BackwardPlan<64> : BackwardPlanOf<64, 96, 1, 2> {
  static constexpr bool slopes_in_registers = true;
};
template <>
struct BackwardPlan<128> : BackwardPlanOf<128, 64, 1, 2> {
  static constexpr bool slopes_in_registers = false;
};
template <>
struct BackwardPlan<192> : BackwardPlanOf<128, 64, 2, 2> {
  static constexpr int weight_slots = 2, slope_slots = 2, sum_slots = 2;
  static constexpr bool slopes_by_values = true;
};
template <>
struct BackwardPlan<256> : BackwardPlanOf<256, 64, 2, 1> {
  static constexpr int weight_slots = 1, slope_slots = 2, sum_slots = 1;
  static constexpr bool slopes_by_values = false;
};

// Calls use(n) with the size of keys whose plan serves such heads.
template <class Use>
auto with_backward_size(int64_t size, int64_t value_size, Use use) {
  return with_sizes<HeadSizes<64, 64>, HeadSizes<128, 128>, HeadSizes<192, 128>, HeadSizes<256, 256>>(
      size, value_size, [&](auto sizes) { return use(std::integral_constant<int, decltype(sizes)::size>()); });
}

// How the gradient by queries lies in the sums, tile by tile. One half of a tile is added by the first warp group, and
// the other by the second; or where two blocks share a piece of work, by these, each in two parts.
template <int size>
struct SumsTile {
  using Plan = BackwardPlan<size>;
  static constexpr bool in_pairs = Plan::blocks > 1, by_columns = size > 64;  // the latter: halves of a head's columns
  static constexpr int count = Plan::queries * size, half = count / 2, parts = in_pairs ? 2 : 1;  // numbers
  // The columns of a part, of its numbers those of a thread, and where it begins in its half.
  static JAXSOFT_ANYWHERE constexpr int columns(int part) { return in_pairs && part == 1 ? size / 2 - 64 : 64; }
  static JAXSOFT_ANYWHERE constexpr int of_thread(int part) {
    return (in_pairs ? Plan::queries * columns(part) : half) / kWarpGroup;
  }
  static JAXSOFT_ANYWHERE constexpr int begin(int part) { return part * Plan::queries * 64; }
  // The first column of a part. Columns of a product lie in boxes of 64: if a half is no number of these, it has one
  // box, and half of the one between.
  static JAXSOFT_ANYWHERE constexpr int first_column(int of_half, int part) {
    if (!by_columns) return 0;
    if (size / 2 % 64 == 0) return of_half * (size / 2) + part * 64;
    return part == 0 ? of_half * (size - 64) : 64 + of_half * (size / 2 - 64);
  }
  static JAXSOFT_ANYWHERE constexpr int first_query(int of_half) {
    return by_columns ? 0 : of_half * (Plan::queries / 2);
  }
};

// What the workspace has, in bytes:
//
//   the counter of pieces of work, 8, and from how many turns they are taken alternately where there are segments, 4
//   for each part of their order;
//   how many blocks of keys are done, and how many parts of sums are cleared, 4 for each of the heads of all sequences;
//   how far blocks of keys are, 8 for each block, of as many as share a piece of work, and each head;
//   where heads share keys, how many of them have been summed, 4 for each block of keys and part of what is added;
//   after the next multiple of 256 the sums, 4 for each query of the tiles of a head and element of the padded head;
//   lse and delta, 8 for each of these queries;
//   where heads share keys, the sums of gradients by keys and values, 8 for each key of the blocks of a key head and
//   element of the padded head;
//   where there are segments, for each element of the batch, of each block of keys what queries they leave to it, 40,
//   its tiles of queries, 16, and which block is taken when, 4; where blocks of keys and tiles of queries begin, 4 for
//   each and three more; and whether a tile of queries is among those of any block, 1.
template <int size>
struct BackwardSpace {
  using Plan = BackwardPlan<size>;
  static constexpr int64_t counter = 8 + 4 * BackwardCode::order_parts;
  int64_t query_tiles, key_blocks, heads, key_heads;         // heads of all sequences
  int64_t of_heads, ends, summed, counts, sums, numbers;     // bytes; those before the sums are `counts`
  int64_t group_sums;                                        // bytes, 0 where no heads share keys
  int64_t segments, tiles, order, key_begins, query_begins, tile_is_met;  // bytes, 0 without segments
  BackwardSpace(int64_t batch, int64_t queries, int64_t keys, int64_t heads_of_one, int64_t key_heads_of_one,
                bool has_segments)
      : query_tiles(has_segments ? most_blocks(queries, Plan::queries) : full_blocks(queries, Plan::queries)),
        key_blocks(has_segments ? most_blocks(keys, Plan::keys) : full_blocks(keys, Plan::keys)),
        heads(batch * heads_of_one),
        key_heads(batch * key_heads_of_one),
        of_heads(heads * 4),
        ends(heads * key_blocks * Plan::blocks * 8),
        summed(heads > key_heads ? key_heads * key_blocks * Plan::added_parts * 4 : 0),
        counts((counter + 2 * of_heads + ends + summed + 255) / 256 * 256),
        sums(heads * query_tiles * Plan::queries * size * 4),
        numbers(heads * query_tiles * Plan::queries * 8),
        group_sums(heads > key_heads ? key_heads * key_blocks * Plan::keys * size * 8 : 0),
        segments(has_segments ? batch * key_blocks * 40 : 0),
        tiles(has_segments ? batch * key_blocks * 16 : 0),
        order(has_segments ? batch * key_blocks * 4 : 0),
        key_begins(has_segments ? batch * begin_numbers(key_blocks) * 4 : 0),
        query_begins(has_segments ? batch * begin_numbers(query_tiles) * 4 : 0),
        tile_is_met(has_segments ? batch * query_tiles : 0) {}
  int64_t bytes() const {
    return counts + sums + numbers + group_sums + segments + tiles + order + key_begins + query_begins + tile_is_met;
  }
};

}  // namespace jaxsoft::cuda
