// state: the state (m, s) of each row. With labels, the label's score is left out of it and is a result of its own.
//
// logsumexp_vjp: dx = scale * p * g, with one cotangent g for each row. With labels, dx is the label's cotangent
// instead at the label. Where there is a cotangent of the distances, it is added at every score above -inf, that of the
// label included.
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
    return finish(part, to, row, first, [&] { return label_element(to, row); });
  }
  template <class Element>
  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first, Element at_label) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    if (first && to.label_score) to.label_score[row] = label_score(to, at_label());
    return {};
  }
};

template <class T>
struct LogsumexpVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr bool reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true, labelled = true;
  struct Values {
    Probabilities<T> p;
    A cotangent, distance_cotangent;
  };
  static __device__ T fill() { return narrow<T>(0); }

  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const bool read = !from.labels || from.labels[row] != kNoRow;
    return {Probabilities<T>(from.m[row], from.s[row]), read ? from.cotangent[row] : A(0),
            read && from.distance_cotangent ? from.distance_cotangent[row] : A(0)};
  }
  static __device__ A value(const Values& row, A x, A) {
    const A y = row.p(x) * row.cotangent;
    return row.distance_cotangent == 0 || x == -infinity<A>() ? y : y + row.distance_cotangent;
  }
  // Whether 16-bit results may be taken from a formula with fewer instructions, which does not round the difference in
  // the exponent but rounds `ref` in it. It errs by 2^-17 at most, if ref is not large and the product of the factors
  // not too small.
  static __device__ bool may_be_quick(const Values& row) {
    return fabs(row.p.ref) < 64 && row.distance_cotangent == 0 &&
           (row.cotangent == 0 || fabs(row.p.scale * row.cotangent) > A(0x1p-100));
  }
  static __device__ A quick_value(const Values& row, A x) {
    const A exponent = fmaf(x, A(kLog2E), -(row.p.ref * A(kLog2E) + A(kUnitExponent<T>)));
    return exp2_approximately(exponent) * (row.p.scale * row.cotangent);
  }
  static __device__ bool ordinary(const Values& row) { return isfinite(row.p.scale) && isfinite(row.cotangent); }
};

}  // namespace jaxsoft::cuda
