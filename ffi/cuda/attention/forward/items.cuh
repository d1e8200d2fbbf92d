// An item of the forward kernel: the queries of one head that a block computes at a time, and the keys that matter.
#pragma once

#include "../../tensor_map.cuh"
#include "../attention.cuh"
#include "../segments.cuh"
#include "../soft_cap.cuh"
#include "tiles.h"

namespace jaxsoft::cuda {

// A call, as the kernel takes it.
struct ForwardArguments {
  CUtensorMap query, key, value;
  CUtensorMap output, output_residual;  // where results are staged
  AttentionCall call;
  AttentionResults results;
  int blocks_of_head;  // items of a head; where there are segments, at most
  const int* blocks_found;  // so many they are then
  int items;                // at most
  // Heads are in sections, which have their items together, those with the same queries one after the other. Each has
  // as many heads, but for the last, which has all others.
  int sections, together;
  float unit;          // scores in base 2 are products, or capped scores, times this
  float inverse_unit;  // one over it
  SoftCap soft_cap;    // if there is one
  unsigned long long* counter;  // null if items are assigned in advance
  AttentionBefore before;       // in calls whose plan says that they continue
  const SegmentRange* segments;  // (B, blocks of a head): what counts for a block, if there are segments
};

// The limits of an element of the batch. In a plain call all keys count for each query.
template <ScoreKind kind>
__device__ AttentionLimits limits_of(const AttentionCall& call, int batch) {
  if constexpr (kind == ScoreKind::plain) return AttentionLimits(call.queries, call.keys);
  else return AttentionLimits(call, batch);
}

// The keys [begin, end) that matter to some queries. Of [inner_begin, inner_end) all count for each of the queries, as
// far as limits, lengths and segments say.
struct KeyRange {
  int begin = 0, inner_begin = 0, inner_end = 0, end = 0;
  // For the queries [query, query_end).
  __device__ KeyRange(const AttentionLimits& limits, int query, int query_end) {
    const int last = query_end - 1;
    if (query >= min(query_end, limits.queries) || last < limits.begin) return;
    // Both ends of the range of a query rise with the query.
    const int first = max(query, limits.begin);
    const ElementRange of_first = limits.of_query(first), of_last = limits.of_query(min(last, limits.queries - 1));
    begin = of_first.begin, end = max(of_last.end, begin);
    const bool all = last < limits.queries && first == query;
    inner_begin = of_last.begin, inner_end = all ? of_first.end : 0;
  }
  __device__ void restrict_to(const SegmentRange& keys) {
    const ElementRange inner = keys.inner();
    begin = max(begin, keys.all.begin), end = max(begin, min(end, keys.all.end));
    inner_begin = max(inner_begin, inner.begin), inner_end = min(inner_end, inner.end);
  }
};

// Tiles of such keys, of which the first begins at the key `from`.
struct TileRange {
  int begin = 0, inner_begin = 0, inner_end = 0, end = 0;
  TileRange() = default;
  __device__ TileRange(const KeyRange& keys, int from, int tile) {
    begin = (keys.begin - from) / tile, end = keys.end > keys.begin ? (keys.end - from + tile - 1) / tile : begin;
    inner_begin = (keys.inner_begin - from + tile - 1) / tile, inner_end = (keys.inner_end - from) / tile;
  }
  // Those of its tiles that some of the queries need, with inner tiles as they say.
  __device__ TileRange part(TileRange of_some) const {
    of_some.begin = min(max(begin, of_some.begin), end), of_some.end = max(of_some.begin, min(end, of_some.end));
    return of_some;
  }
  __device__ bool empty() const { return begin >= end; }
  __device__ bool masked(int tile) const { return tile < inner_begin || tile >= inner_end; }
};

// What the copying thread finds out about an item, and the others read in shared memory.
struct ForwardItem {
  bool there;  // else there are no more
  int batch, head, key_head;
  int query, query_end;  // its queries
  int first_key;         // where tiles begin: at 0, or where the only segment of the queries does
  AttentionLimits limits;
  SegmentRange segments;  // if the call has any
  TileRange tiles;
  // The first key of a tile.
  template <class Plan, ScoreKind kind>
  __device__ int key_of(int tile) const {
    return tile * Plan::key_tile + (may_have_segments<kind> ? first_key : 0);
  }
  // A box of the queries of a warp group.
  template <class Plan>
  __device__ BoxPlace box_of_group(int group, int box) const {
    return {box * 64, head, query + group * Plan::group_queries, batch};
  }
  // Describes an item, where a head has so many `blocks`.
  template <class Plan, ScoreKind kind>
  __device__ void set(const ForwardArguments& args, int blocks, int number) {
    const AttentionCall& call = args.call;
    there = number < blocks * call.batch * call.heads;
    if (!there) return;
    const int last = args.sections - 1, section = min(number / (blocks * args.together), last);
    const int first = section * args.together;
    const int heads_together = section == last ? call.batch * call.heads - first : args.together;
    number -= first * blocks;
    // Under a causal rule the last queries have most keys. They come first, so that what comes last is short.
    const int block = blocks - 1 - number / heads_together, of_batch = first + number % heads_together;
    batch = of_batch / call.heads, head = of_batch % call.heads;
    key_head = head / (call.heads / call.key_heads);
    limits = limits_of<kind>(call, batch);
    query = block * Plan::queries, query_end = min(query + Plan::queries, call.queries), first_key = 0;
    if constexpr (may_have_segments<kind>) {
      if (args.segments) {
        segments = args.segments[batch * args.blocks_of_head + block];
        query = segments.own.begin, query_end = segments.own.end;
        first_key = segments.of_one() ? segments.first.begin : 0;
      }
    }
    KeyRange keys(limits, query, query_end);
    if (may_have_segments<kind> && args.segments) keys.restrict_to(segments);
    tiles = {keys, first_key, Plan::key_tile};
  }
};

}  // namespace jaxsoft::cuda
