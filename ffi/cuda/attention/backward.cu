// The gradients of attention by query, key and value, in one kernel on Hopper.
//
// With the weights P = exp(scores - lse), which are computed again, and the slopes of the loss by scores dS = P (dO V^T
// - delta), the gradients are dV = P^T dO, dK = scale dS^T Q and dQ = scale dS K: five products of tiles. A piece of
// work is a block of keys of one key head. It goes over the tiles of queries that attend to them, of all heads of
// queries of the key head, one head after the other. So the gradients by keys and values stay in registers, and the
// groups of heads are summed in a fixed order. The gradient by queries is a sum over blocks of keys, in f32 in the
// workspace, which bulk copies from shared memory add to. A last kernel rounds it.
//
// If the same operands must give the same bits, blocks of keys add to each tile in a fixed order, from the last to the
// first. They take their work from a counter in this order, so a block waits only for work that has been taken before
// it: there is no deadlock, however many blocks run at once. Under a causal rule each block begins with another tile,
// and none waits long. Without limits blocks of a head run one behind the other, so the blocks that begin at the same
// time belong to different heads, as far as the cache allows.
//
// A block has two warp groups that multiply (multiply.cuh, and multiply_in_pairs.cuh for heads of more than 128), and
// one whose threads bring tiles and add sums (copy.cuh).
//
//   backward/plan.cuh    sizes of tiles, and shared memory
//   backward/work.cuh    the call as kernels read it, and pieces of work
//   backward/copy.cuh    the warp group that copies
//   backward/scores.cuh  weights and slopes
//   backward/around.cuh  the kernels before and after
#include "attention.cuh"

#include <algorithm>
#include <cmath>

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
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<BackwardShared<T, size>*>(bytes);
    if (threadIdx.x == 0) shared.init(call.deterministic);
    __syncthreads();
    const int group = warp_group();
    if (group == BackwardCode::groups) {
      give_registers<BackwardCode::copy_registers>();
      const int warp = threadIdx.x % kWarpGroup / 32;
      if (threadIdx.x % 32 == 0) {
        if (warp == 0) bring_tiles<T, size>(call, shared);
        else if (warp <= BackwardCode::groups) add_sums<T, size>(call, shared, warp - 1);
        else if (call.deterministic) wait_for_turns<T, size>(call, shared);
      }
    } else {
      take_registers<BackwardCode::registers>();
      if constexpr (BackwardShared<T, size>::paired) multiply_in_pairs<T, size, kind>(call, shared, group);
      else multiply_tiles<T, size, kind>(call, shared, group);
    }
  }
}

// Of how many key heads pieces of work are taken in turn, where blocks of keys of a head wait for each other. Pieces
// that are taken at the same time then belong to many heads, but not to more than the cache holds. (H100, TFLOP/s:
// heads of 64, 2K, 335 with one head at a time, 430 with 15 in turn. Heads of 256, 8K, 350 with one, 385 with two, 372
// with three.) The bits of the results do not depend on it.
template <int size>
int heads_in_turn(const BackwardCall& call, int processors) {
  using Plan = BackwardPlan<size>;
  const double of_head = 8. * call.queries * call.group * size;  // bytes of queries, cotangents, and sums
  const double by_waits = std::ceil(Plan::apart * processors / (call.query_tiles * call.group));
  const double by_cache = Plan::cache * double(1 << 20) / of_head - double(processors) / call.key_blocks;
  return std::clamp(static_cast<int>(std::min(by_waits, by_cache)), 1, call.batch * call.key_heads);
}

template <class T, int size, BackwardKind kind>
cudaError_t launch(const BackwardCall& call, const AttentionGradients& gradients, cudaStream_t stream) {
  auto kernel = attention_backward<T, size, kind>;
  constexpr int bytes = sizeof(BackwardShared<T, size>);
  static_assert(bytes <= 227 * 1024);
  static Devices<> prepared;
  if (auto e = prepared.once(
          [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); }))
    return e;
  Device device;
  if (auto e = device.read()) return e;
  const unsigned heads = call.batch * call.heads, queries = call.query_tiles * BackwardPlan<size>::queries;
  prepare_numbers<size><<<dim3((queries + 127) / 128, std::min(heads, 65535u)), 128, 0, stream>>>(
      call, gradients.lse, gradients.delta);
  BackwardCall ordered = call;
  ordered.heads_in_turn = call.deterministic ? heads_in_turn<size>(call, device.processors) : 1;
  const auto blocks = std::min<unsigned>(call.pieces, device.processors);
  kernel<<<blocks, BackwardCode::threads, bytes, stream>>>(ordered);
  round_sums<T, size><<<heads * call.query_tiles, 256, 0, stream>>>(call);
  return cudaGetLastError();
}

// Describes the arrays of a call, divides its workspace, and clears what must be 0 in it. The workspace has
//
//   the sums, B * N * tiles of queries * queries of a tile * padded head size of 4 bytes;
//   the counter of pieces of work, 16 bytes;
//   how far blocks of keys are, B * N * blocks of keys of 8 bytes, rounded up to a multiple of 16;
//   lse and delta, B * N * tiles of queries * queries of a tile of 8 bytes.
//
// Tiles have 96, 64 and 64 queries, blocks 128, 128 and 64 keys, and heads are padded to 64, 128 and 256 (plan.cuh).
template <int size>
cudaError_t prepare(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                    cudaStream_t stream) {
  using Plan = BackwardPlan<size>;
  const auto type =
      given.type == AttentionType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto of_queries = [&](CUtensorMap* map, const void* data) {
    return describe(map, {data, type, given.batch, given.queries, given.heads, given.size}, Plan::queries);
  };
  auto of_keys = [&](CUtensorMap* map, const void* data) {
    return describe(map, {data, type, given.batch, given.keys, given.key_heads, given.size}, Plan::keys);
  };
  if (auto e = of_queries(&call.query, given.query)) return e;
  if (auto e = of_queries(&call.cotangent, gradients.cotangent)) return e;
  if (auto e = of_keys(&call.key, given.key)) return e;
  if (auto e = of_keys(&call.value, given.value)) return e;
  call.query_tiles = (given.queries + Plan::queries - 1) / Plan::queries;
  call.key_blocks = (given.keys + Plan::keys - 1) / Plan::keys;
  const int64_t heads = int64_t(given.batch) * given.heads, tiles = heads * call.query_tiles;
  const int64_t pieces = int64_t(given.batch) * given.key_heads * call.key_blocks;
  if (tiles > INT32_MAX || pieces > INT32_MAX - 1024) return cudaErrorInvalidValue;
  call.pieces = static_cast<unsigned>(pieces);

  auto* place = static_cast<unsigned char*>(given.workspace);
  auto take = [&](int64_t bytes) { return place += bytes, place - bytes; };
  const int64_t sums = tiles * Plan::queries * size * sizeof(float);
  const int64_t ends = (heads * call.key_blocks * sizeof(int2) + 15) / 16 * 16;
  const int64_t numbers = tiles * Plan::queries * 2 * sizeof(float);
  if (given.workspace_bytes < sums + 16 + ends + numbers) return cudaErrorInvalidValue;
  call.sums = reinterpret_cast<float*>(take(sums));
  call.counter = reinterpret_cast<unsigned long long*>(take(16));
  call.ends = reinterpret_cast<int2*>(take(ends));
  call.numbers = reinterpret_cast<float*>(take(numbers));
  // Where the order of additions matters, the first is a store.
  const int64_t kept = gradients.deterministic ? sums : 0;
  return cudaMemsetAsync(static_cast<unsigned char*>(given.workspace) + kept, 0, sums + 16 + ends - kept, stream);
}

template <class T, int size>
cudaError_t run(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                cudaStream_t stream) {
  if (auto e = prepare<size>(call, given, gradients, stream)) return e;
  const bool limited = given.left != kNoLimit || given.right != kNoLimit || given.key_lengths.data ||
                       given.keys % BackwardPlan<size>::keys;
  if (given.cap > 0) return launch<T, size, BackwardKind::capped>(call, gradients, stream);
  if (limited) return launch<T, size, BackwardKind::limited>(call, gradients, stream);
  return launch<T, size, BackwardKind::plain>(call, gradients, stream);
}

template <class T>
cudaError_t run_typed(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                      cudaStream_t stream) {
  if (given.size <= 64) return run<T, 64>(call, given, gradients, stream);
  if (given.size <= 128) return run<T, 128>(call, given, gradients, stream);
  return run<T, 256>(call, given, gradients, stream);
}

}  // namespace

cudaError_t run_attention_backward(const AttentionCall& given, const AttentionGradients& gradients,
                                   cudaStream_t stream) {
  bool fits = false;
  if (auto e = has_warp_groups(&fits)) return e;
  if (!fits) return cudaErrorNotSupported;
  if (given.size != given.value_size || given.size % 8 || given.size > 256 || given.query_segments ||
      given.key_segments || given.bias.data || given.mask.data)
    return cudaErrorInvalidValue;
  BackwardCall call{};
  call.batch = given.batch, call.queries = given.queries, call.keys = given.keys;
  call.heads = given.heads, call.key_heads = given.key_heads, call.group = given.heads / given.key_heads;
  call.size = given.size;
  call.deterministic = gradients.deterministic;
  call.scale = given.scale, call.scale2 = given.scale * float(kLog2E), call.cap = given.cap;
  call.left = given.left, call.right = given.right;
  call.query_lengths = given.query_lengths, call.key_lengths = given.key_lengths, call.offset = given.offset;
  call.query_gradient = gradients.query, call.key_gradient = gradients.key, call.value_gradient = gradients.value;
  return given.type == AttentionType::f16 ? run_typed<__half>(call, given, gradients, stream)
                                          : run_typed<__nv_bfloat16>(call, given, gradients, stream);
}

}  // namespace jaxsoft::cuda
