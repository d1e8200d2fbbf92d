// log_softmax: y = z - m - log(s). The statistics m and s are results as well.
//
// log_softmax_vjp: dx = scale * (g - p * sum(g)), with a = x and b = g.
#pragma once

#include "probabilities.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

template <class T>
struct LogSoftmax : Scores<T, true> {
  using typename Scores<T, true>::A;
  using typename Scores<T, true>::Part;
  static constexpr bool writes = true;
  static constexpr double masked_value = -__builtin_huge_val();
  struct Values { A ref, log_s; };

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    A rest = (1.0 + part.sum.value()) - 1.0;  // rounded as 1 + rest is in f64, in which the CPU kernels sum
    return {reference(part.m), isfinite(part.m) ? log1p(rest) : A(nan(""))};
  }
  static __device__ A value(Values v, A x, A) { return (x - v.ref) - v.log_s; }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.log_s); }
};

template <class T>
struct LogSoftmaxVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true;
  struct Values {
    Probabilities<T> p;
    A sum;
  };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form&) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      A terms[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) terms[i] = b[k].get(i);
      part.add(tree_sum(terms));
    }
  }
  static __device__ Values finish(Part part, const Arguments<T>& from, int64_t row, bool) {
    A m = from.m[row];
    Probabilities<T> p(m, from.s[row]);
    if (!isfinite(m)) p.scale = nan("");  // log_softmax has no value there
    return {p, part.value()};
  }
  static __device__ A value(const Values& v, A x, A g) { return g - v.p(x) * v.sum; }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.p.scale) && isfinite(v.sum); }
};

}  // namespace jaxsoft::cuda
