// From the states of chunks to results: the last block to finish a chunk of an item merges the states of all.
//
// That is done in two steps where an item has many chunks: kGroup neighbouring chunks first, and then these groups, so
// that no block has much to do in the end. States are merged in the order of their keys, whoever does it.
#pragma once

#include "../../warp_groups.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda::decode {

// The warps of a block that store states and merge them, from `first_warp` on. They have a barrier of their own. A
// thread merges so many runs of four elements, of so many states at once. If it `stops_early`, it does nothing for
// states that are not there, which takes less time and more registers.
template <int first_warp, int warps, int runs_of_thread, int states_at_once, bool stops_early>
struct Mergers {
  static constexpr int threads = warps * 32, runs = runs_of_thread, batch = states_at_once;
  static constexpr bool stops = stops_early;
  __device__ static int thread() { return static_cast<int>(threadIdx.x) - first_warp * 32; }
  __device__ static void synchronize() { NamedBarrier{1, threads}.wait(); }
};

// Where an element of a row of an output in shared memory is, so that stores of fragments meet no bank twice.
__device__ inline int place_in_row(int row, int element) { return element ^ row % 4 * 8; }

__device__ inline float4 scaled(float4 x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
// x + y * factor
__device__ inline float4 added(float4 x, float4 y, float factor) {
  return {fmaf(y.x, factor, x.x), fmaf(y.y, factor, x.y), fmaf(y.z, factor, x.z), fmaf(y.w, factor, x.w)};
}

// A maximum and a sum of exponentials relative to it.
__device__ inline float2 combine(float2 a, float2 b) {
  const float m = fmaxf(a.x, b.x);
  return {m, fmaf(a.y, weight_of(a.x, m), b.y * weight_of(b.x, m))};
}

template <class T>
__device__ void store_four(void* to, int64_t index, const float (&values)[4]) {
  const Pair<T> pairs[2] = {narrow_pair(values[0], values[1], T()), narrow_pair(values[2], values[3], T())};
  *reinterpret_cast<uint2*>(static_cast<T*>(to) + index) = {bits<uint32_t>(pairs[0]), bits<uint32_t>(pairs[1])};
}
template <class T>
__device__ void store_results(const AttentionResults& results, int64_t index, const float (&values)[4]) {
  if (results.wide)
    *reinterpret_cast<float4*>(static_cast<float*>(results.output) + index) = {values[0], values[1], values[2],
                                                                             values[3]};
  else
    store_four<T>(results.output, index, values);
  if (results.output_rest) {
    float rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) rest[i] = reference(values[i] - widen(narrow<T>(values[i])));
    store_four<T>(results.output_rest, index, rest);
  }
}

// The results of a row, given the maximum and the sum of all its keys.
class RowResults {
  RowPlace place_;
  float2 sums_;
  float factor_;  // by which the output is multiplied
  bool empty_;

 public:
  __device__ RowResults(const Arguments& args, const Unit& unit, int row, float2 sums)
      : place_(args, unit, row), sums_(sums), factor_(1) {
    const AttentionCall& call = args.call;
    // Rows without keys have shared the products of others.
    empty_ = unit.limits.of_query(place_.query).empty();
    if (empty_) sums_ = {-INFINITY, 0};
    if (call.sinks) {
      const float sink = call.sinks[unit.batch * call.sink_steps[0] + place_.head * call.sink_steps[1]];
      factor_ = weight_of(sums_.x, fmaxf(sums_.x, sink));
      sums_ = combine(sums_, {sink, sink == -INFINITY ? 0.f : 1.f});
    }
    factor_ = sums_.y == 0 ? 0.f : factor_ / sums_.y;
    if (args.pages.value_scale) factor_ *= args.pages.value_scale[unit.head];
  }
  // Writes four elements, from `element` on.
  __device__ void store(const Arguments& args, const Unit& unit, int element, float4 output) const {
    if (element >= args.call.size) return;
    output = empty_ ? float4{} : scaled(output, factor_);
    const float values[4] = {output.x, output.y, output.z, output.w};
    const int64_t index = place_.begin(args, unit) + element;
    if (args.call.type == AttentionType::bf16) store_results<__nv_bfloat16>(args.results, index, values);
    else store_results<__half>(args.results, index, values);
  }
  __device__ void store_sums(const Arguments& args, const Unit& unit) const {
    if (!args.results.lse) return;
    const int64_t index = (int64_t(unit.batch) * args.call.heads + place_.head) * args.call.queries + place_.query;
    const float log_of_sum = sums_.y == 0 ? 0.f : logf(sums_.y);
    const float lse = sums_.y == 0 ? -INFINITY : sums_.x + log_of_sum;
    args.results.lse[index] = lse;
    if (args.results.rest)
      args.results.rest[index] = reference(log_of_sum - (reference(lse) - reference(sums_.x)));
  }
};

// Stores runs of four elements of a row, from `element` on: of the results if `all` keys are in them, else of the state
// of a chunk.
template <int size, int runs>
__device__ void store_row(const Arguments& args, const Unit& unit, bool all, int chunk, int row, int element,
                          float2 sums, const float4 (&output)[runs]) {
  if (all) {
    const RowResults results(args, unit, row, sums);
#pragma unroll
    for (int run = 0; run < runs; run++) results.store(args, unit, element + 4 * run, output[run]);
    if (element == 0) results.store_sums(args, unit);
  } else {
    const int64_t index = unit.state(args, chunk) * args.item_rows + row;
    if (element == 0) __stcg(args.sums + index, sums);
#pragma unroll
    for (int run = 0; run < runs; run++)
      __stcg(reinterpret_cast<float4*>(args.outputs + index * size + element + 4 * run), output[run]);
  }
}

// Merges states of the unit's item, `count` of them, of which each is `step` further than the last, and writes the
// results if these were all, or else the state in the place of the first.
template <int size, class Team>
__device__ void merge_states(const Arguments& args, const Unit& unit, int first, int count, int step, bool all) {
  // A thread has so many runs of four elements of a row, and asks for those of `batch` states before it uses the first.
  constexpr int runs = Team::runs, batch = Team::batch, each = size / 4 / runs;
  const int rows = all ? rows_of(args, unit) : live_rows(args, unit), live = live_rows(args, unit);
  for (int i = Team::thread(); i < rows * each; i += Team::threads) {
    const int row = i / each, element = i % each * 4 * runs;
    const int64_t from = unit.state(args, first) * args.item_rows + row, further = int64_t(step) * args.item_rows;
    const int end = row < live ? count : 0;
    float2 sum{-INFINITY, 0};
    float4 output[runs] = {};
    for (int begin = 0; begin < end; begin += batch) {
      float2 sums[batch];
      float4 outputs[batch][runs];
#pragma unroll
      for (int k = 0; k < batch; k++) {
        if (Team::stops && begin + k >= end) break;
        sums[k] = {-INFINITY, 0};
        for (int run = 0; run < runs; run++) outputs[k][run] = {};
        if (begin + k >= end) continue;
        const int64_t place = from + (begin + k) * further;
        sums[k] = __ldcg(args.sums + place);
#pragma unroll
        for (int run = 0; run < runs; run++)
          outputs[k][run] = __ldcg(reinterpret_cast<const float4*>(args.outputs + place * size + element + 4 * run));
      }
      float m = sum.x;
#pragma unroll
      for (int k = 0; k < batch; k++) {
        if (Team::stops && begin + k >= end) break;
        m = fmaxf(m, sums[k].x);
      }
      const float own = weight_of(sum.x, m);
      sum = {m, sum.y * own};
#pragma unroll
      for (int run = 0; run < runs; run++) output[run] = scaled(output[run], own);
#pragma unroll
      for (int k = 0; k < batch; k++) {
        if (Team::stops && begin + k >= end) break;
        const float factor = weight_of(sums[k].x, m);
        sum.y = fmaf(sums[k].y, factor, sum.y);
#pragma unroll
        for (int run = 0; run < runs; run++) output[run] = added(output[run], outputs[k][run], factor);
      }
    }
    store_row<size>(args, unit, all, first, row, element, sum, output);
  }
}

// Counts the block at a counter, when all its threads have stored. Whether it was the last of `count`.
template <class Team>
__device__ bool arrive_last(unsigned* counter, int count, int* shared) {
  Team::synchronize();
  if (Team::thread() == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    *shared = before + 1 == static_cast<unsigned>(count);
  }
  Team::synchronize();
  return *shared;
}

// What follows when the state of a unit's chunk is stored.
template <int size, class Team>
__device__ void merge_if_last(const Arguments& args, const Unit& unit, int* shared) {
  const int groups = (unit.chunks + kGroup - 1) / kGroup, group = unit.chunk / kGroup, first = group * kGroup;
  const int most_groups = (args.plan.most_chunks + kGroup - 1) / kGroup;
  unsigned* counters = args.counters + 4 + int64_t(unit.item(args)) * (most_groups + 1);
  const int count = min(kGroup, unit.chunks - first);
  if (!arrive_last<Team>(counters + 1 + group, count, shared)) return;
  merge_states<size, Team>(args, unit, first, count, 1, groups == 1);
  if (groups == 1 || !arrive_last<Team>(counters, groups, shared)) return;
  merge_states<size, Team>(args, unit, 0, groups, kGroup, true);
}

}  // namespace jaxsoft::cuda::decode
