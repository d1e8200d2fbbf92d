// From products of keys and queries to weights, and from those to slopes: what the backward kernel does with the
// numbers of a tile. Rows of accumulators are keys here, and columns queries.
#pragma once

#include "../../elements.cuh"
#include "../../exponential.cuh"
#include "../../wgmma.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// Rounds an accumulator to left operands.
template <class T, int count>
__device__ void round_to(uint32_t (&words)[count / 8][4], const float (&numbers)[count]) {
#pragma unroll
  for (int i = 0; i < count / 2; i++)
    words[i / 4][i % 4] = bits<uint32_t>(narrow_pair(numbers[2 * i], numbers[2 * i + 1], T()));
}

// Puts -inf where scores are masked. The limits are those near the thread's first score.
template <int count>
__device__ void exclude(float (&scores)[count], const NearLimits& limits) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int row = i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
    if (!limits.allow(row, column)) scores[i] = -INFINITY;
  }
}

// The same where a key and a query are in different segments. `key` and `query` are those of the thread's first score.
template <int count>
__device__ void exclude_segments(float (&scores)[count], const BackwardCall& call, const SegmentRange& segment,
                                 int batch, int key, int query) {
  if (segment.known) {
    const ElementRange queries[2] = {segment.of(key), segment.of(key + 8)};
#pragma unroll
    for (int i = 0; i < count; i++)
      if (!queries[i / 2 % 2].has(query + i / 4 * 8 + i % 2)) scores[i] = -INFINITY;
    return;
  }
  const int of_keys[2] = {call.key_segments.number(batch, key), call.key_segments.number(batch, key + 8)};
#pragma unroll
  for (int i = 0; i < count; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int of_query = call.query_segments.number(batch, query + i * 2 + j);
      if (of_query != of_keys[0]) scores[i + j] = -INFINITY;
      if (of_query != of_keys[1]) scores[i + 2 + j] = -INFINITY;
    }
  }
}

// cap * tanh(scale * product / cap) in units of base 2, and how it grows with the scaled product.
struct Capped {
  float score, slope;
  __device__ Capped(float product, float cap, float scale) {
    const float root = rsqrtf(1 + exp2_approximately(product * (2 * float(kLog2E) * scale / cap)));
    const float below = root * root;  // (1 - tanh) / 2
    score = (cap - 2 * cap * below) * float(kLog2E);
    slope = 4 * (below - below * below);
  }
};

// Caps the products of 64 keys and a tile of queries, and excludes those of masked scores. `growth` is how
// scores grow with products, if they are capped, and else has one unused element.
template <BackwardKind kind, int count, int growths, class Work>
__device__ void limit_scores(float (&scores)[count], float (&growth)[growths], const BackwardCall& call,
                             const Work& work, int tile, int first_key) {
  if constexpr (kind == BackwardKind::capped) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const Capped capped(scores[i], call.cap, call.scale);
      scores[i] = capped.score, growth[i] = capped.slope;
    }
  }
  if constexpr (kind != BackwardKind::plain) {
    if (work.masked(call, tile, first_key)) {
      const int key = first_key + row_of_thread(), query = tile * (2 * count) + column_of_thread();
      exclude(scores, {work.limits, key, query});
      if (work.has_segments(call)) exclude_segments(scores, call, work.segment, work.batch, key, query);
    }
  }
}

// Makes weights of scores. `lse` begins with the thread's first column.
template <BackwardKind kind, int count>
__device__ void weigh(float (&scores)[count], const float* lse, const BackwardCall& call) {
  const float unit = kind == BackwardKind::capped ? 1.f : call.scale2;
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float2 of_queries = *reinterpret_cast<const float2*>(lse + i * 2);
    scores[i] = exp2_approximately(fmaf(scores[i], unit, -of_queries.x));
    scores[i + 1] = exp2_approximately(fmaf(scores[i + 1], unit, -of_queries.y));
    scores[i + 2] = exp2_approximately(fmaf(scores[i + 2], unit, -of_queries.x));
    scores[i + 3] = exp2_approximately(fmaf(scores[i + 3], unit, -of_queries.y));
  }
}

// Makes slopes of the products of values and cotangents.
template <BackwardKind kind, int count, int growths>
__device__ void slope(float (&slopes)[count], const float (&weights)[count], const float (&growth)[growths],
                      const float* delta) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float2 of_queries = *reinterpret_cast<const float2*>(delta + i * 2);
    slopes[i] = weights[i] * (slopes[i] - of_queries.x);
    slopes[i + 1] = weights[i + 1] * (slopes[i + 1] - of_queries.y);
    slopes[i + 2] = weights[i + 2] * (slopes[i + 2] - of_queries.x);
    slopes[i + 3] = weights[i + 3] * (slopes[i + 3] - of_queries.y);
  }
  if constexpr (kind == BackwardKind::capped) {
#pragma unroll
    for (int i = 0; i < count; i++) slopes[i] *= growth[i];
  }
}

}  // namespace jaxsoft::cuda
