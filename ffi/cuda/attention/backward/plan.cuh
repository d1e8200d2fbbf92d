// How the backward kernel cuts up its work, by the size of heads, and what a block has in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../hopper.cuh"
#include "../../warp_groups.cuh"

namespace jaxsoft::cuda {

// Numbers that all sizes of heads share.
struct BackwardCode {
  static constexpr int groups = 2;                            // warp groups that multiply
  static constexpr int threads = (groups + 1) * kWarpGroup;   // and one that copies
  static constexpr int registers = 240, copy_registers = 24;  // of a thread of either
  static constexpr int mails = 2;                             // pieces of work that are known at a time
};

// A tile of scores, and how many tiles of queries and of cotangents a block has room for. What bounds them is
// registers: of each thread, a gradient by keys takes half the size of heads, scores, slopes and a part of the gradient
// by queries half the queries of a tile each, and rounded weights and slopes a quarter. `slopes_in_registers` says
// where the product with queries takes slopes from. Shared memory is read less if it is from registers, for which 128
// leaves no room. Heads of 64 are bound by the reads of shared memory as well, so tiles are as long as registers allow.
// With `sums_later`, the gradient by queries is taken of the tile before, so that warp groups wait less for each other.
// (H200, 8K, without a causal rule and with one, TFLOP/s: 539 and 482 in place of 500 and 457 with heads of 64, but 561
// and 537 in place of 596 and 571 with heads of 128.)
//
// `keys` are those of a piece of work, and so many `blocks` share it (pair.cuh is about two). What they add to the
// gradient by queries has `added_parts`.
//
// If the order of additions matters, a block tells after each `told` tiles that it has added to them, which takes a
// microsecond, and blocks of keys of one head should begin `apart` tiles one after the other. What blocks read and add
// to should stay in the cache, of which there are `cache` MiB. The last three are by measurement. (H200, heads of 128,
// 8K, without a causal rule and with one, TFLOP/s: 584 and 551; if 1 tile is told, 565 and 518; with 2.5 apart in 40
// MiB, which are two heads in turn and not four, 507 and 542.) A pair of blocks tells of each tile (copy_in_pairs.cuh).
template <int size>
struct BackwardPlan;
template <>
struct BackwardPlan<64> {
  static constexpr int queries = 96, keys = 128, blocks = 1, added_parts = 2, query_slots = 2, cotangent_slots = 2;
  static constexpr bool slopes_in_registers = true, sums_later = true;
  static constexpr int told = 2, cache = 49;
  static constexpr double apart = 4;
};
template <>
struct BackwardPlan<128> {
  static constexpr int queries = 64, keys = 128, blocks = 1, added_parts = 2, query_slots = 2, cotangent_slots = 2;
  static constexpr bool slopes_in_registers = false, sums_later = false;
  static constexpr int told = 2, cache = 49;
  static constexpr double apart = 4;
};
template <>
struct BackwardPlan<256> {
  static constexpr int queries = 64, keys = 128, blocks = 2, added_parts = 4, query_slots = 2, cotangent_slots = 1;
  static constexpr int cache = 49;
  static constexpr double apart = 1.9;
};

template <class T, int size>
struct BackwardShared {
  using Plan = BackwardPlan<size>;
  using Code = BackwardCode;
  static constexpr int boxes = size / 64;  // of 64 columns
  static constexpr int tile = Plan::queries * size, slope_tile = Plan::queries * Plan::keys;
  // The gradient by queries is computed with columns of the head as rows, 64 at a time. If there are fewer boxes than
  // warp groups, each has a part of the queries, and if there are more, each has several parts, one after the other.
  static constexpr int parts = boxes > Code::groups ? boxes / Code::groups : 1;
  static constexpr int sum_queries = boxes > 1 ? Plan::queries : Plan::queries / Code::groups;
  static constexpr int sum = 64 * sum_queries;

  // Boxes of tensor_map.cuh, of 64 columns.
  alignas(1024) T key[Plan::keys * size];
  alignas(1024) T value[Plan::keys * size];
  alignas(1024) T query[Plan::query_slots][tile];
  alignas(1024) T cotangent[Plan::cotangent_slots][tile];
  alignas(1024) T slopes[2][slope_tile];  // of queries (rows) and keys, for the product with keys
  alignas(128) float sums[Code::groups][sum];                        // to be added to the gradient by queries
  alignas(128) float numbers[Plan::query_slots][2 * Plan::queries];  // lse in base 2, then delta
  unsigned tickets[Code::mails];                                     // pieces of work
  unsigned turns;  // how many tiles it has been the block's turn to add to

  Barrier ticket_full[Code::mails], ticket_empty[Code::mails];
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
    // Threads that add sums, and one that waits for turns or a warp that clears sums, read tickets as well.
    init(ticket_full, ticket_empty, 1, all + Code::groups + (deterministic ? 1 : Barrier::warp_arrivals));
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
