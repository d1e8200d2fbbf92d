// From products of keys and queries to weights, and from those to slopes: what the backward kernel does with the
// numbers of a tile. Rows of accumulators are keys here, and columns queries.
#pragma once

#include <cfloat>

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

// Makes tanh(u) of products by a polynomial.
template <int count, int degree>
__device__ void cap_scores(float (&scores)[count], const CapPolynomial<degree>& polynomial) {
#pragma unroll
  for (float& score : scores) score *= polynomial.factor(score * score, polynomial.terms[degree]);
}

// If there is a cap, makes scores over the cap of the products of 64 keys and a tile of queries; where any of the warp
// group's is near the cap, they stay products. Excludes those that are masked, if any `is_masked`. Returns whether they
// have stayed products: a warp group goes one way, as its products need. `all` is a barrier for it.
template <ScoreKind kind, int count, class Work>
__device__ bool limit_scores(float (&scores)[count], const BackwardCall& call, const Work& work, int tile,
                             int first_key, bool is_masked, const NamedBarrier& all) {
  bool near_cap = false;
  if constexpr (kind == ScoreKind::capped) {
    const SoftCap& cap = call.soft_cap;
    float tops[4] = {};
#pragma unroll
    for (int i = 0; i < count; i++) tops[i % 4] = fmaxf(tops[i % 4], fabsf(scores[i]));
    const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    const float square = top * top;
    near_cap = all.any(!(square <= fmaxf(cap.below.largest_square, cap.far_below.largest_square)));
    if (near_cap) {
      // An infinite product has the score -cap, but one that is -inf below is masked.
#pragma unroll
      for (int i = 0; i < count; i++) scores[i] = scores[i] == -INFINITY ? -FLT_MAX : scores[i];
    } else if (__any_sync(0xffffffffu, square > cap.far_below.largest_square)) {
      cap_scores(scores, cap.below);
    } else {
      cap_scores(scores, cap.far_below);
    }
  }
  if constexpr (kind != ScoreKind::plain) {
    if (is_masked) {
      const int key = first_key + row_of_thread(), query = work.query(tile) + column_of_thread();
      exclude(scores, {work.limits, key, query});
      // Of tiles that have no other segments, limits say all.
      if constexpr (may_have_segments<kind>)
        if (call.segments && !work.segments.tiles.of_one)
          exclude_segments(scores, call, work.segments.range, work.batch, key, query);
    }
  }
  return near_cap;
}

// A weight, and what it is multiplied by how its score grows with the scaled product: by 1 - tanh^2, if it is capped.
struct Weight {
  float weight, grown;
};

// Makes weights of scores, as left operands, and leaves what has grown in the scores' place. `lse` begins with the
// thread's first column.
template <class T, int count, class WeightOf>
__device__ void weigh(float (&scores)[count], uint32_t (&weights)[count / 8][4], const float* lse,
                      WeightOf weight_of) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float2 of_queries = *reinterpret_cast<const float2*>(lse + i * 2);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const Weight first = weight_of(scores[i + j], of_queries.x), second = weight_of(scores[i + j + 1], of_queries.y);
      weights[(i + j) / 8][(i + j) / 2 % 4] = bits<uint32_t>(narrow_pair(first.weight, second.weight, T()));
      scores[i + j] = first.grown, scores[i + j + 1] = second.grown;
    }
  }
}
// Of scores that `limit_scores` has made.
template <class T, ScoreKind kind, int count>
__device__ void weigh(float (&scores)[count], uint32_t (&weights)[count / 8][4], const float* lse,
                      const BackwardCall& call) {
  if constexpr (kind != ScoreKind::capped) {
    weigh<T>(scores, weights, lse, [&](float score, float of_query) -> Weight {
      const float weight = exp2_approximately(fmaf(score, call.scale2, -of_query));
      return {weight, weight};
    });
  } else {
    const float cap2 = call.soft_cap.cap * float(kLog2E);
    weigh<T>(scores, weights, lse, [&](float tanh, float of_query) -> Weight {
      const float weight = exp2_approximately(fmaf(tanh, cap2, -of_query));
      return {weight, weight * __saturatef(fmaf(-tanh, tanh, 1.f))};  // of -inf, which is masked, the latter is 0
    });
  }
}
// Of products that it has left, near the cap.
template <class T, int count>
__device__ void weigh_near_cap(float (&products)[count], uint32_t (&weights)[count / 8][4], const float* lse,
                               const SoftCap& cap) {
  const float cap2 = cap.cap * float(kLog2E);
  weigh<T>(products, weights, lse, [&](float product, float of_query) -> Weight {
    const float logistic = cap.logistic(product);
    const float weight = product == -INFINITY ? 0 : exp2_approximately(fmaf(-2 * cap2, logistic, cap2) - of_query);
    return {weight, weight * (4 * (logistic - logistic * logistic))};
  });
}

// Makes slopes of the products of values and cotangents.
template <int count>
__device__ void slope(float (&slopes)[count], const float (&weights)[count], const float* delta) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float2 of_queries = *reinterpret_cast<const float2*>(delta + i * 2);
    slopes[i] = weights[i] * (slopes[i] - of_queries.x);
    slopes[i + 1] = weights[i + 1] * (slopes[i + 1] - of_queries.y);
    slopes[i + 2] = weights[i + 2] * (slopes[i + 2] - of_queries.x);
    slopes[i + 3] = weights[i + 3] * (slopes[i + 3] - of_queries.y);
  }
}

}  // namespace jaxsoft::cuda
