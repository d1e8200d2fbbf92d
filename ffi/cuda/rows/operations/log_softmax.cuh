// log_softmax: y = z - m - log(s). The statistics m and s are results as well.
#pragma once

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

}  // namespace jaxsoft::cuda
