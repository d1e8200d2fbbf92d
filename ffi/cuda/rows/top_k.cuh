// The k largest elements of rows, their softmax, and the rows' state: the interface of top_k/launch.cuh.
#pragma once

#include "extras.cuh"

namespace jaxsoft::cuda {

// The results of top_k beside args.m and args.s, (rows, k) all. Their probabilities go to args.out, unless it is null.
template <class T>
struct Largest {
  T* values;
  int32_t* indices;
  int k;
  T* first = nullptr;  // if this is not null, the first k elements of each row, which are long ones
};

// For f16, bf16 and f32. `workspace` has room for `bytes`.
template <class T>
cudaError_t run_top_k(const Arguments<T>& args, const Largest<T>& largest, void* workspace, int64_t bytes,
                      cudaStream_t stream);

}  // namespace jaxsoft::cuda
