// What a pair of blocks has in shared memory, for heads of more than 128.
//
// The gradients by 64 keys and by 64 values of a head of 256 are all that the registers of two warp groups hold. So a
// piece of work is of 128 keys, which two blocks of a cluster share. Each block has the scores, weights and slopes of
// its 64 keys, and the gradients by them. It sends its slopes to the other block, and adds to the gradient by queries
// for one half of the columns of the head, over all 128 keys: half as many additions as each block by itself would
// have. Heads of 192 with values of 128 leave room for more slots, and registers for that gradient in the warp group
// that has the one by values.
#pragma once

#include "../../hopper.cuh"
#include "plan.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// The rank of a block of the pair is 0 or 1.
__device__ inline unsigned other_block(unsigned rank) { return rank ^ 1; }

template <class T, int head_size, bool segmented>
struct BackwardPair {
  static constexpr int size = head_size, value_size = BackwardPlan<size>::value_size;
  using Sums = SumsTile<size>;
  using Plan = BackwardPlan<size>;
  using Work = BackwardWork<size, segmented>;
  static constexpr int queries = Plan::queries, keys = Plan::keys / Plan::blocks;  // of a block
  static_assert(Plan::blocks == 2 && Plan::slope_slots == 2 && queries == 64 && keys == 64);
  static constexpr int groups = 3, threads = (groups + 1) * kWarpGroup;
  // Of a thread of the warp group for scores, of those that hold a gradient, and of the one that copies.
  static constexpr int score_registers = 168, gradient_registers = 160, copy_registers = 24;
  static constexpr int work_slots = BackwardCode::work_slots;
  static constexpr int parts = Sums::parts;  // of the block's part of the gradient by queries, of up to 64 columns
  // If both parts are boxes of keys side by side, one product gives them.
  static constexpr bool at_once = Sums::columns(1) == 64;
  static constexpr int box_row = 128;
  __device__ static constexpr unsigned sum_bytes(int part) { return sizeof(float) * queries * Sums::columns(part); }

  // Boxes of tensor_map.cuh, of 64 columns.
  alignas(1024) T key[keys * size];
  alignas(1024) T other_key[parts * keys * 64];  // the other block's keys, by boxes from the first columns of the parts
  alignas(1024) T value[keys * value_size];
  alignas(1024) T query[Plan::query_slots][queries * size];
  alignas(1024) T cotangent[Plan::cotangent_slots][queries * value_size];
  // Of queries (rows) and keys.
  alignas(1024) T weights[Plan::weight_slots][queries * keys];
  alignas(1024) T slopes[Plan::slope_slots][queries * keys];
  alignas(1024) T other_slopes[queries * keys];  // the other block's
  alignas(128) float sums[Plan::sum_slots][queries * 64];      // to be added to the gradient by queries
  alignas(128) float numbers[Plan::query_slots][2 * queries];  // lse in base 2, then delta
  Work works[work_slots];

  Barrier work_full[work_slots], work_empty[work_slots];  // the latter only of the first block, for both
  Barrier key_full, key_empty, value_full, value_empty;
  Barrier query_full[Plan::query_slots], query_empty[Plan::query_slots];
  Barrier cotangent_full[Plan::cotangent_slots], cotangent_empty[Plan::cotangent_slots];
  Barrier weights_full[Plan::weight_slots], weights_empty[Plan::weight_slots];
  Barrier slopes_full[Plan::slope_slots], slopes_empty[Plan::slope_slots];
  Barrier other_slopes_full, other_slopes_empty;  // the latter is about the slopes that the other block has got
  Barrier sum_full[parts], sum_empty[Plan::sum_slots];

  __device__ void init(bool deterministic) {
    constexpr unsigned warps = 4 * Barrier::warp_arrivals;
    for (auto& barrier : work_full) barrier.init(1);
    // Warps that multiply, threads that send slopes and add sums, perhaps a warp that clears sums, and the one that
    // brings tiles to the second block.
    const unsigned others = 1 + (deterministic ? parts : 1 + Barrier::warp_arrivals);
    for (auto& barrier : work_empty) barrier.init(2 * (groups * warps + others) + 1);
    key_full.init(1), key_empty.init(Plan::slopes_by_values ? 2 * warps : warps);
    value_full.init(1), value_empty.init(warps);
    for (auto& barrier : query_full) barrier.init(1);
    for (auto& barrier : cotangent_full) barrier.init(1);
    // Two warp groups read them.
    for (auto& barrier : query_empty) barrier.init(2 * warps);
    for (auto& barrier : cotangent_empty) barrier.init(2 * warps);
    for (auto& barrier : weights_full) barrier.init(warps);
    for (auto& barrier : weights_empty) barrier.init(warps);
    for (auto& barrier : slopes_full) barrier.init(warps);
    for (auto& barrier : slopes_empty) barrier.init(2 * warps + 1);  // the last is for the copy to the other block
    other_slopes_full.init(1), other_slopes_empty.init(warps);
    for (auto& barrier : sum_full) barrier.init(warps);
    for (auto& barrier : sum_empty) barrier.init(1);
    show_barriers();
  }
};

}  // namespace jaxsoft::cuda
