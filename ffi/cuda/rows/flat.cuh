// What reduces nothing, of rows that are longer than a block's share: all of them as one array.
//
// A block has so many packs of the array, from a line of the cache on, wherever rows begin: so no two blocks write the
// same line, and a share has the elements of two rows at most.
#pragma once

#include "strategies.cuh"

namespace jaxsoft::cuda {

struct Flat {
  static constexpr int threads = 128, each = 8, packs = threads * each;  // of a block
};

template <template <class> class Op, class T>
__global__ void __launch_bounds__(Flat::threads)
    flat(const __grid_constant__ Arguments<T> args, double rows_an_element) {
  constexpr int size = Pack<T>::size;
  using Values = typename Op<T>::Values;
  // The row that has the block's first element: as a double, it may be one off.
  const int64_t begin = int64_t(blockIdx.x) * Flat::packs, element = begin * size;
  int64_t index = static_cast<int64_t>(static_cast<double>(element) * rows_an_element);
  if (index * args.n > element) index--;
  else if ((index + 1) * args.n <= element) index++;
  const bool last = index + 1 == args.rows;
  const Row<Op, T, Plain> row(args, index), next(args, last ? index : index + 1);
  // The block's first pack, and where the next row begins, counted from the first pack of the row.
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
  const Values values = Op<T>::finish({}, args, index, false), next_values = Op<T>::finish({}, args, index + !last, false);
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

// Rows have at least the elements of a block's share. The first begins at a multiple of 16 bytes.
template <template <class> class Op, class T>
cudaError_t launch_flat(const Arguments<T>& args, cudaStream_t stream) {
  const int64_t packs = (args.rows * args.n + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t blocks = (packs + Flat::packs - 1) / Flat::packs;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  flat<Op, T><<<static_cast<unsigned>(blocks), Flat::threads, 0, stream>>>(args, 1.0 / args.n);
  return cudaGetLastError();
}

}  // namespace jaxsoft::cuda
