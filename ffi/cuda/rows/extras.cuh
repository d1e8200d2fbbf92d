// What scores are made of beside x: scale, bias, and the mask that `where` and `limit` are. See ../rows.h.
//
// A kernel is compiled for each of three forms: plain, with extras, and with extras and a bias. In the plain form all of
// this vanishes. A masked element becomes an infinity as it is read, whose score is -inf, so that neither the reduction
// nor, in an ordinary row, the results need to know of the mask. Where a row's values are not finite, what is masked is
// looked up again.
#pragma once

#include "../../rows/call.h"
#include "../fold.cuh"
#include "../pack.cuh"

namespace jaxsoft::cuda {

// Products that the compiler may not fuse with an addition.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

enum class ResultType { same, f32, f16, bf16 };

// Divides numbers below 2^31 by one that the host knows: a multiplication and a shift (Granlund, Montgomery, *Division
// by invariant integers using multiplication*, 1994).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;
  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    while ((uint64_t(1) << shift) < by) shift++;
    multiplier = static_cast<uint32_t>((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  __device__ uint32_t quotient(uint32_t x) const { return (__umulhi(x, multiplier) + x) >> shift; }
};

template <class T>
struct Arguments {
  using A = Accumulator<T>;
  const T* a = nullptr;
  const T* b = nullptr;
  void* out = nullptr;
  A* m = nullptr;  // statistics, one a row: results of the forward operations, operands of the backward ones
  A* s = nullptr;
  const A* g = nullptr;
  const int32_t* labels = nullptr;                  // one a row, where the operation has them
  A *t = nullptr, *u = nullptr, *k = nullptr;       // results beside them, where it has those: see ../rows.h
  const A *h = nullptr, *v = nullptr;               // and operands
  A cap = 0;                                        // of the scores; 0: none
  int64_t rows = 0, n = 0, inner = 1;
  bool vector = true;                           // whether packs of all whole-row operands are aligned together
  ResultType result = ResultType::same;         // of out, if not T
  bool masked = false;                          // softmax_vjp: elements with y = 0 do not count
  Extras extras;
  // The groups of rows, for numbers of 32 bits: their sizes, and the extras' strides, in rows of an extra. Not set
  // where there are 2^31 rows or more.
  Divider sizes[kGroups];
  uint32_t strides[4][kGroups] = {};

  __host__ __device__ bool counted_in_ints() const { return rows <= INT32_MAX; }
  void set_extras(const Extras& of_call) {
    extras = of_call;
    if (!counted_in_ints()) return;
    for (int i = 0; i < extras.groups; i++) {
      sizes[i] = Divider(static_cast<uint32_t>(extras.size[i]));
      strides[0][i] = static_cast<uint32_t>(extras.scale.stride[i]);
      strides[1][i] = static_cast<uint32_t>(extras.limit.stride[i]);
      strides[2][i] = n > 0 ? static_cast<uint32_t>(extras.where.stride[i] / n) : 0;
      strides[3][i] = n > 0 ? static_cast<uint32_t>(extras.bias.stride[i] / n) : 0;
    }
  }

  // The row whose turn it is: rows that share a row of the bias follow each other, so that it comes from the cache.
  template <bool with_bias>
  __device__ int64_t row(int64_t turn) const {
    const int last = extras.groups - 1;
    if (!with_bias || last < 1 || extras.bias.stride[last] != 0 || !counted_in_ints()) return turn;
    const uint32_t at = static_cast<uint32_t>(turn), row = sizes[last].quotient(at);
    return (at - row * sizes[last].divisor) * extras.divisor[last] + row;
  }

  Layout layout() const {
    auto all = [&](size_t to) {  // 16 bytes, or 8
      auto aligned = [&](const void* p, size_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; };
      return vector && n * sizeof(T) % to == 0 && aligned(a, to) && result == ResultType::same &&
             aligned(extras.bias.data, to) && aligned(extras.where.data, to / sizeof(T));
    };
    return all(16) ? Layout::whole : all(8) ? Layout::halves : Layout::any;
  }
};

// cap * tanh(x / cap), and its derivative. The approximation errs by 2^-22 of the cap, which 16 bits bear.
template <class T, class A>
__device__ A capped(A x, A cap) {
  if constexpr (sizeof(T) == 2) {
    const A y = cap - 2 * cap / (1 + exp2_approximately(2 * A(kLog2E) * fabs(x) / cap));
    return x < 0 ? -y : y;  // a NaN stays
  } else {
    return cap * tanh(x / cap);
  }
}
template <class A>
__device__ A cap_slope(A x, A cap) {
  const A e = exp(-2 * fabs(x) / cap);
  return 4 * e / ((1 + e) * (1 + e));
}

// x alone.
struct Plain {
  static constexpr bool extras = false, bias = false;
  struct Marks {};
  template <class T, class Window>
  __device__ Plain(const Arguments<T>&, int64_t, int64_t, const Window&) {}
};

template <class T, bool with_bias>
struct WithExtras {
  static constexpr bool extras = true, bias = with_bias;
  static constexpr int size = Pack<T>::size;
  using A = Accumulator<T>;
  using Marks = uint64_t;  // what `where` has of a pack: a byte an element, 0 or 1
  A cap;
  A scale = 1, factor = 1;  // factor: what scores are multiplied by; 1 for scale 0, as `mark` has then made x * 0 of x
  int limit;
  const uint8_t* where = nullptr;
  const T* bias_row = nullptr;
  bool masked, where_aligned = false, bias_aligned = false;
  bool unmasked;  // whether nothing of the row is masked

  // `begin`: the element of the row that the window's first is.
  template <class Window>
  __device__ WithExtras(const Arguments<T>& args, int64_t row, int64_t begin, const Window& window)
      : cap(args.cap), limit(window.n), masked(args.masked) {
    const Extras& extras = args.extras;
    int64_t offset[4] = {};  // of scale, limit, where and bias
    if (args.counted_in_ints()) {
      uint32_t rest = static_cast<uint32_t>(row), rows[4] = {};  // rest: in steps of the group
#pragma unroll
      for (int i = 0; i < kGroups; i++) {
        if (i >= extras.groups) break;
        uint32_t at = rest;
        if (i + 1 < extras.groups) {
          rest = args.sizes[i].quotient(rest);
          at -= rest * args.sizes[i].divisor;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) rows[k] += at * args.strides[k][i];
      }
#pragma unroll
      for (int k = 0; k < 4; k++) offset[k] = k < 2 ? rows[k] : rows[k] * args.n;
    } else {
      const Extra* every[4] = {&extras.scale, &extras.limit, &extras.where, &extras.bias};
#pragma unroll 1
      for (int i = 0; i < extras.groups; i++) {
        const int64_t at = row / extras.divisor[i] % extras.size[i];
#pragma unroll
        for (int k = 0; k < 4; k++) offset[k] += at * every[k]->stride[i];
      }
    }
    if (extras.scale.data) scale = static_cast<const A*>(extras.scale.data)[offset[0]];
    factor = scale == 0 ? A(1) : scale;
    masked_element = narrow<T>(factor < 0 ? A(__builtin_huge_val()) : -A(__builtin_huge_val()));
    if (extras.limit.data)
      limit = static_cast<int>(
          min(int64_t(limit), max(int64_t(0), static_cast<const int32_t*>(extras.limit.data)[offset[1]] - begin)));
    if (extras.where.data) {
      where = static_cast<const uint8_t*>(extras.where.data) + offset[2] + begin;
      where_aligned = reinterpret_cast<uintptr_t>(where - window.head) % Pack<T>::size == 0;
    }
    unmasked = !where && limit == window.n;
    asm("" : "+l"(where));  // or it is computed anew for every pack
    if (with_bias) {
      bias_row = static_cast<const T*>(extras.bias.data) + offset[3] + begin;
      bias_aligned = reinterpret_cast<uintptr_t>(bias_row - window.head) % 16 == 0;
    }
  }

  // Packs from here on are masked as a whole, and need not be read.
  template <Layout layout>
  __device__ int masked_from(const Window<T, layout>& window) const {
    return (window.head + limit + Pack<T>::size - 1) / Pack<T>::size;
  }

  T masked_element;  // the x whose score is -inf, a cap or not

  template <Layout layout>
  __device__ Marks fetch_where(int i, const Window<T, layout>& window) const {
    if (!where) return kEveryByte;
    int first = i * size - window.head;
    if (layout == Layout::whole || (where_aligned && window.inside(i))) {
      if constexpr (size == 8) return *reinterpret_cast<const uint64_t*>(where + first);
      if constexpr (size == 4) return *reinterpret_cast<const uint32_t*>(where + first);
      return *reinterpret_cast<const uint16_t*>(where + first);
    }
    Marks marks = 0;
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < limit) marks |= uint64_t(where[first + k]) << 8 * k;
    return marks;
  }
  // Whether the limit, and the row's ends, leave pack i whole; and what they leave of it, a byte an element.
  template <Layout layout>
  __device__ bool inside(int i, const Window<T, layout>& window) const {
    int first = i * size - window.head;
    return (layout == Layout::whole || first >= 0) && first + size <= limit;
  }
  template <Layout layout>
  __device__ Marks inside_marks(int i, const Window<T, layout>& window) const {
    int first = i * size - window.head, left = limit - first;
    return range_bytes(-first, min(left, size));
  }
  // What counts of pack i.
  template <Layout layout>
  __device__ Marks marks(int i, const Window<T, layout>& window) const {
    return fetch_where(i, window) & inside_marks(i, window);
  }
  // Masks what does not count of pack i, the row's padding included: the score becomes -inf, and what stands beside it,
  // a bias or a cotangent, 0.
  template <Layout layout>
  __device__ void mark(Pack<T>& a, Pack<T>& b, bool has_b, Marks marks, int i,
                       const Window<T, layout>& window) const {
    if (!inside(i, window)) marks &= inside_marks(i, window);
    else if (!where) return;
    a.keep(marks, masked_element);
    if (has_b) b.keep(marks, narrow<T>(0));
  }

  __device__ A score(const Pack<T>& a, const Pack<T>& b, int k) const {
    // Rounded here: fused with the subtraction of the maximum it would differ from that by its own rounding, and that
    // is more than exp can take where scores are huge.
    A z = rounded_product(a.get(k), factor);
    if (with_bias) z += b.get(k);
    else if (cap > 0 && z > -infinity<A>()) z = capped<T>(z, cap);
    return z;
  }
};

// Writes the elements of pack i in the type that the result has.
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

}  // namespace jaxsoft::cuda
