// Decode for more than 16 packed queries of a key head, as under speculation, or where all query heads share one key
// head: products are those of warp groups, of which a block has two. Up to 64 rows both have all rows and take tiles in
// turn; of more, each has its own 64 rows and takes every tile.
//
// States go from registers to the workspace, in two parts of 64 rows, and the warp groups themselves merge them: there
// is so much to compute for each key that memory has time.
#pragma once

#include "../../wgmma.cuh"
#include "merge.cuh"
#include "ring.cuh"

namespace jaxsoft::cuda::decode {

constexpr int kPartRows = 64, kParts = 2;

template <int size>
struct ManyRows {
  static constexpr int keys = size == 256 ? 32 : 64;  // of a tile
  static constexpr int slots = 128 * 1024 / (4 * size * keys);
  static constexpr int threads = (kParts + 1) * kWarpGroup;
  using Values = Tile<PageType::as_query, size, keys>;
  using Queries = Tile<PageType::as_query, size, kPartRows>;
  using Ring = RingMemory<Values, keys, 1, slots>;
  using Team = Mergers<0, kParts * 4>;
  static constexpr int batch = 8;  // states that are asked for at once
  struct Memory {
    Ring ring;
    alignas(1024) unsigned char queries[kParts][Queries::bytes];
    int last;
  };
};

// Loads the queries of a warp group's rows, from `first` on. All of its threads call this.
template <class Queries, int size>
__device__ void load_part(const Arguments& args, const Unit& unit, int first, unsigned char* to) {
  constexpr int units = size / 8;  // of 16 bytes
  const int live = live_rows(args, unit);
  const auto* query = static_cast<const uint16_t*>(args.call.query);
  for (int i = threadIdx.x % kWarpGroup; i < kPartRows * units; i += kWarpGroup) {
    const int row = i / units, unit_of_row = i % units;
    uint4 words{};
    if (first + row < live && unit_of_row * 8 < args.call.size)
      words = __ldg(reinterpret_cast<const uint4*>(query + RowPlace(args, unit, first + row).begin(args, unit) +
                                                   unit_of_row * 8));
    *reinterpret_cast<uint4*>(to + Queries::place(row, unit_of_row)) = words;
  }
}

template <class T, int size>
__device__ void consume_many(const Arguments& args, typename ManyRows<size>::Memory& memory) {
  using Shape = ManyRows<size>;
  using Tile = typename Shape::Values;
  using Queries = typename Shape::Queries;
  constexpr int columns = Shape::keys / 8, steps = size / 16;
  auto& ring = memory.ring;
  const int part = warp_group();
  const NamedBarrier group{2 + part, kWarpGroup};
  unsigned char* const queries = memory.queries[part];
  Place<Shape::slots> slot;
  Place<Shape::Ring::units> unit_place;
  for (;;) {
    const Unit unit = next_unit(ring, unit_place);
    if (unit.batch == kNoUnit) return;
    const int live = live_rows(args, unit);
    const bool shared = live <= kPartRows;  // both parts have the same rows
    const int first = shared ? 0 : part * kPartRows, row = first + row_of_thread();
    load_part<Queries, size>(args, unit, first, queries);
    show_to_copies();
    group.wait();
    LaneRows rows(args, unit, row, args.call.scale * (args.pages.key_scale ? args.pages.key_scale[unit.head] : 1.f));
    float output[size / 2];
#pragma unroll
    for (int i = 0; i < size / 2; i++) output[i] = 0;
    const auto query = summed_along_rows(queries);
    int turn = 0;
    for (int key = unit.begin; key < unit.end; key += Shape::keys, turn ^= 1) {
      ring.full[0][slot.slot].wait(slot.parity);
      auto& tile = ring.slots[0][slot.slot];
      if (!shared || turn == part) {
        float z[columns][4];
        auto& flat = reinterpret_cast<float(&)[columns * 4]>(z);
        const auto keys = summed_along_rows(tile.key);
        begin_products();
#pragma unroll
        for (int step = 0; step < steps; step++)
          cuda::multiply<T>(flat, query + (step / 4 * kPartRows * 128 + step % 4 * 32),
                      keys + (step / 4 * Shape::keys * 128 + step % 4 * 32), step > 0);
        commit_products();
        wait_for_products<0>(flat);
        fold_tile(args, unit, rows, row, key, ring.valid[0][slot.slot], z, [&](const float(&factors)[2]) {
#pragma unroll
          for (int i = 0; i < size / 2; i++) output[i] *= factors[i / 2 % 2];
        });
        // Keys that count for nobody have the weight 0, but may have any values.
        if (key < unit.counted_begin || key + Shape::keys > unit.end) {
          Tile::clear(tile.value, unit.counted_begin - key, unit.end - key);
          show_to_copies();
          group.wait();
        }
        uint32_t weights[columns / 2][4];
#pragma unroll
        for (int i = 0; i < columns; i++) {
#pragma unroll
          for (int half = 0; half < 2; half++)
            weights[i / 2][i % 2 * 2 + half] =
                bits<uint32_t>(narrow_pair(z[i][2 * half], z[i][2 * half + 1], T()));
        }
        const auto values = summed_over_rows(tile.value, Shape::keys);
        begin_products();
#pragma unroll
        for (int i = 0; i < columns / 2; i++) cuda::multiply<T>(output, weights[i], values + i * 16 * 128, true);
        commit_products();
        wait_for_products<0>(output, weights);
      }
      ring.empty[0][slot.slot].arrive_as_warp();
      slot.advance();
    }

    // The part's state.
    const int64_t state = unit.state(args, unit.chunk) * args.item_rows + part * kPartRows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 1);
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 2);
      if (row + 8 * half >= live) continue;
      const int64_t place = state + row_of_thread() + 8 * half;
      if (threadIdx.x % 4 == 0) __stcg(args.sums + place, float2{rows.m[half], rows.s[half]});
#pragma unroll
      for (int i = 0; i < size / 8; i++)
        __stcg(reinterpret_cast<float2*>(args.outputs + place * size + 8 * i + column_of_thread()),
               float2{output[4 * i + 2 * half], output[4 * i + 2 * half + 1]});
    }
    const int parts = shared ? kParts : 1;
    if (unit.chunks > 1) {
      wait_for_last_kernel();
      merge_if_last<size, typename Shape::Team, Shape::batch>(args, unit, &memory.last, parts, kPartRows);
    } else {
      Shape::Team::synchronize();
      merge_states<size, typename Shape::Team, Shape::batch>(args, unit, 0, 1, 1, true, parts, kPartRows);
    }
    group.wait();  // before the queries are overwritten
  }
}

template <class T, int size>
__global__ void __launch_bounds__(ManyRows<size>::threads, 1)
    many_rows(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap keys,
              const __grid_constant__ CUtensorMap values) {
  if constexpr (kWarpGroupCode) {  // the only code that is launched
    using Shape = ManyRows<size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& memory = *reinterpret_cast<typename Shape::Memory*>(bytes);
    if (threadIdx.x == 0) {
      prefetch_map(keys), prefetch_map(values);
      memory.ring.init(kParts * 4 * Barrier::warp_arrivals, kParts * 4 * Barrier::warp_arrivals);
      show_barriers();
    }
    __syncthreads();
    // Registers for those that multiply: 504 for a thread of each group.
    if (warp_group() == kParts) {
      give_registers<104>();
      if (threadIdx.x / 32 == kParts * 4) produce(args, keys, values, memory.ring);
    } else {
      take_registers<200>();
      consume_many<T, size>(args, memory);
    }
  }
}

}  // namespace jaxsoft::cuda::decode
