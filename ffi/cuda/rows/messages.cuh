// What the devices of a mesh tell each other of the k largest elements of rows that lie over them: the interface of
// messages.cu, and how a message is laid out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "top_k/tuning.h"

namespace jaxsoft::cuda {

// The operations in the list of those that a library has. They are no row operations as those of rows/operations.h are:
// there are no kernels for a CPU.
constexpr const char* kMessagesText =
    "top_k_message(scores)->(message) k\n"
    "top_k_of_messages(messages)->(values,chosen_probabilities,indices,maximum,sum) part\n";

// What a device tells of its part of each row: the k largest elements of the part and their indices in it, the part's
// first k elements, and its state. The arrays follow each other in one buffer of words of 32 bits.
template <class T>
struct Message {
  T *values, *first;  // (rows, k)
  int32_t* indices;   // (rows, k)
  float *m, *s;       // (rows,)

  __host__ __device__ Message(uint32_t* words, int64_t rows, int64_t k) {
    values = reinterpret_cast<T*>(words), first = values + rows * k;
    indices = reinterpret_cast<int32_t*>(first + rows * k);
    m = reinterpret_cast<float*>(indices + rows * k), s = m + rows;
  }
  static int64_t words(int64_t rows, int64_t k) { return rows * (k * int64_t(2 * sizeof(T) / 4 + 1) + 2); }
};

}  // namespace jaxsoft::cuda
