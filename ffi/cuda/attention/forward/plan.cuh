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
  static constexpr bool continues = true, joined = false;
};

template <class Plan>
struct ForwardMemory {
  static constexpr int row_bytes = static_cast<int>(Swizzle::bytes128);
  static constexpr int query_box = Plan::group_queries * row_bytes, key_box = Plan::key_tile * row_bytes;
  using Queries = unsigned char[Plan::boxes][query_box];
  using Keys = unsigned char[Plan::boxes][key_box];
  using Values = unsigned char[Plan::value_boxes][key_box];

  Queries queries[Plan::groups];
  Keys keys[Plan::slots];
  Values values[Plan::slots];
  Barrier queries_there[Plan::groups], queries_read[Plan::groups];
  Barrier keys_there[Plan::slots], keys_read[Plan::slots], values_there[Plan::slots], values_read[Plan::slots];
  // The item that is computed, the one before, whose output may not yet be written, and the next.
  static constexpr int item_slots = 3;
  ForwardItem items[item_slots];
  Barrier items_there[item_slots], items_read[item_slots];
};

}  // namespace jaxsoft::cuda
