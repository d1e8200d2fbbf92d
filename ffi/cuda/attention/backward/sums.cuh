// The kernels before and after the backward kernel: one lays the numbers of queries in tiles, and one rounds the sums
// that are the gradient by queries, or stores them in f32.
#pragma once

#include "copy.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

// A thread for each query, up to whole tiles. The log-sum-exp is infinite where no key is valid, so that weights are 0.
template <int size>
__global__ void prepare_numbers(const __grid_constant__ BackwardCall call, const float* lse, const float* delta) {
  let_next_kernel_start();
  constexpr int queries = BackwardPlan<size>::queries;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, tile = thread / queries, of_tile = thread % queries;
  if (tile >= call.query_tiles) return;
  for (unsigned head = blockIdx.y; head < unsigned(call.batch * call.heads); head += gridDim.y) {
    const int batch = head / call.heads;
    const AttentionLimits limits(call, batch);
    const ElementRange of_queries = call.queries_of(batch, tile, queries);
    const int query = of_queries.begin + of_tile;
    const int64_t from = int64_t(head) * call.queries + query;
    const bool counts = limits.begin <= query && query < min(of_queries.end, limits.queries);
    const float of_query = counts ? lse[from] : -INFINITY;
    float* to = call.numbers + (int64_t(head) * call.query_tiles + tile) * (2 * queries) + of_tile;
    to[0] = of_query == -INFINITY ? INFINITY : of_query * float(kLog2E);
    to[queries] = of_query == -INFINITY ? 0 : delta[from];
  }
}

// To sums of tiles without a valid key, nothing was added, and perhaps they are not even 0.
template <int queries>
__device__ bool has_sums(const BackwardCall& call, int batch, int tile) {
  if (call.segments) return call.tile_is_met[batch * call.query_tiles + tile];
  const AttentionLimits limits(call, batch);
  return limits.keys > 0 && max(tile * queries, limits.first_query(0)) <
                                min(tile * queries + queries, limits.last_query(limits.keys));
}

// Which tile of sums a block of threads has, in the order of the turns.
struct SumsPlace {
  int64_t number = blockIdx.x;
  int turn, batch, head, tile;
  __device__ explicit SumsPlace(const BackwardCall& call) {
    const int of_turns = static_cast<int>(number / call.query_tiles);
    tile = static_cast<int>(number % call.query_tiles), turn = of_turns / call.heads_of_piece;
    const BackwardHeads heads(call, turn);
    batch = heads.batch, head = heads.first + of_turns % call.heads_of_piece;
  }
  // Where a query's row is among those of the gradient.
  __device__ int64_t row(const BackwardCall& call, int query) const {
    return (int64_t(batch) * call.queries + query) * call.heads + head;
  }
};

// Rounds a tile of sums to rows of the gradient. They are in the order of accumulators of (columns of the head,
// queries), or where blocks work in pairs, of (queries, columns of the head). It may start before the kernel that adds
// them ends, as most heads are complete by then: so multiprocessors have work while others are at their last block of
// keys.
template <class T, int size>
__global__ void __launch_bounds__(256) round_sums(const __grid_constant__ BackwardCall call) {
  using Sums = SumsTile<size>;
  constexpr int queries = BackwardPlan<size>::queries;
  constexpr int row = size + 8;  // padded, so that writes of a warp meet few banks twice
  __shared__ __align__(16) T tile[queries * row];
  const SumsPlace place(call);
  wait_for_sums<size>(call, place.turn);
  const bool any = has_sums<queries>(call, place.batch, place.tile);
  const int half = threadIdx.x / kWarpGroup, thread = threadIdx.x % kWarpGroup;
  const float* const sums = call.sums + place.number * Sums::count + half * Sums::half + thread * 4;
#pragma unroll
  for (int part = 0; part < Sums::parts; part++) {
    constexpr int along = Sums::in_pairs ? 1 : row, across = Sums::in_pairs ? row : 1;  // steps of columns and of rows
    T* const begin = tile + row_of_thread() * across + column_of_thread() * along + Sums::first_column(half, part) +
                     Sums::first_query(half) * row;
#pragma unroll
    for (int i = 0; i < Sums::of_thread(part); i += 4) {
      const float4 four =
          any ? *reinterpret_cast<const float4*>(sums + Sums::begin(part) + i * kWarpGroup) : float4{};
      T* const to = begin + i * 2 * along;
      to[0] = T(four.x * call.scale), to[along] = T(four.y * call.scale);
      to[8 * across] = T(four.z * call.scale), to[along + 8 * across] = T(four.w * call.scale);
    }
  }
  const ElementRange of_queries = call.queries_of(place.batch, place.tile, queries);
  __syncthreads();
  for (int i = threadIdx.x; i < queries * size / 8; i += blockDim.x) {
    const int of_tile = i / (size / 8), first = i % (size / 8) * 8, at = of_queries.begin + of_tile;
    if (at >= of_queries.end || first >= call.size) continue;
    T* to = static_cast<T*>(call.query_gradient) + place.row(call, at) * call.size + first;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + of_tile * row + first);
  }
  if (blockIdx.x == gridDim.x - 1) wait_for_last_kernel();  // what comes next also reads that kernel's results
}

// The same for a gradient in f32, which may be added to what is there. Its tile lies in shared memory part by part.
template <class T, int size>
__global__ void __launch_bounds__(256) store_sums(const __grid_constant__ BackwardCall call) {
  using Sums = SumsTile<size>;
  constexpr int queries = BackwardPlan<size>::queries, halves = Sums::by_columns ? 2 : 1, row = halves * 64 + 4;
  __shared__ __align__(16) float tile[queries * row];
  const SumsPlace place(call);
  wait_for_sums<size>(call, place.turn);
  const bool any = has_sums<queries>(call, place.batch, place.tile);
  const ElementRange of_queries = call.queries_of(place.batch, place.tile, queries);
  const int half = threadIdx.x / kWarpGroup, thread = threadIdx.x % kWarpGroup;
  const float* const sums = call.sums + place.number * Sums::count + half * Sums::half + thread * 4;
#pragma unroll
  for (int part = 0; part < Sums::parts; part++) {
    if (!any && call.adds_query) break;
    constexpr int along = Sums::in_pairs ? 1 : row, across = Sums::in_pairs ? row : 1;  // steps of columns and of rows
    float* const begin = tile + row_of_thread() * across + column_of_thread() * along +
                         (Sums::by_columns ? half * 64 : Sums::first_query(half) * row);
    if (part > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < Sums::of_thread(part); i += 4) {
      const float4 four =
          any ? *reinterpret_cast<const float4*>(sums + Sums::begin(part) + i * kWarpGroup) : float4{};
      float* const to = begin + i * 2 * along;
      to[0] = four.x * call.scale, to[along] = four.y * call.scale;
      to[8 * across] = four.z * call.scale, to[along + 8 * across] = four.w * call.scale;
    }
    __syncthreads();
    const int fours = Sums::columns(part) / 4;  // of a row of a half
    for (int i = threadIdx.x; i < queries * halves * fours; i += blockDim.x) {
      const int of_tile = i / (halves * fours), of_half = i / fours % halves, column = i % fours * 4;
      const int at = of_queries.begin + of_tile, first = Sums::first_column(of_half, part) + column;
      if (at >= of_queries.end || first >= call.size) continue;
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(call.query_gradient) +
                                           place.row(call, at) * call.size + first);
      const float4 own = *reinterpret_cast<const float4*>(tile + of_tile * row + of_half * 64 + column);
      const float4 before = call.adds_query ? *to : float4{};
      *to = make_float4(before.x + own.x, before.y + own.y, before.z + own.z, before.w + own.w);
    }
  }
  if (blockIdx.x == gridDim.x - 1) wait_for_last_kernel();  // what comes next also reads that kernel's results
}

}  // namespace jaxsoft::cuda
