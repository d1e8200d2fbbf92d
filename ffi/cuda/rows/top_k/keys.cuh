// Keys: words that are ordered as a row's elements are to be, by value and then by index.
#pragma once

#include <type_traits>

#include "../../pack.cuh"

namespace jaxsoft::cuda {

using Key = unsigned long long;  // the value's order, and the complement of the index; 0 is no key

// An unsigned number that is ordered as floats are, where -0.0 is 0.0.
__device__ inline uint32_t order_of(float x) {
  const uint32_t word = bits<uint32_t>(x);
  return word >> 31 ? 0u - word : word ^ 0x80000000u;
}
// The float that has this order.
__device__ inline float of_order(uint32_t order) {
  return bits<float>(order >> 31 ? order ^ 0x80000000u : 0u - order);
}
// The number of an order's low bits that are 0 for every element of T.
template <class T> constexpr int kFree = 0;
template <> constexpr int kFree<__half> = 13;
template <> constexpr int kFree<__nv_bfloat16> = 16;

constexpr uint32_t kLeastOrder = 0x00800000;  // that of -inf

__device__ inline Key key_of(uint32_t order, uint32_t index) { return Key(order) << 32 | ~index; }
__device__ inline uint32_t order_in(Key key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline uint32_t index_in(Key key) { return ~static_cast<uint32_t>(key); }

// Keys of rows of at most 2^15 elements: those of 16-bit elements are words of 32 bits. The lowest bit is the element's
// sign, as a zero's is not in its order.
template <class T>
struct ShortKeys {
  using Key = std::conditional_t<sizeof(T) == 2, uint32_t, jaxsoft::cuda::Key>;
  static __device__ Key of(T x, uint32_t index) {
    if constexpr (sizeof(T) == 2) {
      const int word = bits<int16_t>(x);  // with the sign in all bits above
      const uint32_t order = word < 0 ? -word : word + 0x8000;
      return (order << 16) + (0xfffeu - 2 * index) - (word >> 15);
    } else {
      return Key(order_of(x)) << 32 | (~index << 1 | bits<uint32_t>(x) >> 31);
    }
  }
  static __device__ uint32_t index(Key key) {
    if constexpr (sizeof(T) == 2) return (~key & 0xffffu) >> 1;
    else return ~static_cast<uint32_t>(key) >> 1;
  }
  static __device__ T element(Key key) {
    if constexpr (sizeof(T) == 2) {
      const uint32_t order = key >> 16;
      return bits<T>(static_cast<uint16_t>(key & 1 ? 0x10000u - order : order ^ 0x8000u));
    } else {
      return bits<float>(key & 1 ? 0u - order_in(key) : order_in(key) ^ 0x80000000u);
    }
  }
};

// Puts the k greatest of `count` keys in order, by a warp, of which each lane counts the keys that are greater than two
// of them at a time.
inline __device__ void sort_largest(const Key* keys, int count, int k, Key* sorted) {
  constexpr int lanes = 32, each = 2;
  for (int i = threadIdx.x % lanes; i < count; i += each * lanes) {
    Key own[each];
    int before[each];
#pragma unroll
    for (int e = 0; e < each; e++) own[e] = i + e * lanes < count ? keys[i + e * lanes] : 0, before[e] = 0;
#pragma unroll 4
    for (int j = 0; j < count; j++) {
      const Key key = keys[j];
#pragma unroll
      for (int e = 0; e < each; e++) before[e] += key > own[e];
    }
#pragma unroll
    for (int e = 0; e < each; e++)
      if (own[e] > 0 && before[e] < k) sorted[before[e]] = own[e];
  }
}

}  // namespace jaxsoft::cuda
