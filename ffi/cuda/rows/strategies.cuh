// Ways to run a row operation that need nothing but registers and the caches.
//
//   resident  a row in the registers of the threads that share it: a group of lanes, a warp, or a block. One read.
//   tiled     a row too long for that, by one block: reduced in a first pass, read again and written in a second.
//   split     few long rows: each cut over many blocks. One launch writes the parts' states, the next merges them and
//             writes; where they are many, one in between merges. The states wait in a workspace that XLA provides. From
//             Hopper on a launch is made while the one before still runs, and waits for its end within the kernel.
//   spread    the same, but all blocks run at once, keep their parts in registers, and wait for each other. One read.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "../devices.cuh"
#include "operations.cuh"

namespace jaxsoft::cuda {

// That a multiprocessor can have.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kMostThreads = 1536;
#else
constexpr int kMostThreads = 2048;
#endif

// A block that works through a long row: its threads, the packs that each has on the way at once, and how many such
// blocks a multiprocessor must have room for.
template <class Op>
constexpr int kThreads = Op::reduces ? 512 : 128;
template <class Op, class Form>
constexpr int kInFlight = Op::reduces || Form::extras ? 4 : 2;
template <class Op, class T, class Form>
constexpr int kBlocks = sizeof(T) == 8 ? 1
                        : !Op::reduces ? kMostThreads / kThreads<Op> / (Form::extras ? 2 : 1)
                        : Form::extras ? 1 : Op::writes ? 2 : 3;

// One row of the operands, or some elements of it: the pointers, the window on them, and the row's extras.
template <template <class> class Op, class T, class Form, Layout layout = Layout::any>
struct Row {
  const T *a, *b;
  void* out;
  Window<T, layout> window;
  Form form;
  ResultType result;
  int counted;  // packs from here on are masked as a whole, and need not be read
  int label = INT_MIN;  // where that of the row is, counted from the window's first pack; else far from all packs
  Accumulator<T> h = 0, v = 0;  // of the gradient there

  __device__ Row(const Arguments<T>& args, int64_t row) : Row(args, row, 0, args.n) {}
  // Elements [begin, end): as many as an int can count, and from the second on they begin with a pack.
  __device__ Row(const Arguments<T>& args, int64_t row, int64_t begin, int64_t end)
      : a(args.a + row * args.n + begin),
        b(Op<T>::operands > 1 ? args.b + row * args.n + begin : nullptr),
        window(a, static_cast<int>(end - begin), args.vector),
        form(args, row, begin, window),
        result(args.result),
        counted(window.packs) {
    asm("" : "+l"(a));  // or it is computed anew for every pack
    int64_t size = sizeof(T);
    if (Form::extras && result != ResultType::same) size = result == ResultType::f32 ? 4 : 2;
    out = static_cast<char*>(args.out) + (row * args.n + begin) * size;
    if constexpr (Form::extras) counted = min(counted, form.masked_from(window));
    if constexpr (Op<T>::labelled) {
      if (!args.labels) return;
      const int32_t given = args.labels[row];
      if (given == kNoRow) counted = 0;
      else if (given >= begin && given < end) label = static_cast<int>(given - begin) + window.head;
      if (Op<T>::writes) h = args.h[row], v = args.v ? args.v[row] : 0;
    }
  }
  // Whether pack i has the label.
  __device__ bool has_label(int i) const {
    return static_cast<unsigned>(label - i * Pack<T>::size) < static_cast<unsigned>(Pack<T>::size);
  }

  // Packs first, first + step, ... of the operands, those before `end`. `reduce_only`: b alone, where the reduction
  // needs no more. All reads are on their way before the first is used.
  template <int count>
  __device__ void load(int first, int step, int end, Pack<T> (&pa)[count], Pack<T> (&pb)[count],
                       bool reduce_only = false) const {
    constexpr bool marks_a = Form::extras && Op<T>::a_is_scores;
    const bool reads_a = !reduce_only || Op<T>::reads_a_to_reduce || Form::extras;
    [[maybe_unused]] typename Form::Marks marks[count];
    end = min(end, counted);
#pragma unroll
    for (int k = 0; k < count; k++) {
      int i = first + k * step;
      pa[k].fill(fill());
      if (reads_a && i < end) pa[k] = window.fetch(a, i);
      if constexpr (Op<T>::operands > 1) {
        pb[k].fill(Op<T>::fill());
        if (i < end) pb[k] = window.fetch(b, i);
      } else if constexpr (Form::bias) {
        pb[k].fill(narrow<T>(0));
        if (i < end) pb[k] = window.fetch_anywhere(form.bias_row, form.bias_aligned, i);
      }
      if constexpr (marks_a) {
        marks[k] = kEveryByte;
        if (i < end) marks[k] = form.fetch_where(i, window);
      }
    }
    if constexpr (marks_a) {
      if (form.scale == 0) {
#pragma unroll
        for (int k = 0; k < count; k++)
          if (first + k * step < end) pa[k].times_zero();
      }
    }
    if constexpr (marks_a && Op<T>::labelled) {
      if (form.cap > 0) {
#pragma unroll
        for (int k = 0; k < count; k++)
          if (first + k * step < end) pa[k].make_finite();
      }
    }
#pragma unroll
    for (int k = 0; k < count; k++) {
      int i = first + k * step;
      if (i >= end) continue;
      if constexpr (marks_a) {
        form.mark(pa[k], pb[k], Op<T>::operands > 1 || Form::bias, marks[k], i, window);
      } else {
        if (reads_a) window.trim(pa[k], i, Op<T>::fill());
        if constexpr (Op<T>::operands > 1) window.trim(pb[k], i, Op<T>::fill());
      }
      if constexpr (Op<T>::labelled && Op<T>::reduces)
        if (has_label(i)) pa[k].replace(label - i * Pack<T>::size, fill());
    }
  }
  // The element that changes no reduction.
  __device__ T fill() const {
    if constexpr (Form::extras && Op<T>::a_is_scores) return form.masked_element;
    else return Op<T>::fill();
  }
  // Packs first, first + step, ... of the operands, which are all the row's own before `end` and have been copied to
  // shared memory, the first to held_a and held_b. `both`: a is wanted as well.
  template <int count>
  __device__ void load_held(const Pack<T>* held_a, const Pack<T>* held_b, int first, int step, int end, bool both,
                            Pack<T> (&pa)[count], Pack<T> (&pb)[count]) const {
#pragma unroll
    for (int k = 0; k < count; k++) {
      pa[k].fill(fill()), pb[k].fill(Op<T>::fill());
      if (first + k * step >= end) continue;
      if (both) pa[k] = held_a[k * step];
      if (Op<T>::operands > 1) pb[k] = held_b[k * step];
    }
    if constexpr (Form::extras && Op<T>::a_is_scores) {
      if (form.unmasked && form.scale != 0) return;
#pragma unroll
      for (int k = 0; k < count; k++) {
        const int i = first + k * step;
        if (i >= end) continue;
        if (form.scale == 0) pa[k].times_zero();
        if (!form.unmasked) form.mark(pa[k], pb[k], Op<T>::operands > 1, form.fetch_where(i, window), i, window);
      }
    }
  }
  // Whether the results of whole packs may be written as packs, and nothing is to be looked up again.
  __device__ bool writes_packs(const typename Op<T>::Values& values) const {
    return !Form::extras || (result == ResultType::same && Op<T>::ordinary(values));
  }

  // Whether exponentials may be taken without a difference or a factor.
  __device__ bool quick(const typename Op<T>::Values& values) const {
    return values.quick && Op<T>::may_be_quick(values.ref, form);
  }

  // The gradient at the label, which does not depend on a mask.
  __device__ Accumulator<T> label_gradient() const {
    using A = Accumulator<T>;
    const A x = widen(a[label - window.head]);
    A dx = h;
    bool capped = false;
    if constexpr (Form::extras) capped = form.cap > 0;
    if (capped || x != -infinity<A>()) dx += v;
    if constexpr (Form::extras)
      if (capped) dx *= cap_slope(x, form.cap);
    return dx;
  }
  // Pack i of the result, with what the label has.
  __device__ Pack<T> labelled(Pack<T> pack, int i) const {
    if constexpr (Op<T>::labelled && Op<T>::writes)
      if (has_label(i)) pack.replace(label - i * Pack<T>::size, narrow<T>(label_gradient()));
    return pack;
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
  __device__ void write(int i, const typename Op<T>::Values& values, const Pack<T>& pa, const Pack<T>& pb) const {
    if (writes_packs(values)) {
      if constexpr (Form::extras && Op<T>::a_is_scores) {
        if (i >= counted) {
          Pack<T> pack;
          pack.fill(narrow<T>(Op<T>::masked_value));
          return window.store(static_cast<T*>(out), i, labelled(pack, i));
        }
      }
      if constexpr (Op<T>::has_quick)
        if (quick(values)) return window.store(static_cast<T*>(out), i, result_pack<true>(values, pa, pb));
      window.store(static_cast<T*>(out), i, labelled(result_pack(values, pa, pb), i));
    } else if constexpr (Form::extras) {
      Accumulator<T> x[Pack<T>::size];
      results<Op<T>, false>(values, pa, pb, form, x);
      if (Op<T>::a_is_scores && !Op<T>::ordinary(values)) {
        auto marks = i < counted ? form.marks(i, window) : 0;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; k++)
          if (!(marks >> 8 * k & 1)) x[k] = Accumulator<T>(Op<T>::masked_value);
      }
      if constexpr (Op<T>::labelled) {
        if (has_label(i)) {
#pragma unroll
          for (int k = 0; k < Pack<T>::size; k++)
            if (i * Pack<T>::size + k == label) x[k] = label_gradient();
        }
      }
      if constexpr (layout == Layout::whole) {
        Pack<T> pack;
        pack.set_all(x);
        window.store(static_cast<T*>(out), i, pack);
      } else {
        store_as<T>(result, out, window, i, x);
      }
    }
  }
};

// The packs of a row, or a part of one, are dealt out to the block's threads in x, and accumulated.
template <template <class> class Op, class T, class Form>
__device__ typename Op<T>::Part reduce_packs(const Row<Op, T, Form>& row) {
  auto visit = [&](auto use) {
    for (int i = threadIdx.x; i < row.counted; i += kInFlight<Op<T>, Form> * blockDim.x) {
      Pack<T> pa[kInFlight<Op<T>, Form>], pb[kInFlight<Op<T>, Form>];
      row.load(i, blockDim.x, row.counted, pa, pb, true);
      use(pa, pb);
    }
  };
  return reduce_visited<Op<T>>(row.form, visit, [](const auto& part) { return reduce_threads<T>(part); });
}

// `values()` is asked for when the first packs are on their way.
template <template <class> class Op, class T, class Form, class Values>
__device__ void write_packs(const Row<Op, T, Form>& row, Values values) {
  const int step = blockDim.x, packs = row.window.packs;
  Pack<T> pa[kInFlight<Op<T>, Form>], pb[kInFlight<Op<T>, Form>];
  row.load(threadIdx.x, step, packs, pa, pb);
  const auto found = values();
  for (int i = threadIdx.x; i < packs;) {
#pragma unroll
    for (int k = 0; k < kInFlight<Op<T>, Form>; k++)
      if (i + k * step < packs) row.write(i + k * step, found, pa[k], pb[k]);
    i += kInFlight<Op<T>, Form> * step;
    row.load(i, step, packs, pa, pb);
  }
}

// Threads of a block. With extras, more registers for each are worth more than more threads.
template <class Form, int kPacks>
constexpr int most_threads = Form::extras && kPacks > 4 ? 256 : 1024;

// A row of at most blockDim.x * kPacks packs, by as many threads. All lanes of a warp take part in the shuffles, those
// for which no row `exists` too. Of packs first, first + step, ... those with k * step < written are written.
template <template <class> class Op, class T, int kPacks, class Row>
__device__ void held_row(const Arguments<T>& args, const Row& row, int64_t index, bool exists, int left, int written,
                         Pack<T> (&pa)[kPacks], Pack<T> (&pb)[kPacks]) {
  using A = Accumulator<T>;
  const int step = blockDim.x, thread = threadIdx.x;
  // Long sums of f64, and for f32 of products, which cancel, are compensated.
  const bool compensated = step > 32 && sizeof(T) >= (Op<T>::scores ? 8 : 4);
  typename Op<T>::Part part;
  if constexpr (Op<T>::reduces) {
    __shared__ A shared[3][32];
    auto compensated_sum = [&] {
      return reduce_visited<Op<T>>(row.form, [&](auto use) { use(pa, pb); },
                                   [](const auto& part) { return reduce_threads<T>(part); });
    };
    if constexpr (Op<T>::sums) part = compensated_sum();
    else part = compensated ? compensated_sum() : reduce_held<Op<T>>(pa, pb, row.form, left, step, shared);
  }
  if (!exists) return;
  // What the reduction has unpacked would stay so up to the result, for which there are not registers enough. Hence
  // packs become other ones, of which the compiler does not know that they are the same.
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

// The same from the beginning, not inlined: what it needs is not kept ready.
template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
__device__ __noinline__ void row_anew(const Arguments<T>& args, int64_t index, bool exists) {
  Row<Op, T, Form, layout> row(args, index);
  const int packs = exists ? row.window.packs : 0, left = min(packs, row.counted) - int(threadIdx.x);
  Pack<T> pa[kPacks], pb[kPacks];
  row.load(threadIdx.x, blockDim.x, packs, pa, pb);
  held_row<Op, T, kPacks>(args, row, index, exists, left, left, pa, pb);
}

// blockDim.x threads share a row of at most blockDim.x * kPacks packs; blockDim.y rows a block.
template <template <class> class Op, class T, class Form, int kPacks, Layout layout>
__global__ void __launch_bounds__(most_threads<Form, kPacks>, most_threads<Form, kPacks> == 256 ? 3 : 1)
    resident(const __grid_constant__ Arguments<T> args) {
  using A = Accumulator<T>;
  const int64_t first = int64_t(blockIdx.x) * blockDim.y, turn = first + threadIdx.y;
  const bool exists = turn < args.rows;  // lanes without a row still take part in the shuffles
  const int64_t index = args.template row<Form::bias>(exists ? turn : first);
  Row<Op, T, Form, layout> row(args, index);
  const int packs = exists ? row.window.packs : 0, step = blockDim.x, thread = threadIdx.x;
  const int left = min(packs, row.counted) - thread;  // k * step < left: pack k of the thread is to be reduced

  // What is masked as a whole is written before anything is read.
  constexpr bool early = Form::extras && Op<T>::a_is_scores && Op<T>::writes && layout == Layout::whole;
  const int written = early ? left : packs - thread;  // k * step < written: pack k is written in the end
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

  // Where 16 bits are written exponentials are taken once, of the scores' distance from one of them, near which the
  // others mostly are: no maximum has to be found before it for f32 to hold their sum. A warp's row takes one that
  // lane 0 has; a block's the first, or, where causal leaves little to be read and a read more costs 3 %, 0.
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
    held_row<Op, T, kPacks>(args, row, index, exists, left, written, pa, pb);
  }
}

// One row a block.
template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads<Op<T>>, kBlocks<Op<T>, T, Form>)
    tiled(const __grid_constant__ Arguments<T> args) {
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    Row<Op, T, Form> row(args, index);
    typename Op<T>::Part part;
    if constexpr (Op<T>::reduces) part = reduce_packs(row);
    auto values = Op<T>::finish(part, args, index, threadIdx.x == 0);
    if (Op<T>::writes) write_packs(row, [&] { return values; });
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

// How rows are split: into so many parts, each of so many packs but at the row's ends.
struct Split {
  unsigned parts;
  int64_t packs;
  // A row of so many packs, into no more than so many parts, of whole lines: else warps share them.
  Split(int64_t of_row, int64_t most)
      : packs(((of_row + most - 1) / most + kLine - 1) / kLine * kLine) {
    parts = static_cast<unsigned>((of_row + packs - 1) / packs);
  }
};

template <template <class> class Op, class T, class Form>
__device__ Row<Op, T, Form> part_of_row(const Arguments<T>& args, unsigned block, const Split& split) {
  const int64_t row = block / split.parts;
  const int head = head_of(args.a + row * args.n, args.vector);
  auto element = [&](unsigned part) { return max(int64_t(0), min(part * split.packs * Pack<T>::size - head, args.n)); };
  const unsigned part = block % split.parts;
  return {args, row, element(part), element(part + 1)};
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads<Op<T>>, kBlocks<Op<T>, T, Form>)
    split_reduce(const __grid_constant__ Arguments<T> args, typename Op<T>::Part* states, Split split) {
  let_next_kernel_start();
  auto part = reduce_packs(part_of_row<Op, T, Form>(args, blockIdx.x, split));
  if (threadIdx.x == 0) states[blockIdx.x] = part;
}

template <template <class> class Op, class T>
__device__ typename Op<T>::Part merge(const typename Op<T>::Part* states, unsigned parts) {
  typename Op<T>::Part part;
  for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) part = combine<T>(part, states[i]);
  return reduce_threads<T>(part);
}

// Where a row has many parts, their states are merged once, by a block a row, and not by every block that writes.
template <template <class> class Op, class T>
__global__ void split_merge(const typename Op<T>::Part* states, unsigned parts, typename Op<T>::Part* merged) {
  let_next_kernel_start();
  wait_for_last_kernel();
  auto part = merge<Op, T>(states + int64_t(blockIdx.x) * parts, parts);
  if (threadIdx.x == 0) merged[blockIdx.x] = part;
}

// `states`: so many of each row.
template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(kThreads<Op<T>>, kBlocks<Op<T>, T, Form>)
    split_write(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states, unsigned of_row,
                Split split) {
  // What has been read last is still in the cache.
  const unsigned block = Op<T>::reduces ? gridDim.x - 1 - blockIdx.x : blockIdx.x, row = block / split.parts;
  write_packs(part_of_row<Op, T, Form>(args, block, split), [&] {
    typename Op<T>::Part part;
    wait_for_last_kernel();
    if constexpr (Op<T>::reduces) part = merge<Op, T>(states + row * of_row, of_row);
    return Op<T>::finish(part, args, row, threadIdx.x == 0 && block % split.parts == 0);
  });
}

// Merges the parts of a row where nothing is written but its statistics.
template <template <class> class Op, class T>
__global__ void split_finish(const __grid_constant__ Arguments<T> args, const typename Op<T>::Part* states,
                             unsigned parts) {
  wait_for_last_kernel();
  auto part = merge<Op, T>(states + int64_t(blockIdx.x) * parts, parts);
  Op<T>::finish(part, args, blockIdx.x, threadIdx.x == 0);
}

struct Spread {
  static constexpr int threads = 512, blocks = 2;  // of a block, at most; of a multiprocessor
};

// A block has at most blockDim.x * kPacks packs of a row.
template <template <class> class Op, class T, class Form, int kPacks>
__global__ void __launch_bounds__(Spread::threads, Spread::blocks)
    spread(const __grid_constant__ Arguments<T> args, typename Op<T>::Part* states, Split split) {
  const auto row = part_of_row<Op, T, Form>(args, blockIdx.x, split);
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

}  // namespace jaxsoft::cuda
