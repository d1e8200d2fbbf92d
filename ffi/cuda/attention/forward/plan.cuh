// The sizes of tiles in the forward kernel, by the head size, and what a block has in shared memory.
#pragma once

#include "../../hopper.cuh"
#include "../../tensor_map.cuh"
#include "../../warp_groups.cuh"

namespace jaxsoft::cuda {

// How a block works: `groups` warp groups compute, each with 64 queries of one head, and another one copies tiles of
// `key_tile` keys, and of their values, of which `slots` each are in shared memory. Of two groups, one starts its
// products while the other computes exponentials, if they take `turns`.
template <int head_size, int computing_groups, int keys_of_tile, int tiles_in_ring, bool in_turns>
struct ForwardPlanOf {
  static constexpr int size = head_size, groups = computing_groups, key_tile = keys_of_tile, slots = tiles_in_ring;
  static constexpr bool turns = in_turns;
  static constexpr int group_queries = 64, queries = groups * group_queries, threads = (groups + 1) * kWarpGroup;
  // Tiles lie in boxes of 64 columns, which fill the 128 bytes of the swizzle.
  static constexpr int boxes = size / 64;
  static_assert(size % 64 == 0 && key_tile % 16 == 0 && (!turns || groups == 2));
  // Of a thread. A block begins with the same number for all threads, which it was compiled with, and has no more later.
  static constexpr int computing_registers = groups == 2 ? 240 : 160, copying_registers = groups == 2 ? 24 : 32;
  static_assert(groups * computing_registers + copying_registers <= (groups + 1) * (65536 / threads / 8 * 8));
};

// What masks a call has: none but the end of keys; limits by position and lengths; and anything.
enum class ForwardKind { plain, limited, general };

template <int size, ForwardKind kind>
struct ForwardPlan;
template <ForwardKind kind>
struct ForwardPlan<64, kind> : ForwardPlanOf<64, 3, 128, 2, false> {};
template <ForwardKind kind>
struct ForwardPlan<128, kind> : ForwardPlanOf<128, 2, kind == ForwardKind::plain ? 176 : 128, 2, true> {};
template <ForwardKind kind>
struct ForwardPlan<192, kind> : ForwardPlanOf<192, 2, 96, 2, true> {};
template <ForwardKind kind>
struct ForwardPlan<256, kind> : ForwardPlanOf<256, 2, 80, 2, true> {};

template <class Plan>
struct ForwardMemory {
  static constexpr int row_bytes = static_cast<int>(Swizzle::bytes128);
  static constexpr int query_box = Plan::group_queries * row_bytes, key_box = Plan::key_tile * row_bytes;
  using Queries = unsigned char[Plan::boxes][query_box];
  using Keys = unsigned char[Plan::boxes][key_box];

  Queries queries[Plan::groups];
  Keys keys[Plan::slots], values[Plan::slots];
  Barrier queries_there, queries_read;
  Barrier keys_there[Plan::slots], keys_read[Plan::slots], values_there[Plan::slots], values_read[Plan::slots];
  // The numbers of the item that is computed and of the next one, as the copying warp tells them to the others.
  int items[2];
  Barrier items_there[2], items_read[2];
};

}  // namespace jaxsoft::cuda
