// What scores are made of beside x: scale, bias, and the mask that `where` and `limit` are. See ../rows.h.
//
// A kernel is compiled for each of three forms: plain, with extras, and with extras and a bias. In the plain form all of
// this vanishes. A masked element becomes an infinity as it is read, whose score is -inf, so that neither the reduction
// nor, in an ordinary row, the results need to know of the mask. Where a row's values are not finite, what is masked is
// looked up again.
#pragma once

#include "../rows.h"
#include "pack.cuh"

namespace jaxsoft::cuda {

// Products that the compiler may not fuse with an addition.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

enum class ResultType { same, f32, f16, bf16 };

template <class T>
struct Arguments {
  using A = Accumulator<T>;
  const T* a = nullptr;
  const T* b = nullptr;
  void* out = nullptr;
  A* m = nullptr;  // statistics, one a row: results of the forward operations, operands of the backward ones
  A* s = nullptr;
  const A* g = nullptr;
  int64_t rows = 0, n = 0, inner = 1;
  bool vector = true;                           // whether packs of all whole-row operands are aligned together
  ResultType result = ResultType::same;         // of out, if not T
  bool masked = false;                          // softmax_vjp: elements with y = 0 do not count
  Extras extras;
};

// x alone.
struct Plain {
  static constexpr bool extras = false, bias = false;
  template <class T, class Index>
  __device__ Plain(const Arguments<T>&, int64_t, const Window<T, Index>&) {}
};

template <class T, bool with_bias>
struct WithExtras {
  static constexpr bool extras = true, bias = with_bias;
  using A = Accumulator<T>;
  A scale = 1, factor = 1;  // factor: what scores are multiplied by; 1 for scale 0, as `mark` has then made x * 0 of x
  int64_t limit;
  const uint8_t* where = nullptr;
  const T* bias_row = nullptr;
  bool masked, where_aligned = false;

  template <class Index>
  __device__ WithExtras(const Arguments<T>& args, int64_t row, const Window<T, Index>& window)
      : limit(args.n), masked(args.masked) {
    const Extras& extras = args.extras;
    int64_t offset[4] = {};
    const Extra* every[4] = {&extras.scale, &extras.limit, &extras.where, &extras.bias};
    for (int i = 0; i < extras.groups; i++) {
      bool used = false;
#pragma unroll
      for (int k = 0; k < 4; k++) used |= every[k]->stride[i] != 0;
      if (!used) continue;  // divisions take longer than all else here
      int64_t at = row;
      if (args.rows <= UINT32_MAX) {
        auto at32 = static_cast<uint32_t>(row);
        if (i > 0) at32 /= static_cast<uint32_t>(extras.divisor[i]);
        if (i + 1 < extras.groups) at32 %= static_cast<uint32_t>(extras.size[i]);
        at = at32;
      } else {
        at = row / extras.divisor[i] % extras.size[i];
      }
#pragma unroll
      for (int k = 0; k < 4; k++) offset[k] += at * every[k]->stride[i];
    }
    if (extras.scale.data) scale = static_cast<const A*>(extras.scale.data)[offset[0]];
    factor = scale == 0 ? A(1) : scale;
    if (extras.limit.data)
      limit = min(limit, max(int64_t(0), int64_t(static_cast<const int32_t*>(extras.limit.data)[offset[1]])));
    if (extras.where.data) {
      where = static_cast<const uint8_t*>(extras.where.data) + offset[2];
      where_aligned = reinterpret_cast<uintptr_t>(where - window.head) % Pack<T>::size == 0;
    }
    if (with_bias) bias_row = static_cast<const T*>(extras.bias.data) + offset[3];
  }

  // Packs from here on are masked as a whole, and need not be read.
  template <class Index>
  __device__ Index masked_from(const Window<T, Index>& window) const {
    return static_cast<Index>((window.head + limit + Pack<T>::size - 1) / Pack<T>::size);
  }

  // The x whose score is -inf.
  __device__ T masked_element() const {
    return narrow<T>(factor < 0 ? A(__builtin_huge_val()) : -A(__builtin_huge_val()));
  }
  __device__ bool counts(int64_t j) const { return j >= 0 && j < limit && (!where || where[j]); }

  // Masks what does not count of pack i, the row's padding and all packs from `end` on included: the score becomes -inf,
  // and what stands beside it, a bias or a cotangent, 0.
  template <class Index>
  __device__ void mark(Pack<T>& a, Pack<T>& b, bool has_b, Index i, Index end, const Window<T, Index>& window) const {
    constexpr int size = Pack<T>::size;
    int64_t first = int64_t(i) * size - window.head;
    if (scale == 0) a.times_zero();
    bool inside = i < end && first >= 0 && first + size <= limit;
    if (inside && !where) return;
    uint32_t keep[size / 4 + 1];  // a byte an element, 0 or 1
    if (inside && where_aligned) {
      if constexpr (size == 8) memcpy(keep, __builtin_assume_aligned(where + first, 8), 8);
      if constexpr (size == 4) memcpy(keep, __builtin_assume_aligned(where + first, 4), 4);
      if constexpr (size == 2) keep[0] = *reinterpret_cast<const uint16_t*>(where + first);
    } else {
#pragma unroll
      for (int k = 0; k < size; k++) {
        uint32_t one = i < end && counts(first + k);
        keep[k / 4] = (k % 4 == 0 ? 0 : keep[k / 4]) | one << (k % 4 * 8);
      }
    }
    a.keep(keep, masked_element());
    if (has_b) b.keep(keep, narrow<T>(0));
  }

  __device__ A score(const Pack<T>& a, const Pack<T>& b, int k) const {
    // Rounded here: fused with the subtraction of the maximum it would differ from that by its own rounding, and that
    // is more than exp can take where scores are huge.
    A z = rounded_product(a.get(k), factor);
    if (with_bias) z += b.get(k);
    return z;
  }
};

// Writes the elements of pack i in the type that the result has.
template <class T, class Index>
__device__ void store_as(ResultType type, void* row, const Window<T, Index>& window, Index i,
                         const Accumulator<T> (&x)[Pack<T>::size]) {
  auto each = [&](auto* out) {
    using R = std::remove_pointer_t<decltype(out)>;
    constexpr int size = Pack<T>::size;
    int64_t first = int64_t(i) * size - window.head;
    if (first >= 0 && first + size <= window.n && reinterpret_cast<uintptr_t>(out + first) % 16 == 0) {
      alignas(16) R values[size];
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

}  // namespace jaxsoft::cuda
