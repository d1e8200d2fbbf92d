// The forward kernel: persistent blocks, in which one thread copies and warp groups compute.
//
// A warp group keeps the scores, the weights and the output of its queries in registers. The products of a tile of keys
// are started before the weights of the tile before are multiplied with its values: while the tensor cores do that, the
// warp group computes the exponentials of the next. The tiles come in descending order: the last ones are those that a
// causal rule cuts.
#pragma once

#include "../../counter.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// A place in a ring of slots, and the parity of the phase in which its barriers are.
template <int slots>
struct RingSlot {
  unsigned slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// The copying thread: takes items, and fills slots with their tiles.
template <class Plan, ForwardKind kind>
__device__ void copy_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  const AttentionCall& call = args.call;
  RingSlot<Plan::slots> keys, values;
  RingSlot<2> mail;
  unsigned items_with_queries = 0;
  int number = blockIdx.x;
  while (true) {
    memory.items_read[mail.slot].wait(mail.parity ^ 1);
    memory.items[mail.slot] = number;
    memory.items_there[mail.slot].arrive();
    mail.advance();
    if (number >= args.items) return;
    const ForwardItem item(args, number, Plan::queries);
    const ForwardLimits<kind> limits(call, item.batch);
    const TileRange tiles(limits, item.query, Plan::queries, call.queries, Plan::key_tile);
    auto copy = [&](const CUtensorMap& map, RingSlot<Plan::slots>& ring, typename ForwardMemory<Plan>::Keys* slots,
                    Barrier* there, Barrier* read, int tile) {
      read[ring.slot].wait(ring.parity ^ 1);
      there[ring.slot].arrive_expecting(sizeof *slots);
      for (int box = 0; box < Plan::boxes; box++)
        copy_box(slots[ring.slot][box], map, {box * 64, item.key_head, tile * Plan::key_tile, item.batch},
                 there[ring.slot]);
      ring.advance();
    };
    auto copy_keys = [&](int tile) {
      copy(args.key, keys, memory.keys, memory.keys_there, memory.keys_read, tile);
    };
    auto copy_values = [&](int tile) {
      copy(args.value, values, memory.values, memory.values_there, memory.values_read, tile);
    };
    if (tiles.begin < tiles.end) {
      copy_keys(tiles.end - 1);
      memory.queries_read.wait(items_with_queries % 2 ^ 1);
      memory.queries_there.arrive_expecting(sizeof memory.queries);
      for (int group = 0; group < Plan::groups; group++)
        for (int box = 0; box < Plan::boxes; box++)
          copy_box(memory.queries[group][box], args.query,
                   {box * 64, item.head, item.query + group * Plan::group_queries, item.batch}, memory.queries_there);
      items_with_queries++;
      for (int tile = tiles.end - 1; tile > tiles.begin; tile--) copy_keys(tile - 1), copy_values(tile);
    }
    // The next item is taken late: multiprocessors are not equally fast.
    unsigned taken = 0;
    if (args.counter) taken = take(args.counter);
    if (tiles.begin < tiles.end) copy_values(tiles.begin);
    number = args.counter ? static_cast<int>(min(taken + gridDim.x, unsigned(args.items))) : number + gridDim.x;
  }
}

// The warp groups that compute.
template <class T, class Plan, ForwardKind kind>
__device__ void compute_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  using Scores = ForwardScores<T, Plan, kind>;
  constexpr int steps = Plan::size / 16;
  const AttentionCall& call = args.call;
  const int group = warp_group() - 1;
  RingSlot<Plan::slots> keys, values;
  RingSlot<2> mail;
  unsigned items_with_queries = 0;
  // Two groups take turns: each waits at its own barrier, and lets the other go on.
  const NamedBarrier own_turn{1 + group, 2 * kWarpGroup}, other_turn{2 - group, 2 * kWarpGroup};
  if (Plan::turns && group == 1) other_turn.arrive();

  while (true) {
    memory.items_there[mail.slot].wait(mail.parity);
    const int number = *static_cast<volatile int*>(&memory.items[mail.slot]);
    memory.items_read[mail.slot].arrive_as_warp();
    mail.advance();
    if (number >= args.items) break;
    const ForwardItem item(args, number, Plan::queries);
    const ForwardLimits<kind> limits(call, item.batch);
    const TileRange tiles(limits, item.query, Plan::queries, call.queries, Plan::key_tile);
    const int query = item.query + group * Plan::group_queries + row_of_thread();
    Scores scores(args, item, limits, query);
    float output[Plan::size / 2] = {};
    if (tiles.begin < tiles.end) {
      typename Scores::Tile tile_scores;
      typename Scores::Weights weights;
      float factors[2];
      auto start_scores = [&] {
        memory.keys_there[keys.slot].wait(keys.parity);
        begin_products();
#pragma unroll
        for (int k = 0; k < steps; k++)
          multiply<T>(tile_scores, summed_along_rows(memory.queries[group][k / 4]) + k % 4 * 32,
                      summed_along_rows(memory.keys[keys.slot][k / 4]) + k % 4 * 32, k > 0);
        commit_products();
      };
      auto start_outputs = [&] {
        memory.values_there[values.slot].wait(values.parity);
        begin_products();
#pragma unroll
        for (int k = 0; k < Plan::key_tile / 16; k++)
          multiply<T>(output, weights[k],
                      summed_over_rows(memory.values[values.slot], Plan::key_tile) +
                          k * 16 * ForwardMemory<Plan>::row_bytes,
                      true);
        commit_products();
      };
      auto end_keys = [&] {
        memory.keys_read[keys.slot].arrive_as_warp();
        keys.advance();
      };
      auto end_values = [&] {
        memory.values_read[values.slot].arrive_as_warp();
        values.advance();
      };
      auto weigh = [&](int tile) {
        if constexpr (kind == ForwardKind::general) scores.cap_and_segments(tile_scores, tile * Plan::key_tile);
        if (tiles.masked(tile)) scores.mask(tile_scores, tile * Plan::key_tile);
        scores.take(tile_scores, factors);
      };

      memory.queries_there.wait(items_with_queries % 2);
      items_with_queries++;
      start_scores();
      wait_for_products<0>(tile_scores);
      end_keys();
      weigh(tiles.end - 1);
      Scores::round(tile_scores, weights);
      for (int tile = tiles.end - 2; tile >= tiles.begin; tile--) {
        if constexpr (Plan::turns) own_turn.wait();
        start_scores();
        start_outputs();
        if constexpr (Plan::turns) other_turn.arrive();
        wait_for_products<1>(tile_scores);
        end_keys();
        weigh(tile);
        wait_for_products<0>(output, weights);
        end_values();
        if (__any_sync(0xffffffffu, factors[0] != 1 || factors[1] != 1)) {
#pragma unroll
          for (int i = 0; i < Plan::size / 2; i++) output[i] *= factors[i / 2 % 2];
        }
        Scores::round(tile_scores, weights);
      }
      memory.queries_read.arrive_as_warp();
      start_outputs();
      wait_for_products<0>(output, weights);
      end_values();
    }
    write_result<0>(args, item, query, scores, output);
    write_result<1>(args, item, query, scores, output);
  }
  if (Plan::turns && group == 0) own_turn.wait();  // as often as the other has arrived
}

template <class T, class Plan, ForwardKind kind>
__global__ void __launch_bounds__(Plan::threads, 1) attention_forward(const __grid_constant__ ForwardArguments args) {
  if constexpr (kWarpGroupCode) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& memory = *reinterpret_cast<ForwardMemory<Plan>*>(bytes);
    if (threadIdx.x == 0) {
      constexpr unsigned warps = Plan::groups * 4 * Barrier::warp_arrivals;
      memory.queries_there.init(1), memory.queries_read.init(warps);
      for (int slot = 0; slot < Plan::slots; slot++) {
        memory.keys_there[slot].init(1), memory.keys_read[slot].init(warps);
        memory.values_there[slot].init(1), memory.values_read[slot].init(warps);
      }
      for (int i = 0; i < 2; i++) memory.items_there[i].init(1), memory.items_read[i].init(warps);
      show_barriers();
      prefetch_map(args.query), prefetch_map(args.key), prefetch_map(args.value);
    }
    __syncthreads();
    if (warp_group() == 0) {
      give_registers<Plan::copying_registers>();
      if (threadIdx.x == 0) copy_items<Plan, kind>(args, memory);
    } else {
      take_registers<Plan::computing_registers>();
      compute_items<T, Plan, kind>(args, memory);
    }
  }
}

}  // namespace jaxsoft::cuda
