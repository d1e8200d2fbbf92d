// The scores of a warp group's queries and a tile of keys, from products to weights, and the state of the queries.
//
// All is in registers, in the layout of accumulators (wgmma.cuh): a thread has a part of two rows.
#pragma once

#include "../../elements.cuh"
#include "../../exponential.cuh"
#include "../../fold.cuh"
#include "../../wgmma.cuh"
#include "items.cuh"

namespace jaxsoft::cuda {

// From here on references are subtracted from scores before these are multiplied by their unit: the product would have
// lost too much.
constexpr float kLargeReference = 0x1p20f;

// The state of a query, as far as a thread has it: all but the sum are the same in the four threads of the row.
struct RowState {
  float largest = -infinity<float>();  // of the scores, in their unit
  // Exponentials are relative to this. It follows the maximum only where it falls behind by the slack, so that outputs
  // are seldom rescaled. Weights may reach 2^8, which loses no digits.
  float from = -infinity<float>();
  float sum = 0;  // of weights
};

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T, class Plan, ForwardKind kind>
struct ForwardScores {
  static constexpr int tile = Plan::key_tile, count = tile / 2;  // numbers of a thread
  using Tile = float[count];
  using Weights = uint32_t[tile / 16][4];

  const ForwardArguments& args;
  RowState rows[2];
  KeyRange keys[2];
  int query_segments[2] = {};
  const int32_t* key_segments = nullptr;

  // `query` is the thread's first query.
  __device__ ForwardScores(const ForwardArguments& args, const ForwardItem& item, const AttentionLimits& limits,
                           int query)
      : args(args) {
    const AttentionCall& call = args.call;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      keys[r] = kind == ForwardKind::plain ? KeyRange{0, limits.keys} : limits.of_query(query + 8 * r);
      if (call.sinks) {
        // A sink is one more score, whose value is 0.
        const float sink = call.sinks[item.batch * call.sink_steps[0] + item.head * call.sink_steps[1]];
        rows[r].from = sink * (static_cast<float>(kLog2E) / args.unit);
        rows[r].sum = threadIdx.x % 4 != 0 ? 0 : isfinite(sink) ? 1 : exp2_approximately(sink);
        // This makes the result NaN. A test of the sum where the row ends made the kernel 1 to 4 % slower (H200).
        if (sink == infinity<float>()) rows[r].largest = sink;
      }
      if constexpr (kind == ForwardKind::general) {
        if (call.query_segments && query + 8 * r < call.queries)
          query_segments[r] = call.query_segments[item.batch * call.segment_steps[0] + query + 8 * r];
      }
    }
    if (kind == ForwardKind::general && call.key_segments)
      key_segments = call.key_segments + item.batch * call.segment_steps[1];
  }

  // The row of number i of a tile, and its column relative to the thread's first one.
  __device__ static constexpr int row(int i) { return i / 2 % 2; }
  __device__ static constexpr int column(int i) { return i / 4 * 8 + i % 2; }

  // Puts limits on the scores, which become -inf where they are masked.
  __device__ void mask(Tile& scores, int first_key) const {
    const int own = first_key + column_of_thread();
#pragma unroll
    for (int i = 0; i < count; i++)
      if (column(i) >= keys[row(i)].end - own) scores[i] = -infinity<float>();
    if constexpr (kind != ForwardKind::plain) {
      if (!args.call.limits.of_first_keys()) return;
#pragma unroll
      for (int i = 0; i < count; i++)
        if (column(i) < keys[row(i)].begin - own) scores[i] = -infinity<float>();
    }
  }

  // What calls of any kind may have.
  __device__ void cap_and_segments(Tile& scores, int first_key) const {
    const AttentionCall& call = args.call;
    if (call.cap > 0) {
      // cap tanh(x), where (1 - tanh(x)) / 2 = 1 / (1 + exp(2 x)). The hardware's tanh errs by 5e-4 of the cap.
      const float twice = static_cast<float>(2 * kLog2E) * call.scale / call.cap;
#pragma unroll
      for (int i = 0; i < count; i++)
        scores[i] = fmaf(-2 * call.cap, reciprocal(1 + exp2_approximately(scores[i] * twice)), call.cap);
    }
    if (key_segments) {
      const int own = first_key + column_of_thread();
#pragma unroll
      for (int i = 0; i < count; i++) {
        const int key = own + column(i);
        if (key >= call.keys || key_segments[key] != query_segments[row(i)]) scores[i] = -infinity<float>();
      }
    }
  }

  // Takes in a tile of scores, which become weights. Returns by how much to multiply what was added up before.
  __device__ void take(Tile& scores, float (&factors)[2]) {
    float tops[2] = {-infinity<float>(), -infinity<float>()};
#pragma unroll
    for (int i = 0; i < count; i++) tops[row(i)] = fmaxf(tops[row(i)], scores[i]);
    float references[2], sums[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      RowState& state = rows[r];
      state.largest = fmaxf(state.largest, reduce_maximum(tops[r], 4));
      factors[r] = 1;
      if (state.largest > state.from + args.slack && state.largest < infinity<float>()) {
        factors[r] = exp2_approximately((state.from - state.largest) * args.unit);
        state.from = state.largest;
      }
      references[r] = reference_of(state) * args.unit;
    }
    if (__any_sync(0xffffffffu, fmaxf(fabsf(references[0]), fabsf(references[1])) >= kLargeReference))
      subtract_references(scores, references);
#pragma unroll
    for (int i = 0; i < count; i++) {
      scores[i] = exp2_approximately(fmaf(scores[i], args.unit, -references[row(i)]));
      sums[row(i)] += scores[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) rows[r].sum = fmaf(rows[r].sum, factors[r], sums[r]);
  }

  // The weights as the left operand of the product with values.
  __device__ static void round(const Tile& weights, Weights& rounded) {
#pragma unroll
    for (int i = 0; i < count; i += 2)
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
    if (sum == 0) return {0, -infinity<float>()};
    // What the largest weight has lost by rounding is in the sum, but not in the output. It matters where that weight
    // is nearly all there is.
    const float weight = weight_of(state, state.largest), lost = weight - widen(narrow<T>(weight));
    constexpr auto ln2 = static_cast<float>(1 / kLog2E);
    return {1 / (sum - lost), (reference_of(state) * args.unit + __log2f(sum)) * ln2};
  }

 private:
  __device__ static float reference_of(const RowState& state) { return reference(state.from); }
  __device__ float weight_of(const RowState& state, float score) const {
    const float subtracted = reference_of(state), reference = subtracted * args.unit;
    if (fabsf(reference) >= kLargeReference) return exp2_approximately((score - subtracted) * args.unit);
    return exp2_approximately(fmaf(score, args.unit, -reference));
  }
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
