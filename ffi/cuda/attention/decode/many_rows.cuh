// Decode for more than 16 packed queries of a key head, as under speculation, or where all query heads share one key
// head: products are those of warp groups, of which a block has two. Up to 64 rows both have all rows and take tiles in
// turn; of more, each has its own 64 rows and takes every tile.
//
// The warp groups themselves store the states.
#pragma once

#include "../../wgmma.cuh"
#include "merge.cuh"
#include "ring.cuh"

namespace jaxsoft::cuda::decode {

template <int size>
struct ManyRows {
  static constexpr int keys = size == 256 ? 32 : 64;  // of a tile
  static constexpr int slots = 128 * 1024 / (4 * size * keys);
  static constexpr int threads = (kParts + 1) * kWarpGroup;
  using Values = Tile<PageType::as_query, size, keys>;
  using Queries = Tile<PageType::as_query, size, kPartRows>;
  using Ring = RingMemory<Values, keys, 1, slots>;
  static constexpr int consumers = kParts * kWarpGroup;  // the first threads
  struct Memory {
    Ring ring;
    // The queries, and in the end half of each row's output in f32, at `place_in_row`.
    union alignas(1024) Part {
      unsigned char queries[Queries::bytes];
      float output[kPartRows][size / 2];
    } parts[kParts];
    float2 sums[kParts][kPartRows];
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

// `shared` says that both warp groups have the same rows.
template <class T, int size, bool shared>
__device__ void consume_many(const Arguments& args, typename ManyRows<size>::Memory& memory) {
  using Shape = ManyRows<size>;
  using Tile = typename Shape::Values;
  using Queries = typename Shape::Queries;
  constexpr int columns = Shape::keys / 8, steps = size / 16;
  auto& ring = memory.ring;
  const int part = warp_group();
  const NamedBarrier group{2 + part, kWarpGroup}, all{1, Shape::consumers};
  // The queries are left operands from registers, where these are enough, as shared memory is busy enough with keys.
  constexpr bool from_registers = size <= 128;
  uint32_t query[from_registers ? steps : 1][4];
  SlotPlace<Shape::slots> slot;
  SlotPlace<Shape::Ring::units> unit_place;
  auto release = [&] {
    ring.empty[0][slot.slot].arrive_as_warp();
    slot.advance();
  };
  auto wait_full = [&] { ring.full[0][slot.slot].wait(slot.parity); };
  for (;;) {
    const Unit unit = next_unit(ring, unit_place, [](const Unit&, int) {});
    if (unit.batch == kNoUnit) return;
    const int live = live_rows(args, unit);
    const int first = shared ? 0 : part * kPartRows, row = first + row_of_thread();
    if constexpr (from_registers) {
      float unit_of_row[2];
      auto pair_of = [&](int of_row, int element) {
        const int64_t begin = RowPlace(args, unit, of_row).begin(args, unit);
        return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(args.call.query) + begin + element));
      };
      load_queries<T, T, Tile>(args, unit, row, pair_of, query, unit_of_row);
    } else {
      load_part<Queries, size>(args, unit, first, memory.parts[part].queries);
      show_to_copies();
      group.wait();
    }
    LaneRows rows(args, unit, row, args.call.scale * (args.pages.key_scale ? args.pages.key_scale[unit.head] : 1.f));
    float output[size / 2];
#pragma unroll
    for (int i = 0; i < size / 2; i++) output[i] = 0;
    float z[columns][4];
    uint32_t weights[columns / 2][4];
    float factors[2];
    // The products of the queries and the keys in a slot, which run on.
    auto multiply_keys = [&](int of_slot) {
      auto& flat = reinterpret_cast<float(&)[columns * 4]>(z);
      const auto keys = summed_along_rows(ring.slots[0][of_slot].key);
      begin_products();
#pragma unroll
      for (int step = 0; step < steps; step++) {
        const auto key = keys + (step / 4 * Shape::keys * 128 + step % 4 * 32);
        if constexpr (from_registers) {
          cuda::multiply<T>(flat, query[step], key, step > 0);
        } else {
          const auto queries = summed_along_rows(memory.parts[part].queries);
          cuda::multiply<T>(flat, queries + (step / 4 * kPartRows * 128 + step % 4 * 32), key, step > 0);
        }
      }
      commit_products();
    };
    // The products of the weights and the values in the slot, which run on.
    auto multiply_values = [&](int key) {
      auto& tile = ring.slots[0][slot.slot];
      // valid keys for nobody have the weight 0, but may have any values.
      if (key < unit.counted_begin || key + Shape::keys > unit.end) {
        // One warp does it for all that multiply them.
        if (threadIdx.x % (shared ? kWarpGroup : Shape::consumers) < 32) {
          Tile::clear(tile.value, unit.counted_begin - key, unit.end - key);
          show_to_copies();
        }
        (shared || live <= kPartRows ? group : all).wait();
      }
      const auto values = summed_over_rows(tile.value, Shape::keys);
      begin_products();
#pragma unroll
      for (int i = 0; i < columns / 2; i++) cuda::multiply<T>(output, weights[i], values + i * 16 * 128, true);
      commit_products();
    };
    auto round_weights = [&] {
#pragma unroll
      for (int i = 0; i < columns; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
          weights[i / 2][i % 2 * 2 + half] = bits<uint32_t>(narrow_pair(z[i][2 * half], z[i][2 * half + 1], T()));
      }
    };
    auto fold = [&](int key, int of_slot) {
      const unsigned valid = ring.valid[0][of_slot];
      const bool plain = is_plain<Shape::keys>(args, rows, key, valid);
      if (!plain) {
        wait_for_products<0>(output, weights);  // what is called here needs registers
        adjust_tile(args, unit, rows, row, key, valid, z);
      }
      return fold_tile(rows, plain, z, factors);
    };
    auto rescale = [&] {
#pragma unroll
      for (int i = 0; i < size / 2; i++) output[i] *= factors[i / 2 % 2];
    };
    if constexpr (shared) {
      int turn = 0;
      for (int key = unit.begin; key < unit.end; key += Shape::keys, turn ^= 1) {
        wait_full();
        if (turn == part) {
          multiply_keys(slot.slot);
          wait_for_products<0>(z);
          if (fold(key, slot.slot)) rescale();
          round_weights();
          multiply_values(key);
          wait_for_products<0>(output, weights);
        }
        release();
      }
    } else if (first < live) {
      // The next tile's scores are found while this tile's values are multiplied.
      int key = unit.begin;
      if (key < unit.end) {
        wait_full();
        multiply_keys(slot.slot);
        wait_for_products<0>(z);
        fold(key, slot.slot);
        round_weights();
      }
      for (; key + Shape::keys < unit.end; key += Shape::keys) {
        auto next = slot;
        next.advance();
        ring.full[0][next.slot].wait(next.parity);
        multiply_keys(next.slot);
        multiply_values(key);
        wait_for_products<1>(z);
        const bool grown = fold(key + Shape::keys, next.slot);
        wait_for_products<0>(output, weights);
        release();
        if (grown) rescale();
        round_weights();
      }
      if (key < unit.end) {
        multiply_values(key);
        wait_for_products<0>(output, weights);
        release();
      }
    } else {
      for (int key = unit.begin; key < unit.end; key += Shape::keys) wait_full(), release();
    }

    // The block's state, a half of each row after the other, in the place of the queries.
    const int rows_here = shared ? kPartRows : kParts * kPartRows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 1);
      rows.s[half] += __shfl_xor_sync(~0u, rows.s[half], 2);
      if (threadIdx.x % 4 == 0)
        memory.sums[part][row_of_thread() + 8 * half] = {rows.m[half], rows.s[half]};
    }
#pragma unroll
    for (int of_row = 0; of_row < 2; of_row++) {
      constexpr int width = size / 2, each = width / 4;
      all.wait();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int to = row_of_thread() + 8 * half;
#pragma unroll
        for (int i = 0; i < width / 8; i++) {
          const int from = 4 * (of_row * width / 8 + i) + 2 * half;
          *reinterpret_cast<float2*>(&memory.parts[part].output[to][place_in_row(to, 8 * i + column_of_thread())]) = {
              output[from], output[from + 1]};
        }
      }
      all.wait();
      const int count = min(rows_here, unit.chunks == 1 ? rows_of(args, unit) : live);
      for (int i = threadIdx.x; i < count * each; i += Shape::consumers) {
        const int of = i / each, element = i % each * 4, place = of % kPartRows;
        const auto load = [&](int from) {
          return *reinterpret_cast<const float4*>(&memory.parts[from].output[place][place_in_row(place, element)]);
        };
        float2 sums = memory.sums[of / kPartRows][place];
        float4 sum = load(of / kPartRows);
        if constexpr (shared) {
          append(sums, sum, {memory.sums[1][place]}, {load(1)});
        }
        store_row<size>(args, unit, of, of_row * width + element, sums, sum);
      }
    }
    all.wait();  // before the next queries come
  }
}

template <class T, int size, bool shared>
__global__ void __launch_bounds__(ManyRows<size>::threads, 1)
    decode_many_rows(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap keys,
                     const __grid_constant__ CUtensorMap values) {
  if constexpr (kWarpGroupCode) {  // the only code that is launched
    using Shape = ManyRows<size>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& memory = *reinterpret_cast<typename Shape::Memory*>(bytes);
    const bool producer = threadIdx.x / 32 == kParts * 4;
    const NamedBarrier made{4, Shape::threads};
    if (args.plan.most_chunks > 1) let_next_kernel_start();  // the one that merges
    // Registers for those that multiply: 504 for a thread of each group.
    if (warp_group() == kParts) {
      give_registers<104>();
      if (producer) prefetch_map(keys), prefetch_map(values), produce(args, keys, values, memory.ring, made);
      else made.wait();
    } else {
      take_registers<200>();
      constexpr int arrivals = kParts * 4 * Barrier::warp_arrivals;
      if (threadIdx.x == 0) memory.ring.init_slots(0, arrivals);
      if (threadIdx.x == 32) memory.ring.init_units(arrivals);
      made.wait();
      consume_many<T, size, shared>(args, memory);
    }
  }
}

}  // namespace jaxsoft::cuda::decode
