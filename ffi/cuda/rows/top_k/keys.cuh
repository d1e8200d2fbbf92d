// Keys: words of 64 bits that are ordered as a row's elements are to be, by value and then by index.
#pragma once

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

__device__ inline Key key_of(uint32_t order, uint32_t index) { return Key(order) << 32 | ~index; }
__device__ inline uint32_t order_in(Key key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline uint32_t index_in(Key key) { return ~static_cast<uint32_t>(key); }

}  // namespace jaxsoft::cuda
