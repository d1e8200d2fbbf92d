// What the threads of a block share.
#pragma once

#include "row.cuh"

namespace jaxsoft::cuda {

// Those elements of a row of which the first histogram does not tell whether the filters leave them.
struct Bracket {
  static constexpr uint32_t no_bin = ~0u;
  uint32_t begin, end;   // the bins in which top-p ends; elements of bins before these are left by it
  uint32_t last;         // the bin in which top-k ends; no_bin where it leaves all that count
  uint32_t before_last;  // the number of elements in the bins before `last`
  uint32_t in_last;      // the number of elements in that bin
  float mass;            // about that of all that top-k leaves
  uint32_t count;        // of candidates: elements of the bins [begin, end) and of the last bin
  uint32_t before;       // candidates in blocks before this one

  __device__ bool is_candidate(uint32_t bin) const { return (bin >= begin && bin < end) || bin == last; }
};

struct SampleShared {
  static constexpr int most_warps = SampleCode::most_blocks * SampleCode::warps;
  uint32_t counts[SampleCode::bins];    // of the block's elements
  Mass sums[SampleCode::threads];       // a bin for each thread
  Mass warps[32];                       // for scans
  float float_warps[32];
  uint32_t count_warps[32];
  // In the first block of a cluster, for each warp of the cluster: the mass of its elements that are certain to be left
  // by all filters; by top-k and top-p; and by top-k alone.
  Mass left[most_warps], above[most_warps], total[most_warps];
  uint32_t warp_tops[32];
  uint32_t top, low, high;  // orders
  Bracket bracket;
  uint32_t placed;          // candidates that have a place
  Key found_low, found_high;
  Mass found_rest;
  uint32_t found_count;
  Key few[SampleCode::few];
  Key keys[SampleCode::room];  // of the candidates, in the first block of a cluster
};

}  // namespace jaxsoft::cuda
