// Few long rows: each is cut into parts, one for each block, in one launch. All blocks run at the same time, keep their
// parts in registers, and wait for each other's states. Every operand is read once.
#pragma once

// Else the next header brings the C++ library of CUDA, which is more to compile than all other headers and is not used.
#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>

#include "../attributes.cuh"
#include "compiled.cuh"
#include "parts.cuh"

namespace jaxsoft::cuda {

// A block holds at most blockDim.x * kPacks packs of a row.
template <template <class> class Op, class T, class Form, int kPacks>
__global__ void __launch_bounds__(GridRegisters::threads, GridRegisters::blocks)
    grid_registers(const __grid_constant__ Arguments<T> args, typename Op<T>::Part* states, Split split) {
  if constexpr (kChosenHere<Strategy::grid_registers, Op<T>, T, Form, kPacks>) {
    const auto row = part_of_row<Row<Op, T, Form>>(args, blockIdx.x, split, args.vector);
    const int step = blockDim.x, thread = threadIdx.x, packs = row.window.packs;
    Pack<T> pa[kPacks], pb[kPacks];
    row.load(thread, step, packs, pa, pb);
    auto part = reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); },
                                      [](const auto& part) { return reduce_threads<T>(part); });
    if (thread == 0) states[blockIdx.x] = part;
    cooperative_groups::this_grid().sync();
    const unsigned index = blockIdx.x / split.parts;
    part = merge<Op, T>(states + index * split.parts, split.parts);
    const auto values = Op<T>::finish(part, args, index, thread == 0 && blockIdx.x % split.parts == 0);
#pragma unroll
    for (int k = 0; k < kPacks; k++)
      if (thread + k * step < packs) row.write(thread + k * step, values, pa[k], pb[k]);
  }
}

// The workspace must have room for the states of all parts.
template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_grid_registers(const Arguments<T>& args, const Split& split, void* workspace, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(args.rows) * split.parts;
  const auto threads = static_cast<unsigned>(((split.packs + kPacks - 1) / kPacks + 31) / 32 * 32);
  cudaLaunchAttribute attribute = all_at_once();
  const cudaLaunchConfig_t config{dim3(blocks), dim3(threads), 0, stream, &attribute, 1};
  return cudaLaunchKernelEx(&config, grid_registers<Op, T, Form, kPacks>, args,
                            static_cast<typename Op<T>::Part*>(workspace), split);
}

}  // namespace jaxsoft::cuda
