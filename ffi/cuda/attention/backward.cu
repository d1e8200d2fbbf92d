// The gradients of attention by query, key and value, in one kernel on Hopper.
//
// TODO
#include "attention.cuh"

#include <algorithm>

#include "../devices.cuh"
#include "backward/around.cuh"
#include "backward/copy.cuh"
#include "backward/multiply.cuh"
#include "backward/multiply_in_pairs.cuh"

namespace jaxsoft::cuda {
namespace {

template <class T, int size, BackwardKind kind>
__global__ void __launch_bounds__(BackwardCode::threads, 1)
    attention_backward(const __grid_constant__ BackwardCall call) {
  if constexpr (kWarpGroupCode) {
    using Plan = BackwardPlan<size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<BackwardShared<T, size>*>(bytes);
    const int group = warp_group();
    if (threadIdx.x == 0) {
      constexpr int warps = 4 * Barrier::warp_arrivals, all = warps * BackwardCode::groups;
      for (int i = 0; i < BackwardCode::mails; i++)
        shared.ticket_full[i].init(1), shared.ticket_empty[i].init(all + 2 * BackwardCode::groups);
      shared.key_full.init(1), shared.key_empty.init(all);
      shared.value_full.init(1), shared.value_empty.init(all);
      for (int i = 0; i < Plan::query_slots; i++) shared.query_full[i].init(1), shared.query_empty[i].init(all);
      for (int i = 0; i < Plan::cotangent_slots; i++)
        shared.cotangent_full[i].init(1), shared.cotangent_empty[i].init(all);
      for (int i = 0; i < BackwardCode::groups; i++) shared.sum_full[i].init(warps), shared.sum_empty[i].init(1);
      for (unsigned& reached : shared.reached) reached = 0;
      show_barriers();
    }
    __syncthreads();
    if (group == BackwardCode::groups) {
      give_registers<BackwardCode::copy_registers>();
      const int warp = threadIdx.x % kWarpGroup / 32;
      const int lane = threadIdx.x % 32;
      if (warp == 0 && lane == 0) bring_tiles<T, size>(call, shared);
      if (warp > 0 && warp <= BackwardCode::groups && lane == 0) add_sums<T, size>(call, shared, warp - 1);
      if (warp > BackwardCode::groups && lane < BackwardCode::groups) wait_for_turns<T, size>(call, shared, lane);
    } else {
      take_registers<BackwardCode::registers>();
      if constexpr (BackwardShared<T, size>::paired) multiply_in_pairs<T, size, kind>(call, shared, group);
      else multiply_tiles<T, size, kind>(call, shared, group);
    }
  }
}

template <class T, int size, BackwardKind kind>
cudaError_t launch(const BackwardCall& call, const AttentionGradients& gradients, cudaStream_t stream) {
  auto kernel = attention_backward<T, size, kind>;
  constexpr int bytes = sizeof(BackwardShared<T, size>);
  static_assert(bytes <= 227 * 1024);
  static Devices<> prepared;
  if (auto e = prepared.once([&] {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      }))
    return e;
  Device device;
  if (auto e = device.read()) return e;
  const unsigned pieces = call.batch * call.key_heads * call.key_blocks;
  const unsigned rows = static_cast<unsigned>(std::min(call.batch * call.heads, 65535));
  prepare_numbers<size><<<dim3((call.query_tiles * BackwardPlan<size>::queries + 127) / 128, rows), 128, 0, stream>>>(
      call, gradients.lse, gradients.delta);
  kernel<<<std::min<unsigned>(pieces, device.processors), BackwardCode::threads, bytes, stream>>>(call);
  round_sums<T, size><<<call.batch * call.heads * call.query_tiles, 256, 0, stream>>>(call);
  return cudaGetLastError();
}

template <int size>
cudaError_t prepare(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients, cudaStream_t stream) {
  using Plan = BackwardPlan<size>;
  const auto type = given.type == AttentionType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (auto e = describe(&call.query, {given.query, type, given.batch, given.queries, given.heads, given.size}, Plan::queries)) return e;
  if (auto e = describe(&call.cotangent, {gradients.cotangent, type, given.batch, given.queries, given.heads, given.size}, Plan::queries)) return e;
  if (auto e = describe(&call.key, {given.key, type, given.batch, given.keys, given.key_heads, given.size}, Plan::keys)) return e;
  if (auto e = describe(&call.value, {given.value, type, given.batch, given.keys, given.key_heads, given.size}, Plan::keys)) return e;
  call.query_tiles = (given.queries + Plan::queries - 1) / Plan::queries;
  call.key_blocks = (given.keys + Plan::keys - 1) / Plan::keys;
  const int64_t tiles = int64_t(given.batch) * given.heads * call.query_tiles;
  auto* place = static_cast<unsigned char*>(given.workspace);
  const int64_t sums = tiles * Plan::queries * size * 4, turns = tiles * BackwardCode::groups * 4;
  const int64_t turns_and_counter = (turns + 16 + 15) / 16 * 16;
  call.sums = reinterpret_cast<float*>(place);
  call.counter = reinterpret_cast<unsigned long long*>(place + sums);
  call.turns = reinterpret_cast<unsigned*>(place + sums + 16);
  call.numbers = reinterpret_cast<float*>(place + sums + turns_and_counter);
  if (sums + turns_and_counter + tiles * Plan::queries * 8 > given.workspace_bytes) return cudaErrorInvalidValue;
  return cudaMemsetAsync(place, 0, sums + turns_and_counter, stream);
}

template <class T, int size>
cudaError_t run(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients, cudaStream_t stream) {
  if (auto e = prepare<size>(call, given, gradients, stream)) return e;
  const bool limited = given.left != kNoLimit || given.right != kNoLimit || given.key_lengths.data ||
                       given.keys % BackwardPlan<size>::keys;
#ifndef BWD_FEW
  if (given.cap > 0) return launch<T, size, BackwardKind::capped>(call, gradients, stream);
#endif
  if (limited) return launch<T, size, BackwardKind::limited>(call, gradients, stream);
  return launch<T, size, BackwardKind::plain>(call, gradients, stream);
}

template <class T>
cudaError_t run_typed(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients, cudaStream_t stream) {
  if (given.size <= 64) return run<T, 64>(call, given, gradients, stream);
  if (given.size <= 128) return run<T, 128>(call, given, gradients, stream);
  if (given.size <= 256) return run<T, 256>(call, given, gradients, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t run_attention_backward(const AttentionCall& given, const AttentionGradients& gradients,
                                   cudaStream_t stream) {
  bool fits = false;
  if (auto e = has_warp_groups(&fits)) return e;
  if (!fits) return cudaErrorNotSupported;
  BackwardCall call{};
  call.batch = given.batch, call.queries = given.queries, call.keys = given.keys;
  call.heads = given.heads, call.key_heads = given.key_heads, call.group = given.heads / given.key_heads;
  call.size = given.size;
  call.deterministic = gradients.deterministic;
  call.descending = gradients.deterministic;
  call.scale = given.scale, call.scale2 = given.scale * float(kLog2E), call.cap = given.cap;
  call.left = given.left == kNoLimit ? 1 << 30 : given.left;
  call.right = given.right == kNoLimit ? 1 << 30 : given.right;
  call.query_lengths = given.query_lengths, call.key_lengths = given.key_lengths, call.offset = given.offset;
  call.query_gradient = gradients.query, call.key_gradient = gradients.key, call.value_gradient = gradients.value;
#ifndef BWD_FEW
  if (given.type == AttentionType::f16) return run_typed<__half>(call, given, gradients, stream);
#endif
  return run_typed<__nv_bfloat16>(call, given, gradients, stream);
}

}  // namespace jaxsoft::cuda
