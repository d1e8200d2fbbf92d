// Probabilities that are computed again from a row's saved state: for log_softmax_vjp, logsumexp_vjp and entropy_vjp.
#pragma once

#include "operation.cuh"

namespace jaxsoft::cuda {

// p = exp(z - m) / s. It is 0 in a row without scores.
template <class T>
struct Probabilities {
  using A = Accumulator<T>;
  A ref, scale;
  Probabilities() = default;
  __device__ Probabilities(A m, A s) : ref(reference(m)), scale(s == 0 ? A(0) : A(kUnit<T>) / s) {}
  __device__ A operator()(A x) const { return exponential_in_units<T>(x - ref) * scale; }
};

}  // namespace jaxsoft::cuda
