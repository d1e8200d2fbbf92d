// An item of the forward kernel: the queries of one head that a block computes at a time, and the keys that matter.
#pragma once

#include "../attention.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda {

// A call, as the kernel takes it.
struct ForwardArguments {
  CUtensorMap query, key, value;
  AttentionCall call;
  AttentionResults results;
  int blocks_of_head;  // items of a head
  int items;
  // So many heads have their items together, those with the same queries one after the other. Their keys and values fit
  // the cache.
  int together;
  float unit;   // scores in base 2 are products, or capped scores, times this
  float slack;  // in those, the reference of exponentials may be so far below the maximum
  unsigned long long* counter;  // null if items are assigned in advance
  AttentionBefore before;       // in calls whose plan says that they continue
};

// The limits of an element of the batch. In a plain call all keys count for each query.
template <ForwardKind kind>
__device__ AttentionLimits limits_of(const AttentionCall& call, int batch) {
  if constexpr (kind == ForwardKind::plain) return AttentionLimits(call.queries, call.keys);
  else return AttentionLimits(call, batch);
}

struct ForwardItem {
  int batch, head, key_head, query;  // its first query
  __device__ ForwardItem(const ForwardArguments& args, int number, int queries_of_block) {
    const AttentionCall& call = args.call;
    const int together = number / (args.blocks_of_head * args.together), first = together * args.together;
    const int heads = min(args.together, call.batch * call.heads - first);
    number -= first * args.blocks_of_head;
    // Under a causal rule the last queries have most keys. They come first, so that what comes last is short.
    query = (args.blocks_of_head - 1 - number / heads) * queries_of_block;
    head = first + number % heads;
    batch = head / call.heads, head %= call.heads;
    key_head = head / (call.heads / call.key_heads);
  }
};

// The tiles of keys [begin, end) that matter to the queries of a block. Of [inner_begin, inner_end) all keys count for
// each of the queries, as far as limits and lengths say.
struct TileRange {
  int begin, inner_begin, inner_end, end;
  __device__ TileRange(const AttentionLimits& limits, int query, int queries_of_block, int queries, int tile) {
    const int last = min(query + queries_of_block, queries) - 1;
    if (query >= limits.queries || last < limits.begin) {
      begin = inner_begin = inner_end = end = 0;
      return;
    }
    // Both ends of the range of a query rise with the query.
    const int first = max(query, limits.begin);
    const KeyRange of_first = limits.of_query(first), of_last = limits.of_query(min(last, limits.queries - 1));
    begin = of_first.begin / tile, end = (of_last.end + tile - 1) / tile;
    if (of_last.end <= of_first.begin) end = begin;
    const bool all = last < limits.queries && first == query;
    inner_begin = (of_last.begin + tile - 1) / tile, inner_end = all ? of_first.end / tile : 0;
  }
  __device__ bool masked(int tile) const { return tile < inner_begin || tile >= inner_end; }
};

}  // namespace jaxsoft::cuda
