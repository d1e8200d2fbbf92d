// One row as a thread sees it: reading packs of the operands with their mask, and writing packs of the result.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "extras.cuh"
#include "operations/operation.cuh"

namespace jaxsoft::cuda {

// The results of a pack. In a row that is not ordinary, those of masked elements are wrong and must be replaced.
template <class Op, bool quick, class T, class Form>
__device__ void results(const typename Op::Values& values, const Pack<T>& a, const Pack<T>& b, const Form& form,
                        Accumulator<T> (&x)[Pack<T>::size]) {
  using A = Accumulator<T>;
#pragma unroll
  for (int k = 0; k < Pack<T>::size; k++) {
    if constexpr (quick && Op::has_quick) {
      x[k] = exp2_approximately(Op::quick_exponent(a, b, k, form, values.shift));
      continue;
    }
    A first, second = Op::operands > 1 ? b.get(k) : A(0);
    if constexpr (Form::extras && Op::a_is_scores) first = form.score(a, b, k);
    else first = a.get(k);
    x[k] = Op::value(values, first, second);
    if constexpr (Form::extras) {
      if (Op::gradient) x[k] *= form.scale;
      if (Op::gradient && Form::capped) x[k] *= cap_slope<T>(a.get(k), form.cap);
      if (!Op::a_is_scores && form.masked && first == 0) x[k] = 0;
    }
  }
}

// Writes pack i of a row's result in the element type that `type` names. Elements beyond the row's ends are not
// written.
template <class T, Layout layout>
__device__ void store_as(ResultType type, void* row, const Window<T, layout>& window, int i,
                         const Accumulator<T> (&x)[Pack<T>::size]) {
  auto each = [&](auto* out) {
    using R = std::remove_pointer_t<decltype(out)>;
    constexpr int size = Pack<T>::size;
    const int first = i * size - window.head;
    if (first >= 0 && first + size <= window.n && reinterpret_cast<uintptr_t>(out + first) % sizeof(uint2) == 0) {
      alignas(sizeof(uint2)) R values[size];
#pragma unroll
      for (int k = 0; k < size; k++) values[k] = narrow<R>(x[k]);
      constexpr int words = size * sizeof(R) / 8;
#pragma unroll
      for (int k = 0; k < words; k++)
        reinterpret_cast<uint2*>(out + first)[k] = reinterpret_cast<const uint2*>(values)[k];
      return;
    }
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < window.n) out[first + k] = narrow<R>(x[k]);
  };
  if (type == ResultType::same) return each(static_cast<T*>(row));
  if constexpr (sizeof(T) == 2) each(static_cast<float*>(row));
  if constexpr (sizeof(T) == 4) {
    if (type == ResultType::f16) each(static_cast<__half*>(row));
    else each(static_cast<__nv_bfloat16*>(row));
  }
}

// One row of the operands, or a part of one: the pointers, the window on them, and the row's extras and label.
template <template <class> class Op, class T, class Form, Layout layout = Layout::any>
struct Row {
  const T *a, *b;
  void* out;
  Window<T, layout> window;
  Form form;
  ResultType result;
  int counted;          // packs from this one on are masked entirely, and need not be read
  int label = INT_MIN;  // the label's element, counted from the first pack; far from all packs if it lies elsewhere
  Accumulator<T> label_cotangent = 0, distance_cotangent = 0;  // for the gradient at the label

  __device__ Row(const Arguments<T>& args, int64_t row) : Row(args, row, 0, args.n) {}
  // A part of the row: elements [begin, end), at most as many as an int can count. Every part but the first must begin
  // where a pack begins.
  __device__ Row(const Arguments<T>& args, int64_t row, int64_t begin, int64_t end)
      : a(args.a + row * args.n + begin),
        b(Op<T>::operands > 1 ? args.b + row * args.n + begin : nullptr),
        window(a, static_cast<int>(end - begin), args.vector),
        form(args, row, begin, window),
        result(args.result),
        counted(window.packs) {
    asm("" : "+l"(a));  // keeps the compiler from computing the pointer again for every pack
    int64_t size = sizeof(T);
    if (Form::extras && result != ResultType::same) size = result == ResultType::f32 ? 4 : 2;
    out = static_cast<char*>(args.out) + (row * args.n + begin) * size;
    if constexpr (Form::extras) counted = min(counted, form.masked_from(window));
    if constexpr (Op<T>::labelled) {
      if (!args.labels) return;
      const int32_t given = args.labels[row];
      if (given == kNoRow) counted = 0;
      else if (given >= begin && given < end) label = static_cast<int>(given - begin) + window.head;
      if (Op<T>::writes) {
        label_cotangent = args.label_cotangent[row];
        distance_cotangent = args.distance_cotangent ? args.distance_cotangent[row] : 0;
      }
    }
  }
  // Whether the label is in pack i.
  __device__ bool has_label(int i) const {
    return static_cast<unsigned>(label - i * Pack<T>::size) < static_cast<unsigned>(Pack<T>::size);
  }

  // Loads packs first, first + step, ... of the operands, if they lie before `end`, and masks them. With `reduce_only`,
  // a is left out if the reduction does not need it. All reads are in flight before the first is used.
  template <int count>
  __device__ void load(int first, int step, int end, Pack<T> (&pa)[count], Pack<T> (&pb)[count],
                       bool reduce_only = false) const {
    constexpr bool masks_a = Form::extras && Op<T>::a_is_scores;
    const bool reads_a = !reduce_only || Op<T>::reads_a_to_reduce || Form::extras;
    [[maybe_unused]] typename Form::MaskBytes mask[count];
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
      if constexpr (masks_a) {
        mask[k] = kEveryByte;
        if (i < end) mask[k] = form.fetch_where(i, window);
      }
    }
    if constexpr (masks_a) {
      if (form.scales_loaded()) {
#pragma unroll
        for (int k = 0; k < count; k++)
          if (first + k * step < end) pa[k].multiply_each(form.scale);
      }
    }
    if constexpr (Form::capped) {
#pragma unroll
      for (int k = 0; k < count; k++)
        if (first + k * step < end) pa[k].make_finite();
    }
#pragma unroll
    for (int k = 0; k < count; k++) {
      int i = first + k * step;
      if (i >= end) continue;
      if constexpr (masks_a) {
        form.apply_mask(pa[k], pb[k], Op<T>::operands > 1 || Form::bias, mask[k], i, window);
      } else {
        if (reads_a) window.trim(pa[k], i, Op<T>::fill());
        if constexpr (Op<T>::operands > 1) window.trim(pb[k], i, Op<T>::fill());
      }
      if constexpr (Op<T>::labelled && Op<T>::reduces)
        if (has_label(i)) pa[k].replace(label - i * Pack<T>::size, fill());
    }
  }
  // Loads packs first, first + 32, ... of a row of one operand without extras, and leaves out what the reduction does.
  // As the compiler knows the distances, and as nothing needs to be gathered, this takes fewer instructions.
  template <int count>
  __device__ void load_run(int first, Pack<T> (&pa)[count]) const {
    const auto* const from = reinterpret_cast<const Pack<T>*>(a + (first * Pack<T>::size - window.head));
    if (first + (count - 1) * 32 < window.packs) {
#pragma unroll
      for (int k = 0; k < count; k++) pa[k] = from[k * 32];
    } else {
#pragma unroll
      for (int k = 0; k < count; k++) {
        pa[k].fill(fill());
        if (first + k * 32 < window.packs) pa[k] = from[k * 32];
      }
    }
    // Leaves out those elements of pack i for which bytes(i) has a 0.
    auto keep = [&](int i, auto bytes) {
      int to = i - first;
      if (to < 0 || to >= count * 32 || to % 32 != 0) return;
      asm volatile("" : "+r"(i));  // keeps the compiler from computing the bytes earlier
      const uint64_t kept = bytes(i);
#pragma unroll
      for (int k = 0; k < count; k++, to -= 32)
        if (to == 0) pa[k].keep(kept, fill());
    };
    auto inside = [&](int i) { return window.bytes_inside(i); };
    if (window.head > 0) keep(0, inside);
    if (window.whole_end < window.packs) keep(window.whole_end, inside);
    if constexpr (Op<T>::labelled && Op<T>::reduces)
      keep(label / Pack<T>::size, [&](int i) { return kEveryByte - (uint64_t(1) << (label - i * Pack<T>::size) * 8); });
  }
  // The element that changes no reduction.
  __device__ T fill() const {
    if constexpr (Form::extras && Op<T>::a_is_scores) return form.masked_element;
    else return Op<T>::fill();
  }
  // Loads packs first, first + step, ... from shared memory, where the first lies at held_a and held_b. All packs
  // before `end` belong to the row entirely; with `all`, these are all. Without `both`, a is left out.
  template <bool all = false, int count>
  __device__ void load_shared(const Pack<T>* held_a, const Pack<T>* held_b, int first, int step, int end, bool both,
                            Pack<T> (&pa)[count], Pack<T> (&pb)[count]) const {
#pragma unroll
    for (int k = 0; k < count; k++) {
      pa[k].fill(fill()), pb[k].fill(Op<T>::fill());
      if (!all && first + k * step >= end) continue;
      if (both) pa[k] = held_a[k * step];
      if (Op<T>::operands > 1) pb[k] = held_b[k * step];
    }
    if constexpr (Form::extras && Op<T>::a_is_scores) {
      if (form.unmasked && !form.scales_loaded()) return;
#pragma unroll
      for (int k = 0; k < count; k++) {
        const int i = first + k * step;
        if (!all && i >= end) continue;
        if (form.scales_loaded()) pa[k].multiply_each(form.scale);
        if (!form.unmasked) form.apply_mask(pa[k], pb[k], Op<T>::operands > 1, form.fetch_where(i, window), i, window);
      }
    }
  }
  // Whether the results of masked elements are right as they are computed. A gradient of 0 times a scale that is
  // infinite or NaN is not.
  __device__ bool ordinary(const typename Op<T>::Values& values) const {
    if constexpr (Form::extras && Op<T>::gradient) return Op<T>::ordinary(values) && isfinite(form.scale);
    else return Op<T>::ordinary(values);
  }
  // Whether the results may be written as packs, without looking up the mask again.
  __device__ bool writes_packs(const typename Op<T>::Values& values) const {
    return !Form::extras || (result == ResultType::same && ordinary(values));
  }

  // Whether the operation has a quick formula that is exact enough for this row.
  __device__ bool quick(const typename Op<T>::Values& values) const {
    if constexpr (Op<T>::has_quick) return values.quick && Op<T>::may_be_quick(values.ref, form);
    else return false;
  }

  // The gradient at the label. It does not depend on the mask.
  __device__ Accumulator<T> label_gradient() const {
    using A = Accumulator<T>;
    const A x = widen(a[label - window.head]);
    A dx = label_cotangent;
    if (Form::capped || x != -infinity<A>()) dx += distance_cotangent;
    if constexpr (Form::capped) dx *= cap_slope<T>(x, form.cap);
    return dx;
  }
  // Pack i of the result, in which the label's element is replaced if the pack has it.
  __device__ Pack<T> labelled(Pack<T> pack, int i) const {
    if constexpr (Op<T>::labelled && Op<T>::writes)
      if (has_label(i)) pack.replace(label - i * Pack<T>::size, narrow<T>(label_gradient()));
    return pack;
  }

  // A pack of results, as they are in an ordinary row, without the label's.
  template <bool quick = false>
  __device__ Pack<T> result_pack(const typename Op<T>::Values& values, const Pack<T>& pa, const Pack<T>& pb) const {
    Accumulator<T> x[Pack<T>::size];
    results<Op<T>, quick>(values, pa, pb, form, x);
    Pack<T> pack;
    pack.set_all(x);
    if constexpr (quick && kUnit<T> != 1) pack.multiply(kUnit<T>);
    return pack;
  }
  // Computes and writes pack i of the result.
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
      if (Op<T>::a_is_scores && !ordinary(values)) {
        auto mask = i < counted ? form.fetch_where(i, window) & form.inside_mask(i, window) : 0;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; k++)
          if (!(mask >> 8 * k & 1)) x[k] = Accumulator<T>(Op<T>::masked_value);
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

}  // namespace jaxsoft::cuda
