// The backward kernels and their launch, for one element type and size of heads.
#pragma once

#include <algorithm>

#include "../../attributes.cuh"
#include "../../devices.cuh"
#include "../attention.cuh"
#include "sums.cuh"
#include "tile_ranges.cuh"
#include "copy.cuh"
#include "copy_in_pairs.cuh"
#include "multiply.cuh"
#include "multiply_in_pairs.cuh"

namespace jaxsoft::cuda {

template <class T, int size, ScoreKind kind, bool wide>
__global__ void __launch_bounds__(BackwardCode::threads, 1)
    attention_backward(const __grid_constant__ BackwardCall call) {
  let_next_kernel_start();
  if constexpr (kWarpGroupCode) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<BackwardShared<T, size, may_have_segments<kind>>*>(bytes);
    if (threadIdx.x == 0) shared.init(call.deterministic);
    __syncthreads();
    const int group = warp_group();
    if (group == BackwardCode::groups) {
      give_registers<BackwardCode::copy_registers>();
      const int warp = threadIdx.x % kWarpGroup / 32;
      if (warp > BackwardCode::groups && !call.deterministic) {
        clear_sums<size>(call, shared);
      } else if (threadIdx.x % 32 == 0) {
        if (warp == 0) bring_tiles(call, shared);
        else if (warp <= BackwardCode::groups) add_sums<!wide>(call, shared, warp - 1);
        else wait_for_turns(call, shared);
      }
    } else {
      take_registers<BackwardCode::registers>();
      multiply_tiles<kind, wide>(call, shared, group);
    }
  }
}

// The same for heads of more than 128, by pairs of blocks.
template <class T, int size, ScoreKind kind, bool wide>
__global__ void __launch_bounds__(BackwardPair<T, size, false>::threads, 1)
    attention_backward_in_pairs(const __grid_constant__ BackwardCall call) {
  let_next_kernel_start();
  if constexpr (kWarpGroupCode) {
    using Pair = BackwardPair<T, size, may_have_segments<kind>>;
    using Plan = BackwardPlan<size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<Pair*>(bytes);
    if (threadIdx.x == 0) shared.init(call.deterministic);
    __syncthreads();
    synchronize_cluster();  // nobody may reach barriers of a block that has not begun
    const unsigned rank = block_in_cluster();
    const int group = warp_group();
    if (group == Pair::groups) {
      give_registers<Pair::copy_registers>();
      const int warp = threadIdx.x % kWarpGroup / 32;
      if (warp == 3 && !call.deterministic) {
        clear_sums<size>(call, shared, rank);
      } else if (threadIdx.x % 32 == 0) {
        if (warp == 0) bring_tiles(call, shared, rank);
        else if (warp == 1) send_slopes(call, shared, rank);
        else if (call.deterministic) add_part_in_order(call, shared, rank, warp - 2);
        else add_sums(call, shared, rank);
      }
      __syncwarp();
    } else if (group == 0) {
      take_registers<Pair::score_registers>();
      if constexpr (Plan::slopes_by_values) multiply_scores<kind>(call, shared, rank);
      else multiply_scores_and_slopes<kind>(call, shared, rank);
    } else {
      take_registers<Pair::gradient_registers>();
      if (group == 2) multiply_keys<wide>(call, shared, rank);
      else if constexpr (Plan::slopes_by_values) multiply_values_and_slopes<wide>(call, shared, rank);
      else multiply_values<wide>(call, shared, rank);
    }
    synchronize_cluster();  // nor of one that has ended
  }
}

template <class T, int size, ScoreKind kind, bool wide>
cudaError_t launch_backward_as(const BackwardCall& call, const AttentionGradients& gradients, cudaStream_t stream) {
  using Plan = BackwardPlan<size>;
  constexpr bool segmented = may_have_segments<kind>;
  using Shared =
      std::conditional_t<Plan::blocks == 2, BackwardPair<T, size, segmented>, BackwardShared<T, size, segmented>>;
  constexpr auto kernel = [] {
    if constexpr (Plan::blocks == 2) return attention_backward_in_pairs<T, size, kind, wide>;
    else return attention_backward<T, size, kind, wide>;
  }();
  constexpr int bytes = sizeof(Shared);
  if (auto e = allow_shared_memory<kernel, bytes>()) return e;
  const unsigned heads = call.batch * call.heads, queries = call.query_tiles * Plan::queries;
  prepare_numbers<size><<<dim3((queries + 127) / 128, std::min(heads, 65535u)), 128, 0, stream>>>(
      call, gradients.lse, gradients.delta);
  BackwardCall ordered = call;
  ordered.turns_together =
      call.deterministic ? turns_together<size>(call, call.query_tiles, call.query_tiles, call.key_blocks) : 1;
  ordered.reversed = reversed_turns<size>(ordered);
  const auto at_once = std::min<unsigned>(call.pieces, call.processors / Plan::blocks);
  if (auto e = cudaGetLastError()) return e;
  cudaLaunchAttribute attributes[2] = {overlapping(), in_clusters_of(Plan::blocks)};
  cudaLaunchConfig_t config{};
  config.stream = stream, config.attrs = attributes, config.numAttrs = Plan::blocks > 1 ? 2 : 1;
  config.gridDim = at_once * Plan::blocks, config.blockDim = Shared::threads, config.dynamicSmemBytes = bytes;
  if (auto e = cudaLaunchKernelEx(&config, kernel, ordered)) return e;
  return launch_kernel(wide ? store_sums<T, size> : round_sums<T, size>, heads * call.query_tiles, 256, 0, stream, true,
                       call);
}

template <class T, int size, ScoreKind kind>
cudaError_t launch_backward(const BackwardCall& call, const AttentionGradients& gradients, cudaStream_t stream) {
  if (gradients.wide) return launch_backward_as<T, size, kind, true>(call, gradients, stream);
  return launch_backward_as<T, size, kind, false>(call, gradients, stream);
}

// Describes the arrays of a call, divides its workspace (tiles.h), and clears what must be 0 in it.
template <int size>
cudaError_t prepare_backward(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                             cudaStream_t stream) {
  using Plan = BackwardPlan<size>;
  const auto type =
      given.type == AttentionType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto of_queries = [&](CUtensorMap* map, const void* data, int columns) {
    return describe(map, {data, type, given.batch, given.queries, given.heads, columns}, Plan::queries);
  };
  auto of_keys = [&](CUtensorMap* map, const void* data, int columns, int rows = Plan::keys / Plan::blocks) {
    return describe(map, {data, type, given.batch, given.keys, given.key_heads, columns}, rows);
  };
  if (auto e = of_queries(&call.query, given.query, given.size)) return e;
  if (auto e = of_queries(&call.cotangent, gradients.cotangent, given.value_size)) return e;
  if (auto e = of_keys(&call.key, given.key, given.size)) return e;
  if (auto e = of_keys(&call.value, given.value, given.value_size)) return e;
  if (Plan::blocks == 1 && !gradients.wide) {
    if (auto e = of_keys(&call.key_result, gradients.key, given.size, 64)) return e;
    if (auto e = of_keys(&call.value_result, gradients.value, given.value_size, 64)) return e;
  }
  const BackwardSpace<size> space(given.batch, given.queries, given.keys, given.heads, given.key_heads,
                                  given.query_segments);
  const int64_t tiles = space.heads * space.query_tiles;
  if (tiles > INT32_MAX || space.heads * space.key_blocks > INT32_MAX - 1024) return cudaErrorInvalidValue;
  if (given.workspace_bytes < space.bytes()) return cudaErrorInvalidValue;
  call.query_tiles = static_cast<int>(space.query_tiles), call.key_blocks = static_cast<int>(space.key_blocks);

  Device device;
  if (auto e = device.read()) return e;
  call.processors = device.processors;
  if (given.query_segments) {
    call.query_segments = {given.query_segments, given.segment_steps[0], given.queries};
    call.key_segments = {given.key_segments, given.segment_steps[1], given.keys};
  }
  call.heads_of_piece = heads_of_piece<size>(call);
  call.turns = static_cast<int>(space.heads / call.heads_of_piece);
  call.pieces = static_cast<unsigned>(call.turns) * call.key_blocks;

  WorkspaceDivision counts(given.workspace), rest(counts.next + space.counts);
  call.counter = counts.take<unsigned long long>(space.counter);
  call.added = counts.take<unsigned>(space.of_heads);
  call.cleared = counts.take<unsigned>(space.of_heads);
  call.ends = counts.take<int2>(space.ends);
  call.summed = counts.take<unsigned>(space.summed);
  call.sums = rest.take<float>(space.sums);
  call.numbers = rest.take<float>(space.numbers);
  call.group_sums = rest.take<float>(space.group_sums);
  // Where the order of additions matters, the first is a store. Else the kernel clears most sums itself: those of a
  // turn while another is at work, whose blocks of keys have been taken earlier than all that run at the same time.
  call.cleared_ahead = std::min(call.processors / Plan::blocks / call.key_blocks + 2, call.turns);
  const int64_t now = call.deterministic ? 0 : space.sums / call.turns * call.cleared_ahead;
  if (auto e = cudaMemsetAsync(given.workspace, 0, space.counts + now, stream)) return e;
  if (!given.query_segments) return cudaSuccess;
  call.segments = rest.take<SegmentRange>(space.segments);
  call.tiles = rest.take<BlockTiles>(space.tiles);
  call.order = rest.take<int>(space.order);
  call.key_begins = {rest.take<int>(space.key_begins), Plan::keys, call.key_blocks};
  call.query_begins = {rest.take<int>(space.query_begins), Plan::queries, call.query_tiles};
  call.tile_is_met = rest.take<unsigned char>(space.tile_is_met);
  call.turns_together_of_parts = reinterpret_cast<int*>(call.counter + 1);
  if (auto e = launch_find_blocks(given.batch, call.key_segments, call.key_begins, call.query_segments,
                                  call.query_begins, nullptr, stream))
    return e;
  if (auto e = launch_segment_ranges(given.batch, call.key_segments, call.key_begins, call.query_segments,
                                     call.query_begins, call.segments, nullptr, stream))
    return e;
  return launch_tile_ranges<size>(call, stream);
}

template <class T, int size>
cudaError_t run_backward(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                         cudaStream_t stream) {
  if (auto e = prepare_backward<size>(call, given, gradients, stream)) return e;
  const bool limited = given.limits.of_keys() || given.keys % BackwardPlan<size>::keys;
  if (given.cap > 0) return launch_backward<T, size, ScoreKind::capped>(call, gradients, stream);
  if (given.query_segments) return launch_backward<T, size, ScoreKind::segmented>(call, gradients, stream);
  if (limited) return launch_backward<T, size, ScoreKind::limited>(call, gradients, stream);
  return launch_backward<T, size, ScoreKind::plain>(call, gradients, stream);
}

}  // namespace jaxsoft::cuda
