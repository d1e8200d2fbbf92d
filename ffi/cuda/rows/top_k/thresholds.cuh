// Lower bounds of the k-th largest of a row, from the maxima of groups of its elements that lanes hold: thresholds that
// at least k elements reach, and hardly more.
#pragma once

#include "../../fold.cuh"
#include "../../pack.cuh"
#include "buffer.cuh"

namespace jaxsoft::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kGroupsOfThread = 4;  // groups that each thread's elements form, for a bound of the k-th largest

// Words of two 16-bit elements each. A list of four in descending order, s, is the words (s0, s2) and (s1, s3), and one
// of eight these of its first four, and then these of its last.
template <class T>
struct Pairs {
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {  // NaN is no maximum
    return bits<uint32_t>(__hmax2(bits<Pair<T>>(a), bits<Pair<T>>(b)));
  }
  static __device__ uint32_t smaller(uint32_t a, uint32_t b) {
    return bits<uint32_t>(__hmin2(bits<Pair<T>>(a), bits<Pair<T>>(b)));
  }
  static __device__ uint32_t low(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }  // both lower halves
  static __device__ uint32_t high(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
  static __device__ T lower(uint32_t a) { return bits<T>(static_cast<uint16_t>(a)); }
  static __device__ uint32_t turned(uint32_t a) { return __byte_perm(a, a, 0x1032); }
  static __device__ void order_two(uint32_t& a, uint32_t& b) {
    const uint32_t top = larger(a, b);
    b = smaller(a, b), a = top;
  }
  // Puts four numbers that rise and then fall, or fall and then rise, (c0, c1) and (c2, c3), in descending order.
  static __device__ void order_four(uint32_t first, uint32_t last, uint32_t& even, uint32_t& odd) {
    order_two(first, last);
    even = low(first, last), odd = high(first, last);
    order_two(even, odd);
  }
  // The same where they are the words (c0, c2) and (c1, c3).
  static __device__ void order_four(uint32_t& even, uint32_t& odd) {
    order_four(low(even, odd), high(even, odd), even, odd);
  }
};

// The maxima of the groups. Elements at the same place of their packs are in one group; of 16-bit elements, two
// neighbouring words are, so that the maxima of their halves are taken together.
template <class T, int packs>
__device__ void maxima_of_groups(const Pack<T> (&x)[packs], float (&maxima)[kGroupsOfThread]) {
  if constexpr (sizeof(T) == 2) {
    Pack<T> top = x[0];
#pragma unroll
    for (int j = 1; j < packs; j++)
#pragma unroll
      for (int w = 0; w < 4; w++) top.words[w] = Pairs<T>::larger(top.words[w], x[j].words[w]);
    top.words[0] = Pairs<T>::larger(top.words[0], top.words[1]);
    top.words[1] = Pairs<T>::larger(top.words[2], top.words[3]);
#pragma unroll
    for (int g = 0; g < kGroupsOfThread; g++) maxima[g] = max(top.get(g), -infinity<float>());  // NaN is no maximum
  } else {
#pragma unroll
    for (int g = 0; g < kGroupsOfThread; g++) {
      maxima[g] = -infinity<float>();
#pragma unroll
      for (int j = 0; j < packs; j++) maxima[g] = max(maxima[g], x[j].get(g));
    }
  }
}

// Ways to combine two numbers, and the numbers of a warp by one instruction.
struct Greatest {
  static __device__ uint32_t of_two(uint32_t a, uint32_t b) { return max(a, b); }
  static __device__ uint32_t of_warp(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
};
struct Least {
  static __device__ uint32_t of_two(uint32_t a, uint32_t b) { return min(a, b); }
  static __device__ uint32_t of_warp(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }
};
struct Total {
  static __device__ uint32_t of_two(uint32_t a, uint32_t b) { return a + b; }
  static __device__ uint32_t of_warp(uint32_t x) { return __reduce_add_sync(kAllLanes, x); }
};
// Combines over `lanes` neighbouring lanes.
template <class Way, int lanes>
__device__ uint32_t combine_lanes(uint32_t x) {
  if constexpr (lanes == 32) {
    return Way::of_warp(x);
  } else {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) x = Way::of_two(x, __shfl_xor_sync(kAllLanes, x, mask));
    return x;
  }
}

// The sum of a number over lane `lane` of `lanes` neighbouring ones, which is this one, and those before it.
template <int lanes>
__device__ int scan_lanes(int x, int lane) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, x, step, lanes);
    if (lane >= step) x += before;
  }
  return x;
}

// Finds, by bisection, a number that at least k of the groups' maxima reach, and few more unless some are equal.
// `found` becomes the number of those that do. `lanes` neighbouring lanes have the groups of a row. If fewer than k
// have elements above -inf, the threshold is -inf. All lanes of the warp call it.
template <class T, int lanes, int groups>
__device__ float threshold_by_bisection(const float (&maxima)[groups], int k, int& found) {
  constexpr uint32_t nothing = kLeastOrder >> kFree<T>;  // the order of -inf, as of groups without elements
  uint32_t orders[groups], low = ~0u, high = nothing;
  found = 0;
#pragma unroll
  for (int g = 0; g < groups; g++) {
    orders[g] = order_of(maxima[g]) >> kFree<T>;
    if (orders[g] > nothing) low = min(low, orders[g]), high = max(high, orders[g]), found++;
  }
  auto number_from = [&](uint32_t order) {
    int number = 0;
#pragma unroll
    for (int g = 0; g < groups; g++) number += orders[g] >= order;
    return static_cast<int>(combine_lanes<Total, lanes>(number));
  };
  high = combine_lanes<Greatest, lanes>(high);
  if (k == 1) {
    found = number_from(high);
    return of_order(high << kFree<T>);
  }
  const int enough = enough_for(k);
  low = combine_lanes<Least, lanes>(low), found = combine_lanes<Total, lanes>(found);
  if (found < k) low = high = nothing;
  for (;;) {
    const bool searching = low < high && found > enough;
    if (!__any_sync(kAllLanes, searching)) break;
    const uint32_t middle = low + (high - low + 1) / 2;
    const int from = number_from(middle);
    if (!searching) continue;
    if (from >= k) low = middle, found = from;
    else high = middle - 1;
  }
  return of_order(low << kFree<T>);
}

// Puts two numbers in descending order.
__device__ inline void order_two(float& a, float& b) {
  const float high = max(a, b);
  b = min(a, b), a = high;
}
// Puts four in descending order, of which `order_two` does so for two.
template <auto order_two, class V>
__device__ void order_list(V (&x)[4]) {
  order_two(x[0], x[1]), order_two(x[2], x[3]);
  order_two(x[0], x[2]), order_two(x[1], x[3]);
  order_two(x[1], x[2]);
}
// Puts numbers that rise and then fall, or fall and then rise, in descending order.
template <int count>
__device__ void order_bitonic(float (&x)[count]) {
#pragma unroll
  for (int step = count / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < count; i++)
      if (!(i & step)) order_two(x[i], x[i + step]);
}

// The k-th largest of the maxima of the groups, for a k of 4 or 8, of `lanes` neighbouring lanes, and the largest: the
// lanes merge lists in descending order. All lanes of the warp call it.
template <int lanes, int k>
__device__ float threshold_by_merging(float (&list)[kGroupsOfThread], float& largest) {
  order_list<order_two>(list);
  float x[k];
  int mask = 1;
  if constexpr (k == 4) {
#pragma unroll
    for (int i = 0; i < k; i++) x[i] = list[i];
  } else {
#pragma unroll
    for (int i = 0; i < k / 2; i++) x[i] = list[i], x[k - 1 - i] = __shfl_xor_sync(kAllLanes, list[i], mask);
    order_bitonic(x);
    mask = 2;
  }
#pragma unroll
  for (; mask < lanes; mask *= 2) {
    float other[k];
#pragma unroll
    for (int i = 0; i < k; i++) other[i] = __shfl_xor_sync(kAllLanes, x[i], mask);
    if (mask == lanes / 2) largest = max(x[0], other[0]);
#pragma unroll
    for (int i = 0; i < k / 2; i++) {
      const float high = max(x[i], other[k - 1 - i]);
      x[k - 1 - i] = max(x[k - 1 - i], other[i]), x[i] = high;
    }
    if (mask < lanes / 2) order_bitonic(x);
  }
  float least = x[0];
#pragma unroll
  for (int i = 1; i < k; i++) least = min(least, x[i]);
  return least;
}

// The same as `threshold_by_merging` for elements of 16 bits, by half as many instructions for each of them. So every
// lane has eight groups, the elements at the same place of their packs, and takes part with the four largest maxima.
template <class T, int lanes, int k, int packs>
__device__ float threshold_of_pairs(const Pack<T> (&x)[packs], float& largest) {
  using Words = Pairs<T>;
  uint32_t column[4];
#pragma unroll
  for (int w = 0; w < 4; w++) {
    column[w] = x[0].words[w];
#pragma unroll
    for (int j = 1; j < packs; j++) column[w] = Words::larger(column[w], x[j].words[w]);
  }
  order_list<Words::order_two>(column);
  const uint32_t outer = Words::larger(column[0], Words::turned(column[3]));
  const uint32_t inner = Words::larger(column[1], Words::turned(column[2]));
  constexpr int words = k / 2;
  uint32_t list[words];
  Words::order_four(Words::low(outer, inner), __byte_perm(outer, inner, 0x3276), list[0], list[1]);
  int mask = 1;
  if constexpr (k == 8) {  // two lists of four become one of eight
    const uint32_t even = Words::turned(__shfl_xor_sync(kAllLanes, list[1], mask));
    const uint32_t odd = Words::turned(__shfl_xor_sync(kAllLanes, list[0], mask));
    list[2] = Words::smaller(list[0], even), list[3] = Words::smaller(list[1], odd);
    list[0] = Words::larger(list[0], even), list[1] = Words::larger(list[1], odd);
    Words::order_four(list[0], list[1]), Words::order_four(list[2], list[3]);
    mask = 2;
  }
#pragma unroll
  for (; mask < lanes; mask *= 2) {
    uint32_t other[words];
#pragma unroll
    for (int w = 0; w < words; w++) other[w] = __shfl_xor_sync(kAllLanes, list[w], mask);
    if (mask == lanes / 2)
      largest = max(widen(Words::lower(Words::larger(list[0], other[0]))), -infinity<float>());
#pragma unroll
    for (int w = 0; w < words; w++) list[w] = Words::larger(list[w], Words::turned(other[words - 1 - w]));
    if (mask == lanes / 2) break;
    if constexpr (k == 8) Words::order_two(list[0], list[2]), Words::order_two(list[1], list[3]);
#pragma unroll
    for (int w = 0; w < words; w += 2) Words::order_four(list[w], list[w + 1]);
  }
  uint32_t least = list[0];
#pragma unroll
  for (int w = 1; w < words; w++) least = Words::smaller(least, list[w]);
  least = Words::smaller(least, Words::turned(least));
  return max(widen(Words::lower(least)), -infinity<float>());
}

}  // namespace jaxsoft::cuda
