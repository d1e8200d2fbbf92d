// state: the state (m, s) of each row. With labels, the label's score is left out of it and is the result t.
//
// logsumexp_vjp: dx = scale * p * g, with one g for each row. With labels, dx is h instead at the label. Where there is
// a v, it is added at every score above -inf, that of the label included.
#pragma once

#include "labels.cuh"
#include "probabilities.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

template <class T>
struct StateOf : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = false, labelled = true;
  struct Values {};

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    if (first && to.t) to.t[row] = label_score(to, row);
    return {};
  }
  static __device__ A value(Values, A, A) { return 0; }
  static __device__ bool ordinary(const Values&) { return true; }
};

template <class T>
struct LogsumexpVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr bool reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true, labelled = true;
  struct Values {
    Probabilities<T> p;
    A g, v;
  };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part&, const Pack<T> (&)[count], const Pack<T> (&)[count], const Form&) {}
  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const bool read = !from.labels || from.labels[row] != kNoRow;
    return {Probabilities<T>(from.m[row], from.s[row]), read ? from.g[row] : A(0), read && from.v ? from.v[row] : A(0)};
  }
  static __device__ A value(const Values& v, A x, A) {
    const A y = v.p(x) * v.g;
    return v.v == 0 || x == -infinity<A>() ? y : y + v.v;
  }
  // Whether 16-bit results may be taken from a formula with fewer instructions, which does not round the difference in
  // the exponent but rounds `ref` in it. It errs by 2^-17 at most, if ref is not large and the product of the factors
  // not too small.
  static __device__ bool may_be_quick(const Values& v) {
    return fabs(v.p.ref) < 64 && v.v == 0 && (v.g == 0 || fabs(v.p.scale * v.g) > A(0x1p-100));
  }
  static __device__ A quick_value(const Values& v, A x) {
    return exp2_approximately(fmaf(x, A(kLog2E), -(v.p.ref * A(kLog2E) + A(kUnitExponent<T>)))) * (v.p.scale * v.g);
  }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.p.scale) && isfinite(v.g); }
};

}  // namespace jaxsoft::cuda
