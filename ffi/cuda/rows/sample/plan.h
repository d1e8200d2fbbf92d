// Over how many blocks a row lies. Nothing here needs CUDA, so the plan of a call is known without a GPU: it is the one
// of a GPU that has room for the clusters of all rows.
#pragma once

#include <string>

#include "tuning.h"

namespace jaxsoft::cuda {

constexpr int kSampleBlocks[] = {16, 8, 4, 3, 2};  // of a cluster, the first of which that may be is tried first
static_assert(kSampleBlocks[0] == SampleCode::most_blocks);

// Whether a row of `packs` packs may lie over a cluster of blocks: there is a multiprocessor for each block, and most
// threads have more than one pack.
constexpr bool may_have_blocks(int blocks, int64_t rows, int64_t packs, int major, int multiprocessors) {
  return major >= 9 && blocks * rows <= multiprocessors && packs > blocks * SampleCode::threads * 3 / 4;
}

// For example "sample_rows: up to 4 blocks a row". The first word is in the name of the kernel, as a profiler shows it.
inline std::string sample_plan(int64_t rows, int64_t packs, int major, int multiprocessors) {
  for (const int blocks : kSampleBlocks)
    if (may_have_blocks(blocks, rows, packs, major, multiprocessors))
      return "sample_rows: up to " + std::to_string(blocks) + " blocks a row";
  return "sample_rows: a block a row";
}

}  // namespace jaxsoft::cuda
