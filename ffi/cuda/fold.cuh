// The fold on a GPU: sums and states (m, s), for a thread, a warp and a block.
//
// Every layer is a plain function of the one below. Sums are compensated (Knuth's two-sum), so that neither the length
// of a row nor the order of its parts costs accuracy.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

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
  if constexpr (sizeof(T) == 2) return exp2_approximately(x * A(0x1.71547652b82fep0));
  else if constexpr (sizeof(T) == 4) return expf(x);
  else return exp(x);
}

// exp(x - from) for the terms of a sum, where the hardware's approximation is enough, as a term of a large |x - from| is
// a small one. `shifted` saves the subtraction: 2^(x log2(e) - shift), the product exact before the shift is subtracted.
// That the shift itself is rounded multiplies all terms by one number, exp(from - from), which `Running` divides out
// again. From 2^20 on that number could overflow.
constexpr double kLog2E = 0x1.71547652b82fep0;
template <class A>
__device__ bool may_shift(A from) {
  return sizeof(A) == 4 && fabs(from) < A(0x1p20);
}
template <bool shifted, class A>
__device__ A exponential_term(A x, A from) {
  if constexpr (sizeof(A) == 8) return exp(x - from);
  else if constexpr (shifted) return exp2_approximately(fmaf(x, A(kLog2E), -(from * A(kLog2E))));
  else return exp2_approximately((x - from) * A(kLog2E));
}
template <class A>
__device__ A exponential_term(A x, A from) {
  return may_shift(from) ? exponential_term<true>(x, from) : exponential_term<false>(x, from);
}

// exp(x) / kUnit<T>, for a caller whose next factor takes the unit in: the approximation flushes results below the
// normal numbers to 0, and so the smallest results of bf16 stay.
template <class T> constexpr double kUnit = std::is_same<T, __nv_bfloat16>::value ? 0x1p-32 : 1;
template <class T> constexpr int kUnitExponent = std::is_same<T, __nv_bfloat16>::value ? -32 : 0;
template <class T, class A>
__device__ A exponential_in_units(A x) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) return exp2_approximately(fmaf(x, A(kLog2E), 32.f));
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

// The state of the scores that one thread has seen, as it grows: m, and the sum of exp(x - reference(from)). `from`
// follows m only when m has left it well behind, as to move the sum to another reference at every new maximum would
// make the lanes of a warp diverge.
template <class A>
struct Running {
  A m = -infinity<A>(), from = -infinity<A>();
  Sum<A> sum;
  __device__ void raise(A top) {
    m = max(m, top);
    if (top > from + 8 && m < infinity<A>()) {
      A factor = isfinite(from) ? exponential_term(from, top) / exponential_term(from, from) : A(0);
      sum.s *= factor, sum.c *= factor;
      from = top;
    }
  }
  // The sum seen from a maximum. Divided by what a score there has contributed, so that this very score counts as 1.
  __device__ Sum<A> seen_from(A m) const {
    A unit = isfinite(m) && isfinite(from) ? exponential_term(m, from) : A(1);
    return {sum.s / unit, sum.c == 0 ? A(0) : sum.c / unit};
  }
  // With one of the scores that are the maximum apart. It has been added by itself, so the compensated sum still has
  // the digits of the others.
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

// Combines over groups of `width` neighbouring lanes, a power of two; every lane gets its group's result. Of states the
// maximum comes first: then every state is moved to it once, and what is left are sums.
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
  // The score that is kept apart is one lane's: the group's first of those that have it.
  const int first = threadIdx.x % 32 / width * width;
  const unsigned tops = __ballot_sync(0xffffffffu, part.m == m) >> first;
  const bool keeps = threadIdx.x % 32 == first + __ffs(tops) - 1;
  return {m, reduce_lanes<T>(keeps ? part.sum : seen_from<T>(m, part), width)};
}

// Combines over the block's threads in x; every thread gets the result. Up to 32 threads are lanes of one warp.
template <class T, class Part>
__device__ auto reduce_threads(const Part& part) {
  auto lanes = reduce_lanes<T>(part, min(blockDim.x, 32));
  if (blockDim.x <= 32) return lanes;
  __shared__ decltype(lanes) warps[32];
  __syncthreads();  // the previous result has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = lanes;
  __syncthreads();
  return reduce_lanes<T>(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : decltype(lanes){}, 32);
}

}  // namespace jaxsoft::cuda
