// Decode for up to 16 packed queries of a key head: memory decides how long it takes, and products are those of single
// warps. Each consumer warp has all rows, and keeps a state of its own over the tiles that it gets; the states of a
// block's warps are merged at the end of a unit. So until then warps wait for nobody but the copies.
#pragma once

#include "merge.cuh"
#include "ring.cuh"

namespace jaxsoft::cuda::decode {

constexpr int kFewRows = 16;

// What a block consists of. Small heads have more warps, as there is more to do for each byte.
template <PageType type, int size>
struct FewRows {
  static constexpr int bytes = size * (type == PageType::as_query ? 2 : 1);  // of a key
  static constexpr int keys = size == 256 ? 16 : 32;                         // of a tile
  static constexpr int warps = size == 64 ? 8 : 4;
  // Of a warp, of 128 KB in all. With 192 KB in flight all requests took longer, and calls were 2 % slower.
  static constexpr int slots = 128 * 1024 / (2 * bytes * keys * warps);
  static constexpr int threads = (warps + 1) * 32;
  using Values = Tile<type, size, keys>;
  using Ring = RingMemory<Values, keys, warps, slots>;
  struct Memory {
    Ring ring;
    // The warps' states, whose elements are at `place_in_row`.
    alignas(16) float outputs[warps][16][size];
    float2 sums[warps][16];
  };
};

// The product of a tile's keys and the queries.
template <class T, class Tile, int steps, int columns>
__device__ void multiply_keys(float (&z)[columns][4], const uint32_t (&query)[steps][4], uint32_t tile) {
#pragma unroll
  for (int i = 0; i < columns; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) z[i][j] = 0;
  }
#pragma unroll
  for (int step = 0; step < steps; step += Tile::steps_of_load) {
#pragma unroll
    for (int i = 0; i < columns; i++) {
      uint32_t pairs[Tile::steps_of_load][2];
      Tile::load_keys(pairs, tile, 8 * i, step);
#pragma unroll
      for (int k = 0; k < Tile::steps_of_load; k++) multiply(z[i], query[step + k], pairs[k][0], pairs[k][1], T());
    }
  }
}

// Adds the product of weights and a tile's values.
template <class T, class Tile, int columns, class Out>
__device__ void multiply_values(Out& output, const float (&weights)[columns][4], uint32_t tile) {
#pragma unroll
  for (int run = 0; run < columns / 2; run++) {
    uint32_t left[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&of)[4] = weights[2 * run + i / 2];
      left[i] = bits<uint32_t>(narrow_pair(of[i % 2 * 2], of[i % 2 * 2 + 1], T()));
    }
#pragma unroll
    for (int i = 0; i < Out::columns; i += Tile::columns_of_load) {
      uint32_t pairs[Tile::columns_of_load][2];
      Tile::load_values(pairs, tile, 16 * run, i);
#pragma unroll
      for (int k = 0; k < Tile::columns_of_load; k++)
        multiply(output.values[i + k], left, pairs[k][0], pairs[k][1], T());
    }
  }
}

// Loads a lane's part of the queries of the unit, from `row` on and 8 further down, as left operands. Returns by which
// power of 2 each row was divided: in f16, numbers of bf16 might be too large.
template <class T, class Query, class Tile, int steps>
__device__ void load_queries(const Arguments& args, const Unit& unit, int row, uint32_t (&to)[steps][4],
                             float (&unit_of_row)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool exists = row + 8 * half < live_rows(args, unit);
    const RowPlace place(args, unit, exists ? row + 8 * half : 0);
    const auto* from = static_cast<const Query*>(args.call.query) + place.begin(args, unit);
#pragma unroll
    for (int step = 0; step < steps; step++) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int element = Tile::element_of_query(step, k);
        to[step][half + 2 * k] =
            exists && element < args.call.size ? __ldg(reinterpret_cast<const uint32_t*>(from + element)) : 0;
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

// Merges the states of a block's warps and stores that of the chunk, or the results if the item has no other.
template <class Shape, int size>
__device__ void store_few(const Arguments& args, const Unit& unit, const typename Shape::Memory& memory) {
  constexpr int each = size / 4;  // runs of four elements
  const int live = live_rows(args, unit), rows = unit.chunks == 1 ? rows_of(args, unit) : live;
  for (int i = threadIdx.x; i < rows * each; i += Shape::warps * 32) {
    const int row = i / each, element = i % each * 4;
    float2 sum{-INFINITY, 0};
    float4 output{};
    if (row < live) {
      float2 sums[Shape::warps];
      float4 outputs[Shape::warps];
#pragma unroll
      for (int k = 0; k < Shape::warps; k++) {
        sums[k] = memory.sums[k][row];
        outputs[k] = *reinterpret_cast<const float4*>(&memory.outputs[k][row][place_in_row(row, element)]);
      }
      append(sum, output, sums, outputs);
    }
    store_row<size>(args, unit, unit.chunks == 1, unit.chunk, row, element, sum, {output});
  }
}

// T is the type in which is multiplied.
template <class T, PageType type, int size>
__device__ void consume_few(const Arguments& args, typename FewRows<type, size>::Memory& memory) {
  using Shape = FewRows<type, size>;
  using Tile = typename Shape::Values;
  constexpr int steps = size / 16, columns = Shape::keys / 8;
  const NamedBarrier consumers{2, Shape::warps * 32};
  auto& ring = memory.ring;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, row = lane / 4;
  SlotPlace<Shape::slots> slot;
  SlotPlace<ring.units> unit_place;
  uint32_t query[steps][4];
  float unit_of_row[2];
  auto load = [&](const Unit& unit) {
    if (unit.batch == kNoUnit) return;
    if (type == PageType::as_query || args.call.type == AttentionType::f16)
      load_queries<T, T, Tile>(args, unit, row, query, unit_of_row);
    else if constexpr (type != PageType::as_query)
      load_queries<T, __nv_bfloat16, Tile>(args, unit, row, query, unit_of_row);
  };
  Unit unit = next_unit(ring, unit_place);
  load(unit);
  while (unit.batch != kNoUnit) {
    LaneRows rows(args, unit, row, args.call.scale * (args.pages.key_scale ? args.pages.key_scale[unit.head] : 1.f));
    for (int half = 0; half < 2; half++) rows.factor[half] *= unit_of_row[half];
    Output<type, size> output{};
    for (int key = unit.begin + warp * Shape::keys; key < unit.end; key += Shape::warps * Shape::keys) {
      ring.full[warp][slot.slot].wait(slot.parity);
      auto& tile = ring.slots[warp][slot.slot];
      float z[columns][4];
      multiply_keys<T, Tile>(z, query, shared_address(tile.key));
      const unsigned valid = ring.valid[warp][slot.slot];
      const bool plain = is_plain<Shape::keys>(args, rows, key, valid);
      if (!plain) adjust_tile(args, unit, rows, row, key, valid, z);
      float factors[2];
      if (fold_tile(rows, plain, z, factors)) {
#pragma unroll
        for (int i = 0; i < output.columns; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) output.values[i][j] *= factors[j / 2];
        }
      }
      // Keys that count for nobody have the weight 0, but may have any values.
      if (key < unit.counted_begin || key + Shape::keys > unit.end) {
        Tile::clear(tile.value, unit.counted_begin - key, unit.end - key);
        show_to_copies();
        __syncwarp();
      }
      multiply_values<T, Tile>(output, z, shared_address(tile.value));
      ring.empty[warp][slot.slot].arrive_as_warp();
      slot.advance();
    }
    consumers.wait();  // the states of the unit before have been read
    const int live = live_rows(args, unit);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 1);
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 2);
      if (lane % 4 == 0) memory.sums[warp][row + 8 * half] = {rows.m[half], rows.s[half]};
    }
    output.visit([&](int of_row, int element, float a, float b) {
      if (of_row < live)
        *reinterpret_cast<float2*>(&memory.outputs[warp][of_row][place_in_row(of_row, element)]) = {a, b};
    });
    consumers.wait();
    store_few<Shape, size>(args, unit, memory);
    unit = next_unit(ring, unit_place);
    load(unit);
  }
}

template <class T, PageType type, int size>
__global__ void __launch_bounds__(FewRows<type, size>::threads, 1)
    few_rows(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap keys,
             const __grid_constant__ CUtensorMap values) {
  if constexpr (kWarpGroupCode) {  // the only code that is launched
    using Shape = FewRows<type, size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& memory = *reinterpret_cast<typename Shape::Memory*>(bytes);
    const unsigned warp = threadIdx.x / 32;
    let_next_kernel_start();
    if (warp == Shape::warps) prefetch_map(keys), prefetch_map(values);
    memory.ring.init(warp, Barrier::warp_arrivals, Shape::warps * Barrier::warp_arrivals);
    __syncthreads();
    if (warp < Shape::warps) consume_few<T, type, size>(args, memory);
    else produce(args, keys, values, memory.ring);
  }
}

}  // namespace jaxsoft::cuda::decode
