// The scores of a warp group's queries and a tile of keys, from products to weights, and the state of the queries.
//
// All is in registers, in the layout of accumulators (wgmma.cuh): a thread has a part of two rows.
#pragma once

#include "../../elements.cuh"
#include "../../exponential.cuh"
#include "../../fold.cuh"
#include "../../wgmma.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda {

// From here on references are subtracted from scores before these are multiplied by their unit: the product would have
// lost too much.
constexpr float kLargeReference = 0x1p20f;

// References follow the maximum where it is further above in base 2, and weights would exceed the other number.
constexpr float kSlack = 8, kLargestWeight = 0x1p8f;
// Weights by a reference that is so far below the score do not overflow, nor their sums.
constexpr float kFarAbove = 0x1p100f;

// The state of a query, as far as a thread has it.
struct RowState {
  // Exponentials are relative to this score, which is the same in the four threads of the row. It follows the maximum
  // only where a weight would exceed kLargestWeight, so that outputs are seldom rescaled. No digits are lost by that.
  float from = -infinity<float>();
  float largest = 0;  // of the thread's weights
  float sum = 0;      // of them
};

template <class T, class Plan, ScoreKind kind>
struct ForwardScores {
  static constexpr int tile = Plan::key_tile, all = tile / 2;  // numbers of a thread
  using Tile = float[all];
  using Weights = uint32_t[tile / 16][4];

  const ForwardArguments& args;
  const int query;  // the thread's first
  RowState rows[2];
  float sink = -infinity<float>();  // one more score, whose value is 0: it joins when all others have been taken in

  __device__ ForwardScores(const ForwardArguments& args, const ForwardItem& item, int query)
      : args(args), query(query) {
    const AttentionCall& call = args.call;
    if (call.sinks) sink = call.sinks[item.batch * call.sink_steps[0] + item.head * call.sink_steps[1]];
  }

  // The row of number i of a tile, and its column relative to the thread's first one.
  __device__ static constexpr int row(int i) { return i / 2 % 2; }
  __device__ static constexpr int column(int i) { return i / 4 * 8 + i % 2; }

  // Caps scores.
  __device__ void cap(Tile& scores) const {
    const SoftCap& cap = args.soft_cap;
#pragma unroll
    for (int i = 0; i < all; i++) scores[i] = fmaf(-2 * cap.cap, cap.logistic(scores[i]), cap.cap);
  }
  // Puts limits and segments on scores, which become -inf where they are masked: on the first `count`, as below.
  template <int count = all>
  __device__ void mask(Tile& scores, const ForwardItem& item, int first_key) const {
    const AttentionCall& call = args.call;
    const int own = first_key + column_of_thread();
    if constexpr (kind == ScoreKind::plain) {
#pragma unroll
      for (int i = 0; i < count; i++)
        if (column(i) >= call.keys - own) scores[i] = -infinity<float>();
      return;
    }
    ElementRange keys[2] = {item.limits.of_query(query), item.limits.of_query(query + 8)};
    const bool segments = may_have_segments<kind> && call.key_segments;
    const bool known = segments && item.segments.known;
    if (known) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const ElementRange range = item.segments.of(query + 8 * r);
        keys[r] = {max(keys[r].begin, range.begin), min(keys[r].end, range.end)};
      }
    }
#pragma unroll
    for (int i = 0; i < count; i++)
      if (column(i) >= keys[row(i)].end - own) scores[i] = -infinity<float>();
    if (known || call.limits.of_first_keys()) {
#pragma unroll
      for (int i = 0; i < count; i++)
        if (column(i) < keys[row(i)].begin - own) scores[i] = -infinity<float>();
    }
    if (segments && !known) {
      const int32_t* const of_queries = call.query_segments + item.batch * call.segment_steps[0];
      const int32_t* const of_keys = call.key_segments + item.batch * call.segment_steps[1];
      const int last = call.queries - 1;
      const int own_segments[2] = {of_queries[min(query, last)], of_queries[min(query + 8, last)]};
#pragma unroll
      for (int i = 0; i < count; i++) {
        const int key = own + column(i);
        if (key >= call.keys || of_keys[key] != own_segments[row(i)]) scores[i] = -infinity<float>();
      }
    }
  }

  // Whether all rows of a warp have a reference by which there may be weights.
  __device__ bool have_references() const {
    return __all_sync(0xffffffffu, limit(rows[0]) > 0 && limit(rows[1]) > 0);
  }

  // What the thread has of the weights of a tile, by rows.
  struct Taken {
    float largest[2] = {}, sums[2] = {};
    float smallest[2] = {};  // and whether the weights are not these: both by `weigh_below_cap`
    bool wrong = false;
  };
  // Makes weights of scores by the references as they are.
  __device__ Taken weigh(Tile& scores) const {
    return weigh_by(scores, {in_base_2(rows[0].from), in_base_2(rows[1].from)});
  }
  template <int count = all>
  __device__ Taken weigh_by(Tile& scores, const float (&references)[2]) const {
    auto exponent = [&](int i, float reference) { return fmaf(scores[i], args.unit, -reference); };
    return weigh<false, count>(scores, references, exponent);
  }
  // The same from scores that are not capped yet, if they are far enough below the cap for a polynomial. It saves
  // exponentials, which are what takes the longest. The polynomial rises with the product, so it is the weights that
  // tell whether one is not.
  template <int degree>
  __device__ Taken weigh_below_cap(Tile& scores, const CapPolynomial<degree>& polynomial) const {
    const float references[2] = {in_base_2(rows[0].from), in_base_2(rows[1].from)};
    // The compiler would compute all polynomials before the first exponential, if they did not depend on weights.
    constexpr int ahead = 8;
    float last = polynomial.terms[degree];
    Taken taken = weigh<true>(scores, references, [&](int i, float reference) {
      if (i > 0 && i % ahead == 0) last = fmaf(scores[i - ahead], 0.f, last);
      return fmaf(scores[i], polynomial.factor(scores[i] * scores[i], last), -reference);
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float most = exp2_approximately(polynomial.largest - references[r]);
      const float least = exp2_approximately(-polynomial.largest - references[r]);
      taken.wrong |= limit(rows[r]) > 0 && !(taken.largest[r] <= most && taken.smallest[r] >= least);
    }
    return taken;
  }
  // exponent(i, reference) is that of number i.
  template <bool with_smallest = false, int count = all, class Exponent>
  __device__ Taken weigh(Tile& scores, const float (&references)[2], Exponent exponent) const {
    Taken taken;
    // No weight is negative, so they compare as integers do, of which there are three at a time.
    int largest[2] = {}, smallest[2] = {INT32_MAX, INT32_MAX};
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const int r = row(i);
      scores[i] = exp2_approximately(exponent(i, references[r]));
      scores[i + 1] = exp2_approximately(exponent(i + 1, references[r]));
      taken.sums[r] += scores[i] + scores[i + 1];
      largest[r] = __vimax3_s32(largest[r], bits<int>(scores[i]), bits<int>(scores[i + 1]));
      if (with_smallest) smallest[r] = __vimin3_s32(smallest[r], bits<int>(scores[i]), bits<int>(scores[i + 1]));
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
      taken.largest[r] = bits<float>(largest[r]), taken.smallest[r] = bits<float>(smallest[r]);
    return taken;
  }
  // Whether a weight of the warp's is above the limit of its row, or wrong. The compiler would put exponentials behind
  // the vote, if this had not to know what is `never` so.
  __device__ bool above_limits(const Taken& taken) const {
    const bool never = taken.sums[0] + taken.sums[1] < 0;
    const int first = !(taken.largest[0] <= limit(rows[0])), second = !(taken.largest[1] <= limit(rows[1]));
    return __any_sync(0xffffffffu, first | second | int(taken.wrong) | int(never));
  }
  // Adds such a tile up.
  __device__ void add(const Taken& taken) {
#pragma unroll
    for (int r = 0; r < 2; r++)
      rows[r].largest = fmaxf(rows[r].largest, taken.largest[r]), rows[r].sum += taken.sums[r];
  }
  // The same where a weight is above a limit: references follow, and the weights with them. Returns by how much to
  // multiply what was added up before. Weights may have overflowed, or be too inexact: then it does nothing, and says
  // so.
  __device__ bool follow(Tile& weights, const Taken& taken, float (&factors)[2]) {
    float froms[2];
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float top = reduce_maximum(taken.largest[r], 4), limit = this->limit(rows[r]);
      const bool above = !(top <= limit);
      froms[r] = above ? fmaf(__log2f(top), args.inverse_unit, rows[r].from) : rows[r].from;
      far |= above && !(limit > 0 && top < kFarAbove && is_small(froms[r]));
    }
    if (__any_sync(0xffffffffu, far)) return false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      RowState& state = rows[r];
      factors[r] = exp2_approximately(in_base_2(state.from) - in_base_2(froms[r]));
      state.from = froms[r];
      state.largest = fmaxf(state.largest, taken.largest[r]) * factors[r];
      state.sum = (state.sum + taken.sums[r]) * factors[r];
    }
#pragma unroll
    for (int i = 0; i < all; i++) weights[i] *= factors[row(i)];
    return true;
  }

  // Takes in a tile of scores, which become weights. Returns by how much to multiply what was added up before.
  template <int count = all>
  __device__ void take(Tile& scores, float (&factors)[2]) {
    float tops[2] = {-infinity<float>(), -infinity<float>()};
#pragma unroll
    for (int i = 0; i < count; i++) tops[row(i)] = fmaxf(tops[row(i)], scores[i]);
    float references[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      RowState& state = rows[r];
      const float top = reduce_maximum(tops[r], 4);
      factors[r] = 1;
      if (top > fmaf(kSlack, args.inverse_unit, state.from) && top < infinity<float>()) {
        factors[r] = exp2_approximately((state.from - top) * args.unit);
        state.from = top;
      }
      references[r] = subtracted(state);
    }
    if (__any_sync(0xffffffffu, fmaxf(fabsf(references[0]), fabsf(references[1])) >= kLargeReference))
      subtract_references<count>(scores, references);
    const Taken taken = weigh_by<count>(scores, references);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      RowState& state = rows[r];
      state.largest = fmaxf(state.largest * factors[r], taken.largest[r]);
      // Of a score of +inf the sum is and stays that, where a factor may be 0.
      state.sum = state.sum == infinity<float>() ? state.sum : fmaf(state.sum, factors[r], taken.sums[r]);
    }
  }

  // The weights as the left operand of the product with values.
  __device__ static void round(const Tile& weights, Weights& rounded) {
#pragma unroll
    for (int i = 0; i < all; i += 2)
      rounded[i / 8][i / 2 % 4] = bits<uint32_t>(narrow_pair(weights[i], weights[i + 1], T()));
  }

  // What a row ends with.
  struct Result {
    float inverse, lse;  // of the sum; and natural
  };
  __device__ Result result(int r) const {
    const RowState& state = rows[r];
    float sum = state.sum;
    for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    const float weight = reduce_maximum(state.largest, 4);
    constexpr auto ln2 = static_cast<float>(1 / kLog2E);
    const float nan_of_sink = sink < infinity<float>() ? 0 : NAN;  // of one that is not a number, or +inf
    if (sum == 0) return {nan_of_sink, sink};
    // What the largest weight has lost by rounding is in the sum, but not in the output. It matters where that weight
    // is nearly all there is.
    const float lost = weight - widen(narrow<T>(weight));
    const float reference = subtracted(state), of_sink = sink * static_cast<float>(kLog2E);
    if (of_sink > reference && sum < infinity<float>()) {
      const float share = exp2_approximately(reference - of_sink);  // of a weight of 1, relative to the sink
      const float all = fmaf(sum - lost, share, 1.f);
      return {share / all + nan_of_sink, fmaf(__log2f(fmaf(sum, share, 1.f)), ln2, sink)};
    }
    const float other = exp2_approximately(of_sink - reference);
    return {1 / (sum - lost + other), (reference + __log2f(sum + other)) * ln2};
  }
  // The largest score of the row that the thread has seen, in the unit of products, or capped.
  __device__ float largest(int r) const {
    return fmaf(__log2f(rows[r].largest), args.inverse_unit, rows[r].from);
  }

 private:
  // A score in base 2. It is a number of its own: as part of another operation, it would be another one.
  __device__ float in_base_2(float score) const { return __fmul_rn(score, args.unit); }
  // What is subtracted from scores in base 2.
  __device__ float subtracted(const RowState& state) const { return in_base_2(reference_of(state)); }
  // Whether products with the unit lose too little to matter.
  __device__ bool is_small(float reference) const { return fabsf(in_base_2(reference)) < kLargeReference; }
  // The largest weight by the reference as it is. By a large one, or none, there is no weight.
  __device__ float limit(const RowState& state) const { return is_small(state.from) ? kLargestWeight : -1; }
  __device__ static float reference_of(const RowState& state) { return reference(state.from); }
  template <int count>
  __device__ void subtract_references(Tile& scores, float (&references)[2]) const {
    float subtracted[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const bool large = fabsf(references[r]) >= kLargeReference;
      subtracted[r] = large ? reference_of(rows[r]) : 0;
      if (large) references[r] = 0;
    }
#pragma unroll
    for (int i = 0; i < count; i++) scores[i] -= subtracted[row(i)];
  }
};

}  // namespace jaxsoft::cuda
