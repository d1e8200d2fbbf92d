// What a pair of blocks has in shared memory, for heads of more than 128.
//
// The gradients by 64 keys and by 64 values of a head of 256 are all that the registers of two warp groups hold. So a
// piece of work is of 128 keys, which two blocks of a cluster share. Each block has the scores, weights and slopes of
// its 64 keys, and the gradients by them. It sends its slopes to the other block, and adds to the gradient by queries
// for one half of the columns of the head, over all 128 keys: half as many additions as each block by itself would
// have.
#pragma once

#include "../../hopper.cuh"
#include "plan.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// The rank of a block of the pair is 0 or 1.
__device__ inline unsigned other_block(unsigned rank) { return rank ^ 1; }

template <class T, bool segmented>
struct BackwardPair {
  static constexpr int size = 256, half = size / 2;
  using Plan = BackwardPlan<size>;
  using Work = BackwardWork<size, segmented>;
  static constexpr int queries = Plan::queries, keys = Plan::keys / Plan::blocks;  // of a block
  static_assert(Plan::blocks == 2 && queries == 64 && keys == 64);
  static constexpr int groups = 3, threads = (groups + 1) * kWarpGroup;
  // Of a thread of the warp group for scores, of those that hold a gradient, and of the one that copies.
  static constexpr int score_registers = 168, gradient_registers = 160, copy_registers = 24;
  static constexpr int work_slots = BackwardCode::work_slots, slope_slots = 2;
  static constexpr int parts = 2;  // of 64 columns, of the block's part of the gradient by queries
  static constexpr int sum = queries * 64, sum_tile = queries * size;
  static constexpr int box_row = 128, box_bytes = 64 * box_row;

  // Boxes of tensor_map.cuh, of 64 columns.
  alignas(1024) T key[keys * size];
  alignas(1024) T other_key[keys * half];  // the half of the columns that the block has, of the other block's keys
  alignas(1024) T value[keys * size];
  alignas(1024) T query[Plan::query_slots][queries * size];
  alignas(1024) T cotangent[Plan::cotangent_slots][queries * size];
  // Of queries (rows) and keys.
  alignas(1024) T weights[1][queries * keys];
  alignas(1024) T slopes[slope_slots][queries * keys];
  alignas(1024) T other_slopes[queries * keys];                // the other block's
  alignas(128) float sums[sum];                                // to be added to the gradient by queries
  alignas(128) float numbers[Plan::query_slots][2 * queries];  // lse in base 2, then delta
  Work works[work_slots];

  Barrier work_full[work_slots], work_empty[work_slots];  // the latter only of the first block, for both
  Barrier key_full, key_empty, value_full, value_empty;
  Barrier query_full[Plan::query_slots], query_empty[Plan::query_slots];
  Barrier cotangent_full[Plan::cotangent_slots], cotangent_empty[Plan::cotangent_slots];
  Barrier weights_full[1], weights_empty[1], slopes_full[slope_slots], slopes_empty[slope_slots];
  Barrier other_slopes_full, other_slopes_empty;  // the latter is about the slopes that the other block has got
  Barrier sum_full[parts], sum_empty;

  __device__ void init(bool deterministic) {
    constexpr unsigned warps = 4 * Barrier::warp_arrivals;
    for (auto& barrier : work_full) barrier.init(1);
    // Warps that multiply, threads that send slopes and add sums, perhaps a warp that clears sums, and the one that
    // brings tiles to the second block.
    const unsigned others = 1 + (deterministic ? parts : 1 + Barrier::warp_arrivals);
    for (auto& barrier : work_empty) barrier.init(2 * (groups * warps + others) + 1);
    key_full.init(1), key_empty.init(warps), value_full.init(1), value_empty.init(warps);
    for (auto& barrier : query_full) barrier.init(1);
    for (auto& barrier : cotangent_full) barrier.init(1);
    // Two warp groups read them.
    for (auto& barrier : query_empty) barrier.init(2 * warps);
    for (auto& barrier : cotangent_empty) barrier.init(2 * warps);
    weights_full[0].init(warps), weights_empty[0].init(warps);
    for (auto& barrier : slopes_full) barrier.init(warps);
    for (auto& barrier : slopes_empty) barrier.init(warps + 1);  // the last is for the copy to the other block
    other_slopes_full.init(1), other_slopes_empty.init(warps);
    for (auto& barrier : sum_full) barrier.init(warps);
    sum_empty.init(1);
    show_barriers();
  }
};

}  // namespace jaxsoft::cuda
