// Three ways to run a row operation, chosen by the row's length and the number of rows.
//
//   resident  a row in the registers of the threads that share it: a group of lanes, a warp, or a block. One read.
//   tiled     a row too long for that, by one block: reduced in a first pass, read again and written in a second.
//   split     few long rows: each cut over many blocks. One launch writes the parts' states, the next merges them and
//             writes. The states wait in a workspace that XLA provides.
#pragma once

#include <algorithm>

#include "operations.cuh"

namespace jaxsoft::cuda {

constexpr int kThreads = 512;  // of a block that works through a long row

// Packs [begin, end) of a row are dealt out to the block's threads in x, and accumulated.
template <template <class> class Op, class T>
__device__ typename Op<T>::Part reduce_packs(const Window<T>& window, const T* a, const T* b, int64_t begin, int64_t end) {
  constexpr int in_flight = 4;  // loads that a thread starts before it uses the first
  typename Op<T>::Part part;
  for (int64_t i = begin + threadIdx.x; i < end; i += in_flight * blockDim.x) {
    Pack<T> pa[in_flight], pb[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
      int64_t at = i + k * blockDim.x;
      if (Op<T>::reads_a_to_reduce) pa[k] = window.load(a, at, end, Op<T>::fill());
      if (Op<T>::operands > 1) pb[k] = window.load(b, at, end, Op<T>::fill());
    }
    Op<T>::accumulate(part, pa, pb);
  }
  return reduce_threads<T>(part);
}

template <template <class> class Op, class T>
__device__ Pack<T> result_pack(const typename Op<T>::Values& values, const Pack<T>& a, const Pack<T>& b) {
  Accumulator<T> x[Pack<T>::size];
#pragma unroll
  for (int k = 0; k < Pack<T>::size; k++)
    x[k] = Op<T>::value(values, a.get(k), Op<T>::operands > 1 ? b.get(k) : Accumulator<T>(0));
  Pack<T> out;
  out.set_all(x);
  return out;
}

template <template <class> class Op, class T>
__device__ void write_packs(const Window<T>& window, const typename Op<T>::Values& values, const T* a, const T* b, T* out,
                            int64_t begin, int64_t end) {
  constexpr int in_flight = 4;
  for (int64_t i = begin + threadIdx.x; i < end; i += in_flight * blockDim.x) {
    Pack<T> pa[in_flight], pb[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) {
      int64_t at = i + k * blockDim.x;
      pa[k] = window.load(a, at, end, Op<T>::fill());
      if (Op<T>::operands > 1) pb[k] = window.load(b, at, end, Op<T>::fill());
    }
#pragma unroll
    for (int k = 0; k < in_flight; k++)
      if (i + k * blockDim.x < end) window.store(out, i + k * blockDim.x, result_pack<Op, T>(values, pa[k], pb[k]));
  }
}

// One row of the operands: the pointers, and the window on it.
template <template <class> class Op, class T, class Index = int64_t>
struct Row {
  const T *a, *b;
  T* out;
  Window<T, Index> window;
  __device__ Row(const Arguments<T>& args, int64_t row)
      : a(args.a + row * args.n),
        b(Op<T>::operands > 1 ? args.b + row * args.n : nullptr),
        out(Op<T>::writes ? args.out + row * args.n : nullptr),
        window(a, static_cast<Index>(args.n), args.vector) {}
};

// blockDim.x threads share a row of at most blockDim.x * kPacks packs; blockDim.y rows a block.
template <template <class> class Op, class T, int kPacks>
__global__ void __launch_bounds__(1024) resident(Arguments<T> args) {
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < args.rows; first += int64_t(gridDim.x) * blockDim.y) {
    int64_t index = first + threadIdx.y;
    bool exists = index < args.rows;  // lanes without a row still take part in the shuffles
    Row<Op, T, int> row(args, exists ? index : first);
    int packs = exists ? row.window.packs : 0;
    Pack<T> pa[kPacks], pb[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; k++) {
      int at = threadIdx.x + k * blockDim.x;
      pa[k] = row.window.load(row.a, at, packs, Op<T>::fill());
      if (Op<T>::operands > 1) pb[k] = row.window.load(row.b, at, packs, Op<T>::fill());
    }
    typename Op<T>::Part part;
    if constexpr (Op<T>::reduces) {
      Op<T>::accumulate(part, pa, pb);
      part = reduce_threads<T>(part);
    }
    if (!exists) continue;
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0);
    if constexpr (Op<T>::writes) {
#pragma unroll
      for (int k = 0; k < kPacks; k++) {
        int at = threadIdx.x + k * blockDim.x;
        if (at < packs) row.window.store(row.out, at, result_pack<Op, T>(values, pa[k], pb[k]));
      }
    }
  }
}

// One row a block.
template <template <class> class Op, class T>
__global__ void __launch_bounds__(kThreads) tiled(Arguments<T> args) {
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    Row<Op, T> row(args, index);
    typename Op<T>::Part part;
    if constexpr (Op<T>::reduces) part = reduce_packs<Op, T>(row.window, row.a, row.b, 0, row.window.packs);
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0);
    if (Op<T>::writes) write_packs<Op, T>(row.window, values, row.a, row.b, row.out, 0, row.window.packs);
  }
}

// A part of a row a block: blockIdx.x is the part, blockIdx.y the row.
template <template <class> class Op, class T>
__global__ void __launch_bounds__(kThreads) split_reduce(Arguments<T> args, typename Op<T>::Part* parts) {
  Row<Op, T> row(args, blockIdx.y);
  int64_t begin = row.window.packs * blockIdx.x / gridDim.x, end = row.window.packs * (blockIdx.x + 1) / gridDim.x;
  auto part = reduce_packs<Op, T>(row.window, row.a, row.b, begin, end);
  if (threadIdx.x == 0) parts[int64_t(blockIdx.y) * gridDim.x + blockIdx.x] = part;
}

template <template <class> class Op, class T>
__global__ void __launch_bounds__(kThreads) split_write(Arguments<T> args, const typename Op<T>::Part* parts) {
  Row<Op, T> row(args, blockIdx.y);
  typename Op<T>::Part part;
  if constexpr (Op<T>::reduces) {
    for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x)
      part = combine<T>(part, parts[int64_t(blockIdx.y) * gridDim.x + i]);
    part = reduce_threads<T>(part);
  }
  auto values = Op<T>::finish(part, args, blockIdx.y, threadIdx.x == 0 && blockIdx.x == 0);
  int64_t begin = row.window.packs * blockIdx.x / gridDim.x, end = row.window.packs * (blockIdx.x + 1) / gridDim.x;
  if (Op<T>::writes) write_packs<Op, T>(row.window, values, row.a, row.b, row.out, begin, end);
}

// Merges the parts of a row where nothing is written but its statistics.
template <template <class> class Op, class T>
__global__ void split_finish(Arguments<T> args, const typename Op<T>::Part* parts, unsigned count) {
  typename Op<T>::Part part;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
    part = combine<T>(part, parts[int64_t(blockIdx.x) * count + i]);
  part = reduce_threads<T>(part);
  Op<T>::finish(part, args, blockIdx.x, threadIdx.x == 0);
}

// The choice, in packs. Shorter rows get fewer packs a thread, so that enough threads have work.
struct Choice {
  static constexpr int64_t few_packs = 8;     // up to here one pack a thread
  static constexpr int64_t many_packs = 128;  // up to here four packs a thread, else as many as its registers hold
  static constexpr int64_t blocks_per_processor = 4;  // what a split aims for
  static constexpr int64_t least_packs_per_part = 2048;
};

template <template <class> class Op, class T, int kPacks>
cudaError_t launch_resident(const Arguments<T>& args, int64_t packs, cudaStream_t stream) {
  int64_t threads = (packs + kPacks - 1) / kPacks, rows_per_block = 1;
  if (threads <= 32) {
    int64_t lanes = 1;
    while (lanes < threads) lanes *= 2;
    threads = lanes;
    rows_per_block = 128 / lanes;
  } else {
    threads = (threads + 31) / 32 * 32;
  }
  int64_t blocks = std::min<int64_t>((args.rows + rows_per_block - 1) / rows_per_block, 0x7fffffff);
  resident<Op, T, kPacks><<<blocks, dim3(threads, rows_per_block), 0, stream>>>(args);
  return cudaGetLastError();
}

// `workspace` has room for `room` parts. Everything is ordered by `stream`; nothing is allocated or waited for.
template <template <class> class Op, class T>
cudaError_t launch(const Arguments<T>& args, void* workspace, int64_t room, cudaStream_t stream) {
  using Part = typename Op<T>::Part;
  if (args.rows == 0 || args.n == 0) return cudaSuccess;
  // A row that is not a multiple of 16 bytes long begins anywhere in its first pack.
  int64_t packs = (args.n * sizeof(T) + 15) / 16 + (args.n * sizeof(T) % 16 != 0);
  constexpr int most_packs = Op<T>::operands == 1 ? 8 : 4;
  if (packs <= Choice::few_packs) return launch_resident<Op, T, 1>(args, packs, stream);
  if (packs <= Choice::many_packs) return launch_resident<Op, T, 4>(args, packs, stream);
  if (packs <= most_packs * 1024) return launch_resident<Op, T, most_packs>(args, packs, stream);

  int device = 0, processors = 0;
  if (auto e = cudaGetDevice(&device)) return e;
  if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  int64_t parts = std::min({Choice::blocks_per_processor * processors / args.rows, room / args.rows,
                            packs / Choice::least_packs_per_part});
  if (parts < 2) {
    tiled<Op, T><<<std::min<int64_t>(args.rows, 0x7fffffff), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  dim3 grid(parts, args.rows);
  auto* states = static_cast<Part*>(workspace);
  if constexpr (Op<T>::reduces) {
    split_reduce<Op, T><<<grid, kThreads, 0, stream>>>(args, states);
    if (auto e = cudaGetLastError()) return e;
  }
  if constexpr (Op<T>::writes) {
    split_write<Op, T><<<grid, kThreads, 0, stream>>>(args, states);
  } else {
    split_finish<Op, T><<<args.rows, 256, 0, stream>>>(args, states, parts);
  }
  return cudaGetLastError();
}

}  // namespace jaxsoft::cuda
