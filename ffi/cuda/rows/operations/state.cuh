// state: the state (m, s) of each row. With labels, the label's score is left out of it and is the result t.
#pragma once

#include "labels.cuh"
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

}  // namespace jaxsoft::cuda
