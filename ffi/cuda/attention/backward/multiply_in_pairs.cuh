// The warp groups that multiply, of each block of a pair (pair.cuh). The first makes weights and slopes. The second and
// the third have the gradients by values and by keys, to which they add the products of weights and cotangents, and of
// slopes and queries. Slopes are also multiplied with keys, a tile later: by the second where its registers suffice, so
// that the first waits for no other products than its own, and else by the first.
#pragma once

#include "multiply.cuh"
#include "pair.cuh"

namespace jaxsoft::cuda {

// Begins products of 64 keys or values, and of a tile of queries or cotangents, with so many columns.
template <int columns, class T, int count>
__device__ void multiply_tile(float (&products)[count], const T* left, const T* right) {
  const auto of_left = summed_along_rows(left).anew(), of_right = summed_along_rows(right).anew();
  begin_products();
#pragma unroll
  for (int k = 0; k < columns; k += 16)
    multiply<T>(products, of_left + (k / 64 * kBoxBytes + k % 64 * 2), of_right + (k / 64 * kBoxBytes + k % 64 * 2),
                k > 0);
  commit_products();
}

// The same with keys that a thread has in registers, as left operands.
template <int columns, class T, int count>
__device__ void multiply_tile(float (&products)[count], const uint32_t (&left)[columns / 16][4], const T* right) {
  const auto of_right = summed_along_rows(right).anew();
  begin_products();
#pragma unroll
  for (int k = 0; k < columns; k += 16)
    multiply<T>(products, left[k / 16], of_right + (k / 64 * kBoxBytes + k % 64 * 2), k > 0);
  commit_products();
}
// Reads them.
template <int columns, class T>
__device__ void read_left(uint32_t (&left)[columns / 16][4], const T* tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpGroup / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < columns; k += 16)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(left[k / 16][0]), "=r"(left[k / 16][1]), "=r"(left[k / 16][2]), "=r"(left[k / 16][3])
                 : "r"(shared_address(tile) + k / 64 * kBoxBytes + place_in_box(row, k % 64 * 2 + lane / 16 * 16))
                 : "memory");
}

// Stores numbers of 64 keys and a tile of queries, which a warp group has as left operands, so that queries are rows.
template <class T, int count>
__device__ void store_tile(T* to, const uint32_t (&rounded)[count][4], Barrier& full) {
  const uint32_t begin = shared_address(to) + turned_place();
#pragma unroll
  for (int i = 0; i < count; i++) store_turned(begin + i * (16 * 128), rounded[i]);
  show_to_copies();
  full.arrive_as_warp();
}

// Makes weights of the scores of a tile, with a cap and limits on them, and stores them.
template <ScoreKind kind, class T, int size, bool segmented, int slots, int count>
__device__ void make_weights(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, SlotPlace<slots>& at,
                             float (&scores)[count], bool near_cap, const float* numbers) {
  uint32_t rounded[count / 8][4];
  if (near_cap) weigh_near_cap<T>(scores, rounded, numbers, call.soft_cap);
  else weigh<T, kind>(scores, rounded, numbers, call);
  shared.weights_empty[at.slot].wait(at.parity ^ 1);
  store_tile(shared.weights[at.slot], rounded, shared.weights_full[at.slot]);
  at.advance();
}

// The products of slopes and keys, which are the block's part of the gradient by queries: those with the block's own
// keys, to which those with the other block's keys are added. Their rows are queries.
template <class T, int size, bool segmented>
struct PairSums {
  using Pair = BackwardPair<T, size, segmented>;
  using Of = typename Pair::Sums;
  using Turned = Operand<Summed::over_rows>;
  // A thread's numbers, and those of each part.
  static constexpr int count = Of::half / kWarpGroup, first_count = Of::of_thread(0);
  using First = float[first_count];
  using Second = float[count - first_count];

  Pair& shared;
  const unsigned rank;
  SlotPlace<Pair::Plan::slope_slots> slopes = {};
  unsigned other_parity = 0;  // of the other block's slopes
  SlotPlace<Pair::Plan::sum_slots> sum = {};

  __device__ void wait_for_own() const { shared.slopes_full[slopes.slot].wait(slopes.parity); }
  __device__ void wait_for_other() const { shared.other_slopes_full.wait(other_parity); }
  // Begin products with own and then with other slopes, which are there.
  __device__ void multiply_own(float (&sums)[count]) const {
    const auto keys = summed_over_rows(shared.key, Pair::keys);
    auto own_keys = [&](int part) {
      const int column = Of::first_column(rank, part);
      return keys + (column / 64 * kBoxBytes + column % 64 * 2);
    };
    multiply(sums, shared.slopes[slopes.slot], own_keys(0), own_keys(1), false);
  }
  __device__ void multiply_other(float (&sums)[count]) const {
    const auto keys = summed_over_rows(shared.other_key, Pair::keys);
    multiply(sums, shared.other_slopes, keys, keys + kBoxBytes, true);
  }
  __device__ void multiply_both(float (&sums)[count]) const {
    wait_for_own(), multiply_own(sums);
    wait_for_other(), multiply_other(sums);
  }
  // When the products are complete.
  __device__ void release() {
    shared.slopes_empty[slopes.slot].arrive_as_warp();
    slopes.advance();
    shared.other_slopes_empty.arrive_as_warp_in(other_block(rank));
    other_parity ^= 1;
  }
  // Hands the columns of a part over to be added.
  __device__ void hand_over(const float (&sums)[count], int part) {
    shared.sum_empty[sum.slot].wait(sum.parity ^ 1);
    float* const to = shared.sums[sum.slot];
    sum.advance();
    if (part == 0) store_of_thread(to, reinterpret_cast<const First&>(sums));
    else store_of_thread(to, reinterpret_cast<const Second&>(sums[first_count]));
    show_to_copies();
    shared.sum_full[part].arrive_as_warp();
  }

 private:
  __device__ void multiply(float (&sums)[count], const T* slopes, Turned first_keys, Turned second_keys,
                           bool add) const {
    const auto first = first_keys.anew();
    [[maybe_unused]] const auto second = second_keys.anew();
    const auto of_slopes = summed_along_rows(slopes).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < Pair::keys; k += 16) {
      const int rows = k * Pair::box_row;
      if constexpr (Pair::at_once) {
        cuda::multiply<T>(sums, of_slopes + k * 2, first + rows, add || k > 0);
      } else {
        cuda::multiply<T>(reinterpret_cast<First&>(sums), of_slopes + k * 2, first + rows, add || k > 0);
        cuda::multiply<T>(reinterpret_cast<Second&>(sums[first_count]), of_slopes + k * 2, second + rows, add || k > 0);
      }
    }
    commit_products();
  }
};

// The first warp group, where the second multiplies slopes.
template <ScoreKind kind, class T, int size, bool segmented>
__device__ void multiply_scores(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  using Plan = typename Pair::Plan;
  constexpr int queries = Pair::queries, count = queries / 2;  // numbers of a thread, of a tile
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  SlotPlace<Plan::weight_slots> weights_at;
  SlotPlace<Plan::slope_slots> slopes_at;
  const NamedBarrier all{1, kWarpGroup};
  unsigned key_parity = 0;
  for_pieces<true>(shared, [&](const auto& work) {
    const int first_key = work.first_key() + rank * Pair::keys, steps = work.steps(call);
    if (steps == 0) return;
    float scores[count], slopes[count];
    uint32_t key[size / 16][4];
    int tile = work.tiles.begin;
    const QueryTiles unmasked = work.unmasked(call, first_key);
    auto multiply_queries = [&] {
      shared.query_full[query.slot].wait(query.parity);
      multiply_tile<size>(scores, key, shared.query[query.slot]);
    };
    // From the scores of a tile to its slopes. If there are `more` tiles, the scores of the next one are multiplied
    // while slopes are stored.
    auto step = [&](auto has_more) {
      constexpr bool more = decltype(has_more)::value;
      uint32_t rounded[count / 8][4];
      wait_for_products<0>(scores, key);
      const float* numbers = shared.numbers[query.slot] + column_of_thread();
      const bool near_cap = limit_scores<kind>(scores, call, work, tile, first_key, !unmasked.has(tile), all);
      if (++tile == work.tiles.end) tile = work.tiles.begin;
      shared.cotangent_full[cotangent.slot].wait(cotangent.parity);
      // Exponentials run beside these products, as they stand between their instructions (see multiply.cuh).
      multiply_tile<Pair::value_size>(slopes, shared.value, shared.cotangent[cotangent.slot]);
      make_weights<kind>(call, shared, weights_at, scores, near_cap, numbers);
      wait_for_products<0>(slopes);
      shared.cotangent_empty[cotangent.slot].arrive_as_warp();
      cotangent.advance();
      slope(slopes, scores, numbers + queries);
      round_to<T>(rounded, slopes);
      shared.query_empty[query.slot].arrive_as_warp();
      query.advance();
      if constexpr (more) multiply_queries();
      shared.slopes_empty[slopes_at.slot].wait(slopes_at.parity ^ 1);
      store_tile(shared.slopes[slopes_at.slot], rounded, shared.slopes_full[slopes_at.slot]);
      slopes_at.advance();
    };
    shared.key_full.wait(key_parity);
    read_left<size>(key, shared.key);
    multiply_queries();
    shared.value_full.wait(key_parity);
    key_parity ^= 1;
    for (int i = 1; i < steps; i++) step(std::true_type());
    step(std::false_type());
    shared.value_empty.arrive_as_warp();
    shared.key_empty.arrive_as_warp();
  });
}

// The same where the first multiplies slopes as well.
template <ScoreKind kind, class T, int size, bool segmented>
__device__ void multiply_scores_and_slopes(const BackwardCall& call, BackwardPair<T, size, segmented>& shared,
                                           unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  using Plan = typename Pair::Plan;
  constexpr int queries = Pair::queries, count = queries / 2;  // numbers of a thread, of a tile
  PairSums<T, size, segmented> of_queries{shared, rank};
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  SlotPlace<Plan::weight_slots> weights_at;
  SlotPlace<Plan::slope_slots> slopes_at;
  const NamedBarrier all{1, kWarpGroup};
  unsigned key_parity = 0;
  for_pieces<true>(shared, [&](const auto& work) {
    const int first_key = work.first_key() + rank * Pair::keys, steps = work.steps(call);
    if (steps == 0) return;
    shared.key_full.wait(key_parity);
    float scores[count], slopes[count], sums[of_queries.count];
    int tile = work.tiles.begin;
    const QueryTiles unmasked = work.unmasked(call, first_key);
    // Makes slopes of a tile. Meanwhile those of the last tile, if there is one, are multiplied with keys. What comes
    // of it is handed over in two parts. The second one is due after the next products have begun, if there is `more`
    // than one tile before.
    auto step = [&](auto has_last, bool more) {
      constexpr bool last = decltype(has_last)::value;
      uint32_t rounded[count / 8][4];
      shared.query_full[query.slot].wait(query.parity);
      multiply_tile<size>(scores, shared.key, shared.query[query.slot]);
      shared.cotangent_full[cotangent.slot].wait(cotangent.parity);
      if constexpr (!last) shared.value_full.wait(key_parity);
      multiply_tile<Pair::value_size>(slopes, shared.value, shared.cotangent[cotangent.slot]);
      if (last && more) of_queries.hand_over(sums, 1);
      wait_for_products<1>(scores);
      const float* numbers = shared.numbers[query.slot] + column_of_thread();
      if constexpr (last) of_queries.wait_for_own();
      const bool near_cap = limit_scores<kind>(scores, call, work, tile, first_key, !unmasked.has(tile), all);
      if (++tile == work.tiles.end) tile = work.tiles.begin;
      // Exponentials run beside these products, and slopes beside those below, as they stand between their instructions
      // (see multiply.cuh).
      if constexpr (last) of_queries.multiply_own(sums);
      make_weights<kind>(call, shared, weights_at, scores, near_cap, numbers);
      shared.slopes_empty[slopes_at.slot].wait(slopes_at.parity ^ 1);
      if constexpr (last) {
        of_queries.wait_for_other();
        wait_for_products<1>(slopes);
        of_queries.multiply_other(sums);
      } else {
        wait_for_products<0>(slopes);
      }
      slope(slopes, scores, numbers + queries);
      round_to<T>(rounded, slopes);
      store_tile(shared.slopes[slopes_at.slot], rounded, shared.slopes_full[slopes_at.slot]);
      slopes_at.advance();
      shared.cotangent_empty[cotangent.slot].arrive_as_warp();
      cotangent.advance();
      shared.query_empty[query.slot].arrive_as_warp();
      query.advance();
      if constexpr (last) {
        wait_for_products<0>(sums);
        of_queries.release();
        of_queries.hand_over(sums, 0);
      }
    };
    step(std::false_type(), false);
    for (int i = 1; i < steps; i++) step(std::true_type(), i > 1);
    shared.value_empty.arrive_as_warp();
    key_parity ^= 1;
    if (steps > 1) of_queries.hand_over(sums, 1);
    of_queries.multiply_both(sums);
    wait_for_products<0>(sums);
    of_queries.release();
    shared.key_empty.arrive_as_warp();
    of_queries.hand_over(sums, 0);
    of_queries.hand_over(sums, 1);
  });
}

// A gradient by the block's keys, of heads of so many `columns`: if these are many, in halves, as products of all of
// them would need more registers than the compiler plans with. Adds the products of tiles of queries and keys, and of
// queries or cotangents, each in slots.
template <class T, int size, bool segmented, int columns, int left_slots, int right_slots>
struct PairGradient {
  using Pair = BackwardPair<T, size, segmented>;
  static constexpr int parts = columns > 192 ? 2 : 1, of_part = columns / parts;
  const T (&left)[left_slots][Pair::queries * Pair::keys];
  Barrier (&left_full)[left_slots], (&left_empty)[left_slots];
  const T (&right)[right_slots][Pair::queries * columns];
  Barrier (&right_full)[right_slots], (&right_empty)[right_slots];
  SlotPlace<left_slots> of_left = {};
  SlotPlace<right_slots> of_right = {};

  using Numbers = float[parts][of_part / 2];

  __device__ void begin(Numbers& sums) {
    right_full[of_right.slot].wait(of_right.parity);
    left_full[of_left.slot].wait(of_left.parity);
    const auto rows = summed_over_rows(left[of_left.slot], Pair::queries).anew();
    const auto of_heads = summed_over_rows(right[of_right.slot], Pair::queries).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < Pair::queries; k += 16) {
#pragma unroll
      for (int of = 0; of < parts; of++)
        multiply<T>(sums[of], rows + k * Pair::box_row,
                    of_heads + (k * Pair::box_row + of * (of_part / 64 * kBoxBytes)), true);
    }
    commit_products();
  }
  // When the products are complete.
  __device__ void release() {
    left_empty[of_left.slot].arrive_as_warp();
    of_left.advance();
    right_empty[of_right.slot].arrive_as_warp();
    of_right.advance();
  }
  // Adds those of all tiles of a piece of work.
  __device__ void add_all(const BackwardCall& call, const typename Pair::Work& work, Numbers& sums) {
    for (int i = work.steps(call); i > 0; i--) {
      begin(sums);
      wait_for_products<0>(sums);
      release();
    }
  }
  // Ends a piece of work, with the gradient in f32 if it is `wide`, where it is added to what is there if it `adds`.
  // Its rows have `length` numbers.
  template <bool wide>
  __device__ void write(const BackwardCall& call, const typename Pair::Work& work, unsigned rank, Numbers& sums,
                        void* gradient, int length, float factor, bool adds, int number) {
    const bool any = work.tiles.length() > 0;
    if (any ? !add_parts(call, work, rank * 2 + number, sums) : !work.last_of_group(call) || (wide && adds)) return;
    const int first_key = work.first_key() + rank * Pair::keys;
#pragma unroll
    for (int of = 0; of < parts; of++)
      write_gradient<wide, T, of_part>(gradient, length, adds, call, work, first_key, sums[of], factor, of * of_part);
  }

 private:
  __device__ bool add_parts(const BackwardCall& call, const typename Pair::Work& work, int part,
                            float (&sums)[parts][of_part / 2]) {
    const NamedBarrier all{1 + warp_group(), kWarpGroup};
    if constexpr (parts == 2) return add_to_group(call, work, part, all, sums[0], sums[1]);
    else return add_to_group(call, work, part, all, sums[0]);
  }
};

template <class T, int size, bool segmented>
__device__ auto gradient_by_values(BackwardPair<T, size, segmented>& shared) {
  using Plan = BackwardPlan<size>;
  return PairGradient<T, size, segmented, Plan::value_size, Plan::weight_slots, Plan::cotangent_slots>{
      shared.weights,   shared.weights_full,   shared.weights_empty,
      shared.cotangent, shared.cotangent_full, shared.cotangent_empty};
}

// The second warp group.
template <bool wide, class T, int size, bool segmented>
__device__ void multiply_values(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  auto gradient = gradient_by_values(shared);
  for_pieces<true>(shared, [&](const auto& work) {
    typename decltype(gradient)::Numbers of_values = {};
    gradient.add_all(call, work, of_values);
    gradient.template write<wide>(call, work, rank, of_values, call.value_gradient, call.value_size, 1.f,
                                  call.adds_value, 0);
  });
}
// The same where it multiplies slopes as well.
template <bool wide, class T, int size, bool segmented>
__device__ void multiply_values_and_slopes(const BackwardCall& call, BackwardPair<T, size, segmented>& shared,
                                           unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  auto gradient = gradient_by_values(shared);
  PairSums<T, size, segmented> of_queries{shared, rank};
  unsigned key_parity = 0;
  for_pieces<true>(shared, [&](const auto& work) {
    typename decltype(gradient)::Numbers of_values = {};
    if (const int steps = work.steps(call); steps > 0) {
      float sums[of_queries.count];
      shared.key_full.wait(key_parity);
      key_parity ^= 1;
      gradient.begin(of_values);
      wait_for_products<0>(of_values);
      gradient.release();
      // Slopes are those of the tile before, whose second part is handed over when the next products have begun.
      for (int i = 1; i < steps; i++) {
        gradient.begin(of_values);
        if (i > 1) of_queries.hand_over(sums, 1);
        of_queries.multiply_both(sums);
        wait_for_products<1>(of_values);
        gradient.release();
        wait_for_products<0>(sums);
        of_queries.release();
        of_queries.hand_over(sums, 0);
      }
      if (steps > 1) of_queries.hand_over(sums, 1);
      of_queries.multiply_both(sums);
      wait_for_products<0>(sums);
      of_queries.release();
      shared.key_empty.arrive_as_warp();
      of_queries.hand_over(sums, 0);
      of_queries.hand_over(sums, 1);
    }
    gradient.template write<wide>(call, work, rank, of_values, call.value_gradient, call.value_size, 1.f,
                                  call.adds_value, 0);
  });
}

// The third warp group.
template <bool wide, class T, int size, bool segmented>
__device__ void multiply_keys(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  PairGradient<T, size, segmented, size, Pair::Plan::slope_slots, Pair::Plan::query_slots> gradient{
      shared.slopes, shared.slopes_full, shared.slopes_empty, shared.query, shared.query_full, shared.query_empty};
  for_pieces<true>(shared, [&](const auto& work) {
    typename decltype(gradient)::Numbers of_keys = {};
    gradient.add_all(call, work, of_keys);
    gradient.template write<wide>(call, work, rank, of_keys, call.key_gradient, call.size, call.scale, call.adds_key,
                                  1);
  });
}

}  // namespace jaxsoft::cuda
