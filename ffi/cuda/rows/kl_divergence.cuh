// The Kullback-Leibler divergence of rows of two arrays of scores, and its gradients: the interface of
// kl_divergence.cu.
#pragma once

#include <cuda_runtime.h>

#include "../../rows/call.h"

namespace jaxsoft::cuda {

// For f16, bf16, f32 and f64, the element type of all arrays of whole rows. A call with a cotangent is that of the
// gradients, of which the first may be left out. Everything is ordered by `stream`.
template <class T>
cudaError_t run_kl_divergence(const Call& call, cudaStream_t stream);

}  // namespace jaxsoft::cuda
