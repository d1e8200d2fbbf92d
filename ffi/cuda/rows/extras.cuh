// Extras: operands that change what a row's scores are, or which of them count (scale, limit, where, bias), and the
// soft cap.
//
// A kernel is compiled for each form that its operation may have: Plain, and WithExtras without more, with a bias or
// with a cap. In the plain form all of this vanishes. A masked element is replaced, as it is read, by an infinity whose
// score is -inf. So neither the reduction nor, in an ordinary row, the results need to know of the mask. Only in a row
// whose values are not finite, the mask is looked up again for the results.
#pragma once

#include "arguments.cuh"
#include "score.cuh"
#include "../fold.cuh"

namespace jaxsoft::cuda {

// The form of a call without extras: a score is x itself.
struct Plain {
  static constexpr bool extras = false, bias = false, capped = false;
  struct MaskBytes {};
  template <class T, class Window>
  __device__ Plain(const Arguments<T>&, int64_t, int64_t, const Window&) {}
};

// The form of a call with extras: how the scores of one row, or a part of one, are made of x. The cap's code is longer
// than all else, and a softmax of f32 with a limit takes a third longer with it, so calls without a cap go without it.
template <class T, bool with_bias, bool with_cap>
struct WithExtras {
  static constexpr bool extras = true, bias = with_bias, capped = with_cap;
  static_assert(!(bias && capped), "no operation has both");
  static constexpr int size = Pack<T>::size;
  using A = Accumulator<T>;
  using MaskBytes = uint64_t;  // the part of `where` that belongs to a pack: one byte for each element, 0 or 1
  A cap;
  A scale = 1;
  // By which `score` multiplies: the scale, or 1 where that is 0 or NaN and `Row::load` has multiplied x by it. The
  // product with a masked element would not be -inf.
  A factor = 1;
  int limit;  // elements before it count, in elements of the window
  const uint8_t* where = nullptr;
  const T* bias_row = nullptr;
  bool masked, where_aligned = false, bias_aligned = false;
  bool unmasked;  // whether nothing of the row is masked

  // `begin` is the row's element with which the window begins.
  template <class Window>
  __device__ WithExtras(const Arguments<T>& args, int64_t row, int64_t begin, const Window& window)
      : cap(args.cap), limit(window.n), masked(args.masked) {
    const Extras& extras = args.extras;
    int64_t offset[kExtras] = {};  // the element of each extra at which the row's part begins
    if (args.counted_in_ints()) {
      uint32_t rest = static_cast<uint32_t>(row), rows[kExtras] = {};  // rest: the row, counted in steps of the group
#pragma unroll
      for (int i = 0; i < kGroups; i++) {
        if (i >= extras.groups) break;
        uint32_t at = rest;
        if (i + 1 < extras.groups) {
          rest = args.sizes[i].quotient(rest);
          at -= rest * args.sizes[i].divisor;
        }
#pragma unroll
        for (int k = 0; k < kExtras; k++) rows[k] += at * args.strides[k][i];
      }
#pragma unroll
      for (int k = 0; k < kExtras; k++) offset[k] = k < kWhere ? rows[k] : rows[k] * args.n;
    } else {
      const Extra* every[kExtras] = {&extras.scale, &extras.limit, &extras.where, &extras.bias};
#pragma unroll 1
      for (int i = 0; i < extras.groups; i++) {
        const int64_t at = row / extras.divisor[i] % extras.size[i];
#pragma unroll
        for (int k = 0; k < kExtras; k++) offset[k] += at * every[k]->stride[i];
      }
    }
    if (extras.scale.data) scale = static_cast<const A*>(extras.scale.data)[offset[kScale]];
    factor = scale == 0 || isnan(scale) ? A(1) : scale;
    masked_element = narrow<T>(factor < 0 ? A(__builtin_huge_val()) : -A(__builtin_huge_val()));
    if (extras.limit.data)
      limit = static_cast<int>(
          min(int64_t(limit), max(int64_t(0), static_cast<const int32_t*>(extras.limit.data)[offset[kLimit]] - begin)));
    if (extras.where.data) {
      where = static_cast<const uint8_t*>(extras.where.data) + offset[kWhere] + begin;
      where_aligned = reinterpret_cast<uintptr_t>(where - window.head) % Pack<T>::size == 0;
    }
    unmasked = !where && limit == window.n;
    asm("" : "+l"(where));  // keeps the compiler from computing the pointer again for every pack
    if (with_bias) {
      bias_row = static_cast<const T*>(extras.bias.data) + offset[kBias] + begin;
      bias_aligned = reinterpret_cast<uintptr_t>(bias_row - window.head) % 16 == 0;
    }
  }

  // The first pack that is masked entirely, like all after it. These packs need not be read.
  template <Layout layout>
  __device__ int masked_from(const Window<T, layout>& window) const {
    return (window.head + limit + Pack<T>::size - 1) / Pack<T>::size;
  }

  template <Layout layout>
  __device__ MaskBytes fetch_where(int i, const Window<T, layout>& window) const {
    if (!where) return kEveryByte;
    int first = i * size - window.head;
    if (layout == Layout::whole || (where_aligned && window.inside(i))) {
      if constexpr (size == 8) return *reinterpret_cast<const uint64_t*>(where + first);
      if constexpr (size == 4) return *reinterpret_cast<const uint32_t*>(where + first);
      return *reinterpret_cast<const uint16_t*>(where + first);
    }
    MaskBytes mask = 0;
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < limit) mask |= uint64_t(where[first + k]) << 8 * k;
    return mask;
  }
  // Whether all of pack i lies within the limit and the row's ends. `inside_mask` has one byte for each element that
  // does.
  template <Layout layout>
  __device__ bool inside(int i, const Window<T, layout>& window) const {
    int first = i * size - window.head;
    return (layout == Layout::whole || first >= 0) && first + size <= limit;
  }
  template <Layout layout>
  __device__ MaskBytes inside_mask(int i, const Window<T, layout>& window) const {
    int first = i * size - window.head, left = limit - first;
    return range_bytes(-first, min(left, size));
  }
  // Masks the elements of pack i that are masked, those beyond the row's ends included: their scores become -inf, and
  // their bias or cotangent, in b, becomes 0.
  template <Layout layout>
  __device__ void apply_mask(Pack<T>& a, Pack<T>& b, bool has_b, MaskBytes mask, int i,
                       const Window<T, layout>& window) const {
    if (!inside(i, window)) mask &= inside_mask(i, window);
    else if (!where) return;
    a.keep(mask, masked_element);
    if (has_b) b.keep(mask, narrow<T>(0));
  }

  T masked_element;  // the x whose score is -inf, with a cap or without

  // Whether elements are to be multiplied by the scale when they are loaded.
  __device__ bool scales_loaded() const { return !(factor == scale); }

  __device__ A score(const Pack<T>& a, const Pack<T>& b, int k) const {
    // The product must be rounded here. If it were fused with the subtraction of the maximum, which has been rounded,
    // the difference would be wrong by the product's rounding error, which is too much for exp where scores are huge.
    A z = rounded_product(a.get(k), factor);
    if (with_bias) z += b.get(k);
    if (with_cap && z > -infinity<A>()) z = soft_cap<T>(z, cap);
    return z;
  }
};

}  // namespace jaxsoft::cuda
