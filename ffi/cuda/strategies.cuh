// Ways to run a row operation that need nothing but registers and the caches.
//
//   resident  a row in the registers of the threads that share it: a group of lanes, a warp, or a block. One read.
//   tiled     a row too long for that, by one block: reduced in a first pass, read again and written in a second.
//   split     few long rows: each cut over many blocks. One launch writes the parts' states, the next merges them and
//             writes. The states wait in a workspace that XLA provides. From Hopper on the second launch is made while
//             the first still runs, and waits for its end within the kernel.
#pragma once

#include <algorithm>
#include <atomic>

#include "operations.cuh"

namespace jaxsoft::cuda {

constexpr int kThreads = 512;  // of a block that works through a long row

// The devices on which a kernel's attributes have been set.
class Devices {
  std::atomic<uint64_t> known_{0};

 public:
  template <class F>
  cudaError_t once(F f) {
    int device = 0;
    if (auto e = cudaGetDevice(&device)) return e;
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (known_.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    if (auto e = f()) return e;
    known_.fetch_or(bit, std::memory_order_relaxed);
    return cudaSuccess;
  }
};

// One row of the operands: the pointers, the window on it, and its extras.
template <template <class> class Op, class T, class Form, class Index = int64_t>
struct Row {
  const T *a, *b;
  void* out;
  Window<T, Index> window;
  Form form;
  ResultType result;

  __device__ Row(const Arguments<T>& args, int64_t row)
      : a(args.a + row * args.n),
        b(Op<T>::operands > 1 ? args.b + row * args.n : nullptr),
        window(a, static_cast<Index>(args.n), args.vector),
        form(args, row, window),
        result(args.result) {
    int64_t size = sizeof(T);
    if (Form::extras && result != ResultType::same) size = result == ResultType::f32 ? 4 : 2;
    out = static_cast<char*>(args.out) + row * args.n * size;
  }

  // Pack i of the operands. `reduce_only`: b alone, where the reduction needs no more.
  __device__ void load(Index i, Index end, Pack<T>& pa, Pack<T>& pb, bool reduce_only = false) const {
    if constexpr (Form::extras) {
      if (i >= min(end, form.masked_from(window))) {  // nothing of it is read
        pa.fill(Op<T>::a_is_scores ? form.masked_element() : narrow<T>(0));
        pb.fill(narrow<T>(0));
        return;
      }
    }
    if (!reduce_only || Op<T>::reads_a_to_reduce || Form::extras) pa = window.load(a, i, end, Op<T>::fill());
    if constexpr (Op<T>::operands > 1) pb = window.load(b, i, end, Op<T>::fill());
    else if constexpr (Form::bias) pb = window.load_anywhere(form.bias_row, i, end, narrow<T>(0));
    mark(i, end, pa, pb);
  }
  __device__ void mark(Index i, Index end, Pack<T>& pa, Pack<T>& pb) const {
    if constexpr (Form::extras && Op<T>::a_is_scores)
      form.mark(pa, pb, Op<T>::operands > 1 || Form::bias, i, end, window);
  }
  // Whether the results of whole packs may be written as packs, and nothing is to be looked up again.
  __device__ bool writes_packs(const typename Op<T>::Values& values) const {
    return !Form::extras || (result == ResultType::same && Op<T>::ordinary(values));
  }

  template <bool quick = false>
  __device__ Pack<T> result_pack(const typename Op<T>::Values& values, const Pack<T>& pa, const Pack<T>& pb) const {
    Accumulator<T> x[Pack<T>::size];
    results<Op<T>, quick>(values, pa, pb, form, x);
    Pack<T> pack;
    pack.set_all(x);
    if constexpr (quick && kUnit<T> != 1) pack.multiply(kUnit<T>);
    return pack;
  }
  __device__ void write(Index i, const typename Op<T>::Values& values, const Pack<T>& pa, const Pack<T>& pb) const {
    if (writes_packs(values)) {
      if constexpr (Op<T>::has_quick)
        if (values.quick) return window.store(static_cast<T*>(out), i, result_pack<true>(values, pa, pb));
      window.store(static_cast<T*>(out), i, result_pack(values, pa, pb));
    } else if constexpr (Form::extras) {
      Accumulator<T> x[Pack<T>::size];
      results<Op<T>, false>(values, pa, pb, form, x);
      if (Op<T>::a_is_scores && !Op<T>::ordinary(values)) {
#pragma unroll
        for (int k = 0; k < Pack<T>::size; k++)
          if (!form.counts(int64_t(i) * Pack<T>::size - window.head + k)) x[k] = Accumulator<T>(Op<T>::masked_value);
      }
      store_as<T>(result, out, window, i, x);
    }
  }
};

// Packs [begin, end) of a row are dealt out to the block's threads in x, and accumulated.
template <template <class> class Op, class T, class Form>
__device__ typename Op<T>::Part reduce_packs(const Row<Op, T, Form>& row, int64_t begin, int64_t end) {
  constexpr int in_flight = 4;  // loads that a thread starts before it uses the first
  if constexpr (Form::extras) end = min(end, row.form.masked_from(row.window));
  auto visit = [&](auto use) {
    for (int64_t i = begin + threadIdx.x; i < end; i += in_flight * blockDim.x) {
      Pack<T> pa[in_flight], pb[in_flight];
#pragma unroll
      for (int k = 0; k < in_flight; k++) row.load(i + k * blockDim.x, end, pa[k], pb[k], true);
      use(pa, pb);
    }
  };
  return reduce_visited<Op<T>>(row.form, visit, [](const auto& part) { return reduce_threads<T>(part); });
}

template <template <class> class Op, class T, class Form>
__device__ void write_packs(const Row<Op, T, Form>& row, const typename Op<T>::Values& values, int64_t begin,
                            int64_t end) {
  constexpr int in_flight = 4;
  for (int64_t i = begin + threadIdx.x; i < end; i += in_flight * blockDim.x) {
    Pack<T> pa[in_flight], pb[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; k++) row.load(i + k * blockDim.x, end, pa[k], pb[k]);
#pragma unroll
    for (int k = 0; k < in_flight; k++)
      if (i + k * blockDim.x < end) row.write(i + k * blockDim.x, values, pa[k], pb[k]);
  }
}

// blockDim.x threads share a row of at most blockDim.x * kPacks packs; blockDim.y rows a block.
template <template <class> class Op, class T, class Form, int kPacks>
__global__ void __launch_bounds__(1024) resident(const __grid_constant__ Arguments<T> args) {
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < args.rows; first += int64_t(gridDim.x) * blockDim.y) {
    int64_t index = first + threadIdx.y;
    bool exists = index < args.rows;  // lanes without a row still take part in the shuffles
    Row<Op, T, Form, int> row(args, exists ? index : first);
    int packs = exists ? row.window.packs : 0;
    Pack<T> pa[kPacks], pb[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; k++) row.load(threadIdx.x + k * blockDim.x, packs, pa[k], pb[k]);
    typename Op<T>::Part part;
    if constexpr (Op<T>::reduces) {
      if (blockDim.x <= 32)
        part = reduce_short<Op<T>>(pa, pb, row.form, blockDim.x);
      else
        part = reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); },
                                     [](const auto& part) { return reduce_threads<T>(part); });
    }
    if (!exists) continue;
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0);
    if constexpr (Op<T>::writes) {
#pragma unroll
      for (int k = 0; k < kPacks; k++) {
        int at = threadIdx.x + k * blockDim.x;
        if (at < packs) row.write(at, values, pa[k], pb[k]);
      }
    }
  }
}

// One row a block.
template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads) tiled(const __grid_constant__ Arguments<T> args) {
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    Row<Op, T, Form> row(args, index);
    typename Op<T>::Part part;
    if constexpr (Op<T>::reduces) part = reduce_packs(row, 0, row.window.packs);
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0);
    if (Op<T>::writes) write_packs(row, values, 0, row.window.packs);
  }
}

// The two ends of a launch that overlaps the one before.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A part of a row a block.
template <template <class> class Op, class T, class Form>
struct Split {
  int64_t index, begin, end;
  unsigned part;
  Row<Op, T, Form> row;
  __device__ Split(const Arguments<T>& args, unsigned parts)
      : index(blockIdx.x / parts), part(blockIdx.x % parts), row(args, index) {
    begin = row.window.packs * part / parts, end = row.window.packs * (part + 1) / parts;
  }
};

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads)
    split_reduce(const __grid_constant__ Arguments<T> args, typename Op<T>::Part* states, unsigned parts) {
  let_next_kernel_start();
  Split<Op, T, Form> split(args, parts);
  auto part = reduce_packs(split.row, split.begin, split.end);
  if (threadIdx.x == 0) states[blockIdx.x] = part;
}

template <template <class> class Op, class T>
__device__ typename Op<T>::Part merge(const typename Op<T>::Part* states, unsigned parts) {
  typename Op<T>::Part part;
  for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) part = combine<T>(part, states[i]);
  return reduce_threads<T>(part);
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads)
    split_write(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states, unsigned parts) {
  Split<Op, T, Form> split(args, parts);
  typename Op<T>::Part part;
  wait_for_last_kernel();
  if constexpr (Op<T>::reduces) part = merge<Op, T>(states + split.index * parts, parts);
  auto values = Op<T>::finish(part, args, split.index, threadIdx.x == 0 && split.part == 0);
  if (Op<T>::writes) write_packs(split.row, values, split.begin, split.end);
}

// Merges the parts of a row where nothing is written but its statistics.
template <template <class> class Op, class T>
__global__ void split_finish(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states,
                             unsigned parts) {
  wait_for_last_kernel();
  auto part = merge<Op, T>(states + int64_t(blockIdx.x) * parts, parts);
  Op<T>::finish(part, args, blockIdx.x, threadIdx.x == 0);
}

}  // namespace jaxsoft::cuda
