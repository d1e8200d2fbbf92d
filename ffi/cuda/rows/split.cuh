// Few long rows: each is cut into parts, one for each block, in two or three launches.
//
// The first launch writes the parts' states to the workspace, and the last merges them and writes. Where a row has many
// parts, a launch in between merges their states. From Hopper on, a launch starts while the one before still runs, and
// waits within the kernel until that has ended. Rows are read twice, the second time from the cache if they are still
// there.
#pragma once

#include "../attributes.cuh"
#include "../hopper.cuh"
#include "parts.cuh"
#include "tiled.cuh"

namespace jaxsoft::cuda {

// Reduces each part to its state.
template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kTiledThreads<Op<T>>, kTiledBlocks<Op<T>, T, Form>)
    split_reduce(const __grid_constant__ Arguments<T> args, typename Op<T>::Part* states, Split split) {
  let_next_kernel_start();
  const auto row = part_of_row<Row<Op, T, Form>>(args, blockIdx.x, split, args.vector);
  auto part = reduce_packs<kTiledInFlight<Op<T>, Form>>(row);
  if (threadIdx.x == 0) states[blockIdx.x] = part;
}

// Merges the states of each row's parts, by one block for each row. Where a row has few parts, every block that writes
// merges them itself instead.
template <template <class> class Op, class T>
__global__ void split_merge(const typename Op<T>::Part* states, unsigned parts, typename Op<T>::Part* merged) {
  let_next_kernel_start();
  wait_for_last_kernel();
  auto part = merge<Op, T>(states + int64_t(blockIdx.x) * parts, parts);
  if (threadIdx.x == 0) merged[blockIdx.x] = part;
}

// Writes the rows, from `of_row` states for each of them.
template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kTiledThreads<Op<T>>, kTiledBlocks<Op<T>, T, Form>)
    split_write(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states, unsigned of_row,
                Split split) {
  // The parts go in reverse order, because those that were read last are still in the cache.
  const unsigned block = Op<T>::reduces ? gridDim.x - 1 - blockIdx.x : blockIdx.x, row = block / split.parts;
  write_packs(part_of_row<Row<Op, T, Form>>(args, block, split, args.vector), [&] {
    typename Op<T>::Part part;
    wait_for_last_kernel();
    if constexpr (Op<T>::reduces) part = merge<Op, T>(states + row * of_row, of_row);
    return Op<T>::finish(part, args, row, threadIdx.x == 0 && block % split.parts == 0);
  });
}

// Merges the states of a row's parts where nothing but its statistics is written.
template <template <class> class Op, class T>
__global__ void split_finish(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states,
                             unsigned parts) {
  wait_for_last_kernel();
  auto part = merge<Op, T>(states + int64_t(blockIdx.x) * parts, parts);
  Op<T>::finish(part, args, blockIdx.x, threadIdx.x == 0);
}

// The workspace must have room for the states of all parts, and for one more state of each row.
template <template <class> class Op, class T, class Form>
cudaError_t launch_split(const Arguments<T>& args, const Plan& plan, void* workspace, cudaStream_t stream) {
  const Split& split = plan.split;
  const auto rows = static_cast<unsigned>(args.rows), blocks = rows * split.parts;
  auto* states = static_cast<typename Op<T>::Part*>(workspace);
  cudaLaunchAttribute attribute = overlapping();
  auto shape = [&](unsigned blocks, unsigned threads) {
    return cudaLaunchConfig_t{dim3(blocks), dim3(threads), 0, stream, &attribute, Op<T>::reduces && plan.overlap};
  };
  const typename Op<T>::Part* read = states;
  unsigned of_row = split.parts;
  if constexpr (Op<T>::reduces) {
    split_reduce<Op, T, Form><<<blocks, plan.threads, 0, stream>>>(args, states, split);
    if (auto e = cudaGetLastError()) return e;
    if constexpr (Op<T>::writes)
      if (split.parts > Splitting::few_parts) {
        auto* merged = states + int64_t(rows) * split.parts;
        const auto config = shape(rows, Splitting::merge_threads);
        if (auto e = cudaLaunchKernelEx(&config, split_merge<Op, T>, read, split.parts, merged)) return e;
        read = merged, of_row = 1;
      }
  }
  const auto config = Op<T>::writes ? shape(blocks, plan.threads) : shape(rows, Splitting::finish_threads);
  if constexpr (Op<T>::writes) return cudaLaunchKernelEx(&config, split_write<Op, T, Form>, args, read, of_row, split);
  else return cudaLaunchKernelEx(&config, split_finish<Op, T>, args, read, split.parts);
}

}  // namespace jaxsoft::cuda
