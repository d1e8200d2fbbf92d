// Short rows: 4, 8 or 16 lanes or a warp hold a row in their registers.
//
// Every lane's elements form four groups. The k-th largest of the groups' maxima is a lower bound of the k-th largest
// element, and hardly more than k elements reach it. These are put into shared memory and ordered by counting, for each
// of them, those that come before it. There is no barrier but the warp's.
#pragma once

#include "../operations/logsumexp.cuh"
#include "../row.cuh"
#include "buffer.cuh"
#include "marks.cuh"
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
template <class T, int lanes>
__device__ float find_bar(float (&maxima)[kGroupsOfThread], int k, float& m) {
  if constexpr (lanes < 32) {
    if (k <= 4) return bar_by_merging<lanes, 4>(maxima, m);
    if (k <= 8) return bar_by_merging<lanes, 8>(maxima, m);
  }
  m = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]));
  m = reduce_maximum(m, lanes);
  return bar_by_bisection<T, lanes>(maxima, k);
}

template <class T, int lanes, int packs, Layout layout>
__global__ void __launch_bounds__(ShortRows::threads)
    top_k_of_short_rows(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to) {
  using Key = typename ShortKeys<T>::Key;
  constexpr int rows = ShortRows::threads / lanes, size = Pack<T>::size, room = ShortRows::room(lanes);
  __shared__ Key found[rows][room + 1];  // one more, so that the rows of a warp begin in different banks
  __shared__ Key sorted[rows][ShortRows::most_k(lanes) + 1];
  const int lane = threadIdx.x % lanes, at = threadIdx.x / lanes, k = to.k, n = static_cast<int>(args.n);
  const int64_t turn = int64_t(blockIdx.x) * rows + at, index = min(turn, args.rows - 1);
  const T* const row = args.a + index * args.n;
  const Window<T, layout> window(row, n, true);  // all rows begin at an element
  const T nothing = narrow<T>(-infinity<float>());

  Pack<T> x[packs];
#pragma unroll
  for (int j = 0; j < packs; j++) {
    x[j].fill(nothing);
    if (lane + j * lanes < window.packs) x[j] = window.fetch(row, lane + j * lanes);
  }
#pragma unroll
  for (int j = 0; j < packs; j++)
    if (lane + j * lanes < window.packs) window.trim(x[j], lane + j * lanes, nothing);

  float maxima[kGroupsOfThread], m;
  maxima_of_groups(x, maxima);
  const float bar = find_bar<T, lanes>(maxima, k, m);
  uint32_t marks = marks_from(bar, x);
  if (bar == -infinity<float>()) marks = marks_within<T>(marks, window, lane, lanes);
  const int own = __popc(marks);
  int until = own;
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, until, step, lanes);
    if (lane >= step) until += before;
  }
  const int count = __shfl_sync(kAllLanes, until, lanes - 1, lanes);
  const bool crowded = count > room;
  if (!crowded)
    for (int place = until - own; marks; marks &= marks - 1) {
      const unsigned bit = __ffs(marks) - 1;
      const int i = (lane + pack_of_mark<T>(bit) * lanes) * size + place_of_mark<T>(bit) - window.head;
      found[at][place++] = ShortKeys<T>::of(row[i], i);
    }

  const float s = sum_of_held<lanes>(x, m, Plain(args, index, 0, window));
  if (__any_sync(kAllLanes, crowded)) sort_by_turns<lanes>(row, n, k, crowded, sorted[at]);
  __syncwarp();
  if (!crowded) sort_largest<lanes>(found[at], count, k, sorted[at]);
  __syncwarp();
  if (turn >= args.rows) return;
  if (lane == 0) args.m[index] = m, args.s[index] = s;
  const SoftmaxOfRow softmax(m, s);
  if (!softmax.exists) return write_first(args, to, index, softmax, lanes);
  for (int j = lane; j < k; j += lanes) {
    const Key key = sorted[at][j];
    write_element(args, to, index * k + j, ShortKeys<T>::element(key, row), ShortKeys<T>::index(key), softmax);
  }
}

// Whether all rows begin and end at a multiple of 16 bytes.
template <class T>
bool rows_are_whole(const Arguments<T>& args) {
  return args.n * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(args.a) % 16 == 0;
}

// Whether there is a kernel for such rows.
template <class T>
bool is_short(int64_t packs, int k) {
  return packs <= 32 * ShortRows::most_packs(sizeof(T)) && k <= ShortRows::most_k(32);
}

template <class T>
cudaError_t launch_short(const Arguments<T>& args, const Largest<T>& to, int64_t packs, cudaStream_t stream) {
  constexpr int most = ShortRows::most_packs(sizeof(T));
  auto launch = [&](auto lanes, auto each) {
    const int64_t blocks = (args.rows * lanes + ShortRows::threads - 1) / ShortRows::threads;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    auto kernel = rows_are_whole(args) ? top_k_of_short_rows<T, lanes, each, Layout::whole>
                                       : top_k_of_short_rows<T, lanes, each, Layout::any>;
    kernel<<<static_cast<unsigned>(blocks), ShortRows::threads, 0, stream>>>(args, to);
    return cudaGetLastError();
  };
  auto by_packs = [&](auto lanes) {
    if (packs <= lanes * most / 4) return launch(lanes, std::integral_constant<int, most / 4>());
    if (packs <= lanes * most / 2) return launch(lanes, std::integral_constant<int, most / 2>());
    return launch(lanes, std::integral_constant<int, most>());
  };
  if (packs <= 4 * most && to.k <= ShortRows::most_k(4)) return by_packs(std::integral_constant<int, 4>());
  if (packs <= 8 * most && to.k <= ShortRows::most_k(8)) return by_packs(std::integral_constant<int, 8>());
  if (packs <= 16 * most && to.k <= ShortRows::most_k(16)) return by_packs(std::integral_constant<int, 16>());
  return by_packs(std::integral_constant<int, 32>());
}

}  // namespace jaxsoft::cuda
