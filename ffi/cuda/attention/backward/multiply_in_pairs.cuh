// The warp groups that multiply, for heads whose gradients by 64 keys and by 64 values are too much for the registers of
// one group. The first has the scores and the gradient by values, the second the slopes and that by keys. The first
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
    const auto rows = summed_along_rows(left), columns = summed_along_rows(right);
    begin_products();
#pragma unroll
    for (int k = 0; k < size; k += 16)
      multiply<T>(products, rows + (k / 64 * (Plan::keys * box_row) + k % 64 * 2),
                  columns + (k / 64 * (queries * box_row) + k % 64 * 2), k > 0);
    commit_products();
  }
  // Begins to add the products of what is in registers, and cotangents or queries.
  __device__ void add_products(float (&sums)[size / 2], const uint32_t (&left)[count / 8][4], const T* right) const {
    const auto columns = summed_over_rows(right, queries);
    begin_products();
#pragma unroll
    for (int k = 0; k < queries; k += 16) multiply<T>(sums, left[k / 16], columns + k * box_row, true);
    commit_products();
  }
  // Begins the products of slopes and keys, for part of the group's columns.
  __device__ void multiply_slopes(float (&sums)[count], int part) const {
    const auto keys = summed_over_rows(shared.key, Plan::keys) + (group * Shared::parts + part) * Plan::keys * box_row;
    const auto columns = summed_along_rows(shared.slopes[slopes_slot]);
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

template <class T, int size, BackwardKind kind>
__device__ void multiply_in_pairs(const BackwardCall& call, BackwardShared<T, size>& shared, int group) {
  using Both = Pair<T, size>;
  using Plan = BackwardPlan<size>;
  constexpr int queries = Plan::queries, count = Both::count;
  static_assert(Both::Shared::parts == 2 && Both::Shared::sum_queries == queries);
  const int thread = threadIdx.x % kWarpGroup, lane = threadIdx.x % 32;
  const uint32_t slopes_of_lane = shared_address(shared.slopes[0]) + (lane / 16 * 8 + lane % 8) * Both::box_row +
                                  ((thread / 32 * 32 + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
  Both pair{call, shared, group};
  const NamedBarrier slopes_written{1, Both::both}, weights_written{2, Both::both};
  const unsigned pieces = call.batch * call.key_heads * call.key_blocks;
  SlotPlace<BackwardCode::mails> mail;
  unsigned key_parity = 0;
  for (;; mail.advance()) {
    shared.ticket_full[mail.slot].wait(mail.parity);
    const unsigned ticket = *static_cast<volatile unsigned*>(&shared.tickets[mail.slot]);
    shared.ticket_empty[mail.slot].arrive_as_warp();
    if (ticket >= pieces) return;
    const BackwardWork<size> work(call, ticket);
    const int first_key = work.block * Plan::keys;
    const int steps = work.tiles.length() * call.group;
    float gradient[size / 2] = {};
    float products[count];
    uint32_t rounded[count / 8][4];
    int tile = work.tiles.begin;
    if (group == 0) {
      if (steps > 0) {
        shared.key_full.wait(key_parity);
        shared.query_full[pair.query.slot].wait(pair.query.parity);
        pair.multiply_tile(products, shared.key, shared.query[pair.query.slot]);
      }
      // Begins with the products for scores in flight.
      auto step = [&](auto has_more) {
        constexpr bool more = decltype(has_more)::value;
        wait_for_products<0>(products);
        float growth[kind == BackwardKind::capped ? count : 1];
        weigh<size, kind>(products, growth, shared.numbers[pair.query.slot] + column_of_thread(), call, work, tile,
                          first_key);
        round_to<T>(rounded, products);
        if constexpr (kind == BackwardKind::capped) {
#pragma unroll
          for (int i = 0; i < count; i++) products[i] *= growth[i];
        }
        store_of_thread(shared.weights, products);
        weights_written.arrive();
        shared.cotangent_full[pair.cotangent.slot].wait(pair.cotangent.parity);
        pair.add_products(gradient, rounded, shared.cotangent[pair.cotangent.slot]);
        shared.query_empty[pair.query.slot].arrive_as_warp();
        pair.query.advance();
        if constexpr (more) {
          shared.query_full[pair.query.slot].wait(pair.query.parity);
          pair.multiply_tile(products, shared.key, shared.query[pair.query.slot]);
          wait_for_products<1>(gradient, rounded);
        } else {
          wait_for_products<0>(gradient, rounded);
        }
        shared.cotangent_empty[pair.cotangent.slot].arrive_as_warp();
        pair.cotangent.advance();
        slopes_written.wait();
#pragma unroll
        for (int part = 0; part < Both::Shared::parts; part++) {
          float sums[count];
          pair.multiply_slopes(sums, part);
          if (more) wait_for_products<0>(sums, products);
          else wait_for_products<0>(sums);
          pair.hand_over(sums);
        }
        pair.slopes_slot ^= 1;
        if (++tile == work.tiles.end) tile = work.tiles.begin;
      };
      for (int i = 1; i < steps; i++) step(std::true_type());
      if (steps > 0) step(std::false_type());
    } else {
      if (steps > 0) {
        shared.key_full.wait(key_parity);  // before products with keys
        shared.value_full.wait(key_parity);
        shared.cotangent_full[pair.cotangent.slot].wait(pair.cotangent.parity);
        pair.multiply_tile(products, shared.value, shared.cotangent[pair.cotangent.slot]);
      }
      auto step = [&](auto has_more) {
        constexpr bool more = decltype(has_more)::value;
        wait_for_products<0>(products);
        shared.cotangent_empty[pair.cotangent.slot].arrive_as_warp();
        pair.cotangent.advance();
        float weights[count], none[1];
        weights_written.wait();
#pragma unroll
        for (int i = 0; i < count; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(shared.weights + i * kWarpGroup + thread * 4);
          weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
        }
        shared.query_full[pair.query.slot].wait(pair.query.parity);  // before its numbers are read
        slope<BackwardKind::plain>(products, weights, none, shared.numbers[pair.query.slot] + queries + column_of_thread());
        round_to<T>(rounded, products);
#pragma unroll
        for (int i = 0; i < count / 8; i++)
          store_turned(slopes_of_lane + pair.slopes_slot * (Both::Shared::slope_tile * 2) + i * (16 * Both::box_row),
                       rounded[i]);
        show_to_copies();
        slopes_written.wait();
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
      };
      for (int i = 1; i < steps; i++) step(std::true_type());
      if (steps > 0) step(std::false_type());
    }
    if (steps > 0) {
      shared.value_empty.arrive_as_warp();
      shared.key_empty.arrive_as_warp();
      key_parity ^= 1;
    }
    write_gradient<T, size>(group == 0 ? call.value_gradient : call.key_gradient, call, work.batch, work.key_head,
                            first_key, gradient, group == 0 ? 1.f : call.scale);
  }
}

}  // namespace jaxsoft::cuda
