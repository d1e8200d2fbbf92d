// The fold on a GPU: sums and states (m, s), for a thread, a warp and a block.
//
// Every layer is a plain function of the one below. Sums are compensated (Knuth's two-sum), so that neither the length
// of a row nor the order of its parts costs accuracy.
#pragma once

#include <cuda_runtime.h>

namespace jaxsoft::cuda {

template <class A>
__device__ constexpr A infinity() {
  return static_cast<A>(__builtin_huge_val());
}

// What exp subtracts: m where it is finite, else 0. The guard that makes (-inf, 0) the identity of the fold.
template <class A>
__device__ A reference(A m) {
  return isfinite(m) ? m : A(0);
}

// exp in the accuracy that a dtype needs: 16-bit results bear the hardware's approximation.
template <class T, class A>
__device__ A exponential(A x) {
  if constexpr (sizeof(T) == 2) return __expf(x);
  else if constexpr (sizeof(T) == 4) return expf(x);
  else return exp(x);
}

// A sum s + c, where c holds what s has lost to rounding.
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

// The state of a set of scores: their maximum m, and the sum of exp(x - reference(m)) over all of them but one that is
// the maximum. That one contributes exactly 1, which is left out so that log(s) = log1p(rest) keeps its digits where s
// is only just above 1, in a row that one score dominates. The empty set is (-inf, 0).
template <class A>
struct State {
  A m = -infinity<A>();
  Sum<A> rest;
  __device__ A s() const { return isfinite(m) ? 1 + rest.value() : rest.value() + (m > 0 ? m : A(0)); }
};

// The scores of `st`, its maximum included, as part of the rest under a maximum that is at least as large.
template <class T, class A>
__device__ void add_below(Sum<A>& rest, const State<A>& st, A m) {
  A factor = exponential<T>(st.m - reference(m));  // 0 for the empty set
  rest.add(factor);
  rest.add(factor * st.rest.s);
  rest.c += factor * st.rest.c;
}

template <class T, class A>
__device__ State<A> combine(State<A> a, State<A> b) {
  bool swap = b.m > a.m;  // a NaN is in the rest, never in m
  State<A> high = swap ? b : a, low = swap ? a : b;
  add_below<T>(high.rest, low, high.m);
  return high;
}

template <class A>
__device__ Sum<A> shuffle(Sum<A> v, int lane_mask) {
  return {__shfl_xor_sync(0xffffffffu, v.s, lane_mask), __shfl_xor_sync(0xffffffffu, v.c, lane_mask)};
}
template <class A>
__device__ State<A> shuffle(State<A> v, int lane_mask) {
  return {__shfl_xor_sync(0xffffffffu, v.m, lane_mask), shuffle(v.rest, lane_mask)};
}

// Combines over groups of `width` neighbouring lanes, a power of two; every lane gets its group's result.
template <class T, class Part>
__device__ Part reduce_lanes(Part part, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) part = combine<T>(part, shuffle(part, mask));
  return part;
}

// Combines over the block's threads in x; every thread gets the result. Up to 32 threads are lanes of one warp.
template <class T, class Part>
__device__ Part reduce_threads(Part part) {
  if (blockDim.x <= 32) return reduce_lanes<T>(part, blockDim.x);
  __shared__ Part warps[32];
  part = reduce_lanes<T>(part, 32);
  __syncthreads();  // the previous result has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  part = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : Part{};
  return reduce_lanes<T>(part, 32);
}

}  // namespace jaxsoft::cuda
