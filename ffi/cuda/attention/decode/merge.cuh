// From the states of chunks to results: the last block to finish a chunk of an item merges the states of all.
//
// That is done in two steps where an item has many chunks: kGroup neighbouring chunks first, and then these groups, so
// that no block has much to do in the end. States are merged in the order of their keys, whoever does it.
#pragma once

#include "../../warp_groups.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda::decode {

// The warps of a block that store states and merge them, from `first_warp` on. They have a barrier of their own.
template <int first_warp, int warps>
struct Mergers {
  static constexpr int threads = warps * 32;
  __device__ static int thread() { return static_cast<int>(threadIdx.x) - first_warp * 32; }
  __device__ static void synchronize() { NamedBarrier{1, threads}.wait(); }
};

// Where an element of a row of an output in shared memory is, so that stores of fragments meet no bank twice.
__device__ inline int place_in_row(int row, int element) { return element ^ row % 4 * 8; }

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

// Writes four elements of a row's results, from `element` on, given the state of all its keys.
__device__ inline void finish(const Arguments& args, const Unit& unit, int row, int element, float2 sums, float4 output) {
  const AttentionCall& call = args.call;
  const AttentionResults& results = args.results;
  const RowPlace place(args, unit, row);
  // Rows without keys have shared the products of others.
  if (unit.limits.of(call, place.query, place.query).empty()) sums = {-INFINITY, 0}, output = {};
  if (call.sinks) {
    const float sink = call.sinks[unit.batch * call.sink_steps[0] + place.head * call.sink_steps[1]];
    const float m = fmaxf(sums.x, sink), factor = weight_of(sums.x, m);
    sums = combine(sums, {sink, sink == -INFINITY ? 0.f : 1.f});
    output = {output.x * factor, output.y * factor, output.z * factor, output.w * factor};
  }
  if (element < call.size) {
    float scale = sums.y == 0 ? 0.f : 1 / sums.y;
    if (args.pages.value_scale) scale *= args.pages.value_scale[unit.head];
    const float values[4] = {output.x * scale, output.y * scale, output.z * scale, output.w * scale};
    const int64_t index = place.begin(args, unit) + element;
    if (call.type == AttentionType::bf16) store_results<__nv_bfloat16>(results, index, values);
    else store_results<__half>(results, index, values);
  }
  if (element > 0 || !results.lse) return;
  const int64_t index = (int64_t(unit.batch) * call.heads + place.head) * call.queries + place.query;
  const float log_of_sum = sums.y == 0 ? 0.f : logf(sums.y);
  const float lse = sums.y == 0 ? -INFINITY : sums.x + log_of_sum;
  results.lse[index] = lse;
  if (results.rest) results.rest[index] = reference(log_of_sum - (reference(lse) - reference(sums.x)));
}

// Stores four elements of a row of a chunk's state.
template <int size>
__device__ void store_state(const Arguments& args, const Unit& unit, int chunk, int row, int element, float2 sums,
                            float4 output) {
  const int64_t index = unit.state(args, chunk) * args.item_rows + row;
  if (element == 0) __stcg(args.sums + index, sums);
  __stcg(reinterpret_cast<float4*>(args.outputs + index * size + element), output);
}

// Merges states of the unit's item, `count` of them, of which each is `step` further than the last, and writes the
// results if these were all, or else the state in the place of the first. `batch` states are
// asked for at once.
template <int size, class Team, int batch>
__device__ void merge_states(const Arguments& args, const Unit& unit, int first, int count, int step, bool all) {
  constexpr int each = size / 4;
  const int rows = all ? rows_of(args, unit) : live_rows(args, unit), live = live_rows(args, unit);
  for (int i = Team::thread(); i < rows * each; i += Team::threads) {
    const int row = i / each, element = i % each * 4;
    const int64_t from = unit.state(args, first) * args.item_rows + row, further = int64_t(step) * args.item_rows;
    const int end = row < live ? count : 0;
    float2 sum{-INFINITY, 0};
    float4 output{};
    for (int begin = 0; begin < end; begin += batch) {
      float2 sums[batch];
      float4 outputs[batch];
#pragma unroll
      for (int k = 0; k < batch; k++) {
        sums[k] = {-INFINITY, 0}, outputs[k] = {};
        if (begin + k >= end && batch == kGroup) break;
        if (begin + k >= end) continue;  // fewer branches, and so fewer registers
        const int64_t place = from + (begin + k) * further;
        sums[k] = __ldcg(args.sums + place);
        outputs[k] = __ldcg(reinterpret_cast<const float4*>(args.outputs + place * size + element));
      }
      float m = sum.x;
#pragma unroll
      for (int k = 0; k < batch; k++) {
        if (begin + k >= end && batch == kGroup) break;
        m = fmaxf(m, sums[k].x);
      }
      if (begin > 0) {
        const float own = weight_of(sum.x, m);
        sum.y *= own;
        output = {output.x * own, output.y * own, output.z * own, output.w * own};
      }
      sum.x = m;
#pragma unroll
      for (int k = 0; k < batch; k++) {
        if (begin + k >= end && batch == kGroup) break;
        const float factor = weight_of(sums[k].x, m);
        sum.y = fmaf(sums[k].y, factor, sum.y);
        output.x = fmaf(outputs[k].x, factor, output.x), output.y = fmaf(outputs[k].y, factor, output.y);
        output.z = fmaf(outputs[k].z, factor, output.z), output.w = fmaf(outputs[k].w, factor, output.w);
      }
    }
    if (all) finish(args, unit, row, element, sum, output);
    else store_state<size>(args, unit, first, row, element, sum, output);
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
template <int size, class Team, int batch>
__device__ void merge_if_last(const Arguments& args, const Unit& unit, int* shared) {
  const int groups = (unit.chunks + kGroup - 1) / kGroup, group = unit.chunk / kGroup, first = group * kGroup;
  const int most_groups = (args.plan.most_chunks + kGroup - 1) / kGroup;
  unsigned* counters = args.counters + 4 + int64_t(unit.item(args)) * (most_groups + 1);
  const int count = min(kGroup, unit.chunks - first);
  if (!arrive_last<Team>(counters + 1 + group, count, shared)) return;
  merge_states<size, Team, batch>(args, unit, first, count, 1, groups == 1);
  if (groups == 1 || !arrive_last<Team>(counters, groups, shared)) return;
  merge_states<size, Team, batch>(args, unit, 0, groups, kGroup, true);
}

}  // namespace jaxsoft::cuda::decode
