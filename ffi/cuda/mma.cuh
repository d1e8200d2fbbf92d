// Products of a warp on tensor cores (mma.sync): 16 x 8 += 16 x 16 times 16 x 8, of 16-bit elements with f32
// accumulators.
//
// With g = lane / 4 and t = lane % 4, a lane has of an accumulator columns 2 t and 2 t + 1 of row g, and then those of
// row g + 8; of the left operand the like of columns 0 to 7, each pair in a word, and then of columns 8 to 15; and of
// the right one rows 2 t and 2 t + 1 of column g, and then 8 rows further on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxsoft::cuda {

// A macro, as the text of an asm is to be one literal.
#define JAXSOFT_MULTIPLY(T, name)                                                                                      \
  __device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                                \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                      \
  }
JAXSOFT_MULTIPLY(__nv_bfloat16, "bf16")
JAXSOFT_MULTIPLY(__half, "f16")
#undef JAXSOFT_MULTIPLY

}  // namespace jaxsoft::cuda
