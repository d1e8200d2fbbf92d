// A row in the registers of the threads that share it: a group of lanes, a warp, or a block. Every operand is read
// once.
#pragma once

#include <algorithm>

#include "reduce.cuh"
#include "row.cuh"
#include "sizes.cuh"

namespace jaxsoft::cuda {

// Reduces and writes a row of at most blockDim.x * kPacks packs, which the block's threads in x have loaded. All lanes
// of a warp take part in the shuffles, even those for which no row `exists`. Of a thread's packs k = 0, 1, ..., those
// with k * step < left are reduced, and those with k * step < written are written.
template <template <class> class Op, class T, int kPacks, class Row>
__device__ void complete_row(const Arguments<T>& args, const Row& row, int64_t index, bool exists, int left,
                             int written, Pack<T> (&pa)[kPacks], Pack<T> (&pb)[kPacks]) {
  using A = Accumulator<T>;
  const int step = blockDim.x, thread = threadIdx.x;
  // Long sums are compensated in f64, and in f32 where their terms are products, which may cancel.
  const bool compensated = step > 32 && sizeof(T) >= (Op<T>::scores ? 8 : 4);
  typename Op<T>::Part part;
  if constexpr (Op<T>::reduces) {
    __shared__ A shared[3][32];
    auto compensated_sum = [&] {
      return reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); },
                                   [](const auto& part) { return reduce_threads<T>(part); });
    };
    if constexpr (Op<T>::compensates) part = compensated_sum();
    else part = compensated ? compensated_sum() : reduce_registers<Op<T>>(pa, pb, row.form, left, step, shared);
  }
  if (!exists) return;
  // The compiler would keep the elements that the reduction has unpacked until the results are computed, but there are
  // not enough registers for that. So the packs are changed by a mask that is always 0, which the compiler cannot know.
  if constexpr (sizeof(T) == 2 && Op<T>::operands == 2 && !Op<T>::a_is_scores) {
    const auto zero = static_cast<uint32_t>(args.n >> 63);
#pragma unroll
    for (int k = 0; k < kPacks; k++) pa[k].toggle(zero), pb[k].toggle(zero);
  }
  auto values = Op<T>::finish(part, args, index, thread == 0);
  if constexpr (Op<T>::writes) {
#pragma unroll
    for (int k = 0; k < kPacks; k++)
      if (k * step < written) row.write(thread + k * step, values, pa[k], pb[k]);
  }
}

// The same, from the loads on. It is not inlined, so that the caller keeps no registers for it.
template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
__device__ __noinline__ void row_anew(const Arguments<T>& args, int64_t index, bool exists) {
  Row<Op, T, Form, layout> row(args, index);
  const int packs = exists ? row.window.packs : 0, left = min(packs, row.counted) - int(threadIdx.x);
  Pack<T> pa[kPacks], pb[kPacks];
  row.load(threadIdx.x, blockDim.x, packs, pa, pb);
  complete_row<Op, T, kPacks>(args, row, index, exists, left, left, pa, pb);
}

// blockDim.x threads share a row of at most blockDim.x * kPacks packs. A block has blockDim.y rows.
template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
__global__ void __launch_bounds__(RegisterRow::most_threads(Form::extras, kPacks),
                                  RegisterRow::blocks(Form::extras, kPacks))
    register_row(const __grid_constant__ Arguments<T> args) {
  using A = Accumulator<T>;
  const int64_t first = int64_t(blockIdx.x) * blockDim.y, turn = first + threadIdx.y;
  const bool exists = turn < args.rows;  // lanes without a row still take part in the shuffles
  const int64_t index = args.template row<Form::bias>(exists ? turn : first);
  Row<Op, T, Form, layout> row(args, index);
  const int packs = exists ? row.window.packs : 0, step = blockDim.x, thread = threadIdx.x;
  const int left = min(packs, row.counted) - thread;  // the thread's packs k with k * step < left are reduced

  // Packs that are masked entirely are written before anything is read.
  constexpr bool early = Form::extras && Op<T>::a_is_scores && Op<T>::writes && layout == Layout::whole;
  const int written = early ? left : packs - thread;  // those with k * step < written are written in the end
  if constexpr (early) {
    Pack<T> pack;
    pack.fill(narrow<T>(Op<T>::masked_value));
#pragma unroll
    for (int k = 0; k < kPacks; k++)
      if (k * step >= left && k * step < packs - thread)
        row.window.store(static_cast<T*>(row.out), thread + k * step, row.labelled(pack, thread + k * step));
  }
  constexpr bool quick = Op<T>::has_quick && (Form::extras ? layout == Layout::whole : kPacks <= 5);
  Pack<T> pa[kPacks], pb[kPacks];
  row.load(thread, step, packs, pa, pb);

  // 16-bit results take one exponential for each score, relative to one of the row's scores instead of their maximum.
  // Mostly the others are so near to it that f32 can represent their sum; if not, the row is done anew. A row of one
  // warp takes a score that lane 0 has. A row of a block takes its first score. Where a limit leaves packs out, reading
  // that score once more would cost 3 %, so 0 takes its place.
  if constexpr (quick) {
    A near = 0;
    if (step <= 32) near = __shfl_sync(0xffffffffu, pa[0].get(Pack<T>::size - 1), 0, step);
    else if (row.counted == row.window.packs) near = widen(row.a[0]);
    const A shift = Op<T>::quick_shift(near, row.form);
    A x[kPacks][Pack<T>::size], sums[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; k++) {
      sums[k] = 0;
      if (k * step < left) sums[k] = Op<T>::quick_terms(pa[k], pb[k], row.form, shift, x[k]);
    }
    __shared__ A shared[32];
    const A s = reduce_values(tree_sum(sums), A(0), shared, [](A x, A y) { return x + y; });
    const bool holds = Op<T>::holds(s);
    if (exists && holds) {
#pragma unroll
      for (int k = 0; k < kPacks; k++)
        if (k * step < written) {
          Pack<T> pack;
          pack.set_all(x[k], __fdividef(1.f, s));
          row.window.store(static_cast<T*>(row.out), thread + k * step, pack);
        }
    }
    if (!__all_sync(0xffffffffu, !exists || holds))
      row_anew<Op, T, Form, kPacks, layout>(args, index, exists && !holds);
  } else {
    complete_row<Op, T, kPacks>(args, row, index, exists, left, written, pa, pb);
  }
}

template <template <class> class Op, class T, class Form, int kPacks>
cudaError_t launch_register_row(const Arguments<T>& args, Layout layout, int64_t packs, cudaStream_t stream) {
  int64_t threads = (packs + kPacks - 1) / kPacks, rows_per_block = 1;
  if (threads <= 32) {
    int64_t lanes = 1;
    while (lanes < threads) lanes *= 2;
    threads = lanes;
    rows_per_block = RegisterRow::short_threads / lanes;
  } else {
    threads = (threads + 31) / 32 * 32;
  }
  int64_t blocks = std::min<int64_t>((args.rows + rows_per_block - 1) / rows_per_block, 0x7fffffff);
  auto kernel = register_row<Op, T, Form, kPacks, Layout::any>;
  // f64 and the rare sums do without kernels for aligned rows, which saves compile time.
  if constexpr (sizeof(T) < 8 && !Op<T>::sums)
    if (layout == Layout::whole) kernel = register_row<Op, T, Form, kPacks, Layout::whole>;
  if constexpr (!Form::extras && kPacks <= 2 && sizeof(T) == 2 && !Op<T>::sums)
    if (layout == Layout::halves) kernel = register_row<Op, T, Form, kPacks, Layout::halves>;
  kernel<<<blocks, dim3(threads, rows_per_block), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace jaxsoft::cuda
