// From the states of chunks to results: a kernel of its own merges the states of an item's chunks.
//
// All multiprocessors take part in it, where a block that finished an item's last chunk would have to read all of its
// states by itself. It is launched beside the kernel that computes the states, and so waits on free multiprocessors.
#pragma once

#include "../../hopper.cuh"
#include "../../warp_groups.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda::decode {

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

// Adds other states to one: the sums of a row, and four elements of its output.
template <int count>
__device__ void append(float2& sums, float4& output, const float2 (&others)[count], const float4 (&of_others)[count]) {
  float m = sums.x;
#pragma unroll
  for (int i = 0; i < count; i++) m = fmaxf(m, others[i].x);
  const float own = weight_of(sums.x, m);
  sums = {m, sums.y * own};
  output = scaled(output, own);
#pragma unroll
  for (int i = 0; i < count; i++) {
    const float factor = weight_of(others[i].x, m);
    sums.y = fmaf(others[i].y, factor, sums.y);
    output = added(output, of_others[i], factor);
  }
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
  if (results.output_residual) {
    float residual[4];
#pragma unroll
    for (int i = 0; i < 4; i++) residual[i] = reference(values[i] - widen(narrow<T>(values[i])));
    store_four<T>(results.output_residual, index, residual);
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
    // A score or a sink of +inf makes the sum infinite, and the output NaN.
    factor_ = sums_.y == 0 ? 0.f : sums_.y == INFINITY ? NAN : factor_ / sums_.y;
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
    if (args.results.lse_residual)
      args.results.lse_residual[index] = reference(log_of_sum - (reference(lse) - reference(sums_.x)));
  }
};

// Stores four elements of a row, from `element` on: of the results if the unit's item has no other chunk, else of the
// state of the chunk.
template <int size>
__device__ void store_row(const Arguments& args, const Unit& unit, int row, int element, float2 sums, float4 output) {
  if (unit.chunks == 1) {
    const RowResults results(args, unit, row, sums);
    results.store(args, unit, element, output);
    if (element == 0) results.store_sums(args, unit);
  } else {
    const int64_t index = unit.state(args, unit.chunk) * args.item_rows + row;
    if (element == 0) __stcg(args.sums + index, sums);
    __stcg(reinterpret_cast<float4*>(args.outputs + index * size + element), output);
  }
}

constexpr int kMergeThreads = 512;  // of a block, at most
constexpr int kMergeBlocks = 4096;  // at most, where there are fewer items: they take several rows each, then

// How a block merges: its threads are teams, each of as many as a row has runs of four elements. The teams that share a
// row take its chunks in turn.
struct MergeShape {
  int teams_of_row, threads;
  int rows(int size) const { return threads / (size / 4 * teams_of_row); }  // of a block, at a time
  MergeShape(const Plan& plan, int size) {
    const int chunks = plan.most_chunks, most = kMergeThreads / (size / 4);
    teams_of_row = std::min(most, chunks > 64 ? 16 : chunks > 4 ? 8 : chunks > 2 ? 4 : 2);
    threads = std::max(256, teams_of_row * size / 4);
  }
};

// Merges the states of an item, blockIdx.x, for its rows in turn, and writes the results. What is of one chunk only has
// its results already.
template <int size>
__global__ void __launch_bounds__(kMergeThreads, 2)
    merge(const __grid_constant__ Arguments args, const int teams) {
  constexpr int each = size / 4, most_teams = kMergeThreads / each;
  constexpr int batch = 4;  // states that a thread asks for before it uses the first
  __shared__ float4 outputs[most_teams][each];
  __shared__ float2 all_sums[most_teams];
  const int own = threadIdx.x / each, team = own % teams, element = threadIdx.x % each * 4;
  const int rows_at_once = blockDim.x / (each * teams);
  Unit unit{};
  const int head = blockIdx.x / args.plan.row_groups;
  unit.group = blockIdx.x - head * args.plan.row_groups;
  unit.batch = head / args.call.key_heads, unit.head = head - unit.batch * args.call.key_heads;
  unit.limits = AttentionLimits(args.call, unit.batch);
  unit.chunks = 1;  // as they are one then
  const Cut cut = cut_of(args, unit.limits);
  const int rows = rows_of(args, unit), live = live_rows(args, unit);
  wait_for_last_kernel();
  if (unit.group >= cut.groups || cut.chunks == 1) return;
  for (int begin = blockIdx.y * rows_at_once; begin < rows; begin += gridDim.y * rows_at_once) {
    const int row = begin + own / teams, end = row < live ? cut.chunks : 0;
    const int64_t first = unit.state(args, 0) * args.item_rows + row;
    float2 sum{-INFINITY, 0};
    float4 output{};
    for (int chunk = team; chunk < end; chunk += batch * teams) {
      float2 sums[batch];
      float4 of_chunk[batch];
#pragma unroll
      for (int k = 0; k < batch; k++) {
        sums[k] = {-INFINITY, 0}, of_chunk[k] = {};
        if (chunk + k * teams >= end) continue;
        const int64_t place = first + int64_t(chunk + k * teams) * args.item_rows;
        sums[k] = __ldcg(args.sums + place);
        of_chunk[k] = __ldcg(reinterpret_cast<const float4*>(args.outputs + place * size + element));
      }
      append(sum, output, sums, of_chunk);
    }
    __syncthreads();  // the rows before are done
    outputs[own][element / 4] = output;
    if (element == 0) all_sums[own] = sum;
    __syncthreads();
    if (team > 0 || row >= rows) continue;
    for (int first_other = 1; first_other < teams; first_other += batch) {
      float2 sums[batch];
      float4 of_team[batch];
#pragma unroll
      for (int k = 0; k < batch; k++) {
        sums[k] = {-INFINITY, 0}, of_team[k] = {};
        if (first_other + k >= teams) continue;
        sums[k] = all_sums[own + first_other + k];
        of_team[k] = outputs[own + first_other + k][element / 4];
      }
      append(sum, output, sums, of_team);
    }
    store_row<size>(args, unit, row, element, sum, output);
  }
}

}  // namespace jaxsoft::cuda::decode
