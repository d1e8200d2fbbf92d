// From products of queries and keys to weights: which scores count, and the online fold of a tile's scores.
//
// Scores are natural, and weights 2^((z - m) log2(e)).
#pragma once

#include <cmath>

#include "../../exponential.cuh"
#include "../../fold.cuh"
#include "arguments.cuh"

namespace jaxsoft::cuda::decode {

__device__ inline float weight_of(float m, float total) {
  return exp2_approximately((m - reference(total)) * float(kLog2E));
}

__device__ inline float score_of(const OfScores& array, int64_t index) {
  switch (array.type) {
    case AttentionType::f16: return widen(static_cast<const __half*>(array.data)[index]);
    case AttentionType::bf16: return widen(static_cast<const __nv_bfloat16*>(array.data)[index]);
    default: return static_cast<const float*>(array.data)[index];
  }
}
__device__ inline int64_t place(const OfScores& array, int b, int head, int query, int key) {
  return b * array.steps[0] + head * array.steps[1] + query * array.steps[2] + key * array.steps[3];
}

// A score of a key that lies within the limits: with a cap, a bias, a mask and segments.
// A function of its own, as it is long and rare.
__device__ __noinline__ float adjust(const AttentionCall& call, const Unit& unit, const RowPlace& row, int key,
                                     float z) {
  const int b = unit.batch;
  if (call.cap > 0) z = call.cap * tanhf(z / call.cap);
  if (call.bias.data) z += score_of(call.bias, place(call.bias, b, row.head, row.query, key));
  if (call.mask.data &&
      !static_cast<const uint8_t*>(call.mask.data)[place(call.mask, b, row.head, row.query, key)])
    return -INFINITY;
  if (call.query_segments && call.query_segments[b * call.segment_steps[0] + row.query] !=
                                 call.key_segments[b * call.segment_steps[1] + key])
    return -INFINITY;
  return z;
}

// What a lane keeps of the two rows whose scores it has: row `half` is 8 * half further down.
struct LaneRows {
  ElementRange ranges[2];  // the keys within each row's limits; none of a row that is only there to fill the tile
  int whole_begin, whole_end;  // the keys within the limits of all rows of the warp that have any
  float factor[2];  // products are multiplied by it
  float m[2] = {-INFINITY, -INFINITY}, s[2] = {};  // the sum is over the lane's keys only

  // `row` is the lane's first row.
  __device__ LaneRows(const Arguments& args, const Unit& unit, int row, float scale) : factor{scale, scale} {
    whole_begin = 0, whole_end = INT_MAX;
    for (int half = 0; half < 2; half++) {
      ranges[half] = {0, 0};
      if (row + 8 * half >= live_rows(args, unit)) continue;
      const RowPlace place(args, unit, row + 8 * half);
      ranges[half] = unit.limits.of_query(place.query);
      if (ranges[half].empty()) continue;
      whole_begin = max(whole_begin, ranges[half].begin), whole_end = min(whole_end, ranges[half].end);
    }
    if (!(scale > 0)) whole_end = 0;  // the fold of plain tiles takes products' maximum for that of scores
    whole_begin = __reduce_max_sync(~0u, whole_begin), whole_end = __reduce_min_sync(~0u, whole_end);
  }
};

// Whether all of a tile's scores count as they are. `key` is the tile's first key, and bit i of `valid` says whether
// its i-th run of 16 keys is in the cache.
template <int keys>
__device__ bool is_plain(const Arguments& args, const LaneRows& rows, int key, unsigned valid) {
  constexpr unsigned all = (1u << (keys / kRun)) - 1;
  return key >= rows.whole_begin && key + keys <= rows.whole_end && (valid & all) == all && !args.adjusted;
}

// Turns a tile's products into scores, where it is not plain.
template <int columns>
__device__ void adjust_tile(const Arguments& args, const Unit& unit, const LaneRows& rows, int row, int key,
                            unsigned valid, float (&z)[columns][4]) {
  const int first = key + threadIdx.x % 4 * 2;
  const RowPlace places[2] = {RowPlace(args, unit, row), RowPlace(args, unit, row + 8)};
#pragma unroll
  for (int i = 0; i < columns; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int of = first + 8 * i + j % 2;
      const ElementRange& range = rows.ranges[j / 2];
      const bool counts = of >= range.begin && of < range.end && valid >> (i / 2) & 1;
      z[i][j] *= rows.factor[j / 2];
      if (!counts) z[i][j] = -INFINITY;
      else if (args.adjusted) z[i][j] = adjust(args.call, unit, places[j / 2], of, z[i][j]);
    }
  }
}

// Turns a plain tile's products into scores, and scores into weights, and folds them. Puts into `factors` by what the
// output so far must be multiplied, for each of the lane's rows, and returns whether that is not 1 for all of the warp.
template <int columns>
__device__ bool fold_tile(LaneRows& rows, bool plain, float (&z)[columns][4], float (&factors)[2]) {
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float unit = plain ? rows.factor[half] : 1.f;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < columns; i++) most = fmaxf(most, fmaxf(z[i][2 * half], z[i][2 * half + 1]));
    float m = fmaxf(rows.m[half], most * unit);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    grown |= m > rows.m[half];
    factors[half] = weight_of(rows.m[half], m);
    rows.m[half] = m;
    const float from = reference(m);
    // Of a plain tile exponents are one operation. Others subtract first, as a bias may be of any size.
    const float slope = plain ? unit * float(kLog2E) : 1.f, shift = plain ? -from * float(kLog2E) : 0.f;
    if (!plain) {
#pragma unroll
      for (int i = 0; i < columns; i++) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; j++) z[i][j] = (z[i][j] - from) * float(kLog2E);
      }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < columns; i++) {
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; j++) {
        z[i][j] = exp2_approximately(fmaf(z[i][j], slope, shift));
        sum += z[i][j];
      }
    }
    rows.s[half] = fmaf(rows.s[half], factors[half], sum);
  }
  return __any_sync(~0u, grown);
}

}  // namespace jaxsoft::cuda::decode
