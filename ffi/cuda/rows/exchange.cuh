// What the devices of a mesh exchange to find the k largest elements of rows that lie over them: the interface of
// exchange.cu, and how the candidates of a device are laid out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "top_k/tuning.h"

namespace jaxsoft::cuda {

// The operations in the list of those that a library has. They are no row operations as those of rows/operations.h are:
// there are no kernels for a CPU.
constexpr const char* kExchangeText =
    "top_k_candidates(scores)->(candidates) k\n"
    "top_k_of_candidates(candidates)->(values,chosen_probabilities,indices,maximum,sum) part\n";

// The candidates of a device, of its part of each row: the k largest elements of the part and their indices in it, the
// part's first k elements, and its state. The arrays follow each other in one buffer of words of 32 bits.
template <class T>
struct Candidates {
  T *values, *first;  // (rows, k)
  int32_t* indices;   // (rows, k)
  float *m, *s;       // (rows,)

  __host__ __device__ Candidates(uint32_t* words, int64_t rows, int64_t k) {
    values = reinterpret_cast<T*>(words), first = values + rows * k;
    indices = reinterpret_cast<int32_t*>(first + rows * k);
    m = reinterpret_cast<float*>(indices + rows * k), s = m + rows;
  }
  static int64_t words(int64_t rows, int64_t k) { return rows * (k * int64_t(2 * sizeof(T) / 4 + 1) + 2); }
};

}  // namespace jaxsoft::cuda
