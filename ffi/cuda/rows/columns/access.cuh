// Accesses of `width` elements, at most a pack. In registers they are the first elements of a pack.
#pragma once

#include "../../fold.cuh"
#include "../../pack.cuh"

namespace jaxsoft::cuda {

template <int bytes>
struct alignas(bytes) Words {
  uint32_t words[bytes / 4];
};

template <int width, class T>
__device__ Pack<T> load_elements(const T* from) {
  constexpr int bytes = width * sizeof(T);
  Pack<T> pack;
  if constexpr (bytes >= 4) reinterpret_cast<Words<bytes>&>(pack) = *reinterpret_cast<const Words<bytes>*>(from);
  else pack.set(0, *from);
  return pack;
}

template <int width, class T>
__device__ void store_elements(T* to, const Pack<T>& pack) {
  constexpr int bytes = width * sizeof(T);
  if constexpr (bytes >= 4) *reinterpret_cast<Words<bytes>*>(to) = reinterpret_cast<const Words<bytes>&>(pack);
  else *to = pack.raw(0);
}

// Rounds results to R and stores them, 16 bytes at a time at most.
template <int width, class R, class A>
__device__ void store_results(R* to, const A (&x)[width]) {
  constexpr int size = width < Pack<R>::size ? width : Pack<R>::size;
  alignas(width * sizeof(R) < 16 ? width * sizeof(R) : 16) R result[width];
#pragma unroll
  for (int e = 0; e < width; e++) result[e] = narrow<R>(x[e]);
  struct alignas(size * sizeof(R)) Store { R elements[size]; };
#pragma unroll
  for (int e = 0; e < width; e += size) *reinterpret_cast<Store*>(to + e) = *reinterpret_cast<const Store*>(result + e);
}

// The larger of each two elements; of a number and a NaN, the number.
template <int width, class T>
__device__ Pack<T> larger(Pack<T> a, const Pack<T>& b) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < (width + 1) / 2; k++)
      a.words[k] = bits<uint32_t>(__hmax2(bits<Pair<T>>(a.words[k]), bits<Pair<T>>(b.words[k])));
  } else {
#pragma unroll
    for (int e = 0; e < width; e++) a.set(e, max(a.get(e), b.get(e)));
  }
  return a;
}

template <int width, class T>
__device__ Pack<T> shuffle(const Pack<T>& pack, int lane_mask) {
  Pack<T> other;
#pragma unroll
  for (int k = 0; k < (width * int(sizeof(T)) + 3) / 4; k++)
    other.words[k] = __shfl_xor_sync(0xffffffffu, pack.words[k], lane_mask);
  return other;
}

}  // namespace jaxsoft::cuda
