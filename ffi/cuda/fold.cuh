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

__device__ inline float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp in the accuracy that a dtype needs: 16-bit results bear the hardware's approximation.
template <class T, class A>
__device__ A exponential(A x) {
  if constexpr (sizeof(T) == 2) return exp2_approximately(x * 0x1.715476p0f);
  else if constexpr (sizeof(T) == 4) return expf(x);
  else return exp(x);
}

// exp(x) / kUnit<T>, for a caller whose next factor takes the unit in: the approximation flushes results below the
// normal numbers to 0, and so the smallest results of bf16 stay.
template <class T> constexpr double kUnit = sizeof(T) == 2 ? 0x1p-32 : 1;
template <class T, class A>
__device__ A exponential_in_units(A x) {
  if constexpr (sizeof(T) == 2) return exp2_approximately(fmaf(x, 0x1.715476p0f, 32.f));
  else return exponential<T>(x);
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

// The state of a set of scores: their maximum m, and the sum of exp(x - reference(m)). The empty set is (-inf, 0).
//
// `apart` leaves one score out of the sum that is the maximum. It contributes exactly 1, and kept apart from it the rest
// keeps its digits where s is only just above 1, in a row that one score dominates: log(s) = log1p(rest).
template <class A, bool apart>
struct State {
  A m = -infinity<A>();
  Sum<A> sum;
  __device__ A s() const {
    if constexpr (!apart) return sum.value();
    return isfinite(m) ? 1 + sum.value() : sum.value() + (m > 0 ? m : A(0));
  }
};

// The sum of a state seen from a maximum that is at least its own; the state's own maximum is then one of the rest.
template <class T, class A, bool apart>
__device__ Sum<A> seen_from(A m, const State<A, apart>& st) {
  A factor = exponential<T>(st.m - reference(m));  // 0 for the empty set
  Sum<A> sum{st.sum.s == 0 ? A(0) : st.sum.s * factor, st.sum.c * factor};  // the factor may be inf where m is
  if constexpr (apart) sum.add(factor);
  return sum;
}

template <class T, class A, bool apart>
__device__ State<A, apart> combine(State<A, apart> a, State<A, apart> b) {
  bool swap = b.m > a.m;  // a NaN is in the sum, never in m
  State<A, apart> high = swap ? b : a, low = swap ? a : b;
  high.sum = combine<T>(high.sum, seen_from<T>(high.m, low));
  return high;
}

template <class A>
__device__ Sum<A> shuffle(Sum<A> v, int lane_mask) {
  return {__shfl_xor_sync(0xffffffffu, v.s, lane_mask), __shfl_xor_sync(0xffffffffu, v.c, lane_mask)};
}
template <class A, bool apart>
__device__ State<A, apart> shuffle(State<A, apart> v, int lane_mask) {
  return {__shfl_xor_sync(0xffffffffu, v.m, lane_mask), shuffle(v.sum, lane_mask)};
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
