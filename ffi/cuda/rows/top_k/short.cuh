// Short rows: 4, 8 or 16 lanes or a warp hold a row in their registers.
//
// Every lane's elements form four groups. The k-th largest of the groups' maxima is a lower bound of the k-th largest
// element, and hardly more than k elements reach it. These are put into shared memory and ordered by counting, for each
// of them, those that come before it. There is no barrier but the warp's.
#pragma once

#include "../operations/logsumexp.cuh"
#include "../row.cuh"
#include "buffer.cuh"
#include "masks.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// The sum of exp(x - m) of a row whose packs `lanes` neighbouring lanes hold, and whose maximum is m.
template <int lanes, class T, int packs>
__device__ float sum_of_held(const Pack<T> (&x)[packs], float m, const Plain& form) {
  const float from = reference(m);
  float sum;
  if (may_shift(from)) sum = StateOf<T>::template sum_of_terms<true>(from, x, x, form);
  else sum = StateOf<T>::template sum_of_terms<false>(from, x, x, form);
#pragma unroll
  for (int mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  return isfinite(m) ? __fdividef(sum, exponential_term(m, from)) : sum;
}

// The elements of a lane's packs that reach the threshold, a bit each, as `mask_from` gives them, but NaN may be among
// them, as a row with NaN has no softmax. That of f32 is computed with numbers, since there are twice as many units for
// sums and products as for comparisons.
template <class T, int packs>
__device__ uint32_t mask_of_lane(float threshold, const Pack<T> (&x)[packs]) {
  if constexpr (sizeof(T) == 4) {
    // The threshold is scaled to 2^30 or more. An element lacks 64 of it then, at least, or nothing, which saturates to
    // 1 or 0.
    const uint32_t exponent = bits<uint32_t>(threshold) >> 23 & 0xff;
    if (exponent >= 30 && exponent < 255) {
      const float scale = bits<float>((284 - exponent) << 23), scaled = threshold * scale;
      constexpr int of_part = 16;
      uint32_t below = 0;
#pragma unroll
      for (int start = 0; start < 4 * packs; start += of_part) {
        float number = 1;  // a leading bit, and the bits of the elements behind it
        constexpr int count = 4 * packs < of_part ? 4 * packs : of_part;
#pragma unroll
        for (int j = start + count - 1; j >= start; j--)
          number = fmaf(number, 2, __saturatef(fmaf(x[j / 4].get(j % 4), -scale, scaled)));
        const uint32_t found = bits<uint32_t>(number) >> (23 - count) & ((1u << count) - 1);
        below |= found << start;
      }
      return ~below & (4 * packs < 32 ? (1u << 4 * packs % 32) - 1 : ~0u);
    }
  }
  return mask_from(threshold, x);
}

// Of elements that are equal to the threshold, a `mask`, keeps the first ones: at least `needed`, and at most `most`.
// This is for rows that are `wanted`, which have so many from `begin` to `end`, the ends of the row. Places are counted
// from its first pack. All lanes of the warp call it.
template <class T, int lanes, int packs>
__device__ __noinline__ uint32_t first_of_equal(uint32_t mask, int needed, int most, bool wanted, int begin, int end) {
  const int last = end;
  int place = begin + needed;
  for (;;) {
    const uint32_t before = mask & mask_before<T, packs>(place, threadIdx.x % lanes, lanes);
    const int count = combine_lanes<Total, lanes>(__popc(before));
    if (wanted && count >= needed && count <= most) mask = before, wanted = false;
    if (!__any_sync(kAllLanes, wanted)) return mask;
    if (count < needed) begin = place;
    else end = place;
    place = end == last ? min(2 * place, (begin + end + 1) / 2) : begin + (end - begin) / 2;
  }
}

// Finds the k largest of a row one after the other, each as the greatest key below the last one. This is for rows of
// which more elements reach the bound than there is room for, as many are equal.
template <int lanes, class T>
__device__ __noinline__ void sort_by_turns(const T* row, int n, int k, bool wanted,
                                           typename ShortKeys<T>::Key* sorted) {
  using Key = typename ShortKeys<T>::Key;
  Key last = ~Key(0);
  for (int j = 0; j < k; j++) {
    Key best = 0;
    for (int i = threadIdx.x % lanes; i < n; i += lanes) {
      const Key key = ShortKeys<T>::of(row[i], i);
      if (key < last && key > best) best = key;
    }
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
      const Key other = __shfl_xor_sync(kAllLanes, best, mask);
      best = max(best, other);
    }
    if (wanted && threadIdx.x % lanes == 0) sorted[j] = best;
    last = best;
  }
}

// A lower bound of the k-th largest of the groups' maxima, which hardly more than k of them reach, and the maximum m.
template <class T, int lanes, int packs>
__device__ float find_threshold(const Pack<T> (&x)[packs], int k, float& m) {
  if constexpr (lanes < 32 && sizeof(T) == 2) {
    if (k <= 4) return threshold_of_pairs<T, lanes, 4>(x, m);
    if (k <= 8) return threshold_of_pairs<T, lanes, 8>(x, m);
  }
  float maxima[kGroupsOfThread];
  maxima_of_groups(x, maxima);
  if constexpr (lanes < 32 && sizeof(T) == 4) {
    if (k <= 4) return threshold_by_merging<lanes, 4>(maxima, m);
    if (k <= 8) return threshold_by_merging<lanes, 8>(maxima, m);
  }
  m = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]));
  m = reduce_maximum(m, lanes);
  int found;
  return threshold_by_bisection<T, lanes>(maxima, k, found);
}

// Takes 1 from `number` if a is greater than b. This is the borrow of a subtraction, which takes an instruction less
// than a comparison.
__device__ inline void count_down_if_greater(int& number, uint32_t a, uint32_t b) {
  asm("{\n"
      ".reg .u32 difference;\n"
      "sub.cc.u32 difference, %1, %2;\n"
      "subc.u32 %0, %0, 0;\n"
      "}"
      : "+r"(number) : "r"(b), "r"(a));
}
__device__ inline void count_down_if_greater(int& number, unsigned long long a, unsigned long long b) {
  auto low = [](unsigned long long x) { return static_cast<uint32_t>(x); };
  asm("{\n"
      ".reg .u32 difference;\n"
      "sub.cc.u32 difference, %1, %3;\n"
      "subc.cc.u32 difference, %2, %4;\n"
      "subc.u32 %0, %0, 0;\n"
      "}"
      : "+r"(number) : "r"(low(b)), "r"(low(b >> 32)), "r"(low(a)), "r"(low(a >> 32)));
}

// Puts the k greatest of `count` keys in order, by `lanes` neighbouring lanes, of which each counts the keys that are
// greater than some of them. Four keys are read at a time: up to the next multiple of four, keys of 0 follow.
template <int lanes, class Key>
__device__ void sort_found(const Key* keys, int lane, int count, int k, Key* sorted) {
  constexpr int each = ShortRows::compared_at_once(lanes), read = ShortRows::keys_at_once;
  struct alignas(16) Keys {
    Key of[read];
  };
#pragma unroll 1
  for (int i = lane; i < count; i += each * lanes) {
    Key own[each];
    int before[each];  // the number of greater keys, negated
#pragma unroll
    for (int e = 0; e < each; e++) own[e] = i + e * lanes < count ? keys[i + e * lanes] : 0, before[e] = 0;
#pragma unroll 1
    for (int j = 0; j < count; j += read) {
      const Keys other = *reinterpret_cast<const Keys*>(keys + j);
#pragma unroll
      for (int c = 0; c < read; c++)
#pragma unroll
        for (int e = 0; e < each; e++) count_down_if_greater(before[e], other.of[c], own[e]);
    }
#pragma unroll
    for (int e = 0; e < each; e++)
      if (own[e] > 0 && -before[e] < k) sorted[-before[e]] = own[e];
  }
}

// The shared memory of a row. It is an odd multiple of 16 bytes long, so that the rows of a warp begin in different
// banks.
template <class Key, int lanes>
struct FoundInRow {
  static constexpr int room = ShortRows::room(lanes);
  static constexpr int zeros = ShortRows::keys_at_once + (ShortRows::compared_at_once(lanes) - 1) * lanes;
  struct Content {
    Key found[room + zeros];  // keys of 0 follow those found
    Key sorted[ShortRows::most_k(lanes)];
    uint16_t positions[room];
  };
  union alignas(16) {
    Content content;
    char units[((sizeof(Content) + 15) / 16 | 1) * 16];
  };
};

template <class T, int lanes, int packs, Layout layout>
__global__ void __launch_bounds__(ShortRows::threads(lanes), ShortRows::blocks(lanes, packs))
    top_k_of_short_rows(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to) {
  using Key = typename ShortKeys<T>::Key;
  using Found = FoundInRow<Key, lanes>;
  constexpr int rows = ShortRows::threads(lanes) / lanes, size = Pack<T>::size, room = Found::room;
  constexpr int each = ShortRows::compared_at_once(lanes), read = ShortRows::keys_at_once;
  __shared__ Found of_rows[rows];
  const int k = to.k, n = static_cast<int>(args.n);
  int lane = threadIdx.x % lanes;
  int64_t index = int64_t(blockIdx.x) * rows + threadIdx.x / lanes;
  const T* row = args.a + min(index, args.rows - 1) * args.n;
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&of_rows[threadIdx.x / lanes]));
  // Keeps the compiler from computing them again and again.
  asm("" : "+l"(row), "+l"(index), "+r"(lane), "+r"(address));
  __builtin_assume(__isGlobal(row));
  auto& [found, sorted, positions] = static_cast<Found*>(__cvta_shared_to_generic(address))->content;
  const Window<T, layout> window(row, n, true);  // all rows begin at an element

  Pack<T> x[packs];
  if (layout == Layout::whole && window.packs == lanes * packs) {  // no lane has less, which takes fewer instructions
#pragma unroll
    for (int j = 0; j < packs; j++) x[j] = window.fetch(row, lane + j * lanes);
  } else {
#pragma unroll
    for (int j = 0; j < packs; j++) {
      x[j].fill(StateOf<T>::fill());
      if (lane + j * lanes < window.packs) x[j] = window.fetch(row, lane + j * lanes);
    }
#pragma unroll
    for (int j = 0; j < packs; j++)
      if (lane + j * lanes < window.packs) window.trim(x[j], lane + j * lanes, StateOf<T>::fill());
  }

  float m;
  const float threshold = find_threshold<T, lanes>(x, k, m);
  uint32_t mask = mask_of_lane(threshold, x);
  if (threshold == -infinity<float>()) mask = mask_within<T>(mask, window, lane, lanes);
  int own, until, count;  // the lane's elements found, those up to this lane, and all of the row
  auto count_bits = [&] {
    own = __popc(mask), until = scan_lanes<lanes>(own, lane);
    count = __shfl_sync(kAllLanes, until, lanes - 1, lanes);
  };
  count_bits();
  if (__any_sync(kAllLanes, count > room)) {  // mostly many are equal to the threshold
    const uint32_t above = mask_from(of_order(order_of(threshold) + (1u << kFree<T>)), x), equal = mask & ~above;
    const int needed = k - combine_lanes<Total, lanes>(__popc(above)), most = room - k + needed;
    const bool divides = count > room && needed > 0;
    const uint32_t first = first_of_equal<T, lanes, packs>(equal, needed, most, divides, window.head, window.head + n);
    if (divides) mask = above | first;
    count_bits();
  }
  const bool crowded = count > room;
  if (!crowded)
    for (int place = until - own; mask; place++) {
      const unsigned bit = 31 - __clz(mask);
      mask ^= 1u << bit;
      positions[place] = static_cast<uint16_t>(lane * 32 + bit);
    }

  const float s = sum_of_held<lanes>(x, m, Plain(args, index, 0, window));
  if (__any_sync(kAllLanes, crowded)) sort_by_turns<lanes>(row, n, k, crowded, sorted);
  __syncwarp();
  if (!crowded) {
    // Only the places were kept, so that all elements found are read at the same time, from the nearest cache.
#pragma unroll 1
    for (int i = lane; i < count + read; i += each * lanes) {
      int places[each];
      Key keys[each];
#pragma unroll
      for (int e = 0; e < each; e++) {
        const unsigned position = i + e * lanes < count ? positions[i + e * lanes] : 0, bit = position % 32;
        places[e] = (position / 32 + pack_of_bit<T>(bit) * lanes) * size + place_of_bit<T>(bit) - window.head;
        keys[e] = ShortKeys<T>::of(row[layout == Layout::whole ? places[e] : max(places[e], 0)], places[e]);
      }
#pragma unroll
      for (int e = 0; e < each; e++) found[i + e * lanes] = i + e * lanes < count ? keys[e] : 0;
    }
  }
  __syncwarp();
  if (!crowded) sort_found<lanes>(found, lane, count, k, sorted);
  __syncwarp();
  if (index >= args.rows) return;
  if (lane == 0) args.m[index] = m, args.s[index] = s;
  const SoftmaxOfRow softmax(m, s);
  if (!softmax.exists) return write_first<true>(args, to, index, softmax, lanes);
#pragma unroll 1
  for (int j = lane; j < k; j += lanes) {
    const Key key = sorted[j];
    write_element<true>(args, to, index * k + j, ShortKeys<T>::element(key), ShortKeys<T>::index(key), softmax);
  }
}

// Whether all rows begin and end at a multiple of 16 bytes.
template <class T>
bool rows_are_whole(const Arguments<T>& args) {
  return args.n * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(args.a) % 16 == 0;
}

template <class T>
cudaError_t launch_short(const Arguments<T>& args, const Largest<T>& to, int64_t packs, cudaStream_t stream) {
  constexpr int most = ShortRows::most_packs(sizeof(T));
  auto launch = [&](auto lanes, auto each) {
    constexpr int threads = ShortRows::threads(lanes);
    const int64_t blocks = (args.rows * lanes + threads - 1) / threads;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    auto kernel = rows_are_whole(args) ? top_k_of_short_rows<T, lanes, each, Layout::whole>
                                       : top_k_of_short_rows<T, lanes, each, Layout::any>;
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(args, to);
    return cudaGetLastError();
  };
  auto by_packs = [&](auto lanes) {
    if (packs <= lanes * most / 4) return launch(lanes, std::integral_constant<int, most / 4>());
    if (packs <= lanes * most / 2) return launch(lanes, std::integral_constant<int, most / 2>());
    return launch(lanes, std::integral_constant<int, most>());
  };
  if (packs <= 4 * ShortRows::most_of_four && to.k <= ShortRows::most_k(4))
    return by_packs(std::integral_constant<int, 4>());
  if (packs <= 8 * most && to.k <= ShortRows::most_k(8)) return by_packs(std::integral_constant<int, 8>());
  if (packs <= 16 * most && to.k <= ShortRows::most_k(16)) return by_packs(std::integral_constant<int, 16>());
  return by_packs(std::integral_constant<int, 32>());
}

}  // namespace jaxsoft::cuda
