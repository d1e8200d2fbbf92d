// The sizes of tiles in the forward kernel, by the sizes of heads of keys and of values.
#pragma once

#include "../../anywhere.h"
#include "../blocks.h"
#include "../head_sizes.h"
#include "../score_kind.h"

namespace jaxsoft::cuda {

// How a block works: `groups` warp groups compute, each with 64 queries of one head, and another one copies tiles of
// `key_tile` keys, and of their values, of which `slots` each are in shared memory. Groups start products in turns, or
// they are free. Groups that are free let tiles pass that matter to others alone, and so do those in turns if tiles
// are shorter than the queries of a block. The last product of an item may be `joined` with the first of the next one.
// Results are staged in shared memory; if there is no room for that, they may take the place of queries.
template <int head_size, int computing_groups, int keys_of_tile, int tiles_in_ring, bool in_turns,
          bool joined_items = false, bool results_over_queries = false, int size_of_values = head_size>
struct ForwardPlanOf {
  static constexpr int size = head_size, value_size = size_of_values;
  static constexpr int groups = computing_groups, key_tile = keys_of_tile, slots = tiles_in_ring;
  static constexpr bool turns = in_turns, joined = joined_items, over_queries = results_over_queries;
  static constexpr bool continues = false;
  static constexpr int group_queries = 64, queries = groups * group_queries, threads = (groups + 1) * kWarpGroup;
  // Whether a group multiplies half of its last tile, where the other is masked for it: under a causal rule, so it is
  // for the first of two groups where a tile is as long as the queries of both.
  static constexpr bool halves = false;
  static constexpr bool short_tiles = turns && key_tile < queries, parted = !turns || short_tiles;
  // Tiles lie in boxes of 64 columns, which fill the 128 bytes of the swizzle.
  static constexpr int boxes = size / 64, value_boxes = value_size / 64;
  static_assert(size % 64 == 0 && value_size % 64 == 0 && key_tile % 16 == 0 && (groups == 2 || groups == 3));
  // Of a thread. A block begins with the same number for all threads, as compiled, and has no more later.
  static constexpr int computing_registers = groups == 2 ? 240 : 160, copying_registers = groups == 2 ? 24 : 32;
  static_assert(groups * computing_registers + copying_registers <= (groups + 1) * (65536 / threads / 8 * 8));
};

// By measurement on an H200: items that are joined are 2 to 5 % faster without limits, and no faster under a causal
// rule, where 176 keys in place of 128 are 2 % faster at 32K and 10 % slower at 2K with heads of 128. With heads of
// 64, groups in turns are 2 to 6 % faster, but 1 to 3 % slower where there are segments, and two groups of 176 or 192
// keys 5 to 14 % slower. With heads of 256, results in the place of queries are under a causal rule 7 % faster at 512,
// 4 % at 2K and 1 % at 8K, and without limits 4 % slower at 512 and 1 % at 2K. Half a tile where the other is masked
// makes heads of 128 2 % faster. No faster were, on an H100, clusters of two blocks that copy tiles for one another, a
// second slot for queries, exponentials by polynomials beside those of the hardware, two tiles of scores in flight, and
// products for the output that are started between the exponentials of the next tile; and on an H200 groups that begin
// an item one after the other, and an item's end computed beside its last product.
template <int size, int value_size, ScoreKind kind>
struct ForwardPlan;
template <ScoreKind kind>
struct ForwardPlan<64, 64, kind>
    : ForwardPlanOf<64, 3, 128, 4, kind != ScoreKind::segmented, kind == ScoreKind::plain> {};
template <ScoreKind kind>
struct ForwardPlan<128, 128, kind>
    : ForwardPlanOf<128, 2, kind == ScoreKind::plain ? 176 : 128, 2, true, kind == ScoreKind::plain> {
  // For other kinds, as for values of 128 with larger heads, ptxas has not the registers then to overlap products.
  static constexpr bool halves = kind == ScoreKind::limited;
};
template <ScoreKind kind>
struct ForwardPlan<192, 128, kind> : ForwardPlanOf<192, 2, 128, 2, true, kind == ScoreKind::plain, false, 128> {};
template <ScoreKind kind>
struct ForwardPlan<192, 192, kind> : ForwardPlanOf<192, 2, 96, 2, true> {};
template <ScoreKind kind>
struct ForwardPlan<256, 256, kind> : ForwardPlanOf<256, 2, 80, 2, true, false, kind == ScoreKind::limited> {};

// The plan of calls without limits that have few keys, if there is one, and which calls it serves: of those that
// continue, none. With heads of 128, its tiles are shorter, so that there is room to stage results. (H200, beside tiles
// of 176: 20 % faster at 256 keys, 5 % at 512, 3 % at 1024 and 2048, and 1 % slower at 8192.)
template <int size, int value_size>
struct FewKeysPlan {
  static constexpr bool exists = false;
};
template <>
struct FewKeysPlan<128, 128> : ForwardPlanOf<128, 2, 128, 2, true, true> {
  static constexpr bool exists = true;
  static constexpr bool serves(int64_t keys, bool continues) { return keys <= 2048 && !continues; }
};

// What the workspace has, in bytes: a counter of items, and how many blocks of queries a head has, 16; and where there
// are segments, for each element of the batch what keys they leave to each block of queries, 40, and where blocks of
// queries and of as many keys begin, 4 for each and three more. `blocks` are those of queries of a head, at most.
struct ForwardSpace {
  static constexpr int64_t counter = 16;
  int64_t blocks, key_blocks;
  int64_t ranges, begins, key_begins;  // bytes, 0 without segments
  ForwardSpace(int64_t batch, int64_t queries, int64_t keys, int64_t queries_of_block, bool has_segments)
      : blocks(has_segments ? most_blocks(queries, queries_of_block) : full_blocks(queries, queries_of_block)),
        key_blocks(has_segments ? most_blocks(keys, queries_of_block) : 0),
        ranges(has_segments ? batch * blocks * 40 : 0),
        begins(has_segments ? batch * begin_numbers(blocks) * 4 : 0),
        key_begins(has_segments ? batch * begin_numbers(key_blocks) * 4 : 0) {}
  int64_t bytes() const { return counter + ranges + begins + key_begins; }
};

// Calls use(sizes) with the HeadSizes whose plan serves such heads.
template <class Use>
auto with_forward_sizes(int64_t size, int64_t value_size, Use use) {
  return with_sizes<HeadSizes<64, 64>, HeadSizes<128, 128>, HeadSizes<192, 128>, HeadSizes<192, 192>,
                    HeadSizes<256, 256>>(size, value_size, use);
}

}  // namespace jaxsoft::cuda
