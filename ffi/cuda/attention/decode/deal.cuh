// Dealing: which unit of work a block takes next.
//
// Units are counted from the first sequence to the last, and within a sequence by chunk, then key head: so the heads of
// the same keys, which lie side by side in memory, are read at about the same time. How many units there are depends on
// the lengths of all sequences. A block takes numbers that grow, from a counter, and so its producer walks through the
// sequences once, 32 at a time.
#pragma once

#include "arguments.cuh"

namespace jaxsoft::cuda::decode {

class Dealer {
  const Arguments& args_;
  int first_ = 0;       // the first of the 32 sequences, of which each lane has one
  int64_t before_ = 0;  // units of the sequences before
  Range range_{};
  int chunk_ = 1, chunks_ = 0;
  int64_t upto_ = 0;  // units of the sequences up to the lane's

  __device__ void look() {
    const int lane = threadIdx.x % 32, b = first_ + lane;
    chunks_ = 0;
    if (b < args_.call.batch) {
      const Limits limits(args_.call, b);
      range_ = limits.of(args_.call, 0, args_.call.queries - 1);
      const int keys = range_.end - range_.begin / kChunkAlign * kChunkAlign;
      chunk_ = range_.empty() ? kLeastChunk : args_.plan.chunk(keys);
      chunks_ = range_.empty() ? 1 : args_.plan.chunks(keys);
    }
    upto_ = int64_t(chunks_) * args_.call.key_heads * args_.plan.row_groups;
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, upto_, step);
      if (lane >= step) upto_ += other;
    }
  }

 public:
  __device__ explicit Dealer(const Arguments& args) : args_(args) { look(); }
  // Finds unit `number`, which is not less than before. All lanes of a warp call this. Returns false if there are not
  // so many.
  __device__ bool find(int64_t number, Unit* unit) {
    for (;;) {
      const int64_t all = __shfl_sync(~0u, upto_, 31);
      if (number < before_ + all) break;
      before_ += all;
      first_ += 32;
      if (first_ >= args_.call.batch) return false;
      look();
    }
    const int own = __ffs(__ballot_sync(~0u, number - before_ < upto_)) - 1;
    const int64_t upto = __shfl_sync(~0u, upto_, own);
    const Range range{__shfl_sync(~0u, range_.begin, own), __shfl_sync(~0u, range_.end, own)};
    const int chunk = __shfl_sync(~0u, chunk_, own), chunks = __shfl_sync(~0u, chunks_, own);
    const int each = args_.call.key_heads * args_.plan.row_groups;
    const int within = static_cast<int>(number - before_ - (upto - int64_t(chunks) * each));
    unit->batch = first_ + own;
    unit->chunk = within / each;
    unit->head = within % each / args_.plan.row_groups;
    unit->group = within % args_.plan.row_groups;
    unit->chunks = chunks;
    unit->begin = range.begin / kChunkAlign * kChunkAlign + unit->chunk * chunk;
    unit->end = min(unit->begin + chunk, range.end);
    unit->counted_begin = range.begin;
    return true;
  }
};

}  // namespace jaxsoft::cuda::decode
