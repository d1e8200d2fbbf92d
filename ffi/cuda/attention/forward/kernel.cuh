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
    const AttentionLimits limits = limits_of<kind>(call, item.batch);
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

// What a computing warp group has in registers, and the steps in which it takes in a tile.
//
// Where the plan says `joined`, the product of an item's last weights with their values is started with the first
// product of the next item, as it is within an item: it runs while exponentials are computed. The exact form of the
// code around that matters: the compiler has to see that all of a warp go the same way, and the schedules that it finds
// for the main loop differ by up to 4 %.
template <class T, class Plan, ForwardKind kind>
struct ForwardTiles {
  using Scores = ForwardScores<T, Plan, kind>;

  ForwardMemory<Plan>& memory;
  const int group;
  // Each group waits at its own barrier for its turn, and then lets the other one go on.
  const NamedBarrier own_turn, other_turn;
  float output[Plan::size / 2] = {};
  typename Scores::Tile tile;             // products, then scores, then weights
  typename Scores::Weights weights = {};  // of the tile before, rounded
  float factors[2];                       // by which the rows of the output are to be multiplied

  // The compiler would put exponentials behind the next wait for products, with which they are to overlap, as nothing
  // needs them before. If this wait has to know what is `never` so, it cannot.
  __device__ void wait_for_keys(unsigned step, bool never = false) const {
    const RingSlot<Plan> at(step);
    memory.keys_there[at.slot].wait(at.parity ^ never);
  }
  __device__ void wait_for_values(unsigned step) const {
    const RingSlot<Plan> at(step);
    memory.values_there[at.slot].wait(at.parity);
  }
  __device__ void free_keys(unsigned step) const { memory.keys_read[RingSlot<Plan>(step).slot].arrive_as_warp(); }
  __device__ void free_values(unsigned step) const { memory.values_read[RingSlot<Plan>(step).slot].arrive_as_warp(); }
  __device__ void free_queries() const { memory.queries_read[group].arrive_as_warp(); }

  __device__ void start_scores(unsigned step) {
    const unsigned slot = RingSlot<Plan>(step).slot;
    begin_products();
#pragma unroll
    for (int k = 0; k < Plan::size / 16; k++)
      multiply<T>(tile, summed_along_rows(memory.queries[group][k / 4]) + k % 4 * 32,
                  summed_along_rows(memory.keys[slot][k / 4]) + k % 4 * 32, k > 0);
    commit_products();
  }
  __device__ void start_output(unsigned step) {
    constexpr int bytes = 16 * ForwardMemory<Plan>::row_bytes;
    const auto values = summed_over_rows(memory.values[RingSlot<Plan>(step).slot], Plan::key_tile);
    begin_products();
#pragma unroll
    for (int k = 0; k < Plan::key_tile / 16; k++) multiply<T>(output, weights[k], values + k * bytes, true);
    commit_products();
  }
  // Starts the products of a tile of keys, and those of the weights of the tile before with its values, if they are
  // `real`: else what becomes of the output is not used.
  __device__ void start_products(unsigned step, unsigned before, bool real = true) {
    if constexpr (Plan::turns) own_turn.wait();
    start_scores(step);
    if (real) wait_for_values(before);
    start_output(before);
    if constexpr (Plan::turns) other_turn.arrive();
    wait_for_products<1>(tile);
    free_keys(step);
  }
  // From products to weights.
  __device__ void weigh(Scores& scores, const TileRange& range, int number) {
    const int first_key = number * Plan::key_tile;
    if constexpr (kind == ForwardKind::general) scores.cap_and_segments(tile, first_key);
    if (range.masked(number)) scores.mask(tile, first_key);
    scores.take(tile, factors);
  }
  __device__ void rescale_output() {
    if (!__any_sync(0xffffffffu, factors[0] != 1 || factors[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < Plan::size / 2; i++) output[i] *= factors[Scores::row(i)];
  }

  // Takes in a range of tiles, of which the last is number `step` of the block's, but for the values of the first one.
  // If a product is `pending`, that of the weights of the tile `before`, the last of another item, calls `write` when
  // that item's output is complete.
  template <class Write>
  __device__ void take(Scores& scores, const TileRange& range, unsigned step, unsigned before, bool pending,
                       Write write) {
    const int begin = range.begin, end = range.end;
    wait_for_keys(step);
    if constexpr (Plan::joined) {
      start_products(step, before, pending);
    } else {
      start_scores(step);
      wait_for_products<0>(tile);
      free_keys(step);
    }
    if (end - 1 == begin) free_queries();
    weigh(scores, range, end - 1);
    if (end - 1 > begin) wait_for_keys(step + 1, Plan::joined && scores.rows[0].sum + scores.rows[1].sum < 0);
    if constexpr (Plan::joined) {
      wait_for_products<0>(output, weights);
      if (pending) free_values(before), write();
    }
#pragma unroll
    for (int i = 0; i < Plan::size / 2; i++) output[i] = 0;
    Scores::round(tile, weights);
    for (int number = end - 2; number >= begin; number--, step++) {
      start_products(step + 1, step);
      if (number == begin) free_queries();
      weigh(scores, range, number);
      if (number > begin) wait_for_keys(step + 2, scores.rows[0].sum + scores.rows[1].sum < 0);
      wait_for_products<0>(output, weights);
      free_values(step);
      rescale_output();
      Scores::round(tile, weights);
    }
  }
  // The product that `take` has left.
  __device__ void finish(unsigned step) {
    wait_for_values(step);
    start_output(step);
    wait_for_products<0>(output, weights);
    free_values(step);
  }
};

// The warp groups that compute.
template <class T, class Plan, ForwardKind kind>
__device__ void compute_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  using Scores = ForwardScores<T, Plan, kind>;
  const AttentionCall& call = args.call;
  const int group = warp_group() - 1;
  ForwardTiles<T, Plan, kind> state{memory, group, {1 + group, 2 * kWarpGroup},
                                   {1 + (group + 1) % Plan::groups, 2 * kWarpGroup}};
  if (Plan::turns && group == Plan::groups - 1) state.other_turn.arrive();

  unsigned step = 0, items_with_queries = 0;
  RowsResult ended;      // of the item whose last product is not yet started
  unsigned before = 0;   // the tile of that product
  bool pending = false;  // whether there is one
  auto write = [&] {
    if constexpr (Plan::continues) write_continued_results<T, Plan>(args, ended, state.output);
    else write_results<T, Plan>(args, ended, state.output);
  };
  auto finish = [&] {
    if (!pending) return;
    state.finish(before), write();
    pending = false;
  };
  auto let_pass = [&](int count) {
    for (const unsigned end = step + count; step < end; step++) {
      state.wait_for_keys(step), state.free_keys(step);
      state.wait_for_values(step), state.free_values(step);
    }
  };

  for (unsigned turn = 0;; turn++) {
    memory.items_there[turn % 2].wait(turn / 2 % 2);
    const int number = *static_cast<volatile int*>(&memory.items[turn % 2]);
    memory.items_read[turn % 2].arrive_as_warp();
    if (number >= args.items) break;
    const ForwardItem item(args, number, Plan::queries);
    const AttentionLimits limits = limits_of<kind>(call, item.batch);
    const TileRange tiles(limits, item.query, Plan::queries, call.queries, Plan::key_tile);
    const int first_query = item.query + group * Plan::group_queries, query = first_query + row_of_thread();
    TileRange own = tiles;
    if constexpr (!Plan::turns) {
      own = TileRange(limits, first_query, Plan::group_queries, call.queries, Plan::key_tile);
      own.end = max(min(own.end, tiles.end), tiles.begin), own.begin = min(max(own.begin, tiles.begin), own.end);
      // Tiles that matter to other groups alone. While values are held, only few more can come.
      const int others = tiles.end - own.end;
      if (others >= Plan::slots) finish();
      let_pass(others);
    }
    if (tiles.begin < tiles.end) memory.queries_there[group].wait(items_with_queries++ % 2);
    Scores scores(args, item, limits, query);
    if (own.begin < own.end) {
      if constexpr (Plan::continues) prefetch_before(args, item, first_query);
      state.take(scores, own, step, before, pending, write);
      step += own.end - own.begin;
      before = step - 1, pending = true;
      ended = {args, item, query, scores};
      if constexpr (!Plan::joined) finish();
    } else {
      finish();
      if (tiles.begin < tiles.end) state.free_queries();
      ended = {args, item, query, scores};
#pragma unroll
      for (float& x : state.output) x = 0;
      write();
    }
    if (!Plan::turns && own.begin > tiles.begin) finish(), let_pass(own.begin - tiles.begin);
  }
  finish();
  if (Plan::turns && group == 0) state.own_turn.wait();  // as often as the other has arrived
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
