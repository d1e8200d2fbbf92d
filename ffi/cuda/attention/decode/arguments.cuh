// What the kernels of decode are given, and which keys count for a sequence and for a query.
#pragma once

#include "../../elements.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda::decode {

struct Range {
  int begin, end;  // may be empty: then end <= begin
  __host__ __device__ bool empty() const { return end <= begin; }
};

__host__ __device__ inline int of_batch(const OfBatch& numbers, int b, int otherwise) {
  return numbers.data ? numbers.data[int64_t(b) * numbers.step] : otherwise;
}

// The numbers of a sequence that decide which of its keys count.
struct Limits {
  int offset = 0, queries = 0, keys = 0;
  Limits() = default;
  __host__ __device__ Limits(const AttentionCall& call, int b)
      : offset(of_batch(call.offset, b, 0)),
        queries(max(0, min(call.queries, of_batch(call.query_lengths, b, call.queries)))),
        keys(max(0, min(call.keys, of_batch(call.key_lengths, b, call.keys)))) {}
  // The keys within the limits of any of the queries [first, last].
  __host__ __device__ Range of(const AttentionCall& call, int first, int last) const {
    last = min(last, queries - 1);
    if (last < first) return {0, 0};
    int64_t begin = 0, end = keys;
    if (call.left >= 0) begin = max(begin, int64_t(offset) + first - call.left);
    if (call.right >= 0) end = min(end, int64_t(offset) + last + call.right + 1);
    if (end <= begin) return {0, 0};
    return {static_cast<int>(begin), static_cast<int>(end)};
  }
};

// How the keys of a sequence are cut into chunks.
struct Cut {
  Range range{0, 0};          // the keys that count for any query
  int groups = 0;             // row groups with keys
  int chunk = 1, chunks = 1;  // keys of a chunk, and how many there are
  Cut() = default;
  __host__ __device__ Cut(const AttentionCall& call, const Plan& plan, const Limits& limits)
      : range(limits.of(call, 0, call.queries - 1)) {
    if (range.empty()) return;
    const int keys = range.end - first();
    groups = short_quotient(limits.queries * plan.heads_each + plan.row_tile - 1, plan.row_tile);
    chunk = plan.chunk(keys), chunks = short_quotient(keys + chunk - 1, chunk);
  }
  __host__ __device__ int first() const { return range.begin / kChunkAlign * kChunkAlign; }  // of the first chunk
  // Units of a sequence. Items without keys have one each.
  __host__ __device__ int units(const AttentionCall& call, const Plan& plan) const {
    return (groups * chunks + plan.row_groups - groups) * call.key_heads;
  }
};

struct Arguments {
  AttentionCall call;
  Pages pages;  // of a contiguous cache: as many as there are sequences, each as long as a sequence
  AttentionResults results;
  Plan plan;
  bool uniform = false;  // whether sequences have neither lengths nor offsets: then `cut` is of all of them
  Cut cut;
  bool paged = false;
  int page_shift = 0;   // log2 of the page size, if paged
  int rows = 1;         // packed queries of a key head of a sequence
  int item_rows = 1;    // that a state has room for
  bool adjusted = false;  // whether scores have a cap, a bias, a mask or segments
  bool dealt = false;     // whether units after the first are dealt by a counter
  unsigned* counter = nullptr;  // of units
  float2* sums = nullptr;  // maximum and sum of each row of each state
  float* outputs = nullptr;
};

__device__ inline Cut cut_of(const Arguments& args, const Limits& limits) {
  return args.uniform ? args.cut : Cut(args.call, args.plan, limits);
}

// A unit of work, as the producer of a block tells it to the others.
struct Unit {
  int batch, head, group;        // whose item it is
  int chunk, chunks;             // which of the item's it is
  int begin, end;                // its keys: begin is a multiple of kChunkAlign
  int counted_begin;             // keys before this count for no query of the sequence
  Limits limits;                 // of the sequence
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
