// The launch of the forward kernel, for one element type and sizes of heads.
#pragma once

#include <algorithm>

#include "../../attributes.cuh"
#include "../../devices.cuh"
#include "kernel.cuh"

namespace jaxsoft::cuda {

// Heads are in sections, whose items are taken together, the longest first (items.cuh). The keys and values of a
// section have no more bytes than this, if it has several key heads, so that the cache keeps them. Those of the last
// one may have twice as many: with few heads, its longest items would start late, and multiprocessors would wait for
// them at the end. (H200, heads of 256, causal, equal sections, and a last one that is longer: 606 and 627 TFLOP/s at
// 2K, 719 and 756 at 8K. A last one with three times as many bytes: 617 and 744.) Where there are segments, what is
// computed at the same time reads a part of the keys, so a section has at least `kPackedHeads` key heads, and the last
// one twice as many, if there are so many. (H200, heads of 128: 4 documents in 32K, causal, sections of 1 and 6 heads,
// 3117 and 2991 us; 8 documents in 8K, of 6 and 24 heads, causal 426 and 440 us, else 702 and 751 us.)
constexpr int64_t kBytesTogether = 24 << 20, kPackedHeads = 6;

template <class T, class Plan, ScoreKind kind>
cudaError_t launch_forward_by_plan(const AttentionCall& call, const AttentionBefore& before,
                                   const AttentionResults& results, const Device& device, cudaStream_t stream) {
  constexpr int bytes = sizeof(ForwardMemory<Plan>);
  const auto type = std::is_same<T, __half>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  ForwardArguments args{};
  args.call = call, args.results = results, args.before = before;
  auto of_queries = [&](CUtensorMap* map, const void* data, int size) {
    return describe(map, {data, type, call.batch, call.queries, call.heads, size}, Plan::group_queries);
  };
  auto of_keys = [&](CUtensorMap* map, const void* data, int size) {
    return describe(map, {data, type, call.batch, call.keys, call.key_heads, size}, Plan::key_tile);
  };
  if (auto e = of_queries(&args.query, call.query, call.size)) return e;
  if (auto e = of_keys(&args.key, call.key, call.size)) return e;
  if (auto e = of_keys(&args.value, call.value, call.value_size)) return e;
  if ((ForwardMemory<Plan>::staged || Plan::over_queries) && !results.wide) {
    if (auto e = of_queries(&args.output, results.output, call.value_size)) return e;
    if (results.output_residual)
      if (auto e = of_queries(&args.output_residual, results.output_residual, call.value_size)) return e;
  }
  const int64_t heads = int64_t(call.batch) * call.heads;
  const ForwardSpace space(call.batch, call.queries, call.keys, Plan::queries, call.query_segments);
  const int64_t items = heads * space.blocks;
  // Sums of these and of tiles are 32 bits wide, and the places of rows.
  const int64_t rows = heads * call.queries;
  if (std::max<int64_t>({items, rows, call.queries, call.keys}) >= 1 << 30) return cudaErrorInvalidValue;
  args.blocks_of_head = static_cast<int>(space.blocks), args.items = static_cast<int>(items);
  args.together = 1, args.sections = static_cast<int>(heads);
  if (kind != ScoreKind::plain) {
    const int64_t of_head = std::max<int64_t>(int64_t(call.keys) * (call.size + call.value_size) * sizeof(T), 1);
    const int64_t some = call.query_segments ? kPackedHeads : 0;
    auto heads_of = [&](int sections) {
      const int64_t key_heads = std::max<int64_t>({sections * kBytesTogether / of_head, sections * some, 1});
      return std::min(key_heads * (call.heads / call.key_heads), heads);
    };
    const int64_t together = heads_of(1), of_last = heads_of(2);
    args.together = static_cast<int>(together);
    args.sections = static_cast<int>(full_blocks(heads - of_last, together) + 1);
  }
  args.unit = static_cast<float>(kLog2E) * (call.cap > 0 ? 1 : call.scale);
  args.inverse_unit = 1 / args.unit;
  if (call.cap > 0) args.soft_cap = SoftCap(call.cap, call.scale, call.cap * kLog2E);
  if (call.query_segments) {
    if (call.workspace_bytes < space.bytes()) return cudaErrorInvalidValue;
    WorkspaceDivision rest(call.workspace);
    args.counter = rest.take<unsigned long long>(space.counter);
    auto* const found = reinterpret_cast<int*>(args.counter + 1);
    auto* const ranges = rest.take<SegmentRange>(space.ranges);
    const BlockBegins of_queries{rest.take<int>(space.begins), Plan::queries, args.blocks_of_head};
    const BlockBegins of_keys{rest.take<int>(space.key_begins), Plan::queries, static_cast<int>(space.key_blocks)};
    const Segments query_segments{call.query_segments, call.segment_steps[0], call.queries};
    const Segments key_segments{call.key_segments, call.segment_steps[1], call.keys};
    args.segments = ranges, args.blocks_found = found;
    if (auto e = launch_find_blocks(call.batch, query_segments, of_queries, key_segments, of_keys, args.counter,
                                    stream))
      return e;
    if (auto e = launch_segment_ranges(call.batch, query_segments, of_queries, key_segments, of_keys, ranges, found,
                                       stream))
      return e;
  }
  // Results in f32 are those of some of the keys: others come from other devices meanwhile, by kernels that need
  // multiprocessors. They get none from blocks that stay until all is done: on an H200 a message waited for the end of
  // the kernel. With the last keys nothing has to arrive any more.
  const int most = results.wide ? args.items : std::min(device.processors, args.items);
  if (!args.segments)
    if (auto e = clear_counter(args.items > most, call.workspace, stream, &args.counter)) return e;
  constexpr auto kernel = attention_forward<T, Plan, kind>;
  if (auto e = allow_shared_memory<kernel, bytes>()) return e;
  return launch_kernel(kernel, most, Plan::threads, bytes, stream, args.segments != nullptr, args);
}

template <class T, class Sizes, ScoreKind kind>
cudaError_t launch_forward(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                           const Device& device, cudaStream_t stream) {
  using Plan = ForwardPlan<Sizes::size, Sizes::value_size, kind>;
  if (before.lse) return launch_forward_by_plan<T, ContinuedPlan<Plan>, kind>(call, before, results, device, stream);
  return launch_forward_by_plan<T, Plan, kind>(call, before, results, device, stream);
}

template <class T, class Sizes>
cudaError_t run_forward(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                        cudaStream_t stream) {
  Device device;
  if (auto e = device.read()) return e;
  if (call.cap > 0) return launch_forward<T, Sizes, ScoreKind::capped>(call, before, results, device, stream);
  if (call.query_segments)
    return launch_forward<T, Sizes, ScoreKind::segmented>(call, before, results, device, stream);
  if (call.limits.any())
    return launch_forward<T, Sizes, ScoreKind::limited>(call, before, results, device, stream);
  using Few = FewKeysPlan<Sizes::size, Sizes::value_size>;
  if constexpr (Few::exists)
    if (Few::serves(call.keys, before.lse))
      return launch_forward_by_plan<T, Few, ScoreKind::plain>(call, before, results, device, stream);
  return launch_forward<T, Sizes, ScoreKind::plain>(call, before, results, device, stream);
}

}  // namespace jaxsoft::cuda
