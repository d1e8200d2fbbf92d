// The warp groups that multiply, for heads whose gradients by 64 keys and by 64 values are too much for the registers
// of one group. The first has the scores and the gradient by values, the second the slopes and that by keys. The first
// gives its weights to the second, the second its slopes to the first, and each has half of the gradient by queries.
#pragma once

#include "multiply.cuh"

namespace jaxsoft::cuda {

// What both groups know.
template <class T, int size>
struct Pair {
  using Plan = BackwardPlan<size>;
  using Shared = BackwardShared<T, size>;
  static constexpr int queries = Plan::queries, count = queries / 2;  // numbers of a thread, of a tile of scores
  static constexpr int box_row = 128, both = BackwardCode::groups * kWarpGroup;
  const BackwardCall& call;
  Shared& shared;
  int group;
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  unsigned sum_parity = 0, slopes_slot = 0;

  // Begins the products of keys or values, and of queries or cotangents.
  __device__ void multiply_tile(float (&products)[count], const T* left, const T* right) const {
    const auto rows = summed_along_rows(left).anew(), columns = summed_along_rows(right).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < size; k += 16)
      multiply<T>(products, rows + (k / 64 * (Plan::keys * box_row) + k % 64 * 2),
                  columns + (k / 64 * (queries * box_row) + k % 64 * 2), k > 0);
    commit_products();
  }
  // Begins to add the products of what is in registers, and cotangents or queries.
  __device__ void add_products(float (&sums)[size / 2], const uint32_t (&left)[count / 8][4], const T* right) const {
    const auto columns = summed_over_rows(right, queries).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < queries; k += 16) multiply<T>(sums, left[k / 16], columns + k * box_row, true);
    commit_products();
  }
  // Begins the products of slopes and keys, for part of the group's columns.
  __device__ void multiply_slopes(float (&sums)[count], int part) const {
    const auto keys =
        (summed_over_rows(shared.key, Plan::keys) + (group * Shared::parts + part) * (Plan::keys * box_row)).anew();
    const auto columns = summed_along_rows(shared.slopes[slopes_slot]).anew();
    begin_products();
#pragma unroll
    for (int k = 0; k < Plan::keys; k += 16) multiply<T>(sums, keys + k * box_row, columns + k * 2, k > 0);
    commit_products();
  }
  __device__ void hand_over(const float (&sums)[count]) {
    shared.sum_empty[group].wait(sum_parity ^ 1);
    sum_parity ^= 1;
    store_of_thread(shared.sums[group], sums);
    show_to_copies();
    shared.sum_full[group].arrive_as_warp();
  }
};

// The first warp group. `weights_written` and `slopes_written` are barriers of both groups.
template <class T, int size, BackwardKind kind>
__device__ void multiply_values(Pair<T, size>& pair, NamedBarrier weights_written, NamedBarrier slopes_written) {
  using Both = Pair<T, size>;
  using Plan = BackwardPlan<size>;
  constexpr int count = Both::count;
  const BackwardCall& call = pair.call;
  auto& shared = pair.shared;
  unsigned key_parity = 0;
  for_pieces<true>(call, shared, [&](const BackwardWork<size>& work) {
    const int first_key = work.block * Plan::keys, steps = work.tiles.length() * call.group;
    float gradient[size / 2] = {};
    float products[count];
    uint32_t rounded[count / 8][4];
    int tile = work.tiles.begin;
    // Makes weights of the products for scores, which are complete.
    auto finish_weights = [&] {
      float growth[kind == BackwardKind::capped ? count : 1];
      limit_scores<size, kind>(products, growth, call, work, tile, first_key);
      weigh<kind>(products, shared.numbers[pair.query.slot] + column_of_thread(), call);
      shared.query_empty[pair.query.slot].arrive_as_warp();
      pair.query.advance();
      if (++tile == work.tiles.end) tile = work.tiles.begin;
      round_to<T>(rounded, products);
      if constexpr (kind == BackwardKind::capped) {
#pragma unroll
        for (int i = 0; i < count; i++) products[i] *= growth[i];
      }
    };
    auto give_weights = [&] {
      store_of_thread(shared.weights, products);
      weights_written.arrive();
    };
    auto multiply_scores = [&] {
      shared.query_full[pair.query.slot].wait(pair.query.parity);
      pair.multiply_tile(products, shared.key, shared.query[pair.query.slot]);
    };
    // Begins with the weights of a tile, and makes those of the next, if there are more.
    auto step = [&](auto has_more) {
      constexpr bool more = decltype(has_more)::value;
      shared.cotangent_full[pair.cotangent.slot].wait(pair.cotangent.parity);
      hold(products);
      pair.add_products(gradient, rounded, shared.cotangent[pair.cotangent.slot]);
      if constexpr (more) multiply_scores();
      wait_for_products<more ? 1 : 0>(gradient, rounded);
      shared.cotangent_empty[pair.cotangent.slot].arrive_as_warp();
      pair.cotangent.advance();
      if constexpr (more) {
        wait_for_products<0>(products);
        finish_weights();
      }
      slopes_written.wait();
      if constexpr (more) give_weights();
#pragma unroll
      for (int part = 0; part < Both::Shared::parts; part++) {
        float sums[count];
        pair.multiply_slopes(sums, part);
        wait_for_products<0>(sums);
        pair.hand_over(sums);
      }
      pair.slopes_slot ^= 1;
    };
    if (steps > 0) {
      shared.key_full.wait(key_parity);
      multiply_scores();
      wait_for_products<0>(products);
      finish_weights();
      give_weights();
      for (int i = 1; i < steps; i++) step(std::true_type());
      step(std::false_type());
    }
    if (steps > 0) {
      shared.value_empty.arrive_as_warp();
      shared.key_empty.arrive_as_warp();
      key_parity ^= 1;
    }
    write_gradient<T, size>(call.value_gradient, call, work.batch, work.key_head, first_key, gradient, 1.f);
  });
}

// The second one.
template <class T, int size>
__device__ void multiply_keys(Pair<T, size>& pair, NamedBarrier weights_written, NamedBarrier slopes_written) {
  using Both = Pair<T, size>;
  using Plan = BackwardPlan<size>;
  constexpr int queries = Plan::queries, count = Both::count;
  const NamedBarrier own_slopes_written{3, kWarpGroup};
  const BackwardCall& call = pair.call;
  auto& shared = pair.shared;
  const int thread = threadIdx.x % kWarpGroup, lane = threadIdx.x % 32;
  const uint32_t slopes_of_lane = shared_address(shared.slopes[0]) + (lane / 16 * 8 + lane % 8) * Both::box_row +
                                  ((thread / 32 * 32 + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
  unsigned key_parity = 0;
  for_pieces<true>(call, shared, [&](const BackwardWork<size>& work) {
    const int first_key = work.block * Plan::keys, steps = work.tiles.length() * call.group;
    float gradient[size / 2] = {};
    float products[count];
    uint32_t rounded[count / 8][4];
    auto finish_products = [&] {
      wait_for_products<0>(products);
      shared.cotangent_empty[pair.cotangent.slot].arrive_as_warp();
      pair.cotangent.advance();
    };
    if (steps > 0) {
      shared.key_full.wait(key_parity);  // before products with keys
      shared.value_full.wait(key_parity);
      shared.cotangent_full[pair.cotangent.slot].wait(pair.cotangent.parity);
      pair.multiply_tile(products, shared.value, shared.cotangent[pair.cotangent.slot]);
      finish_products();
    }
    auto step = [&](auto has_more) {
      constexpr bool more = decltype(has_more)::value;
      float weights[count], none[1];
      weights_written.wait();
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(shared.weights + i * kWarpGroup + thread * 4);
        weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
      }
      shared.query_full[pair.query.slot].wait(pair.query.parity);  // before its numbers are read
      const float* delta = shared.numbers[pair.query.slot] + queries + column_of_thread();
      slope<BackwardKind::plain>(products, weights, none, delta);
      round_to<T>(rounded, products);
#pragma unroll
      for (int i = 0; i < count / 8; i++)
        store_turned(slopes_of_lane + pair.slopes_slot * (Both::Shared::slope_tile * 2) + i * (16 * Both::box_row),
                     rounded[i]);
      show_to_copies();
      slopes_written.arrive();
      own_slopes_written.wait();
      float sums[count];
      pair.multiply_slopes(sums, 0);
      pair.add_products(gradient, rounded, shared.query[pair.query.slot]);
      wait_for_products<1>(sums);
      pair.hand_over(sums);
      pair.multiply_slopes(sums, 1);
      if constexpr (more) {
        shared.cotangent_full[pair.cotangent.slot].wait(pair.cotangent.parity);
        pair.multiply_tile(products, shared.value, shared.cotangent[pair.cotangent.slot]);
      }
      wait_for_products<more ? 1 : 0>(sums, gradient, rounded);
      shared.query_empty[pair.query.slot].arrive_as_warp();
      pair.query.advance();
      pair.hand_over(sums);
      pair.slopes_slot ^= 1;
      if constexpr (more) finish_products();
    };
    for (int i = 1; i < steps; i++) step(std::true_type());
    if (steps > 0) step(std::false_type());
    if (steps > 0) {
      shared.value_empty.arrive_as_warp();
      shared.key_empty.arrive_as_warp();
      key_parity ^= 1;
    }
    write_gradient<T, size>(call.key_gradient, call, work.batch, work.key_head, first_key, gradient, call.scale);
  });
}

template <class T, int size, BackwardKind kind>
__device__ void multiply_in_pairs(const BackwardCall& call, BackwardShared<T, size>& shared, int group) {
  using Both = Pair<T, size>;
  static_assert(Both::Shared::parts == 2 && Both::Shared::sum_queries == Both::queries);
  Both pair{call, shared, group};
  const NamedBarrier slopes_written{1, Both::both}, weights_written{2, Both::both};
  if (group == 0) multiply_values<T, size, kind>(pair, weights_written, slopes_written);
  else multiply_keys(pair, weights_written, slopes_written);
}

}  // namespace jaxsoft::cuda
