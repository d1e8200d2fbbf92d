// Products of a warp on tensor cores (mma.sync), and how their operands come out of tiles in shared memory.
//
// A fragment is what a lane has of a tile. With g = lane / 4 and t = lane % 4, an accumulator of 16 x 8 is in rows g
// and g + 8, and columns 2 t and 2 t + 1. Rows are packed queries; columns are keys in the first product, and elements
// of values in the second.
//
// 8-bit elements are converted to f16, which holds them exactly. They come in pairs that are next to each other, so the
// order in which they are multiplied differs: see `element_of_query` and `column_of_output`.
#pragma once

#include "../../mma.cuh"
#include "../../tensor_map.cuh"
#include "arguments.cuh"

namespace jaxsoft::cuda::decode {

// Loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8, and gets of each
// the 4 bytes at 4 t of row g; or if `turned`, 16 bits each at 2 g of rows 2 t and 2 t + 1.
template <bool turned>
__device__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Two of a word's 8-bit floats, as f16. A number of e5m2 is the upper half of the f16.
template <PageType type, int low, int high>
__device__ uint32_t widen_bytes(uint32_t word) {
  if constexpr (type == PageType::e5m2) {
    return __byte_perm(word, 0, 0x0404 | low << 4 | high << 12);
  } else {
    uint32_t wide;
    const uint32_t pair = low == 0 && high == 1 ? word : __byte_perm(word, 0, 0x4400 | low | high << 4);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(pair)));
    return wide;
  }
}

// A tile of keys or of values in shared memory: boxes of `keys` rows, one for each 128 bytes of a key (64 if it has no
// more), one after the other.
template <PageType type, int size, int keys>
struct Tile {
  static constexpr bool wide = type == PageType::as_query;
  static constexpr int key_bytes = size * (wide ? 2 : 1), box_bytes = key_bytes < 128 ? key_bytes : 128;
  static constexpr Swizzle swizzle = box_bytes == 128 ? Swizzle::bytes128 : Swizzle::bytes64;
  static constexpr int elements = size;
  static constexpr int boxes = key_bytes / box_bytes, bytes = keys * key_bytes;
  static constexpr int box_elements = size / boxes;
  // How many products of 16 elements, or columns of 8, four matrices are enough for.
  static constexpr int steps_of_load = wide ? 2 : 4, columns_of_load = wide ? 2 : 4;

  // Of which box, and how far from its begin, is a unit of 16 bytes of a key.
  __device__ static uint32_t place(int key, int unit) {
    constexpr int units = box_bytes / 16;
    return unit / units * keys * box_bytes + place_in_box<swizzle>(key, unit % units * 16);
  }
  // The right operands of the first product: of 8 keys from `key` on, and steps [step, step + steps_of_load) of 16
  // elements.
  __device__ static void load_keys(uint32_t (&pairs)[steps_of_load][2], uint32_t tile, int key, int step) {
    const int lane = threadIdx.x % 32;
    uint32_t words[4];
    load_matrices<false>(words, tile + place(key + lane % 8, step * (wide ? 2 : 1) + lane / 8));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (wide) pairs[i / 2][i % 2] = words[i];
      else pairs[i][0] = widen_bytes<type, 0, 1>(words[i]), pairs[i][1] = widen_bytes<type, 2, 3>(words[i]);
    }
  }
  // The element of the query that goes with pair `half` of a step in lane t: it and the next one.
  __device__ static int element_of_query(int step, int half) {
    const int t = threadIdx.x % 4;
    return wide ? step * 16 + half * 8 + 2 * t : step * 16 + 4 * t + 2 * half;
  }
  // The right operands of the second product: of 16 keys from `key` on, and columns of 8 from `column` on.
  __device__ static void load_values(uint32_t (&pairs)[columns_of_load][2], uint32_t tile, int key, int column) {
    const int lane = threadIdx.x % 32;
    uint32_t words[4];
    // Matrices are the first 8 keys, the other 8 keys, and the same of the next 16 bytes.
    const int unit = (wide ? column : column / 2) + lane / 16;
    load_matrices<true>(words, tile + place(key + lane % 16, unit));
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t word = words[2 * i + half];
        if constexpr (wide) {
          pairs[i][half] = word;
        } else {  // even elements of both keys are one column, odd ones the other
          pairs[2 * i][half] = widen_bytes<type, 0, 2>(word);
          pairs[2 * i + 1][half] = widen_bytes<type, 1, 3>(word);
        }
      }
    }
  }
  // Sets keys [0, before) and [from, keys) to 0. All lanes of a warp call this.
  __device__ static void clear(unsigned char* tile, int before, int from) {
    constexpr int units = key_bytes / 16;
    for (int i = threadIdx.x % 32; i < keys * units; i += 32) {
      const int key = i / units;
      if (key < before || key >= from) *reinterpret_cast<uint4*>(tile + place(key, i % units)) = uint4{};
    }
  }
};

// The output of 16 rows in a warp's accumulators.
template <PageType type, int size>
struct Output {
  static constexpr int columns = size / 8;
  float values[columns][4];
  // A lane has runs of elements that lie next to each other in two rows: of 2, or of 4 where elements were of 8 bits.
  // Calls use(row, element, value...) for each.
  template <class Use>
  __device__ void visit(Use use) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (type == PageType::as_query) {
#pragma unroll
      for (int i = 0; i < columns; i++) {
        use(g, 8 * i + 2 * t, values[i][0], values[i][1]);
        use(g + 8, 8 * i + 2 * t, values[i][2], values[i][3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < columns; i += 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          use(g + 8 * half, 8 * i + 4 * t, values[i][2 * half], values[i + 1][2 * half]);
          use(g + 8 * half, 8 * i + 4 * t + 2, values[i][2 * half + 1], values[i + 1][2 * half + 1]);
        }
      }
    }
  }
};

// Loads a lane's part of the queries of the unit, from `row` on and 8 further down, as left operands: `pair_of` gives
// two elements of a row. Returns by which power of 2 each row was divided: in f16, numbers of bf16 might be too large.
template <class T, class Query, class Tile, int steps, class GetPair>
__device__ void load_queries(const Arguments& args, const Unit& unit, int row, GetPair pair_of,
                             uint32_t (&to)[steps][4], float (&unit_of_row)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool exists = row + 8 * half < live_rows(args, unit);
#pragma unroll
    for (int step = 0; step < steps; step++) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int element = Tile::element_of_query(step, k);
        to[step][half + 2 * k] = exists && element < args.call.size ? pair_of(row + 8 * half, element) : 0;
      }
    }
    unit_of_row[half] = 1;
    if constexpr (!std::is_same_v<T, Query>) {
      float most = 0;
#pragma unroll
      for (int step = 0; step < steps; step++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float2 pair = __bfloat1622float2(bits<__nv_bfloat162>(to[step][half + 2 * k]));
          most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const int exponent = most > 0 && most < INFINITY ? max(-126, ilogbf(most)) : 0;
      unit_of_row[half] = scalbnf(1.f, exponent);
      const float inverse = scalbnf(1.f, -exponent);
#pragma unroll
      for (int step = 0; step < steps; step++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
          uint32_t& word = to[step][half + 2 * k];
          const float2 pair = __bfloat1622float2(bits<__nv_bfloat162>(word));
          word = bits<uint32_t>(__floats2half2_rn(pair.x * inverse, pair.y * inverse));
        }
      }
    }
  }
}

}  // namespace jaxsoft::cuda::decode
