// A token drawn from each row of logits: the arguments of sample.cu's kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../rows/limits.h"

namespace jaxsoft::cuda {

// The operation in the list of those that a library has. It is no row operation as those of rows/operations.h are:
// there are no kernels for a CPU.
constexpr const char* kSampleText = "sample(logits,uniform,temperature,top_p,min_p)->(token,probability) k\n";

// An option: one number a row, or one for all rows.
struct SampleOption {
  const float* numbers;
  int step;  // from one row's number to the next one's: 1 or 0

  __host__ __device__ float at(int64_t row) const { return numbers[row * step]; }
};

// The operands and results of a call. Options that change nothing are 1, 1 and 0.
template <class T>
struct Sampling {
  const T* logits;       // (rows, n)
  const float* uniform;  // (rows, 2), from 0 to 1
  SampleOption temperature, top_p, min_p;
  int32_t* token;
  float* probability;
  int64_t rows;
  uint32_t n;
  uint32_t k;  // of top-k; n or more for all
};

}  // namespace jaxsoft::cuda
