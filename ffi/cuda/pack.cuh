// Rows in packs of 16 bytes, the widest access of a thread.
//
// A row may begin anywhere. It is seen through a window that begins at the 16-byte boundary at or before it, so that all
// packs but the first and the last are whole and aligned; of those two, only the row's own elements are touched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace jaxsoft::cuda {

template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T> __device__ T narrow(Accumulator<T> x) { return x; }
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Elements stay packed in 32-bit words until they are used: unpacked early, 16-bit ones would take twice the registers.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  uint32_t words[4];

  __device__ T raw(int k) const {
    T x;
    if constexpr (sizeof(T) == 2) {
      uint16_t half = words[k / 2] >> (k % 2 * 16);
      memcpy(&x, &half, sizeof x);
    } else {
      memcpy(&x, &words[k * sizeof(T) / 4], sizeof x);
    }
    return x;
  }
  __device__ Accumulator<T> get(int k) const { return widen(raw(k)); }

  // The elements one after the other, k from 0.
  __device__ void set(int k, T x) {
    if constexpr (sizeof(T) == 2) {
      uint16_t half;
      memcpy(&half, &x, sizeof x);
      words[k / 2] = k % 2 == 0 ? half : words[k / 2] | static_cast<uint32_t>(half) << 16;
    } else {
      memcpy(&words[k * sizeof(T) / 4], &x, sizeof x);
    }
  }
};

// The window on one row of n elements. Pack i holds the elements [i * size - head, ...) of the row. Index is the type of
// positions in a row: int takes fewer registers.
template <class T, class Index = int64_t>
struct Window {
  static constexpr int size = Pack<T>::size;
  Index n;
  int head;     // elements of the first pack that are not the row's
  Index packs;
  bool vector;  // whether the operands lie alike, so that packs of all of them are aligned

  // `like` is the row in any of the operands.
  __device__ Window(const T* like, Index n, bool vector) : n(n), vector(vector) {
    head = vector ? static_cast<int>(reinterpret_cast<uintptr_t>(like) % 16 / sizeof(T)) : 0;
    packs = (head + n + size - 1) / size;
  }
  __device__ bool whole(Index i) const {
    Index first = i * size - head;
    return vector && first >= 0 && first + size <= n;
  }
  // Elements past the row's ends are `fill`.
  __device__ Pack<T> load(const T* row, Index i, T fill) const {
    Index first = i * size - head;
    if (whole(i)) return *reinterpret_cast<const Pack<T>*>(row + first);
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < size; k++) pack.set(k, first + k >= 0 && first + k < n ? row[first + k] : fill);
    return pack;
  }
  __device__ void store(T* row, Index i, Pack<T> pack) const {
    Index first = i * size - head;
    if (whole(i)) {
      *reinterpret_cast<Pack<T>*>(row + first) = pack;
      return;
    }
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < n) row[first + k] = pack.raw(k);
  }
};

}  // namespace jaxsoft::cuda
