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

// The slot of the tile that is number `step` of all tiles of a block, and the parity of its barriers' phase.
template <class Plan>
struct RingSlot {
  unsigned slot, parity;
  __device__ explicit RingSlot(unsigned step) : slot(step % Plan::slots), parity(step / Plan::slots % 2) {}
};

// The copying thread: takes items, and fills slots with their tiles.
template <class Plan, ForwardKind kind>
__device__ void copy_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  const AttentionCall& call = args.call;
  unsigned step = 0, items_with_queries = 0;
  int number = blockIdx.x;
  for (unsigned turn = 0;; turn++) {
    memory.items_read[turn % 2].wait(turn / 2 % 2 ^ 1);
    memory.items[turn % 2] = number;
    memory.items_there[turn % 2].arrive();
    if (number >= args.items) return;
    const ForwardItem item(args, number, Plan::queries);
    const ForwardLimits<kind> limits(call, item.batch);
    const TileRange tiles(limits, item.query, Plan::queries, call.queries, Plan::key_tile);
    auto copy = [&](const CUtensorMap& map, typename ForwardMemory<Plan>::Keys* slots, Barrier* there, Barrier* read,
                    unsigned step, int tile) {
      const RingSlot<Plan> at(step);
      read[at.slot].wait(at.parity ^ 1);
      there[at.slot].arrive_expecting(sizeof *slots);
      for (int box = 0; box < Plan::boxes; box++)
        copy_box(slots[at.slot][box], map, {box * 64, item.key_head, tile * Plan::key_tile, item.batch},
                 there[at.slot]);
    };
    auto copy_keys = [&](unsigned step, int tile) {
      copy(args.key, memory.keys, memory.keys_there, memory.keys_read, step, tile);
    };
    auto copy_values = [&](unsigned step, int tile) {
      copy(args.value, memory.values, memory.values_there, memory.values_read, step, tile);
    };
    if (tiles.begin < tiles.end) {
      copy_keys(step, tiles.end - 1);
      for (int group = 0; group < Plan::groups; group++) {
        memory.queries_read[group].wait(items_with_queries % 2 ^ 1);
        memory.queries_there[group].arrive_expecting(sizeof memory.queries[group]);
        for (int box = 0; box < Plan::boxes; box++)
          copy_box(memory.queries[group][box], args.query,
                   {box * 64, item.head, item.query + group * Plan::group_queries, item.batch},
                   memory.queries_there[group]);
      }
      items_with_queries++;
      for (int tile = tiles.end - 1; tile > tiles.begin; tile--, step++)
        copy_keys(step + 1, tile - 1), copy_values(step, tile);
    }
    // The next item is taken late: multiprocessors are not equally fast.
    unsigned taken = 0;
    if (args.counter) taken = take(args.counter);
    if (tiles.begin < tiles.end) copy_values(step++, tiles.begin);
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
  unsigned step = 0, items_with_queries = 0;
  // Each group waits at its own barrier for its turn, and then lets the next one go on.
  const NamedBarrier own_turn{1 + group, 2 * kWarpGroup}, other_turn{1 + (group + 1) % Plan::groups, 2 * kWarpGroup};
  if (Plan::turns && group == Plan::groups - 1) other_turn.arrive();

  for (unsigned turn = 0;; turn++) {
    memory.items_there[turn % 2].wait(turn / 2 % 2);
    const int number = *static_cast<volatile int*>(&memory.items[turn % 2]);
    memory.items_read[turn % 2].arrive_as_warp();
    if (number >= args.items) break;
    const ForwardItem item(args, number, Plan::queries);
    const ForwardLimits<kind> limits(call, item.batch);
    const TileRange tiles(limits, item.query, Plan::queries, call.queries, Plan::key_tile);
    const int first_query = item.query + group * Plan::group_queries, query = first_query + row_of_thread();
    const TileRange own = Plan::turns ? tiles
                                      : TileRange(limits, first_query, Plan::group_queries, call.queries, Plan::key_tile);
    const int end = Plan::turns ? tiles.end : max(min(own.end, tiles.end), tiles.begin);
    const int begin = Plan::turns ? tiles.begin : min(max(own.begin, tiles.begin), end);
    Scores scores(args, item, limits, query);
    float output[Plan::size / 2] = {};
    auto end_keys = [&](unsigned step) { memory.keys_read[RingSlot<Plan>(step).slot].arrive_as_warp(); };
    auto end_values = [&](unsigned step) { memory.values_read[RingSlot<Plan>(step).slot].arrive_as_warp(); };
    auto let_pass = [&](int count) {
      for (int i = 0; i < count; i++, step++) {
        const RingSlot<Plan> at(step);
        memory.keys_there[at.slot].wait(at.parity);
        end_keys(step);
        memory.values_there[at.slot].wait(at.parity);
        end_values(step);
      }
    };
    let_pass(tiles.end - end);  // they matter to other groups alone
    if (tiles.begin < tiles.end) memory.queries_there[group].wait(items_with_queries++ % 2);
    if (begin < end) {
      typename Scores::Tile tile_scores;
      typename Scores::Weights weights;
      float factors[2];
      // The compiler would put the exponentials behind the next wait for products, with which they are to overlap, as
      // nothing needs them before. So this wait needs their sums, which are `never` negative.
      auto wait_for_keys = [&](unsigned step, bool never = false) {
        const RingSlot<Plan> at(step);
        memory.keys_there[at.slot].wait(at.parity ^ never);
      };
      auto start_scores = [&](unsigned step) {
        const RingSlot<Plan> at(step);
        begin_products();
#pragma unroll
        for (int k = 0; k < steps; k++)
          multiply<T>(tile_scores, summed_along_rows(memory.queries[group][k / 4]) + k % 4 * 32,
                      summed_along_rows(memory.keys[at.slot][k / 4]) + k % 4 * 32, k > 0);
        commit_products();
      };
      auto start_outputs = [&](unsigned step) {
        const RingSlot<Plan> at(step);
        memory.values_there[at.slot].wait(at.parity);
        begin_products();
#pragma unroll
        for (int k = 0; k < Plan::key_tile / 16; k++)
          multiply<T>(output, weights[k],
                      summed_over_rows(memory.values[at.slot], Plan::key_tile) +
                          k * 16 * ForwardMemory<Plan>::row_bytes,
                      true);
        commit_products();
      };
      auto weigh = [&](int tile) {
        if constexpr (kind == ForwardKind::general) scores.cap_and_segments(tile_scores, tile * Plan::key_tile);
        if (own.masked(tile)) scores.mask(tile_scores, tile * Plan::key_tile);
        scores.take(tile_scores, factors);
      };
      auto rescale = [&] {
        if (__any_sync(0xffffffffu, factors[0] != 1 || factors[1] != 1)) {
#pragma unroll
          for (int i = 0; i < Plan::size / 2; i++) output[i] *= factors[i / 2 % 2];
        }
      };

      wait_for_keys(step);
      start_scores(step);
      wait_for_products<0>(tile_scores);
      end_keys(step);
      weigh(end - 1);
      if (end - 1 > begin) wait_for_keys(step + 1);
      Scores::round(tile_scores, weights);
      for (int tile = end - 2; tile >= begin; tile--, step++) {
        if constexpr (Plan::turns) own_turn.wait();
        start_scores(step + 1);
        start_outputs(step);
        if constexpr (Plan::turns) other_turn.arrive();
        wait_for_products<1>(tile_scores);
        end_keys(step + 1);
        weigh(tile);
        if (tile > begin) wait_for_keys(step + 2, scores.rows[0].sum + scores.rows[1].sum < 0);
        wait_for_products<0>(output, weights);
        end_values(step);
        rescale();
        Scores::round(tile_scores, weights);
      }
      memory.queries_read[group].arrive_as_warp();
      start_outputs(step);
      wait_for_products<0>(output, weights);
      end_values(step++);
    } else if (tiles.begin < tiles.end) {
      memory.queries_read[group].arrive_as_warp();
    }
    let_pass(begin - tiles.begin);
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
      constexpr unsigned warps = 4 * Plan::groups * Barrier::warp_arrivals;
      for (int group = 0; group < Plan::groups; group++)
        memory.queries_there[group].init(1), memory.queries_read[group].init(4 * Barrier::warp_arrivals);
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
