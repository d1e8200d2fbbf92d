// What scores are made of beside x: scale, bias, and the mask that `where` and `limit` are. See ../rows.h.
//
// A kernel is compiled for each of three forms: plain, with extras, and with extras and a bias. In the plain form all of
// this vanishes. A masked element is marked in its pack by a bit pattern of its own, a NaN that no arithmetic makes, so
// that the mask is read once and takes no registers.
#pragma once

#include "../rows.h"
#include "pack.cuh"

namespace jaxsoft::cuda {

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
  A scale = 1;
  int64_t limit;
  const uint8_t* where = nullptr;
  const T* bias_row = nullptr;
  bool masked, where_aligned = false;

  template <class Index>
  __device__ WithExtras(const Arguments<T>& args, int64_t row, const Window<T, Index>& window)
      : limit(args.n), masked(args.masked) {
    const Extras& extras = args.extras;
    int64_t offset[4] = {};
    for (int i = 0; i < extras.groups; i++) {
      int64_t at;
      if (args.rows <= UINT32_MAX)  // a division of 32 bits is several times faster
        at = static_cast<uint32_t>(row) / static_cast<uint32_t>(extras.divisor[i]) % static_cast<uint32_t>(extras.size[i]);
      else
        at = row / extras.divisor[i] % extras.size[i];
      offset[0] += at * extras.scale.stride[i], offset[1] += at * extras.limit.stride[i];
      offset[2] += at * extras.where.stride[i], offset[3] += at * extras.bias.stride[i];
    }
    if (extras.scale.data) scale = static_cast<const A*>(extras.scale.data)[offset[0]];
    if (extras.limit.data) limit = min(limit, max(int64_t(0), int64_t(static_cast<const int32_t*>(extras.limit.data)[offset[1]])));
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

  // Marks what does not count of pack i, the row's padding and all packs from `end` on included.
  template <class Index>
  __device__ void mark(Pack<T>& pack, Index i, Index end, const Window<T, Index>& window) const {
    constexpr int size = Pack<T>::size;
    int64_t first = int64_t(i) * size - window.head;
    uint8_t counts[size];
    if (where && where_aligned && i < end && first >= 0 && first + size <= limit) {
      if constexpr (size == 8) *reinterpret_cast<uint2*>(counts) = *reinterpret_cast<const uint2*>(where + first);
      if constexpr (size == 4) *reinterpret_cast<uint32_t*>(counts) = *reinterpret_cast<const uint32_t*>(where + first);
      if constexpr (size == 2) *reinterpret_cast<uint16_t*>(counts) = *reinterpret_cast<const uint16_t*>(where + first);
    } else {
#pragma unroll
      for (int k = 0; k < size; k++) {
        int64_t j = first + k;
        counts[k] = i < end && j >= 0 && j < limit && (!where || where[j]);
      }
    }
#pragma unroll
    for (int k = 0; k < size; k++) pack.mark(k, !counts[k]);
  }

  __device__ A score(const Pack<T>& a, const Pack<T>& b, int k) const {
    A z = a.get(k) * scale;
    if (with_bias) z += b.get(k);
    return a.marked(k) ? -static_cast<A>(__builtin_huge_val()) : z;
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
  if constexpr (sizeof(T) == 2) each(static_cast<float*>(row));
  if constexpr (sizeof(T) == 4) {
    if (type == ResultType::f16) each(static_cast<__half*>(row));
    else each(static_cast<__nv_bfloat16*>(row));
  }
}

}  // namespace jaxsoft::cuda
