// entropy_vjp: dx = -scale * g * p * ((z - m) - u / s), with one g for each row and p = exp(z - m) / s.
#pragma once

#include "probabilities.cuh"

namespace jaxsoft::cuda {

template <class T>
struct EntropyVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr bool reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true;
  struct Values {
    Probabilities<T> p;
    A g, mean;  // mean: of z - m, with the probabilities as weights
  };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part&, const Pack<T> (&)[count], const Pack<T> (&)[count], const Form&) {}
  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const A s = from.s[row];
    return {Probabilities<T>(from.m[row], s), from.g[row], s == 0 ? A(0) : from.u[row] / s};
  }
  static __device__ A value(const Values& v, A x, A) {
    const A below = x == -infinity<A>() ? A(0) : x - v.p.ref;
    return -(v.p(x) * v.g) * (below - v.mean);
  }
  static __device__ bool may_be_quick(const Values&) { return false; }
  static __device__ A quick_value(const Values& v, A x) { return value(v, x, 0); }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.p.scale) && isfinite(v.g) && isfinite(v.mean); }
};

}  // namespace jaxsoft::cuda
