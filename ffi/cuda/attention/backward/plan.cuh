// How the backward kernel cuts up its work, by the size of heads, and what a block has in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../hopper.cuh"
#include "../../warp_groups.cuh"

namespace jaxsoft::cuda {

// Numbers that all sizes of heads share.
struct BackwardCode {
  static constexpr int groups = 2;                             // warp groups that multiply
  static constexpr int threads = (groups + 1) * kWarpGroup;    // and one that copies
  static constexpr int registers = 240, copy_registers = 24;   // of a thread of either
  static constexpr int mails = 2;                              // pieces of work that are known at a time
};

// Queries and keys of a tile of scores, and how many tiles of queries and of cotangents a block holds.
template <int size>
struct BackwardPlan;
template <>
struct BackwardPlan<64> {
  static constexpr int queries = 96, keys = 128, query_slots = 2, cotangent_slots = 2;
  static constexpr bool slopes_in_registers = true;
};
template <>
struct BackwardPlan<128> {
#ifndef BWD_M
#define BWD_M 64
#endif
  static constexpr int queries = BWD_M, keys = 128, query_slots = 2, cotangent_slots = 2;
  static constexpr bool slopes_in_registers = false;
};

template <>
struct BackwardPlan<256> {
  static constexpr int queries = 64, keys = 64, query_slots = 2, cotangent_slots = 1;
};

template <class T, int size>
struct BackwardShared {
  using Plan = BackwardPlan<size>;
  static constexpr int boxes = size / 64;  // of 64 columns
  static constexpr int tile = Plan::queries * size, slope_tile = Plan::queries * Plan::keys;
  // The gradient by queries is computed with columns of the head as rows, 64 at a time. If there are fewer boxes than
  // warp groups, each has a part of the queries, and if there are more, each has several parts, one after the other.
  static constexpr int parts = boxes > BackwardCode::groups ? boxes / BackwardCode::groups : 1;
  static constexpr int sum_queries = boxes > 1 ? Plan::queries : Plan::queries / BackwardCode::groups;
  static constexpr int sum = 64 * sum_queries;
  static constexpr bool paired = Plan::keys == 64;  // whether the warp groups share the keys

  // Boxes of tensor_map.cuh, of 64 columns.
  alignas(1024) T key[Plan::keys * size];
  alignas(1024) T value[Plan::keys * size];
  alignas(1024) T query[Plan::query_slots][tile];
  alignas(1024) T cotangent[Plan::cotangent_slots][tile];
  alignas(1024) T slopes[2][slope_tile];  // of queries (rows) and keys, for the product with keys
  alignas(128) float sums[BackwardCode::groups][sum];  // to be added to the gradient by queries
  alignas(128) float numbers[Plan::query_slots][2 * Plan::queries];  // lse in base 2, then delta
  float weights[paired ? slope_tile : 1];  // from one warp group to the other
  unsigned tickets[BackwardCode::mails];
  unsigned reached[BackwardCode::groups];  // how many tiles it has been the block's turn to add to

  Barrier ticket_full[BackwardCode::mails], ticket_empty[BackwardCode::mails];
  Barrier key_full, key_empty, value_full, value_empty;
  Barrier query_full[Plan::query_slots], query_empty[Plan::query_slots];
  Barrier cotangent_full[Plan::cotangent_slots], cotangent_empty[Plan::cotangent_slots];
  Barrier sum_full[BackwardCode::groups], sum_empty[BackwardCode::groups];
};

// A place in a ring of slots, and the parity of the phase in which its barrier says that it is full.
template <int slots>
struct SlotPlace {
  unsigned slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

}  // namespace jaxsoft::cuda
