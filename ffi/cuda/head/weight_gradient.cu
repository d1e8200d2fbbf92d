// The gradient of a linear layer's weight, in the place of the gradients of its scores: x := hidden^T x.
//
// x has the shape of weight, (width, classes), and its first rows are the gradients of the scores. A panel is 256 of
// the classes. The blocks that compute the tiles of one panel, of 128 rows each, are a group: all of them run at the
// same time, and none writes before all have read the panel. So nothing is copied.
//
// In a block one thread copies tiles to shared memory, and two warp groups multiply 64 rows by 256 columns each. Two
// blocks are a cluster, and each copies half of what both need of x. Groups take panels in turn from a counter, so that
// one has fewer whose blocks come late, as multiprocessors are still busy with something else.
//
// Where a group does not fit on the device, as on a part of a GPU (MIG), each panel is copied to the workspace first.
#include "plan.h"

#include <algorithm>
#include <string>

#include "../attributes.cuh"
#include "../counter.cuh"
#include "../devices.cuh"
#include "../elements.cuh"
#include "../handlers.cuh"
#include "../tensor_map.cuh"
#include "../wgmma.cuh"

namespace jaxsoft::cuda {

template <class T>
struct alignas(1024) WeightShared {
  using Code = WeightCode;
  T left[Code::slots][Code::rows / Code::box][Code::depth * Code::box];
  T right[Code::slots][Code::columns / Code::box][Code::depth * Code::box];
  Barrier full[Code::slots], empty[Code::slots];
};

struct WeightCall {
  CUtensorMap left, right;  // hidden (rows, width), and the gradients of the scores (rows, columns)
  void* x;
  int steps;
  int64_t classes;  // of x
  int columns;      // that are computed, from the first of x on
  int panels;
  int of_group;       // blocks
  unsigned* next;     // the next panel, for all groups
  unsigned* arrived;  // of each group: how many times its blocks have read a panel
  int* taken;         // of each group, panels + 1 in the order of its turns, and 1 more; 0 is none yet

  // The panel of a group's turn: none of them if there is none any more. One thread of the group takes it.
  __device__ int panel_of_turn(int group, int turn, bool takes) const {
    if (!next) return turn;
    int* const place = taken + int64_t(group) * (panels + 1) + turn;
    if (takes) {
      const int panel = static_cast<int>(atomicAdd(next, 1u));
      store_released(place, panel + 1);
      return panel;
    }
    int found;
    while ((found = load_acquired(place)) == 0) continue;
    return found - 1;
  }
};

template <class T>
__device__ void copy_panels(const WeightCall& call, WeightShared<T>& shared, int group, int tile) {
  using Code = WeightCode;
  constexpr int own_boxes = Code::columns / Code::box / Code::blocks;
  const int first_box = static_cast<int>(block_in_cluster()) * own_boxes;
  SlotPlace<Code::slots> place;
  for (int turn = 0;; turn++) {
    const int panel = call.panel_of_turn(group, turn, tile == 0);
    if (panel >= call.panels) break;
    for (int step = 0; step < call.steps; step++, place.advance()) {
      const int row = step * Code::depth;
      shared.empty[place.slot].wait(place.parity ^ 1);
      Barrier& full = shared.full[place.slot];
      full.arrive_expecting(sizeof shared.left[0] + sizeof shared.right[0]);
#pragma unroll
      for (int box = 0; box < Code::rows / Code::box; box++)
        copy_box(shared.left[place.slot][box], call.left, {tile * Code::rows + box * Code::box, 0, row, 0}, full);
#pragma unroll
      for (int box = first_box; box < first_box + own_boxes; box++)
        copy_box_to_both(shared.right[place.slot][box], call.right,
                         {panel * Code::columns + box * Code::box, 0, row, 0}, full);
    }
  }
  // The other block may still arrive at barriers here.
  for (int i = 0; i < Code::slots; i++, place.advance()) shared.empty[place.slot].wait(place.parity ^ 1);
}

// Writes a warp group's rows of a tile. Four threads that have 32 columns of a row get 8 in a row each.
template <class T>
__device__ void write_tile(const WeightCall& call, const float (&sums)[WeightCode::columns / 2], int row,
                           int first_column) {
#pragma unroll
  for (int i = 0; i < WeightCode::columns / 32; i++) {
    const int column = first_column + i * 32 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const int at = (i * 4 + word) * 4 + half * 2;
        words[word] = bits<uint32_t>(narrow_pair(sums[at], sums[at + 1], T()));
      }
      turn_in_four(words);
      T* const to = static_cast<T*>(call.x) + (row + half * 8) * call.classes + column;
      if (column < call.columns) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <class T>
__device__ void multiply_panels(const WeightCall& call, WeightShared<T>& shared, int group, int tile) {
  using Code = WeightCode;
  const int own = warp_group() - 1;
  const NamedBarrier of_warp_group{1 + own, kWarpGroup};
  SlotPlace<Code::slots> place;
  float sums[Code::columns / 2];
  auto give_back = [&](int slot) {
    for (unsigned block = 0; block < Code::blocks; block++) shared.empty[slot].arrive_as_warp_in(block);
  };
  for (int turn = 0;; turn++) {
    const int panel = call.panel_of_turn(group, turn, false);
    if (panel >= call.panels) break;
    int last = 0;
    for (int step = 0; step < call.steps; step++, place.advance()) {
      shared.full[place.slot].wait(place.parity);
      const bool all_read = step == call.steps - 1 && threadIdx.x == kWarpGroup;
      if (all_read && call.next) add_released(call.arrived + group, 1);
      const auto left = summed_over_rows(shared.left[place.slot][own], Code::depth);
      const auto right = summed_over_rows(shared.right[place.slot], Code::depth);
      begin_products();
#pragma unroll
      for (int i = 0; i < Code::depth / 16; i++)
        multiply<T>(sums, left + i * 16 * 128, right + i * 16 * 128, step > 0 || i > 0);
      commit_products();
      if (step > 0) {
        wait_for_products<1>();
        give_back(last);
      }
      last = place.slot;
    }
    wait_for_products<0>(sums);
    give_back(last);
    // Nobody writes before all blocks of the group have read the panel.
    const unsigned all = static_cast<unsigned>(call.of_group) * (turn + 1);
    if (call.next && threadIdx.x % kWarpGroup == 0)
      while (load_acquired(call.arrived + group) < all) continue;
    of_warp_group.wait();
    write_tile<T>(call, sums, tile * Code::rows + own * 64 + row_of_thread(), panel * Code::columns);
  }
}

template <class T>
__global__ void __launch_bounds__(WeightCode::threads, 1)
    weight_gradient_in_place(const __grid_constant__ WeightCall call) {
  if constexpr (kWarpGroupCode) {
    using Code = WeightCode;
    extern __shared__ unsigned char bytes[];
    auto& shared = *reinterpret_cast<WeightShared<T>*>((reinterpret_cast<uintptr_t>(bytes) + 1023) / 1024 * 1024);
    const int group = blockIdx.x / call.of_group, tile = blockIdx.x % call.of_group;
    if (threadIdx.x == 0) {
      for (int i = 0; i < Code::slots; i++) {
        shared.full[i].init(1);
        shared.empty[i].init(Code::blocks * Code::groups * 4 * Barrier::warp_arrivals);
      }
      show_barriers();
    }
    __syncthreads();
    publish_to_cluster();
    wait_for_cluster();
    if (warp_group() == 0) {
      give_registers<Code::copy_registers>();
      if (threadIdx.x == 0) copy_panels<T>(call, shared, group, tile);
    } else {
      take_registers<Code::registers>();
      multiply_panels<T>(call, shared, group, tile);
    }
  }
}

namespace {

template <class T>
cudaError_t run(const Buffer& hidden, const Buffer& x, const Buffer& workspace, cudaStream_t stream) {
  using Code = WeightCode;
  constexpr auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr int bytes = sizeof(WeightShared<T>) + 1024;  // which begin at the next multiple of 1024
  constexpr auto kernel = weight_gradient_in_place<T>;
  const int rows = static_cast<int>(hidden.dims[0]), width = static_cast<int>(hidden.dims[1]);
  const int classes = static_cast<int>(x.dims[1]);
  WeightCall call{};
  call.x = x.data, call.classes = call.columns = classes;
  call.steps = (rows + Code::depth - 1) / Code::depth, call.panels = static_cast<int>(weight_gradient_panels(classes));
  call.of_group = static_cast<int>(blocks_of_group(width));
  auto describe_right = [&](const void* data, int columns) {
    return describe(&call.right, {data, type, 1, rows, 1, columns}, Code::depth);
  };
  if (auto e = describe(&call.left, {hidden.data, type, 1, rows, 1, width}, Code::depth)) return e;
  if (auto e = describe_right(x.data, classes)) return e;

  cudaLaunchAttribute attributes[2] = {in_clusters_of(Code::blocks), all_at_once()};
  cudaLaunchConfig_t config{dim3(Code::blocks), dim3(Code::threads), bytes, stream, attributes, 1};
  static Devices<> known;
  int clusters = 0;
  if (auto e = known.once(0, &clusters, [&](int* found) {
        if (auto e = allow_shared_memory<kernel, bytes>()) return e;
        return find_clusters(kernel, config, found);
      }))
    return e;
  const int groups = std::min({Code::blocks * clusters / call.of_group, call.panels, Code::most_groups});
  if (groups > 0) {
    call.next = static_cast<unsigned*>(workspace.data), call.arrived = call.next + 1;
    call.taken = reinterpret_cast<int*>(call.arrived + groups);
    if (auto e = cudaMemsetAsync(call.next, 0, 4 * counted_words(groups, call.panels), stream)) return e;
    config.gridDim = dim3(groups * call.of_group), config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, call);
  }
  if (auto e = describe_right(workspace.data, Code::columns)) return e;
  call.panels = 1, config.gridDim = dim3(call.of_group);
  for (int first = 0; first < classes; first += Code::columns) {
    call.x = static_cast<T*>(x.data) + first, call.columns = std::min(Code::columns, classes - first);
    if (auto e = cudaMemcpy2DAsync(workspace.data, Code::columns * sizeof(T), call.x, classes * sizeof(T),
                                   call.columns * sizeof(T), rows, cudaMemcpyDeviceToDevice, stream))
      return e;
    if (auto e = cudaLaunchKernelEx(&config, kernel, call)) return e;
  }
  return cudaSuccess;
}

// What is wrong with the buffers of a call, or "".
std::string check(const Buffer& hidden, const Buffer& gradients, const Buffer& result, const Buffer& workspace) {
  using Limits = WeightLimits;
  if (!is_16_bit(hidden.dtype) || hidden.dims.size() != 2 || !Limits::take_hidden(hidden.dims[0], hidden.dims[1]))
    return "hidden must be F16 or BF16, of 1 to width rows, and its width a multiple of " +
           std::to_string(Limits::width_multiple) + " up to 2^20: got " + describe(hidden);
  if (gradients.dtype != hidden.dtype || gradients.dims.size() != 2 || gradients.dims[0] != hidden.dims[1] ||
      !Limits::take_classes(gradients.dims[1]))
    return "gradients must have hidden's dtype and the shape (width, classes), with a number of classes that is a "
           "multiple of 8 up to 2^30: got " + describe(gradients) + " beside " + describe(hidden);
  if (result.dtype != gradients.dtype || !(result.dims == gradients.dims) || result.data != gradients.data)
    return "the result must take the place of gradients: got " + describe(result) + " beside " + describe(gradients);
  const int64_t bytes = weight_gradient_workspace(hidden.dims[0], gradients.dims[1], 2);
  if (workspace.dtype != ffi::U8 || workspace.dims.size() != 1 || workspace.dims[0] < bytes)
    return "workspace must be U8(" + std::to_string(bytes) + ") or longer: got " + describe(workspace);
  return "";
}

ffi::Error handle(cudaStream_t stream, ffi::AnyBuffer hidden, ffi::AnyBuffer gradients,
                  ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> workspace) {
  const Buffer h(hidden), given(gradients), x(*result), space(*workspace);
  const std::string reason = check(h, given, x, space);
  if (!reason.empty()) return refuse("weight_gradient_in_place: " + reason);
  if (auto e = need_warp_groups()) return answer("weight_gradient_in_place", e);
  return answer("weight_gradient_in_place", h.dtype == ffi::F16 ? run<__half>(h, x, space, stream)
                                                                : run<__nv_bfloat16>(h, x, space, stream));
}

}  // namespace
}  // namespace jaxsoft::cuda

JAXSOFT_EXPORT_HANDLER(jaxsoft_weight_gradient_in_place, jaxsoft::cuda::handle,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>())
