// From products of keys and queries to weights, and from those to slopes: what the backward kernel does with the numbers
// of a tile. Rows of accumulators are keys here, and columns queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../exponential.cuh"
#include "../../wgmma.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// Two numbers, rounded, of which `low` is the first in memory.
template <class T>
__device__ uint32_t pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Rounds an accumulator to left operands.
template <class T, int count>
__device__ void round_to(uint32_t (&words)[count / 8][4], const float (&numbers)[count]) {
#pragma unroll
  for (int i = 0; i < count / 2; i++) words[i / 4][i % 4] = pair<T>(numbers[2 * i], numbers[2 * i + 1]);
}

// Puts -inf where scores do not count. `row` is the thread's first row less its first column, key less query.
template <int count>
__device__ void exclude(float (&scores)[count], int difference, int rows_left, int least, int most) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int row = i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
    const int here = difference + row - column;
    if (here < least || here > most || row >= rows_left) scores[i] = -INFINITY;
  }
}

// cap * tanh(scale * product / cap) in units of base 2, and how it grows with the scaled product.
struct Capped {
  float score, slope;
  __device__ Capped(float product, float cap, float scale) {
    const float root = rsqrtf(1 + exp2_approximately(product * (2 * float(kLog2E) * scale / cap)));
    const float below = root * root;  // (1 - tanh) / 2
    score = (cap - 2 * cap * below) * float(kLog2E);
    slope = 4 * (below - below * below);
  }
};

}  // namespace jaxsoft::cuda
