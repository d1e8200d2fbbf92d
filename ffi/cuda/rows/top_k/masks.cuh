// Which of a thread's elements may be among the k largest of a row: those that reach a threshold, a bit each.
#pragma once

#include "thresholds.cuh"

namespace jaxsoft::cuda {

// The elements of a thread's packs that reach the threshold, a bit each. NaN reaches none. A thread has at most 32
// elements.
template <class T, int packs>
__device__ uint32_t mask_from(float threshold, const Pack<T> (&x)[packs]) {
  static_assert(packs * Pack<T>::size <= 32);
  uint32_t mask = 0;
  if constexpr (sizeof(T) == 2) {
    uint32_t both;
    // f16 may have no such number.
    if constexpr (std::is_same_v<T, __half>) both = bits<uint16_t>(__float2half_ru(threshold));
    else both = bits<uint16_t>(narrow<T>(threshold));
    const auto pair = bits<Pair<T>>(both | both << 16);
#pragma unroll
    for (int w = 0; w < 4 * packs; w++)
      mask |= __hge2_mask(bits<Pair<T>>(x[w / 4].words[w % 4]), pair) & 0x00010001u << w;
  } else {
#pragma unroll
    for (int j = 0; j < 4 * packs; j++)
      if (x[j / 4].get(j % 4) >= threshold) mask |= 1u << j;
  }
  return mask;
}
// Where the element of a bit is: its pack, and its place in the pack.
template <class T>
__device__ int pack_of_bit(unsigned bit) {
  return sizeof(T) == 2 ? bit % 16 / 4 : bit / 4;
}
template <class T>
__device__ int place_of_bit(unsigned bit) {
  return sizeof(T) == 2 ? bit % 4 * 2 + bit / 16 : bit % 4;
}

// The mask of all elements before a place, which is counted from the window's first pack. The thread has the packs
// `first`, `first` + `step`, and so on.
template <class T, int packs>
__device__ uint32_t mask_before(int place, int first, int step) {
  uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < packs; j++) {
    const int count = min(max(place - (first + j * step) * Pack<T>::size, 0), Pack<T>::size);
    auto lowest = [](int number) { return (1u << number) - 1; };
    if constexpr (sizeof(T) == 2) mask |= (lowest((count + 1) / 2) | lowest(count / 2) << 16) << 4 * j;
    else mask |= lowest(count) << 4 * j;
  }
  return mask;
}

// The mask without those of what lies past the ends of the row. That is -inf, so this is only needed if the threshold
// is. `first` is the thread's first pack, and `step` the distance of its packs.
template <class T, class Window>
__device__ uint32_t mask_within(uint32_t mask, const Window& window, int first, int step) {
  for (uint32_t left = mask; left; left &= left - 1) {
    const unsigned bit = __ffs(left) - 1;
    const int at = (first + pack_of_bit<T>(bit) * step) * Pack<T>::size + place_of_bit<T>(bit) - window.head;
    if (static_cast<unsigned>(at) >= static_cast<unsigned>(window.n)) mask ^= 1u << bit;
  }
  return mask;
}

}  // namespace jaxsoft::cuda
