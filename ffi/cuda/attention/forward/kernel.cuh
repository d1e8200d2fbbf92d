// The forward kernel: persistent blocks, in which one thread copies and warp groups compute.
//
// A warp group keeps the scores, the weights and the output of its queries in registers. The products of a tile of keys
// are started before the weights of the tile before are multiplied with its values: while the tensor cores do that, the
// warp group computes the exponentials of the next. The tiles come in descending order: the last ones are those that a
// causal rule cuts.
#pragma once

#include "../../counter.cuh"
#include "../../mma.cuh"
#include "results.cuh"

namespace jaxsoft::cuda {

// The slot of number `index` of all that go through a ring of slots, and the parity of its barriers' phase.
template <unsigned slots>
struct SlotOf {
  unsigned slot, parity;
  __device__ explicit SlotOf(unsigned index) : slot(index % slots), parity(index / slots % 2) {}
};
template <class Plan>
using RingSlot = SlotOf<Plan::slots>;  // of a tile
template <class Plan>
using ItemSlot = SlotOf<ForwardMemory<Plan>::item_slots>;

// Brings an item's queries to the cache: where items are joined, the product that ends one waits for those of the next,
// and where results take the place of queries, they are copied late.
template <class Plan>
__device__ void prefetch_queries(const ForwardArguments& args, const ForwardItem& item) {
  if (!item.there) return;
  for (int group = 0; group < Plan::groups; group++)
    for (int box = 0; box < Plan::boxes; box++)
      prefetch_box(args.query, item.template box_of_group<Plan>(group, box));
}

// The copying thread: takes items, and fills slots with their tiles.
template <class Plan, ScoreKind kind>
__device__ void copy_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  unsigned step = 0;
  int number = blockIdx.x;
  if constexpr (may_have_segments<kind>) wait_for_last_kernel();  // which says what counts for blocks
  const int blocks = may_have_segments<kind> && args.segments ? *args.blocks_found : args.blocks_of_head;
  auto post = [&](unsigned turn, int number) {
    const ItemSlot<Plan> place(turn);
    memory.items_read[place.slot].wait(place.parity ^ 1);
    memory.items[place.slot].template set<Plan, kind>(args, blocks, number);
    memory.items_there[place.slot].arrive();
  };
  post(0, number);
  for (unsigned turn = 0;; turn++) {
    const ForwardItem& item = memory.items[ItemSlot<Plan>(turn).slot];
    if (!item.there) return;
    auto copy = [&](const CUtensorMap& map, auto* slots, Barrier* there, Barrier* read, unsigned step, int tile) {
      const RingSlot<Plan> at(step);
      read[at.slot].wait(at.parity ^ 1);
      there[at.slot].arrive_expecting(sizeof *slots);
      for (int box = 0; box < static_cast<int>(sizeof *slots / sizeof **slots); box++)
        copy_box(slots[at.slot][box], map,
                 {box * 64, item.key_head, item.template key_of<Plan, kind>(tile), item.batch}, there[at.slot]);
    };
    auto copy_keys = [&](unsigned step, int tile) {
      copy(args.key, memory.keys, memory.keys_there, memory.keys_read, step, tile);
    };
    auto copy_values = [&](unsigned step, int tile) {
      copy(args.value, memory.values, memory.values_there, memory.values_read, step, tile);
    };
    const TileRange& tiles = item.tiles;
    if (!tiles.empty()) copy_keys(step, tiles.end - 1);
    auto copy_queries = [&] {
      for (int group = 0; group < Plan::groups; group++) {
        memory.queries_read[group].wait(turn % 2 ^ 1);
        memory.queries_there[group].arrive_expecting(sizeof memory.queries[group]);
        for (int box = 0; box < Plan::boxes; box++)
          copy_box(memory.queries[group][box], args.query, item.template box_of_group<Plan>(group, box),
                   memory.queries_there[group]);
      }
    };
    // A group that lets the first tile pass waits for its values, and where results take the place of queries, these
    // are copied late.
    if (!Plan::over_queries || tiles.end - tiles.begin < 2) copy_queries();
    // The next item is taken late, as multiprocessors are not equally fast, but so that what there is to know of it is
    // known when the others have ended this one.
    unsigned taken = 0;
    for (int tile = tiles.end - 1; tile > tiles.begin; tile--, step++) {
      copy_keys(step + 1, tile - 1);
      if (tile - 1 == tiles.begin && args.counter) taken = take(args.counter);
      copy_values(step, tile);
      if (Plan::over_queries && tile == tiles.end - 1) copy_queries();
    }
    if (tiles.end - tiles.begin < 2 && args.counter) taken = take(args.counter);
    number = args.counter ? static_cast<int>(min(taken + gridDim.x, unsigned(args.items))) : number + gridDim.x;
    post(turn + 1, number);
    if constexpr (Plan::joined || Plan::over_queries)
      prefetch_queries<Plan>(args, memory.items[ItemSlot<Plan>(turn + 1).slot]);
    if (!tiles.empty()) copy_values(step++, tiles.begin);
  }
}

// What a computing warp group has in registers, and the steps in which it takes in a tile.
//
// Where the plan says `joined`, the product of an item's last weights with their values is started with the first
// product of the next item, as it is within an item. The exact form of the code matters: the compiler has to see that
// all of a warp go the same way, registers just suffice, and the schedules that it finds for the main loop differ by
// several per cent.
template <class T, class Plan, ScoreKind kind>
struct ForwardTiles {
  using Scores = ForwardScores<T, Plan, kind>;

  ForwardMemory<Plan>& memory;
  const int group;
  // Each group waits at its own barrier for its turn, and then lets the next one go on.
  const NamedBarrier own_turn, next_turn;
  float output[Plan::value_size / 2] = {};
  typename Scores::Tile tile;             // products, then scores, then weights
  typename Scores::Weights weights = {};  // of the tile before, rounded
  float factors[2];                       // by which the rows of the output are to be multiplied

  __device__ void wait_for_keys(unsigned step) const {
    const RingSlot<Plan> at(step);
    memory.keys_there[at.slot].wait(at.parity);
  }
  __device__ void wait_for_values(unsigned step) const {
    const RingSlot<Plan> at(step);
    memory.values_there[at.slot].wait(at.parity);
  }
  __device__ void free_keys(unsigned step) const { memory.keys_read[RingSlot<Plan>(step).slot].arrive_as_warp(); }
  __device__ void free_values(unsigned step) const { memory.values_read[RingSlot<Plan>(step).slot].arrive_as_warp(); }
  // After the last product with keys; if results take their place, when these have been read from there.
  __device__ void free_queries() const { memory.queries_read[group].arrive_as_warp(); }

  // Of the first keys of a tile, or of all of them.
  template <int keys = Plan::key_tile>
  __device__ void start_scores(unsigned step) {
    const unsigned slot = RingSlot<Plan>(step).slot;
    int own = group;
    // Else addresses are computed in advance, also of rows that are stored from there, and there are no registers.
    if (Plan::over_queries) asm volatile("" : "+r"(own));
    auto& products = reinterpret_cast<float(&)[keys / 2]>(tile);
    begin_products();
#pragma unroll
    for (int k = 0; k < Plan::size / 16; k++)
      multiply<T>(products, summed_along_rows(memory.queries[own][k / 4]) + k % 4 * 32,
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
    if constexpr (Plan::turns) next_turn.arrive();
    wait_for_products<1>(tile);
  }
  // Computes the products of a tile of keys once more. A warp does it by itself.
  __device__ void multiply_again(unsigned step) {
    const unsigned slot = RingSlot<Plan>(step).slot;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % kWarpGroup / 32 * 16 + lane / 4;
#pragma unroll
    for (float& x : tile) x = 0;
    // Volatile, so that not many are read before they are needed: there are no registers.
    auto word = [&](const unsigned char* box, int row, int column) {
      return *reinterpret_cast<const volatile uint32_t*>(box + place_in_box(row, column * 2));
    };
#pragma unroll 1
    for (int k = 0; k < Plan::size; k += 16) {
      const unsigned char* const queries = memory.queries[group][k / 64];
      const unsigned char* const keys = memory.keys[slot][k / 64];
      const int column = k % 64 + lane % 4 * 2;
      const uint32_t left[4] = {word(queries, first_row, column), word(queries, first_row + 8, column),
                                word(queries, first_row, column + 8), word(queries, first_row + 8, column + 8)};
#pragma unroll
      for (int n = 0; n < Plan::key_tile / 8; n++) {
        float products[4] = {tile[4 * n], tile[4 * n + 1], tile[4 * n + 2], tile[4 * n + 3]};
        multiply(products, left, word(keys, n * 8 + lane / 4, column), word(keys, n * 8 + lane / 4, column + 8), T());
#pragma unroll
        for (int i = 0; i < 4; i++) tile[4 * n + i] = products[i];
      }
    }
  }
  // Takes in a tile whatever its scores are: from products to weights.
  __device__ void take_any(Scores& scores, const ForwardItem& item, const TileRange& tiles, int number) {
    if constexpr (kind == ScoreKind::capped) scores.cap(tile);
    if (tiles.masked(number)) scores.mask(tile, item, item.template key_of<Plan, kind>(number));
    scores.take(tile, factors);
  }
  // The same of a tile whose second half is masked for all of the group's queries, and not multiplied.
  __device__ void take_first_half(Scores& scores, const ForwardItem& item, int number) {
    static_assert(!Plan::halves || kind == ScoreKind::limited);
    constexpr int half = Scores::all / 2;
    scores.template mask<half>(tile, item, item.template key_of<Plan, kind>(number));
    scores.template take<half>(tile, factors);
#pragma unroll
    for (int i = half; i < Scores::all; i++) tile[i] = 0;
  }
  // Whether that is so, as far as limits say.
  __device__ bool half_is_masked(const ForwardItem& item, int number) const {
    const int first = item.query + group * Plan::group_queries;
    const int last = min(first + Plan::group_queries, item.query_end) - 1;
    return item.limits.of_queries(first, last).end <= item.template key_of<Plan, kind>(number) + Plan::key_tile / 2;
  }
  // From products to weights, by the references as they are. So many `polynomials` for the cap are not enough.
  __device__ typename Scores::Taken weigh(Scores& scores, int polynomials) {
    if constexpr (kind == ScoreKind::capped) {
      const SoftCap& cap = scores.args.soft_cap;
      if (polynomials == 0) return scores.weigh_below_cap(tile, cap.far_below);
      if (polynomials < 2) return scores.weigh_below_cap(tile, cap.below);
      scores.cap(tile);
    }
    return scores.weigh(tile);
  }
  __device__ void rescale_output() {
#pragma unroll
    for (int i = 0; i < Plan::value_size / 2; i++) output[i] *= factors[Scores::row(i)];
  }

  // Takes in the tiles of an item, of which the last is number `step` of the block's, but for the values of the first
  // one. If a product is `pending`, that of the weights of the tile `before`, the last of another item, calls `write`
  // when that item's output is complete.
  //
  // Most tiles have no score that is masked, and none far above the references. Their weights are computed at once by
  // the references as they are, and then it is seen whether that was right: no maximum has to be known before, the
  // exponentials follow each other without a break, and what else there is runs beside them.
  template <class Write>
  __device__ void take(Scores& scores, const ForwardItem& item, const TileRange& tiles, unsigned step, unsigned before,
                       bool pending, Write write) {
    const int begin = tiles.begin;
    int number = tiles.end - 1;
    wait_for_keys(step);
    bool half = false;
    if constexpr (Plan::joined) {
      start_products(step, before, pending);
      wait_for_products<0>(output, weights);
      if (pending) free_values(before), write();
    } else {
      half = Plan::halves && half_is_masked(item, number);
      if (half) start_scores<Plan::halves ? Plan::key_tile / 2 : Plan::key_tile>(step);
      else start_scores(step);
      wait_for_products<0>(tile);
    }
    free_keys(step);
    if (!Plan::over_queries && number == begin) free_queries();
    if (half) take_first_half(scores, item, number);
    else take_any(scores, item, tiles, number);
    if (number > begin) wait_for_keys(step + 1);
#pragma unroll
    for (float& x : output) x = 0;
    Scores::round(tile, weights);
    number--;
    auto end_tile = [&] {
      free_keys(step + 1);
      if (!Plan::over_queries && number == begin) free_queries();
      if (number > begin) wait_for_keys(step + 2);
      wait_for_products<0>(output, weights);
      free_values(step);
      Scores::round(tile, weights);
      number--, step++;
    };
    const int inner_begin = kind == ScoreKind::plain ? begin : max(begin, tiles.inner_begin);
    bool again = false;   // whether the weights of a tile are wrong, have overflowed, or are too inexact
    int polynomials = 0;  // how many of those for the cap have been wrong for scores of the warp's
    while (number >= begin) {
      while (number >= begin && (again || (kind != ScoreKind::plain && tiles.masked(number)))) {
        if (again) multiply_again(step + 1);
        else start_products(step + 1, step);
        // Where many tiles are masked, as documents that are packed have one at each begin, these are taken in like
        // others: the text is that of the loop below, without a cap. As one function, it made ptxas serialize the
        // products of that loop.
        if constexpr (kind == ScoreKind::segmented || (kind == ScoreKind::limited && Plan::short_tiles)) {
          if (!again && scores.have_references()) {
            scores.mask(tile, item, item.template key_of<Plan, kind>(number));
            const auto taken = scores.weigh(tile);
            if (scores.above_limits(taken)) {
              wait_for_products<0>(output, weights);
              again = !scores.follow(tile, taken, factors);
              if (again) continue;
              rescale_output();
            } else {
              scores.add(taken);
            }
            end_tile();
            continue;
          }
        }
        take_any(scores, item, tiles, number);
        if (!again) wait_for_products<0>(output, weights);
        again = false;
        rescale_output();
        end_tile();
      }
      while (number >= inner_begin) {
        start_products(step + 1, step);
        const auto taken = weigh(scores, polynomials);
        if (scores.above_limits(taken)) {
          wait_for_products<0>(output, weights);
          const bool wrong = kind == ScoreKind::capped && __any_sync(0xffffffffu, taken.wrong);
          polynomials += wrong;
          again = wrong || !scores.follow(tile, taken, factors);
          if (again) break;
          rescale_output();
        } else {
          scores.add(taken);
        }
        end_tile();
      }
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
template <class T, class Plan, ScoreKind kind>
__device__ void compute_items(const ForwardArguments& args, ForwardMemory<Plan>& memory) {
  using Scores = ForwardScores<T, Plan, kind>;
  const int group = warp_group() - 1;
  const int of_block = group * Plan::group_queries + row_of_thread();  // the thread's first query
  ForwardTiles<T, Plan, kind> state{memory, group, {1 + group, 2 * kWarpGroup},
                                   {1 + (group + 1) % Plan::groups, 2 * kWarpGroup}};
  if (Plan::turns && group == Plan::groups - 1) state.next_turn.arrive();

  unsigned step = 0;
  RowsResult ended;           // of the item whose last product is not yet started
  unsigned ended_turn = 0;    // that item
  unsigned before = 0;        // the tile of that product
  bool pending = false;       // whether there is one
  // Ends an item, and writes its log-sum-exps: its output is complete later.
  auto end_rows = [&](const ForwardItem& item, unsigned turn, const Scores& scores) {
    ended = RowsResult(scores), ended_turn = turn;
    note_maximum(args, item, item.query + of_block, ended, scores);
    if constexpr (!Plan::continues) write_lses(args, item, item.query + of_block, ended);
  };
  auto write = [&] {
    const ItemSlot<Plan> place(ended_turn);
    const ForwardItem& item = memory.items[place.slot];
    if constexpr (Plan::continues)
      write_continued_results<T, Plan>(args, item, item.query + of_block, ended, state.output);
    else write_results<T, Plan, kind>(args, memory, item, group, ended, state.output);
    if (Plan::over_queries) state.free_queries();
    memory.items_read[place.slot].arrive_as_warp();
  };
  auto finish = [&] {
    if (!pending) return;
    state.finish(before), write();
    pending = false;
  };
  // Each group in turns takes one for each tile of an item but the first, also for those that it lets pass. Where items
  // are joined, it takes one for the first as well, and lets none pass.
  static_assert(!Plan::joined || kind == ScoreKind::plain);
  [[maybe_unused]] int turns = 0;  // for the latter
  auto let_pass = [&](int count) {
    for (const unsigned end = step + count; step < end; step++) {
      if constexpr (Plan::turns)
        if (turns-- > 0) state.own_turn.wait(), state.next_turn.arrive();
      state.wait_for_keys(step), state.free_keys(step);
      state.wait_for_values(step), state.free_values(step);
    }
  };

  for (unsigned turn = 0;; turn++) {
    const ItemSlot<Plan> place(turn);
    memory.items_there[place.slot].wait(place.parity);
    const ForwardItem& item = memory.items[place.slot];
    if (!item.there) break;
    const int first_query = item.query + group * Plan::group_queries;
    TileRange own = item.tiles;
    if constexpr (Plan::parted && kind != ScoreKind::plain) {
      const int end_query = min(first_query + Plan::group_queries, item.query_end);
      const TileRange of_group({item.limits, first_query, end_query}, item.first_key, Plan::key_tile);
      own = item.tiles.part(of_group);
      own.inner_begin = max(own.inner_begin, item.tiles.inner_begin);
      own.inner_end = min(own.inner_end, item.tiles.inner_end);
      // Tiles that matter to other groups alone.
      turns = item.tiles.end - item.tiles.begin - max(own.end - own.begin, 1);
      let_pass(item.tiles.end - own.end);
    }
    memory.queries_there[group].wait(turn % 2);
    Scores scores(args, item, item.query + of_block);
    if (!own.empty()) {
      if constexpr (Plan::continues) prefetch_before(args, item, first_query);
      state.take(scores, item, own, step, before, pending, write);
      step += own.end - own.begin;
      before = step - 1, pending = true;
      end_rows(item, turn, scores);
      if constexpr (!Plan::joined) finish();
    } else {
      if constexpr (Plan::joined) finish();
      if (!Plan::over_queries) state.free_queries();
      end_rows(item, turn, scores);
#pragma unroll
      for (float& x : state.output) x = 0;
      write();
    }
    if constexpr (Plan::parted && kind != ScoreKind::plain) {
      let_pass(own.begin - item.tiles.begin);
    }
  }
  if constexpr (Plan::joined) finish();
  if (Plan::turns && group == 0) state.own_turn.wait();  // as often as the last group has arrived
  if (ForwardMemory<Plan>::staged || Plan::over_queries) wait_for_reads_of_stores();
}

template <class T, class Plan, ScoreKind kind>
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
      for (int i = 0; i < memory.item_slots; i++) memory.items_there[i].init(1), memory.items_read[i].init(warps);
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
