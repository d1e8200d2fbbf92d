// Rows without a reduction that are longer than a block's share: all rows as one array.
//
// Every block has the same number of packs of the array, which begin with a cache line, wherever rows begin. So no two
// blocks write the same cache line. A share has elements of at most two rows.
#pragma once

#include <climits>

#include "row.cuh"
#include "sizes.cuh"

namespace jaxsoft::cuda {

template <template <class> class Op, class T>
__global__ void __launch_bounds__(Flat::threads)
    flat(const __grid_constant__ Arguments<T> args, double rows_an_element) {
  constexpr int size = Pack<T>::size;
  using Values = typename Op<T>::Values;
  // The row that has the block's first element. Computed in f64, it may be off by one.
  const int64_t begin = int64_t(blockIdx.x) * Flat::packs, element = begin * size;
  int64_t index = static_cast<int64_t>(static_cast<double>(element) * rows_an_element);
  if (index * args.n > element) index--;
  else if ((index + 1) * args.n <= element) index++;
  const bool last = index + 1 == args.rows;
  const Row<Op, T, Plain> row(args, index), next(args, last ? index : index + 1);
  // The block's first pack, and the pack where the next row begins, both counted from the first pack of the row.
  const int first = static_cast<int>(begin - (index * args.n) / size);
  const int boundary = last ? INT_MAX : static_cast<int>((index + 1) * args.n / size - (index * args.n) / size);

  Pack<T> packs_here[Flat::each];
#pragma unroll
  for (int k = 0; k < Flat::each; k++) {
    const int i = first + threadIdx.x + k * Flat::threads;
    packs_here[k].fill(row.fill());
    if ((i < row.counted) || (i >= boundary && i - boundary < next.counted))
      packs_here[k] = *reinterpret_cast<const Pack<T>*>(row.a + (int64_t(i) * size - row.window.head));
  }
  const Values values = Op<T>::finish({}, args, index, false);
  const Values next_values = Op<T>::finish({}, args, index + !last, false);
  auto write = [&](auto quick) {
    auto write_if = [&](bool here, const auto& row, const Values& values, int i, Pack<T> pack) {
      if (!here) return;
      if (row.counted == 0) pack.fill(row.fill());
      Accumulator<T> x[size];
#pragma unroll
      for (int e = 0; e < size; e++)
        x[e] = decltype(quick)::value ? Op<T>::quick_value(values, pack.get(e)) : Op<T>::value(values, pack.get(e), 0);
      pack.set_all(x);
      row.window.store(static_cast<T*>(row.out), i, row.labelled(pack, i));
    };
#pragma unroll
    for (int k = 0; k < Flat::each; k++) {
      const int i = first + threadIdx.x + k * Flat::threads;
      write_if(i < row.window.packs, row, values, i, packs_here[k]);
      write_if(i >= boundary && i - boundary < next.window.packs, next, next_values, i - boundary, packs_here[k]);
    }
  };
  if constexpr (sizeof(T) == 2)
    if (Op<T>::may_be_quick(values) && Op<T>::may_be_quick(next_values)) return write(std::true_type());
  write(std::false_type());
}

// Rows must have at least as many elements as a block's share, and the first must begin at a multiple of 16 bytes.
template <template <class> class Op, class T>
cudaError_t launch_flat(const Arguments<T>& args, cudaStream_t stream) {
  const int64_t packs = (args.rows * args.n + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t blocks = (packs + Flat::packs - 1) / Flat::packs;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  flat<Op, T><<<static_cast<unsigned>(blocks), Flat::threads, 0, stream>>>(args, 1.0 / args.n);
  return cudaGetLastError();
}

}  // namespace jaxsoft::cuda
