// The warp groups that multiply, of each block of a pair (pair.cuh). The first has scores and slopes, and multiplies
// slopes and keys. The second and the third have the gradients by values and by keys, to which they add the products of
// weights and cotangents, and of slopes and queries, as the first makes them.
#pragma once

#include "multiply.cuh"
#include "pair.cuh"

namespace jaxsoft::cuda {

template <ScoreKind kind, class T, bool segmented>
__device__ void multiply_scores(const BackwardCall& call, BackwardPair<T, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, segmented>;
  using Plan = typename Pair::Plan;
  constexpr int size = Pair::size, queries = Pair::queries, count = queries / 2;  // numbers of a thread, of a tile
  constexpr int box_row = Pair::box_row, box_bytes = Pair::box_bytes;
  const int thread = threadIdx.x % kWarpGroup, lane = threadIdx.x % 32;
  const auto own_keys_turned = summed_over_rows(shared.key, Pair::keys) + rank * (Pair::parts * box_bytes);
  const auto other_keys_turned = summed_over_rows(shared.other_key, Pair::keys);
  const uint32_t of_lane =
      (lane / 16 * 8 + lane % 8) * box_row + ((thread / 32 * 32 + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  SlotPlace<Pair::slope_slots> last_slopes{Pair::slope_slots - 1, 1}, next_slopes;
  unsigned key_parity = 0, parity = 0, sum_parity = 0;
  // Stores numbers of 64 keys and a tile of queries.
  auto store = [&](T* to, const uint32_t (&rounded)[count / 8][4], Barrier& full) {
#pragma unroll
    for (int i = 0; i < count / 8; i++) store_turned(shared_address(to) + of_lane + i * (16 * box_row), rounded[i]);
    show_to_copies();
    full.arrive_as_warp();
  };
  // Begins products of keys or values, and of a tile of queries or cotangents.
  auto multiply_tile = [&](float (&products)[count], const T* left, const T* right) {
    const auto rows = summed_along_rows(left).anew(), columns = summed_along_rows(right).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < size; k += 16)
      multiply<T>(products, rows + (k / 64 * box_bytes + k % 64 * 2), columns + (k / 64 * box_bytes + k % 64 * 2),
                  k > 0);
    commit_products();
  };
  // Begin products of the last slopes and keys: with the block's own keys, to which those with the other block's keys
  // are added. Their rows are queries, and their columns the block's part of the head.
  auto multiply_slopes = [&](float (&sums)[2 * count], const T* slopes, Operand<Summed::over_rows> keys, bool add) {
    const auto of_keys = keys.anew();
    const auto of_slopes = summed_along_rows(slopes).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < Pair::keys; k += 16) multiply<T>(sums, of_slopes + k * 2, of_keys + k * box_row, add || k > 0);
    commit_products();
  };
  auto multiply_own_slopes = [&](float (&sums)[2 * count]) {
    multiply_slopes(sums, shared.slopes[last_slopes.slot], own_keys_turned, false);
  };
  auto multiply_other_slopes = [&](float (&sums)[2 * count]) {
    multiply_slopes(sums, shared.other_slopes, other_keys_turned, true);
  };
  // Hands the first or the second 64 columns over to be added.
  auto hand_over = [&](const float (&sums)[2 * count], int part) {
    shared.sum_empty.wait(sum_parity ^ 1);
    sum_parity ^= 1;
    store_of_thread(shared.sums, reinterpret_cast<const float(&)[count]>(sums[part * count]));
    show_to_copies();
    shared.sum_full[part].arrive_as_warp();
  };
  for_pieces<true>(shared, [&](const auto& work) {
    const int first_key = work.block * Plan::keys + rank * Pair::keys, steps = work.steps(call);
    if (steps == 0) return;
    shared.key_full.wait(key_parity);
    float scores[count], slopes[count], sums[2 * count];
    int tile = work.tiles.begin;
    const QueryTiles unmasked = work.unmasked(call, first_key);
    // Makes slopes of a tile. Meanwhile those of the last tile, if there is one, are multiplied with keys. What comes
    // of it is handed over in two parts. The second one is due after the next products have begun, if there is `more`
    // than one tile before.
    auto step = [&](auto has_last, bool more) {
      constexpr bool last = decltype(has_last)::value;
      uint32_t rounded[count / 8][4];
      shared.query_full[query.slot].wait(query.parity);
      multiply_tile(scores, shared.key, shared.query[query.slot]);
      shared.cotangent_full[cotangent.slot].wait(cotangent.parity);
      if constexpr (!last) shared.value_full.wait(key_parity);
      multiply_tile(slopes, shared.value, shared.cotangent[cotangent.slot]);
      if (last && more) hand_over(sums, 1);
      wait_for_products<1>(scores);
      const float* numbers = shared.numbers[query.slot] + column_of_thread();
      if constexpr (last) {
        last_slopes.advance();
        shared.slopes_full[last_slopes.slot].wait(last_slopes.parity);
      }
      const bool near_cap = limit_scores<kind>(scores, call, work, tile, first_key, !unmasked.has(tile));
      if (++tile == work.tiles.end) tile = work.tiles.begin;
      // Exponentials run beside these products, and slopes beside those below, as they stand between their instructions
      // (see multiply.cuh).
      if constexpr (last) multiply_own_slopes(sums);
      if (near_cap) weigh_near_cap<T>(scores, rounded, numbers, call.soft_cap);
      else weigh<T, kind>(scores, rounded, numbers, call);
      shared.weights_empty[0].wait(parity ^ 1);
      store(shared.weights[0], rounded, shared.weights_full[0]);
      shared.slopes_empty[next_slopes.slot].wait(next_slopes.parity ^ 1);
      if constexpr (last) {
        shared.other_slopes_full.wait(parity ^ 1);
        wait_for_products<1>(slopes);
        multiply_other_slopes(sums);
      } else {
        wait_for_products<0>(slopes);
      }
      slope(slopes, scores, numbers + queries);
      round_to<T>(rounded, slopes);
      store(shared.slopes[next_slopes.slot], rounded, shared.slopes_full[next_slopes.slot]);
      shared.cotangent_empty[cotangent.slot].arrive_as_warp();
      cotangent.advance();
      shared.query_empty[query.slot].arrive_as_warp();
      query.advance();
      next_slopes.advance();
      if constexpr (last) {
        wait_for_products<0>(sums);
        shared.other_slopes_empty.arrive_as_warp_in(other_block(rank));
        hand_over(sums, 0);
      }
      parity ^= 1;
    };
    step(std::false_type(), false);
    for (int i = 1; i < steps; i++) step(std::true_type(), i > 1);
    shared.value_empty.arrive_as_warp();
    key_parity ^= 1;
    if (steps > 1) hand_over(sums, 1);
    last_slopes.advance();
    shared.slopes_full[last_slopes.slot].wait(last_slopes.parity);
    shared.other_slopes_full.wait(parity ^ 1);
    multiply_own_slopes(sums);
    multiply_other_slopes(sums);
    wait_for_products<0>(sums);
    shared.other_slopes_empty.arrive_as_warp_in(other_block(rank));
    shared.key_empty.arrive_as_warp();
    hand_over(sums, 0);
    hand_over(sums, 1);
  });
}

// A gradient by the block's keys, in halves of the columns: products of all columns would need more registers than the
// compiler plans with. Adds the products of tiles of queries and keys, and of queries or cotangents, each in slots.
template <class T, bool segmented, int left_slots, int right_slots>
struct PairGradient {
  using Pair = BackwardPair<T, segmented>;
  const T (&left)[left_slots][Pair::queries * Pair::keys];
  Barrier (&left_full)[left_slots], (&left_empty)[left_slots];
  const T (&right)[right_slots][Pair::queries * Pair::size];
  Barrier (&right_full)[right_slots], (&right_empty)[right_slots];
  SlotPlace<left_slots> of_left = {};
  SlotPlace<right_slots> of_right = {};

  // In f32 if it is `wide`, where it is added to what is there if it `adds`.
  template <bool wide>
  __device__ void sum(const BackwardCall& call, const typename Pair::Work& work, unsigned rank, void* gradient,
                      float factor, bool adds, int number) {
    const bool any = work.tiles.length() > 0;
    if (!any && (!work.last_of_group(call) || (wide && adds))) return;
    float sums[2][Pair::half / 2] = {};
    for (int i = work.steps(call); i > 0; i--) {
      right_full[of_right.slot].wait(of_right.parity);
      left_full[of_left.slot].wait(of_left.parity);
      const auto rows = summed_over_rows(left[of_left.slot], Pair::queries).anew();
      const auto columns = summed_over_rows(right[of_right.slot], Pair::queries).anew();
      begin_products();
#pragma unroll
      for (int k = 0; k < Pair::queries; k += 16) {
#pragma unroll
        for (int of = 0; of < 2; of++)
          multiply<T>(sums[of], rows + k * Pair::box_row,
                      columns + (k * Pair::box_row + of * (Pair::half / 64 * Pair::box_bytes)), true);
      }
      commit_products();
      wait_for_products<0>(sums);
      left_empty[of_left.slot].arrive_as_warp();
      of_left.advance();
      right_empty[of_right.slot].arrive_as_warp();
      of_right.advance();
    }
    const int part = rank * Pair::parts + number;
    if (any && !add_to_group(call, work, part, {1 + warp_group(), kWarpGroup}, sums[0], sums[1])) return;
    const int first_key = work.block * Pair::Plan::keys + rank * Pair::keys;
#pragma unroll
    for (int of = 0; of < 2; of++)
      write_gradient<wide, T, Pair::half>(gradient, adds, call, work, first_key, sums[of], factor, of * Pair::half);
  }
};

template <bool wide, class T, bool segmented>
__device__ void multiply_values(const BackwardCall& call, BackwardPair<T, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, segmented>;
  PairGradient<T, segmented, 1, Pair::Plan::cotangent_slots> gradient{
      shared.weights,   shared.weights_full,   shared.weights_empty,
      shared.cotangent, shared.cotangent_full, shared.cotangent_empty};
  for_pieces<true>(shared, [&](const auto& work) {
    gradient.template sum<wide>(call, work, rank, call.value_gradient, 1.f, call.adds_value, 0);
  });
}

template <bool wide, class T, bool segmented>
__device__ void multiply_keys(const BackwardCall& call, BackwardPair<T, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, segmented>;
  PairGradient<T, segmented, Pair::slope_slots, Pair::Plan::query_slots> gradient{
      shared.slopes, shared.slopes_full, shared.slopes_empty, shared.query, shared.query_full, shared.query_empty};
  for_pieces<true>(shared, [&](const auto& work) {
    gradient.template sum<wide>(call, work, rank, call.key_gradient, call.scale, call.adds_key, 1);
  });
}

}  // namespace jaxsoft::cuda
