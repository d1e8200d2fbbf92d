// What a block of the forward kernel has in shared memory.
#pragma once

#include "../../hopper.cuh"
#include "../../tensor_map.cuh"
#include "../../warp_groups.cuh"
#include "items.cuh"

namespace jaxsoft::cuda {

// The same for a call that continues from what other keys gave. There are not the registers to read that beside weights
// of the next item.
template <class Plan>
struct ContinuedPlan : Plan {
  static constexpr bool continues = true, joined = false, halves = false, over_queries = false;
};

template <class Plan>
struct ForwardMemory {
  static constexpr int row_bytes = static_cast<int>(Swizzle::bytes128);
  static constexpr int query_box = Plan::group_queries * row_bytes, key_box = Plan::key_tile * row_bytes;
  using Queries = unsigned char[Plan::boxes][query_box];
  using Keys = unsigned char[Plan::boxes][key_box];
  using Values = unsigned char[Plan::value_boxes][key_box];

  // Where rows of a warp group lie before they are stored: output, and what rounding took from it. If there is no room
  // for that, threads store them, or the plan has them `over_queries`: one after the other in the place of the group's
  // queries. Those in f32, or added to others, are stored by threads.
  using Rows = unsigned char[Plan::value_boxes][query_box];
  struct Staged { Rows rows[Plan::groups][2]; };
  struct NotStaged {};
  static constexpr int most = 227 * 1024, others = 1024;  // bytes
  static constexpr int of_group = sizeof(Queries) + 2 * sizeof(Rows), of_slot = sizeof(Keys) + sizeof(Values);
  static constexpr bool staged =
      !Plan::continues && Plan::groups * of_group + Plan::slots * of_slot + others <= most;
  // Where items are joined, the next queries are multiplied before these results are there.
  static_assert(!Plan::over_queries || (!staged && sizeof(Rows) <= sizeof(Queries) && !Plan::joined));

  Queries queries[Plan::groups];
  Keys keys[Plan::slots];
  Values values[Plan::slots];
  std::conditional_t<staged, Staged, NotStaged> results;
  Barrier queries_there[Plan::groups], queries_read[Plan::groups];
  Barrier keys_there[Plan::slots], keys_read[Plan::slots], values_there[Plan::slots], values_read[Plan::slots];
  // The item that is computed, the one before, whose output may not yet be written, and the next.
  static constexpr int item_slots = 3;
  ForwardItem items[item_slots];
  Barrier items_there[item_slots], items_read[item_slots];
  static_assert(sizeof(Barrier) * 64 + sizeof items <= others);
};

}  // namespace jaxsoft::cuda
