// Which kernel finds the k largest elements of rows. Nothing here needs CUDA, so the plan of a call is known without a
// GPU: it is the one of a GPU that has room for the clusters, as a part of one (MIG) may not have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "tuning.h"

namespace jaxsoft::cuda {

// The rows of a call. A pack is 16 bytes.
struct TopKRows {
  int64_t rows, packs;
  int k, element;  // the latter in bytes
};

// The packs of a row, which may begin anywhere in its first unless all rows begin with one.
inline int64_t packs_of_row(int64_t n, int element, bool whole) { return (n * element + 15) / 16 + !whole; }

// Whether there is a kernel for short rows that takes these.
inline bool is_short(const TopKRows& call) {
  return call.packs <= 32 * ShortRows::most_packs(call.element) && call.k <= ShortRows::most_k(32);
}

// Whether a warp has a row. There must be rows enough for all of the multiprocessors' warps, several times, and groups
// enough to tell the k largest apart.
inline bool is_for_warps(const TopKRows& call, const TopKTuning& tuning, int multiprocessors) {
  const int64_t warps = int64_t(TopKCode::rows) * TopKCode::row_blocks * multiprocessors;
  return call.packs <= tuning.row_packs && call.rows >= tuning.waves * warps && call.k <= tuning.row_k &&
         2 * call.k <= call.packs / TopKCode::tile_packs;
}

// How many lanes share a slot in clusters of this choice, or 0 where these do not take the rows. There must be few
// rows, slots enough to tell the k largest apart, and a pack for each thread.
inline int lanes_of_slot(const ClusterChoice& choice, const TopKRows& call, int multiprocessors) {
  const int64_t of_cluster = choice.blocks * choice.warps, threads = 32 * of_cluster;
  if (call.rows * choice.blocks > choice.most * multiprocessors) return 0;
  if (call.packs < threads || call.packs > TopKClusters::most_packs * threads) return 0;
  int lanes = 32;
  int64_t slots = of_cluster;
  while (lanes > 1 && slots < TopKClusters::slots_for_each * call.k && 2 * slots <= TopKClusters::most_slots)
    lanes /= 2, slots *= 2;
  return slots < 2 * call.k ? 0 : lanes;
}

// The most parts of a row by blocks, where there are fewer rows than blocks that run at once. The workspace, of so many
// bytes, has room for all parts' keys and states.
inline int64_t parts_of_row(const TopKRows& call, const TopKTuning& tuning, int multiprocessors, int64_t bytes) {
  const int64_t tiles = call.packs / (TopKCode::tile_packs * TopKCode::threads);
  const int64_t of_part = call.k * TopKCode::key_bytes + TopKCode::state_bytes;
  const int64_t parts = std::min({int64_t(tuning.blocks_at_once) * multiprocessors / call.rows,
                                  call.packs / TopKCode::threads,
                                  std::max<int64_t>(tuning.few_parts, tiles / tuning.least_tiles),
                                  int64_t(tuning.merged / call.k), bytes / (call.rows * of_part)});
  return std::max<int64_t>(parts, 1);
}

// For example "top_k_by_clusters: 8 blocks of 16 warps a row". The first word is in the name of the kernel, as a
// profiler shows it.
inline std::string top_k_plan(const TopKRows& call, int major, int multiprocessors, int64_t workspace_bytes) {
  const TopKTuning& tuning = top_k_tuning(major);
  if (is_short(call)) return "top_k_of_short_rows: rows in registers";
  if (is_for_warps(call, tuning, multiprocessors)) return "top_k_by_warps: a warp a row";
  for (const ClusterChoice& choice : kClusterChoices)
    if (major >= 9 && lanes_of_slot(choice, call, multiprocessors) > 0)
      return "top_k_by_clusters: " + std::to_string(choice.blocks) + " blocks of " + std::to_string(choice.warps) +
             " warps a row";
  const int64_t parts = parts_of_row(call, tuning, multiprocessors, workspace_bytes);
  return "top_k_by_blocks: up to " + std::to_string(parts) + " blocks a row";
}

}  // namespace jaxsoft::cuda
