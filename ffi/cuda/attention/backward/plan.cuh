// What the blocks of the backward kernel are, and have in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../warp_groups.cuh"
#include "../stage.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

template <class T, int head_size, bool segmented>
struct BackwardShared {
  static constexpr int size = head_size, threads = BackwardCode::threads;
  using Plan = BackwardPlan<size>;
  static_assert(Plan::value_size == size);
  using Work = BackwardWork<size, segmented>;
  using Code = BackwardCode;
  static constexpr int boxes = size / 64;  // of 64 columns
  static constexpr int tile = Plan::queries * size, slope_tile = Plan::queries * Plan::keys;
  // The gradient by queries is computed with columns of the head as rows, 64 at a time. If there are fewer boxes than
  // warp groups, each has a part of the queries.
  static constexpr int sum_queries = boxes > 1 ? Plan::queries : Plan::queries / Code::groups;
  using Sums = SumsTile<size>;
  static constexpr int stage_box = kBoxBytes / sizeof(T);

  // Boxes of tensor_map.cuh, of 64 columns.
  alignas(1024) T key[Plan::keys * size];
  alignas(1024) T value[Plan::keys * size];
  alignas(1024) T query[Plan::query_slots][tile];
  alignas(1024) T cotangent[Plan::cotangent_slots][tile];
  alignas(1024) T slopes[2][slope_tile];  // of queries (rows) and keys, for the product with keys
  // To be added to the gradient by queries. At the end of a piece of work the gradient by a group's keys is left there,
  // and beside it that by its values, as boxes that are stored.
  alignas(1024) float sums[Code::groups][Sums::half];
  alignas(1024) T value_stage[Code::groups][64 * size];
  __device__ T* key_stage(int group) {
    static_assert(sizeof value_stage <= sizeof sums);
    return reinterpret_cast<T*>(sums[group]);
  }
  alignas(128) float numbers[Plan::query_slots][2 * Plan::queries];  // lse in base 2, then delta
  Work works[Code::work_slots];
  unsigned turns;  // how many tiles it has been the block's turn to add to

  Barrier work_full[Code::work_slots], work_empty[Code::work_slots];
  Barrier key_full, key_empty, value_full, value_empty;
  Barrier query_full[Plan::query_slots], query_empty[Plan::query_slots];
  Barrier cotangent_full[Plan::cotangent_slots], cotangent_empty[Plan::cotangent_slots];
  Barrier slopes_full[2], slopes_empty[2];  // of both groups
  Barrier sum_full[Code::groups], sum_empty[Code::groups];

  __device__ void init(bool deterministic) {
    constexpr unsigned warps = 4 * Barrier::warp_arrivals, all = warps * Code::groups;
    auto init = [](auto& full, auto& empty, unsigned of_full, unsigned of_empty) {
      for (auto& barrier : full) barrier.init(of_full);
      for (auto& barrier : empty) barrier.init(of_empty);
    };
    // Threads that add sums, and one that waits for turns or a warp that clears sums, read of work as well.
    init(work_full, work_empty, 1, all + Code::groups + (deterministic ? 1 : Barrier::warp_arrivals));
    key_full.init(1), key_empty.init(all), value_full.init(1), value_empty.init(all);
    init(query_full, query_empty, 1, all);
    init(cotangent_full, cotangent_empty, 1, all);
    init(slopes_full, slopes_empty, all, all);
    init(sum_full, sum_empty, warps, 1);
    turns = 0;
    show_barriers();
  }
};

}  // namespace jaxsoft::cuda
