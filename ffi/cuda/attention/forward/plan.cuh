// What a block of the forward kernel has in shared memory.
#pragma once

#include "../../hopper.cuh"
#include "../../tensor_map.cuh"
#include "../../warp_groups.cuh"
#include "tiles.h"

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

  Queries queries[Plan::groups];
  Keys keys[Plan::slots], values[Plan::slots];
  Barrier queries_there[Plan::groups], queries_read[Plan::groups];
  Barrier keys_there[Plan::slots], keys_read[Plan::slots], values_there[Plan::slots], values_read[Plan::slots];
  // The numbers of the item that is computed and of the next one, as the copying warp passes them to the others.
  int items[2];
  Barrier items_there[2], items_read[2];
};

}  // namespace jaxsoft::cuda
