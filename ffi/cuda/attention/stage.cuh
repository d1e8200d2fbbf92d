// From registers to boxes in shared memory (tensor_map.cuh), which are then stored: results of a warp group.
#pragma once

#include "../elements.cuh"
#include "../tensor_map.cuh"
#include "../warp_groups.cuh"

namespace jaxsoft::cuda {

// The bytes of a box of 64 rows and as many columns of 16 bits.
constexpr int kBoxBytes = 64 * 128;

// Puts 64 rows of `columns` there, in boxes one after the other. `value(i)` is what becomes of number i of an
// accumulator.
template <class T, int columns, class Value>
__device__ void stage_rows(void* boxes, Value value) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpGroup / 32 * 16 + lane % 16;
  const uint32_t begin = shared_address(boxes);
#pragma unroll
  for (int column = 0; column < columns; column += 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = bits<uint32_t>(narrow_pair(value(column / 2 + 2 * i), value(column / 2 + 2 * i + 1), T()));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     begin + column / 64 * kBoxBytes + place_in_box(row, column % 64 * 2 + lane / 16 * 16)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

}  // namespace jaxsoft::cuda
