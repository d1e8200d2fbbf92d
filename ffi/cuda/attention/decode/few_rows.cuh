// Decode for up to 16 packed queries of a key head: memory decides how long it takes, and products are those of single
// warps. Each consumer warp has all rows, and keeps a state of its own over the tiles that it gets. Other warps merge
// these states at the end of a unit and store the result. So the warps that multiply wait for nobody but the copies.
#pragma once

#include "merge.cuh"
#include "ring.cuh"

namespace jaxsoft::cuda::decode {

// What a block consists of. Small heads have more warps, as there is more to do for each byte.
template <PageType type, int size>
struct FewRows {
  static constexpr int bytes = size * (type == PageType::as_query ? 2 : 1);  // of a key
  // Of a tile. What a warp does once a tile is no longer hidden behind the copies where keys have 8 bits.
  static constexpr int keys = (size == 256 ? 16 : 32) * (type == PageType::as_query ? 1 : 2);
  static constexpr int warps = size == 64 ? 8 : 4;
  // Of a warp, of 128 KB in all. With 192 KB in flight all requests took longer, and calls were 2 % slower.
  static constexpr int slots = 128 * 1024 / (2 * bytes * keys * warps);
  static constexpr int storers = 3, threads = (warps + 1 + storers) * 32;
  static constexpr int first_storer = (warps + 1) * 32;
  using Values = Tile<type, size, keys>;
  using Ring = RingMemory<Values, keys, warps, slots, kFewRows>;
  struct Memory {
    Ring ring;
    // The warps' states, whose elements are at `place_in_row`.
    alignas(16) float outputs[warps][16][size];
    float2 sums[warps][16];
    Barrier ready, free;  // for storers to read the states, and for consumers to write them
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

// Merges the states of a block's warps and stores that of the chunk, or the results if the item has no other.
template <class Shape, int size>
__device__ void store_unit(const Arguments& args, const Unit& unit, const typename Shape::Memory& memory) {
  constexpr int each = size / 4;  // runs of four elements
  const int live = live_rows(args, unit), rows = unit.chunks == 1 ? rows_of(args, unit) : live;
  for (int i = threadIdx.x - Shape::first_storer; i < rows * each; i += Shape::storers * 32) {
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
    store_row<size>(args, unit, row, element, sum, output);
  }
}

// What the storers do: so the warps that multiply need not wait for each other.
template <class Shape, int size>
__device__ void store_few(const Arguments& args, typename Shape::Memory& memory) {
  SlotPlace<Shape::Ring::units> unit_place;
  for (unsigned parity = 0;; parity ^= 1) {
    const Unit unit = next_unit(memory.ring, unit_place, [](const Unit&, int) {});
    if (unit.batch == kNoUnit) return;
    memory.ready.wait(parity);
    store_unit<Shape, size>(args, unit, memory);
    memory.free.arrive_as_warp();
  }
}

// T is the type in which is multiplied.
template <class T, PageType type, int size>
__device__ void consume_few(const Arguments& args, typename FewRows<type, size>::Memory& memory) {
  using Shape = FewRows<type, size>;
  using Tile = typename Shape::Values;
  constexpr int steps = size / 16, columns = Shape::keys / 8;
  auto& ring = memory.ring;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, row = lane / 4;
  SlotPlace<Shape::slots> slot;
  SlotPlace<ring.units> unit_place;
  unsigned free_parity = 1;
  uint32_t query[steps][4];
  float unit_of_row[2];
  auto load = [&](const Unit& unit, int slot_of_unit) {
    if (unit.batch == kNoUnit) return;
    auto pair_of = [&](int of_row, int element) {
      return *reinterpret_cast<const uint32_t*>(&ring.queries[slot_of_unit][of_row][element]);
    };
    if (type == PageType::as_query || args.call.type == AttentionType::f16)
      load_queries<T, T, Tile>(args, unit, row, pair_of, query, unit_of_row);
    else if constexpr (type != PageType::as_query)
      load_queries<T, __nv_bfloat16, Tile>(args, unit, row, pair_of, query, unit_of_row);
  };
  for (;;) {
    const Unit unit = next_unit(ring, unit_place, load);
    if (unit.batch == kNoUnit) return;
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
      // valid keys for nobody have the weight 0, but may have any values.
      if (key < unit.counted_begin || key + Shape::keys > unit.end) {
        Tile::clear(tile.value, unit.counted_begin - key, unit.end - key);
        show_to_copies();
        __syncwarp();
      }
      multiply_values<T, Tile>(output, z, shared_address(tile.value));
      ring.empty[warp][slot.slot].arrive_as_warp();
      slot.advance();
    }
    memory.free.wait(free_parity);
    free_parity ^= 1;
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
    memory.ready.arrive_as_warp();
  }
}

template <class T, PageType type, int size>
__global__ void __launch_bounds__(FewRows<type, size>::threads, 1)
    decode_few_rows(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap keys,
                    const __grid_constant__ CUtensorMap values) {
  if constexpr (kWarpGroupCode) {  // the only code that is launched
    using Shape = FewRows<type, size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& memory = *reinterpret_cast<typename Shape::Memory*>(bytes);
    const unsigned warp = threadIdx.x / 32;
    const NamedBarrier made{1, Shape::threads};
    if (args.plan.most_chunks > 1) let_next_kernel_start();  // the one that merges
    if (warp == Shape::warps) {
      prefetch_map(keys), prefetch_map(values);
      produce(args, keys, values, memory.ring, made);
      return;
    }
    if (threadIdx.x % 32 == 0) {
      constexpr int one = Barrier::warp_arrivals;
      if (warp < Shape::warps) memory.ring.init_slots(warp, one);
      if (threadIdx.x == Shape::first_storer) memory.ring.init_units((Shape::warps + Shape::storers) * one);
      if (threadIdx.x == Shape::first_storer + 32) {
        memory.ready.init(Shape::warps * one), memory.free.init(Shape::storers * one);
        show_barriers();
      }
    }
    made.wait();
    if (warp < Shape::warps) consume_few<T, type, size>(args, memory);
    else store_few<Shape, size>(args, memory);
  }
}

}  // namespace jaxsoft::cuda::decode
