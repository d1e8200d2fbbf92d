// Products of warp groups on Hopper's tensor cores (wgmma): 64 x N += 64 x 16 times 16 x N, of 16-bit elements with f32
// accumulators. They run while the warp group goes on, and read shared memory themselves.
//
// Accumulators: element (row, column) of the 64 x N result is in warp row / 16 of the group, in lane
// row % 8 * 4 + column % 8 / 2, at index column / 8 * 4 + row % 16 / 8 * 2 + column % 2. So a thread has two rows,
// `row_of_thread` and 8 more, and a row is spread over four neighbouring lanes. A left operand in registers lies in the
// same way: what a thread has of columns [16 k, 16 k + 16) of an accumulator, rounded and in pairs, in that order, are
// the four words of a 64 x 16 tile.
//
// The order of things: `begin_products`, products, `commit_products`, and `wait_for_products` before their results are
// read or their operands overwritten. Meanwhile nobody may touch the accumulators and a left operand in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "copies.cuh"
#include "tensor_map.cuh"
#include "warp_groups.cuh"

namespace jaxsoft::cuda {

// Whether products sum along the rows of a tile in shared memory, or over its rows.
enum class Summed { along_rows, over_rows };

// A tile in shared memory, as products take it: from the first of the 16 elements that are summed. It consists of boxes
// (tensor_map.cuh) with rows of 128 bytes, one after the other.
template <Summed summed>
struct Operand {
  uint64_t word;
  // The address is in the lower half, and does not overflow.
  __device__ Operand operator+(uint32_t bytes) const {
    return {word >> 32 << 32 | (static_cast<uint32_t>(word) + (bytes >> 4))};
  }
  // The same, but as if it were not known. Else the compiler finds out what is the same in each round of a loop, and
  // keeps the addresses of all products of the loop in registers, which it does not have.
  __device__ Operand anew() const {
    auto low = static_cast<uint32_t>(word);
    asm volatile("" : "+r"(low));
    return {word >> 32 << 32 | low};
  }
};
__device__ inline uint64_t operand_word(const void* box, uint32_t leading_bytes) {
  constexpr uint64_t stride_bytes = 8 * 128, swizzle_of_128_bytes = 1;
  const uint64_t address = (shared_address(box) & 0x3ffff) >> 4;
  return address | uint64_t(leading_bytes >> 4) << 16 | stride_bytes >> 4 << 32 | swizzle_of_128_bytes << 62;
}

// A tile whose rows are rows of the left operand, or columns of the right one. Another 16 elements within a box are 32
// bytes further on. A box has at least as many rows as the operand.
__device__ inline Operand<Summed::along_rows> summed_along_rows(const void* box) { return {operand_word(box, 16)}; }
// A tile whose columns are rows of the left operand, or columns of the right one, and may lie in several boxes of
// `box_rows` rows each. Another 16 rows are 16 rows of the box further on.
__device__ inline Operand<Summed::over_rows> summed_over_rows(const void* box, int box_rows) {
  return {operand_word(box, box_rows * 128)};
}

// Where a thread's first elements are in an accumulator: the other row is 8 further on, and columns come in pairs, each
// 8 after the last.
__device__ inline int row_of_thread() { return threadIdx.x % kWarpGroup / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ inline int column_of_thread() { return threadIdx.x % 4 * 2; }

// The words of four lanes side by side, turned: word i of lane j becomes word j of lane i. So the four that
// share a row of an accumulator get each a run of its columns.
__device__ inline void turn_in_four(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = got;
  }
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving what uses these registers over this place.
template <class T, int count>
__device__ void hold(T (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    if constexpr (std::is_array_v<T>) hold(registers[i]);
    else if constexpr (std::is_same_v<T, float>) asm volatile("" : "+f"(registers[i])::"memory");
    else asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// Waits until all but the last `groups` committed groups of products are complete. `done` are arrays of registers that
// the complete ones have used: accumulators, and left operands.
template <int groups, class... Registers>
__device__ void wait_for_products(Registers&... done) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
  (hold(done), ...);
}

// The instruction for N columns and elements of type T.
template <class T, int N>
struct Instruction;

// d += left * right, or d = left * right if not `add`, for 64 rows and N = 2 * count columns. The left operand is in
// shared memory, or the four words in registers.
template <class T, int count, Summed left_summed, Summed right_summed>
__device__ void multiply(float (&d)[count], Operand<left_summed> left, Operand<right_summed> right, bool add) {
  Instruction<T, 2 * count>::template run<left_summed == Summed::over_rows, right_summed == Summed::over_rows>(
      d, left.word, right.word, add);
}
template <class T, int count, Summed right_summed>
__device__ void multiply(float (&d)[count], const uint32_t (&left)[4], Operand<right_summed> right, bool add) {
  Instruction<T, 2 * count>::template run<right_summed == Summed::over_rows>(d, left, right.word, add);
}

// What follows writes the instructions out, for the numbers of columns that kernels have. As asm, they need the list of
// their registers by number.
#define JAXSOFT_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAXSOFT_NUMBERS_16 JAXSOFT_NUMBERS_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define JAXSOFT_NUMBERS_24 JAXSOFT_NUMBERS_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define JAXSOFT_NUMBERS_32 JAXSOFT_NUMBERS_24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define JAXSOFT_NUMBERS_40 JAXSOFT_NUMBERS_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define JAXSOFT_NUMBERS_48 JAXSOFT_NUMBERS_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define JAXSOFT_NUMBERS_56 JAXSOFT_NUMBERS_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define JAXSOFT_NUMBERS_64 JAXSOFT_NUMBERS_56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define JAXSOFT_NUMBERS_72 JAXSOFT_NUMBERS_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define JAXSOFT_NUMBERS_80 JAXSOFT_NUMBERS_72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define JAXSOFT_NUMBERS_88 JAXSOFT_NUMBERS_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define JAXSOFT_NUMBERS_96 JAXSOFT_NUMBERS_88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define JAXSOFT_NUMBERS_104 JAXSOFT_NUMBERS_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define JAXSOFT_NUMBERS_112 JAXSOFT_NUMBERS_104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define JAXSOFT_NUMBERS_120 JAXSOFT_NUMBERS_112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define JAXSOFT_NUMBERS_128 JAXSOFT_NUMBERS_120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define JAXSOFT_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXSOFT_EIGHT(i) JAXSOFT_FOUR(i), JAXSOFT_FOUR(i + 4)
#define JAXSOFT_REGISTERS_8 JAXSOFT_EIGHT(0)
#define JAXSOFT_REGISTERS_16 JAXSOFT_REGISTERS_8, JAXSOFT_EIGHT(8)
#define JAXSOFT_REGISTERS_24 JAXSOFT_REGISTERS_16, JAXSOFT_EIGHT(16)
#define JAXSOFT_REGISTERS_32 JAXSOFT_REGISTERS_24, JAXSOFT_EIGHT(24)
#define JAXSOFT_REGISTERS_40 JAXSOFT_REGISTERS_32, JAXSOFT_EIGHT(32)
#define JAXSOFT_REGISTERS_48 JAXSOFT_REGISTERS_40, JAXSOFT_EIGHT(40)
#define JAXSOFT_REGISTERS_56 JAXSOFT_REGISTERS_48, JAXSOFT_EIGHT(48)
#define JAXSOFT_REGISTERS_64 JAXSOFT_REGISTERS_56, JAXSOFT_EIGHT(56)
#define JAXSOFT_REGISTERS_72 JAXSOFT_REGISTERS_64, JAXSOFT_EIGHT(64)
#define JAXSOFT_REGISTERS_80 JAXSOFT_REGISTERS_72, JAXSOFT_EIGHT(72)
#define JAXSOFT_REGISTERS_88 JAXSOFT_REGISTERS_80, JAXSOFT_EIGHT(80)
#define JAXSOFT_REGISTERS_96 JAXSOFT_REGISTERS_88, JAXSOFT_EIGHT(88)
#define JAXSOFT_REGISTERS_104 JAXSOFT_REGISTERS_96, JAXSOFT_EIGHT(96)
#define JAXSOFT_REGISTERS_112 JAXSOFT_REGISTERS_104, JAXSOFT_EIGHT(104)
#define JAXSOFT_REGISTERS_120 JAXSOFT_REGISTERS_112, JAXSOFT_EIGHT(112)
#define JAXSOFT_REGISTERS_128 JAXSOFT_REGISTERS_120, JAXSOFT_EIGHT(120)

// n0 to n6 are the numbers of the operands after the `count` accumulators.
#define JAXSOFT_INSTRUCTION(T, name, N, count, n0, n1, n2, n3, n4, n5, n6)                                             \
  template <>                                                                                                          \
  struct Instruction<T, N> {                                                                                           \
    template <bool left_turned, bool right_turned>                                                                     \
    __device__ static void run(float (&d)[count], uint64_t left, uint64_t right, bool add) {                           \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #n2 ", 0;\n"                                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" JAXSOFT_NUMBERS_##count "}, "           \
          "%" #n0 ", %" #n1 ", add, 1, 1, %" #n3 ", %" #n4 ";\n}\n"                                                    \
          : JAXSOFT_REGISTERS_##count                                                                                  \
          : "l"(left), "l"(right), "r"(int(add)), "n"(int(left_turned)), "n"(int(right_turned)));                      \
    }                                                                                                                  \
    template <bool right_turned>                                                                                       \
    __device__ static void run(float (&d)[count], const uint32_t (&left)[4], uint64_t right, bool add) {               \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #n5 ", 0;\n"                                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" JAXSOFT_NUMBERS_##count "}, "           \
          "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", add, 1, 1, %" #n6 ";\n}\n"                              \
          : JAXSOFT_REGISTERS_##count                                                                                  \
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int(add)),                         \
            "n"(int(right_turned)));                                                                                   \
    }                                                                                                                  \
  }
#define JAXSOFT_INSTRUCTIONS(N, ...)                      \
  JAXSOFT_INSTRUCTION(__half, "f16", N, __VA_ARGS__);     \
  JAXSOFT_INSTRUCTION(__nv_bfloat16, "bf16", N, __VA_ARGS__)
JAXSOFT_INSTRUCTIONS(32, 16, 16, 17, 18, 19, 20, 21, 22);
JAXSOFT_INSTRUCTIONS(48, 24, 24, 25, 26, 27, 28, 29, 30);
JAXSOFT_INSTRUCTIONS(64, 32, 32, 33, 34, 35, 36, 37, 38);
JAXSOFT_INSTRUCTIONS(80, 40, 40, 41, 42, 43, 44, 45, 46);
JAXSOFT_INSTRUCTIONS(96, 48, 48, 49, 50, 51, 52, 53, 54);
JAXSOFT_INSTRUCTIONS(128, 64, 64, 65, 66, 67, 68, 69, 70);
JAXSOFT_INSTRUCTIONS(176, 88, 88, 89, 90, 91, 92, 93, 94);
JAXSOFT_INSTRUCTIONS(192, 96, 96, 97, 98, 99, 100, 101, 102);
JAXSOFT_INSTRUCTIONS(256, 128, 128, 129, 130, 131, 132, 133, 134);

}  // namespace jaxsoft::cuda
