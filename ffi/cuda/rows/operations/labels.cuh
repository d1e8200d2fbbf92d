// The score of a row's label, which the operations with integer labels leave out of their reduction.
#pragma once

#include "../score.cuh"
#include "operation.cuh"

namespace jaxsoft::cuda {

// The element at a row's label. It is NaN where the label is out of range, and 0 for a row that is not read.
template <class T>
__device__ T label_element(const Arguments<T>& args, int64_t row) {
  using A = Accumulator<T>;
  const int32_t label = args.labels[row];
  if (label < 0 || label >= args.n) return narrow<T>(label == kNoRow ? A(0) : A(nan("")));
  return args.a[row * args.n + label];
}

// Its score.
template <class T>
__device__ Accumulator<T> label_score(const Arguments<T>& args, T element) {
  const Accumulator<T> x = widen(element);
  return args.cap > 0 ? soft_cap<T>(x, args.cap) : x;
}

}  // namespace jaxsoft::cuda
