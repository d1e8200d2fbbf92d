// What the kernels of decode are given, units of their work, and rows of those.
#pragma once

#include "../../elements.cuh"
#include "../attention.cuh"
#include "plan.h"

namespace jaxsoft::cuda::decode {

// How the keys of a sequence are cut into chunks.
struct Cut {
  ElementRange range{0, 0};       // the valid keys for any query
  int groups = 0;             // row groups with keys
  int chunk = 1, chunks = 1;  // keys of a chunk, and how many there are
  Cut() = default;
  // `queries` of the sequence count, and keys [range.begin, range.end).
  JAXSOFT_ANYWHERE Cut(const Plan& plan, int queries, ElementRange range) : range(range) {
    if (range.end <= range.begin) return;
    const int keys = range.end - first();
    groups = short_quotient(queries * plan.heads_each + plan.row_tile - 1, plan.row_tile);
    chunk = plan.chunk(keys), chunks = short_quotient(keys + chunk - 1, chunk);
  }
  JAXSOFT_ANYWHERE int first() const { return range.begin / kChunkAlign * kChunkAlign; }  // of the first chunk
  // Units of a sequence. Items without keys have one each.
  JAXSOFT_ANYWHERE int units(const AttentionCall& call, const Plan& plan) const {
    return (groups * chunks + plan.row_groups - groups) * call.key_heads;
  }
};

struct Arguments {
  AttentionCall call;
  Pages pages;  // of a contiguous cache: as many as there are sequences, each as long as a sequence
  AttentionResults results;
  Plan plan;
  bool uniform = false;  // whether all keys of all sequences count: then `cut` is of each of them
  Cut cut;
  bool paged = false;
  int page_shift = 0;   // log2 of the page size, if paged
  int rows = 1;         // packed queries of a key head of a sequence
  int item_rows = 1;    // that a state has room for
  bool adjusted = false;  // whether scores have a cap, a bias, a mask or segments
  bool dynamic = false;   // whether blocks take units after their first from a counter
  unsigned* counter = nullptr;  // of units
  float2* sums = nullptr;  // maximum and sum of each row of each state
  float* outputs = nullptr;
};

// How the keys of a sequence with these limits are cut.
__device__ inline Cut cut_of(const Arguments& args, const AttentionLimits& limits) {
  if (args.uniform) return args.cut;
  return Cut(args.plan, limits.queries, limits.of_queries(0, args.call.queries - 1));
}

// A unit of work, as the producer of a block passes it to the others.
struct Unit {
  int batch, head, group;        // whose item it is
  int chunk, chunks;             // which of the item's it is
  int begin, end;                // its keys: begin is a multiple of kChunkAlign
  int counted_begin;             // keys before this count for no query of the sequence
  AttentionLimits limits;        // of the sequence
  __device__ int item(const Arguments& args) const {
    return (batch * args.call.key_heads + head) * args.plan.row_groups + group;
  }
  __device__ int64_t state(const Arguments& args, int which) const {
    return int64_t(item(args)) * args.plan.most_chunks + which;
  }
};

// A row of an item: a query of the sequence, in one of the heads that share the key head.
struct RowPlace {
  int query, head;
  __device__ RowPlace(const Arguments& args, const Unit& unit, int row) {
    const int packed = unit.group * args.plan.row_tile + row;
    query = short_quotient(packed, args.plan.heads_each);
    head = unit.head * args.plan.heads_each + packed - query * args.plan.heads_each;
  }
  // Where the row begins in an array (B, T, N, H).
  __device__ int64_t begin(const Arguments& args, const Unit& unit) const {
    return ((int64_t(unit.batch) * args.call.queries + query) * args.call.heads + head) * args.call.size;
  }
};
// Rows of the unit's item. The others up to plan.row_tile are only there to fill a tile.
__device__ inline int rows_of(const Arguments& args, const Unit& unit) {
  return min(args.plan.row_tile, args.rows - unit.group * args.plan.row_tile);
}
// How many of these are of the sequence's queries. Nothing is computed for the others.
__device__ inline int live_rows(const Arguments& args, const Unit& unit) {
  const int live = unit.limits.queries * args.plan.heads_each - unit.group * args.plan.row_tile;
  return max(0, min(args.plan.row_tile, live));
}

}  // namespace jaxsoft::cuda::decode
