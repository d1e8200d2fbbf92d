// The grid schedule: which unit of work a block takes next.
//
// Units are counted from the first sequence to the last, and within a sequence by chunk, then key head: so the heads of
// the same keys, which lie side by side in memory, are read at about the same time. Items without keys come last, with
// one unit each. How many units there are depends on the lengths of all sequences. A block takes numbers that grow,
// from a counter, and so its producer walks through the sequences once, 32 at a time.
#pragma once

#include "arguments.cuh"

namespace jaxsoft::cuda::decode {

class Scheduler {
  const Arguments& args_;
  int first_ = 0;   // the first of the 32 sequences, of which each lane has one
  int before_ = 0;  // units of the sequences before
  AttentionLimits limits_;
  Cut cut_;
  int upto_ = 0;    // units of the sequences up to the lane's

  __device__ void look() {
    const int lane = threadIdx.x % 32, b = first_ + lane;
    upto_ = 0;
    if (b < args_.call.batch) {
      limits_ = AttentionLimits(args_.call, b);
      cut_ = cut_of(args_, limits_);
      upto_ = cut_.units(args_.call, args_.plan);
    }
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto_, step);
      if (lane >= step) upto_ += other;
    }
  }
  // A unit of a sequence, of which it is unit `within`.
  __device__ static Unit of_sequence(const Arguments& args, int batch, int within, const Cut& cut) {
    Unit unit{};
    unit.batch = batch;
    const int heads = args.call.key_heads, with_keys = cut.groups * cut.chunks * heads;
    if (within < with_keys) {
      unit.chunk = short_quotient(within, heads * cut.groups);
      within -= unit.chunk * heads * cut.groups;
      unit.head = short_quotient(within, cut.groups);
      unit.group = within - unit.head * cut.groups;
      unit.chunks = cut.chunks;
      unit.begin = cut.first() + unit.chunk * cut.chunk;
      unit.end = min(unit.begin + cut.chunk, cut.range.end);
      unit.counted_begin = cut.range.begin;
    } else {
      within -= with_keys;
      unit.head = within % heads;
      unit.group = cut.groups + within / heads;
      unit.chunks = 1;
    }
    return unit;
  }

 public:
  __device__ explicit Scheduler(const Arguments& args) : args_(args) {
    if (!args.uniform) look();
  }
  // Finds unit `number`, which is not less than before. All lanes of a warp call this. Returns false if there are not
  // so many.
  __device__ bool find(int number, Unit* unit) {
    if (args_.uniform) {
      const int each = args_.cut.units(args_.call, args_.plan), batch = number / each;
      if (batch >= args_.call.batch) return false;
      *unit = of_sequence(args_, batch, number - batch * each, args_.cut);
      unit->limits = AttentionLimits(args_.call, batch);
      return true;
    }
    for (;;) {
      const int all = __shfl_sync(~0u, upto_, 31);
      if (number < before_ + all) break;
      before_ += all;
      first_ += 32;
      if (first_ >= args_.call.batch) return false;
      look();
    }
    const int own = __ffs(__ballot_sync(~0u, number - before_ < upto_)) - 1;
    const int before = __shfl_up_sync(~0u, upto_, 1);
    const int within = number - before_ - (own > 0 ? __shfl_sync(~0u, before, own) : 0);
    Cut cut;
    cut.range = {__shfl_sync(~0u, cut_.range.begin, own), __shfl_sync(~0u, cut_.range.end, own)};
    cut.groups = __shfl_sync(~0u, cut_.groups, own);
    cut.chunk = __shfl_sync(~0u, cut_.chunk, own), cut.chunks = __shfl_sync(~0u, cut_.chunks, own);
    *unit = of_sequence(args_, first_ + own, within, cut);
    unit->limits = limits_.of_lane(own);
    return true;
  }
};

}  // namespace jaxsoft::cuda::decode
