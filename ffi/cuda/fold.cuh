// The fold on a GPU: sums, and states (m, s) of scores, for a thread, for neighbouring lanes and for a block.
//
// Every layer is a plain function of the one below. Sums are compensated by Knuth's two-sum, so neither the length of a
// row nor the order of its parts costs accuracy.
#pragma once

#include <cuda_runtime.h>

#include "exponential.cuh"

namespace jaxsoft::cuda {

template <class A>
__device__ constexpr A infinity() {
  return static_cast<A>(__builtin_huge_val());
}

// The number that exp subtracts: m where it is finite, else 0. This guard makes (-inf, 0) the identity of the fold.
template <class A>
__device__ A reference(A m) {
  return isfinite(m) ? m : A(0);
}

// A sum s + c. c holds what s has lost to rounding.
template <class A>
struct Sum {
  A s = 0, c = 0;
  __device__ void add(A v) {
    A t = s + v, d = t - s;
    c += (s - (t - d)) + (v - d);
    s = t;
  }
  __device__ A value() const { return isfinite(s) ? s + c : s; }
};

template <class T, class A>
__device__ Sum<A> combine(Sum<A> a, Sum<A> b) {
  a.add(b.s);
  a.c += b.c;
  return a;
}

// The state of a set of scores: their maximum m, and the sum of exp(x - reference(m)). The empty set is (-inf, 0).
//
// With `apart`, one score that equals the maximum is left out of the sum. It contributes exactly 1. In a row that one
// score dominates, s is only just above 1, and the sum of the rest keeps its digits: log(s) = log1p(rest).
template <class A, bool apart>
struct State {
  A m = -infinity<A>();
  Sum<A> sum;
  __device__ A s() const {
    if constexpr (!apart) return sum.value();
    return isfinite(m) ? 1 + sum.value() : sum.value() + (m > 0 ? m : A(0));
  }
};

// The sum of a state, relative to a maximum m that is at least the state's own. With `apart`, the state's own maximum
// joins the rest.
template <class T, class A, bool apart>
__device__ Sum<A> seen_from(A m, const State<A, apart>& st) {
  A factor = exponential<T>(st.m - reference(m));  // 0 for the empty set
  Sum<A> sum{st.sum.s == 0 ? A(0) : st.sum.s * factor, st.sum.c * factor};  // the factor may be inf where m is
  if constexpr (apart) sum.add(factor);
  return sum;
}

template <class T, class A, bool apart>
__device__ State<A, apart> combine(State<A, apart> a, State<A, apart> b) {
  bool swap = b.m > a.m;  // a NaN among the scores is in the sum, and never in m
  State<A, apart> high = swap ? b : a, low = swap ? a : b;
  high.sum = combine<T>(high.sum, seen_from<T>(high.m, low));
  return high;
}

// The growing state of the scores that one thread has seen: m, and the sum of exp(x - reference(from)). `from` follows
// m only when m is well above it. Moving the sum to another reference at every new maximum would make the lanes of a
// warp diverge.
template <class A>
struct Running {
  A m = -infinity<A>(), from = -infinity<A>();
  Sum<A> sum;
  __device__ void raise(A top) {
    if (falls_behind(top)) move(top);
  }
  // Takes in the maximum of more scores. Returns whether `from` is to move to it before their terms are added.
  __device__ bool falls_behind(A top) {
    m = max(m, top);
    return top > from + 8 && m < infinity<A>();
  }
  __device__ void move(A to) {
    A factor = isfinite(from) ? exponential_term(from, to) / exponential_term(from, from) : A(0);
    sum.s *= factor, sum.c *= factor;
    from = to;
  }
  // The sum relative to the maximum m. It is divided by what a score that equals m has contributed, so that this score
  // counts as exactly 1.
  __device__ Sum<A> seen_from(A m) const {
    A unit = isfinite(m) && isfinite(from) ? exponential_term(m, from) : A(1);
    return {sum.s / unit, sum.c == 0 ? A(0) : sum.c / unit};
  }
  // The state with one score that equals the maximum kept apart. `Scores::accumulate` has added this score in a step of
  // its own, so the compensated sum still has the digits of the others when the score is taken out again.
  __device__ State<A, true> apart() const {
    Running rest = *this;
    if (isfinite(m)) rest.sum.add(-exponential_term(m, from));
    return {m, rest.seen_from(m)};
  }
};

template <class A>
__device__ Sum<A> shuffle(Sum<A> v, int lane_mask) {
  return {__shfl_xor_sync(0xffffffffu, v.s, lane_mask), __shfl_xor_sync(0xffffffffu, v.c, lane_mask)};
}

// These functions combine over groups of `width` neighbouring lanes, a power of two, and every lane gets its group's
// result. States take two steps: the lanes find the maximum, each moves its state to it once, and then they add plain
// sums.
template <class A>
__device__ A reduce_maximum(A m, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) m = max(m, __shfl_xor_sync(0xffffffffu, m, mask));
  return m;
}
template <class T, class A>
__device__ Sum<A> reduce_lanes(Sum<A> sum, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) sum = combine<T>(sum, shuffle(sum, mask));
  return sum;
}
template <class T, class A>
__device__ State<A, false> reduce_lanes(const State<A, false>& part, int width) {
  A m = reduce_maximum(part.m, width);
  return {m, reduce_lanes<T>(seen_from<T>(m, part), width)};
}
template <class T, class A>
__device__ State<A, false> reduce_lanes(const Running<A>& part, int width) {
  A m = reduce_maximum(part.m, width);
  return {m, reduce_lanes<T>(part.seen_from(m), width)};
}
template <class T, class A>
__device__ State<A, true> reduce_lanes(const State<A, true>& part, int width) {
  A m = reduce_maximum(part.m, width);
  // Only one lane may keep the maximum apart: the first lane of the group that has it.
  const int first = threadIdx.x % 32 / width * width;
  const unsigned tops = __ballot_sync(0xffffffffu, part.m == m) >> first;
  const bool keeps = threadIdx.x % 32 == first + __ffs(tops) - 1;
  return {m, reduce_lanes<T>(keeps ? part.sum : seen_from<T>(m, part), width)};
}

// Combines over the block's threads in x, and every thread gets the result. Up to 32 threads are lanes of one warp. The
// compiler can write out the steps if it knows that the block has `whole_warps`.
template <class T, bool whole_warps = false, class Part>
__device__ auto reduce_threads(const Part& part) {
  auto lanes = reduce_lanes<T>(part, whole_warps ? 32 : min(blockDim.x, 32));
  if (blockDim.x <= 32) return lanes;
  __shared__ decltype(lanes) warps[32];
  __syncthreads();  // all threads have read the previous result
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = lanes;
  __syncthreads();
  // All warps do this, even where only the first needs the result: entropies took a tenth longer where the others left.
  int width = 32;
  if constexpr (whole_warps) {  // every group of as many lanes as there are warps, or more, does the same
    width = 2;
    while (width < blockDim.x / 32) width *= 2;
  }
  const int warp = threadIdx.x & (width - 1);
  return reduce_lanes<T>(warp < blockDim.x / 32 ? warps[warp] : decltype(lanes){}, width);
}

}  // namespace jaxsoft::cuda
