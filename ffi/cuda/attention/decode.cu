// Attention of few queries of each sequence over many keys: the launch of its kernel.
#include "decode/few_rows.cuh"
#include "decode/many_rows.cuh"

#include <algorithm>

#include "../attributes.cuh"
#include "../devices.cuh"

namespace jaxsoft::cuda {
namespace decode {

// Clears the counter. The kernel that follows runs at the same time, and waits for this before it uses it: so it starts
// earlier than after a memset.
template <int = 0>
__global__ void clear(unsigned* counter) {
  let_next_kernel_start();
  *counter = 0;
}

using Kernel = void(Arguments, CUtensorMap, CUtensorMap);
using MergeKernel = void(Arguments, int);

struct Launch {
  Arguments args;
  cudaStream_t stream;
  int padded;
  Device device;

  template <class T, PageType type>
  cudaError_t run_few() {
    return with_padded_size(padded, [&](auto size) {
      return start<FewRows<type, size>, decode_few_rows<T, type, size>, merge<size>>();
    });
  }
  template <class T>
  cudaError_t run_many() {
    return with_padded_size(padded, [&](auto size) {
      const bool shared = args.plan.row_tile == kPartRows;
      if (shared) return start<ManyRows<size>, decode_many_rows<T, size, true>, merge<size>>();
      return start<ManyRows<size>, decode_many_rows<T, size, false>, merge<size>>();
    });
  }

  template <class Shape, Kernel* kernel, MergeKernel* merge_kernel>
  cudaError_t start() {
    constexpr size_t bytes = sizeof(typename Shape::Memory);
    if (auto e = allow_shared_memory<kernel, bytes>()) return e;
    const int box_rows = args.paged ? std::min(Shape::keys, args.pages.page_size) : Shape::keys;
    CUtensorMap keys, values;
    if (auto e = describe_cache(&keys, args.call.key, box_rows, Shape::Values::swizzle)) return e;
    if (auto e = describe_cache(&values, args.call.value, box_rows, Shape::Values::swizzle)) return e;
    if (auto e = place_workspace()) return e;
    const int64_t units = int64_t(args.plan.items) * args.plan.most_chunks;
    const int blocks = static_cast<int>(std::min<int64_t>(units, device.processors));
    // Short units of one length are assigned in advance: a counter would have to be cleared first.
    args.dynamic = units > blocks && !(args.uniform && units * args.cut.chunk <= int64_t(blocks) * kShortKeys);
    if (args.dynamic) {
      if (auto e = launch(clear<>, dim3(1), 1, 0, false, args.counter)) return e;
    }
    if (auto e = launch(kernel, dim3(blocks), Shape::threads, bytes, args.dynamic, args, keys, values)) return e;
    if (args.plan.most_chunks == 1) return cudaSuccess;
    const MergeShape shape(args.plan, padded);
    const int64_t rounds = divide_up(args.item_rows, shape.rows(padded));
    const int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(rounds, kMergeBlocks / args.plan.items));
    const dim3 merge_blocks(args.plan.items, static_cast<unsigned>(at_once));
    return launch(merge_kernel, merge_blocks, shape.threads, 0, true, args, shape.teams_of_row);
  }

  cudaError_t describe_cache(CUtensorMap* map, const void* data, int box_rows, Swizzle swizzle) const {
    const AttentionCall& call = args.call;
    const auto type = args.paged && args.pages.type != PageType::as_query ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                      : call.type == AttentionType::bf16                  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const int batch = args.paged ? args.pages.pages : call.batch, rows = args.paged ? args.pages.page_size : call.keys;
    return describe(map, {data, type, batch, rows, call.key_heads, call.size}, box_rows, swizzle);
  }

  cudaError_t place_workspace() {
    const AttentionCall& call = args.call;
    const Workspace workspace(args.plan, args.item_rows, padded);
    if (call.workspace_bytes < workspace.bytes) return cudaErrorInvalidValue;
    auto* at = static_cast<char*>(call.workspace);
    args.counter = reinterpret_cast<unsigned*>(at);
    args.sums = reinterpret_cast<float2*>(at + workspace.sums);
    args.outputs = reinterpret_cast<float*>(at + workspace.outputs);
    return cudaSuccess;
  }

  // Launches a kernel, that may overlap the one before.
  template <class... Given>
  cudaError_t launch(void (*kernel)(Given...), dim3 blocks, int threads, size_t bytes, bool overlaps,
                     const Given&... given) {
    cudaLaunchAttribute attribute = overlapping();
    cudaLaunchConfig_t config{blocks, dim3(threads), bytes, stream, &attribute, overlaps};
    return cudaLaunchKernelEx(&config, kernel, given...);
  }

  cudaError_t run() {
    const AttentionCall& call = args.call;
    const LimitOperands& limits = call.limits;
    Problem problem{call.batch, call.queries, call.keys, call.heads, call.key_heads, limits.left, limits.right};
    problem.ragged = limits.key_lengths.data, problem.narrow = args.pages.type != PageType::as_query;
    if (auto e = device.read()) return e;
    args.plan = plan_within(call.workspace_bytes, problem, padded, device.processors);
    args.uniform = !limits.any();
    if (args.uniform) {
      args.cut = Cut(args.plan, call.queries, {0, call.keys});
      args.plan.most_chunks = args.cut.chunks;
    }
    args.item_rows = problem.item_rows();
    const bool bf16 = call.type == AttentionType::bf16;
    if (problem.many()) return bf16 ? run_many<__nv_bfloat16>() : run_many<__half>();
    switch (args.pages.type) {
      case PageType::e4m3: return run_few<__half, PageType::e4m3>();
      case PageType::e5m2: return run_few<__half, PageType::e5m2>();
      default: return bf16 ? run_few<__nv_bfloat16, PageType::as_query>() : run_few<__half, PageType::as_query>();
    }
  }
};

}  // namespace decode

cudaError_t run_attention_decode(const AttentionCall& call, const Pages* pages, const AttentionResults& results,
                                 cudaStream_t stream) {
  if (auto e = need_warp_groups()) return e;
  decode::Launch launch{};
  launch.stream = stream;
  launch.padded = decode::padded_size(call.size);
  decode::Arguments& args = launch.args;
  args.call = call, args.results = results;
  args.paged = pages != nullptr;
  if (pages) {
    args.pages = *pages;
    while (1 << args.page_shift < pages->page_size) args.page_shift++;
  }
  args.rows = call.queries * (call.heads / call.key_heads);
  args.adjusted = call.cap > 0 || call.bias.data || call.mask.data || call.query_segments;
  return launch.run();
}

}  // namespace jaxsoft::cuda
