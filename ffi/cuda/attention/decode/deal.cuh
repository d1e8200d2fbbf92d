// Dealing: which unit of work a block takes next.
//
// Units are counted from the first sequence to the last, and within a sequence by chunk, then key head: so the heads of
// the same keys, which lie side by side in memory, are read at about the same time. Items without keys come last, with
// one unit each. How many units there are depends on the lengths of all sequences. A block takes numbers that grow,
// from a counter, and so its producer walks through the sequences once, 32 at a time.
#pragma once

#include "arguments.cuh"

namespace jaxsoft::cuda::decode {

class Dealer {
  const Arguments& args_;
  int first_ = 0;   // the first of the 32 sequences, of which each lane has one
  int before_ = 0;  // units of the sequences before
  AttentionLimits limits_;
  KeyRange range_{};
  int chunk_ = 1, chunks_ = 1;
  int groups_ = 0;  // row groups with keys
  int upto_ = 0;    // units of the sequences up to the lane's

  __device__ void look() {
    const int lane = threadIdx.x % 32, b = first_ + lane;
    upto_ = 0;
    if (b < args_.call.batch) {
      limits_ = AttentionLimits(args_.call, b);
      range_ = limits_.of_queries(0, args_.call.queries - 1);
      const int keys = range_.end - range_.begin / kChunkAlign * kChunkAlign, tile = args_.plan.row_tile;
      groups_ = range_.empty() ? 0 : short_quotient(limits_.queries * args_.heads_each + tile - 1, tile);
      if (!range_.empty()) chunk_ = args_.plan.chunk(keys), chunks_ = short_quotient(keys + chunk_ - 1, chunk_);
      upto_ = (groups_ * chunks_ + args_.plan.row_groups - groups_) * args_.call.key_heads;
    }
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto_, step);
      if (lane >= step) upto_ += other;
    }
  }

 public:
  __device__ explicit Dealer(const Arguments& args) : args_(args) { look(); }
  // Finds unit `number`, which is not less than before. All lanes of a warp call this. Returns false if there are not
  // so many.
  __device__ bool find(int number, Unit* unit) {
    for (;;) {
      const int all = __shfl_sync(~0u, upto_, 31);
      if (number < before_ + all) break;
      before_ += all;
      first_ += 32;
      if (first_ >= args_.call.batch) return false;
      look();
    }
    const int own = __ffs(__ballot_sync(~0u, number - before_ < upto_)) - 1;
    const KeyRange range{__shfl_sync(~0u, range_.begin, own), __shfl_sync(~0u, range_.end, own)};
    const int chunk = __shfl_sync(~0u, chunk_, own), chunks = __shfl_sync(~0u, chunks_, own);
    const int groups = __shfl_sync(~0u, groups_, own), heads = args_.call.key_heads;
    const int before = __shfl_up_sync(~0u, upto_, 1);
    int within = number - before_ - (own > 0 ? __shfl_sync(~0u, before, own) : 0);
    unit->batch = first_ + own;
    if (within < groups * chunks * heads) {
      unit->chunk = short_quotient(within, heads * groups);
      within -= unit->chunk * heads * groups;
      unit->head = short_quotient(within, groups);
      unit->group = within - unit->head * groups;
      unit->chunks = chunks;
      unit->begin = range.begin / kChunkAlign * kChunkAlign + unit->chunk * chunk;
      unit->end = min(unit->begin + chunk, range.end);
      unit->counted_begin = range.begin;
    } else {
      within -= groups * chunks * heads;
      unit->head = within % heads;
      unit->group = groups + within / heads;
      unit->chunk = 0, unit->chunks = 1;
      unit->begin = unit->end = unit->counted_begin = 0;
    }
    unit->limits.queries = __shfl_sync(~0u, limits_.queries, own);
    unit->limits.keys = __shfl_sync(~0u, limits_.keys, own);
    unit->limits.least = __shfl_sync(~0u, limits_.least, own);
    unit->limits.most = __shfl_sync(~0u, limits_.most, own);
    return true;
  }
};

}  // namespace jaxsoft::cuda::decode
