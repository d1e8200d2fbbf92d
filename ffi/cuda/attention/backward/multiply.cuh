// The warp groups that multiply, of the backward kernel. Each has 64 keys of the block.
#pragma once

#include "group.cuh"
#include "plan.cuh"
#include "scores.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// Stores a left operand for 16 columns so that its columns become rows: what the threads of a warp have of 16 x 16.
__device__ inline void store_turned(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Where a thread does so in a tile of queries and keys, in bytes, if its warp has 16 of these keys and the first 16
// queries: a row has 128 bytes.
__device__ inline uint32_t turned_place() {
  const int warp = threadIdx.x % kWarpGroup / 32, lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * 128 + ((warp * 32 + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
}

// Stores numbers of each thread of a warp group, in an order of their own.
template <int count>
__device__ void store_of_thread(float* to, const float (&numbers)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += 4)
    *reinterpret_cast<float4*>(to + i * kWarpGroup + threadIdx.x % kWarpGroup * 4) =
        make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
}

// Adds to four numbers in device memory, which begin at a multiple of 16 bytes.
__device__ inline void add_four(float* to, const float (&four)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]), "f"(four[1]),
               "f"(four[2]), "f"(four[3])
               : "memory");
}

// Writes a gradient by 64 keys or values of heads of `size`, times a factor: `columns` of them, from the column `from`.
// It is in f32 if it is `wide`, and if it then `adds`, what is there becomes the sum of both. Each number is added to
// once, so no bits depend on what comes first.
template <bool wide, class T, int columns, class Work>
__device__ void write_gradient(void* gradient, int size, bool adds, const BackwardCall& call, const Work& work,
                               int key, const float (&sums)[columns / 2], float factor, int from = 0) {
  using Element = std::conditional_t<wide, float, T>;
  Element* const begin =
      static_cast<Element*>(gradient) + (int64_t(work.batch) * call.keys * call.key_heads + work.key_head) * size;
  [[maybe_unused]] const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = key + row_of_thread() + 8 * half;
    if constexpr (wide) {
#pragma unroll
      for (int column = 0; column < columns; column += 16) {
        // Two threads side by side have a pair of columns each of both blocks of 8. The first gets those of the first
        // block, and the other those of the second.
        float own[2], got[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float* const two = sums + column / 2 + 2 * half + i;
          const float low = two[0] * factor, high = two[4] * factor;
          own[i] = odd ? high : low;
          got[i] = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        }
        const int first = from + column + (odd ? 8 : 0) + threadIdx.x % 4 / 2 * 4;
        if (row >= work.end_key(call) || first >= size) continue;
        const float four[4] = {odd ? got[0] : own[0], odd ? got[1] : own[1],
                               odd ? own[0] : got[0], odd ? own[1] : got[1]};
        float* const to = begin + int64_t(row) * call.key_heads * size + first;
        if (adds) add_four(to, four);
        else *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
      }
    } else {
#pragma unroll
      for (int column = 0; column < columns; column += 32) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* two = sums + (column / 8 + i) * 4 + 2 * half;
          words[i] = bits<uint32_t>(narrow_pair(two[0] * factor, two[1] * factor, T()));
        }
        turn_in_four(words);
        const int first = from + column + threadIdx.x % 4 * 8;
        if (row < work.end_key(call) && first < size)
          *reinterpret_cast<uint4*>(begin + int64_t(row) * call.key_heads * size + first) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

template <ScoreKind kind, bool wide, class T, int size, bool segmented>
__device__ void multiply_tiles(const BackwardCall& call, BackwardShared<T, size, segmented>& shared, int group) {
  using Plan = BackwardPlan<size>;
  using Shared = BackwardShared<T, size, segmented>;
  constexpr int queries = Plan::queries, count = queries / 2;  // numbers of a thread, of a tile of scores
  constexpr int sum_queries = Shared::sum_queries;
  static_assert(Shared::boxes <= BackwardCode::groups);
  constexpr int box_row = 128;
  const NamedBarrier all{1 + group, kWarpGroup};  // of the warp group

  const auto keys = summed_along_rows(shared.key) + group * (64 * box_row);
  const auto values = summed_along_rows(shared.value) + group * (64 * box_row);
  const auto keys_turned =
      summed_over_rows(shared.key, Plan::keys) + (Shared::boxes > 1 ? group * Plan::keys * box_row : 0);
  const uint32_t slopes_of_lane = shared_address(shared.slopes[0]) + group * (queries * box_row) + turned_place();
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  SlotPlace<2> slopes_at, sums_at;  // where slopes are stored next, and multiplied with keys
  unsigned key_parity = 0, sum_parity = 0;
  for_pieces<true>(shared, [&](const auto& work) {
    const int first_key = work.first_key() + group * 64;
    const int steps = work.steps(call);
    float of_keys[size / 2] = {}, of_values[size / 2] = {};  // the gradients
    float scores[count];  // and then weights
    uint32_t weights[count / 8][4], rounded[count / 8][4];  // left operands: weights, and slopes
    int tile = work.tiles.begin;
    const QueryTiles unmasked = work.unmasked(call, first_key);
    // Begins the products of 64 keys or values, and a tile of queries or cotangents.
    auto multiply_tile = [&](float (&products)[count], Operand<Summed::along_rows> rows, const T* columns) {
      const auto left = rows.anew(), right = summed_along_rows(columns).anew();
      begin_products();
#pragma unroll
      for (int k = 0; k < size; k += 16)
        multiply<T>(products, left + (k / 64 * (Plan::keys * box_row) + k % 64 * 2),
                    right + (k / 64 * (queries * box_row) + k % 64 * 2), k > 0);
      commit_products();
    };
    auto multiply_scores = [&] {
      shared.query_full[query.slot].wait(query.parity);
      multiply_tile(scores, keys, shared.query[query.slot]);
    };
    auto show_slopes = [&] {
      show_to_copies();
      shared.slopes_full[slopes_at.slot].arrive_as_warp();
    };
    // Puts a cap and limits on the scores of a tile, which are complete.
    bool near_cap = false;
    auto limit_tile = [&] {
      near_cap = limit_scores<kind>(scores, call, work, tile, first_key, !unmasked.has(tile), all);
    };
    // Whether they stay as they are.
    auto is_free = [&] { return kind == ScoreKind::plain || (kind != ScoreKind::capped && unmasked.has(tile)); };
    // From these to the tile's slopes.
    auto begin_tile = [&] {
      shared.cotangent_full[cotangent.slot].wait(cotangent.parity);
      // A warp that issues a product stands still while the tensor cores are busy. So exponentials run beside products
      // only if they stand between their instructions. The compiler moves them there, if no wait and no branch is in
      // its way.
      float slopes[count];
      const float* numbers = shared.numbers[query.slot] + column_of_thread();
      // So this product stands in both branches.
      if (near_cap) {
        weigh_near_cap<T>(scores, weights, numbers, call.soft_cap);
        multiply_tile(slopes, values, shared.cotangent[cotangent.slot]);
      } else {
        multiply_tile(slopes, values, shared.cotangent[cotangent.slot]);
        weigh<T, kind>(scores, weights, numbers, call);
      }

      // The same holds for slopes and the last products for the gradient by values. When the others have been issued,
      // those that slopes need are complete.
      constexpr int last = queries * 3 / 64 * 16;
      const auto cotangents = summed_over_rows(shared.cotangent[cotangent.slot], queries).anew();
      auto add_values = [&](int begin, int end) {
        begin_products();
#pragma unroll
        for (int k = begin; k < end; k += 16)
          multiply<T>(of_values, weights[k / 16], cotangents + k * box_row, true);
        commit_products();
      };
      add_values(0, last);
      wait_for_products<1>(slopes);
      add_values(last, queries);
      slope(slopes, scores, numbers + queries);
      round_to<T>(rounded, slopes);
      shared.slopes_empty[slopes_at.slot].wait(slopes_at.parity ^ 1);
#pragma unroll
      for (int i = 0; i < count / 8; i++)
        store_turned(slopes_of_lane + slopes_at.slot * (Shared::slope_tile * 2) + i * (16 * box_row), rounded[i]);
    };
    // Begins the products of keys, and the slopes that both groups have stored.
    auto multiply_slopes = [&](float (&sums)[sum_queries / 2]) {
      shared.slopes_full[sums_at.slot].wait(sums_at.parity);
      const auto left = keys_turned.anew();
      const auto right = (summed_along_rows(shared.slopes[sums_at.slot]) +
                          (Shared::boxes > 1 ? 0 : group * (sum_queries * box_row))).anew();
      begin_products();
#pragma unroll
      for (int k = 0; k < Plan::keys; k += 16)
        multiply<T>(sums, left + k * box_row, right + (k / 64 * (queries * box_row) + k % 64 * 2), k > 0);
      commit_products();
    };
    auto hand_over = [&](const float (&sums)[sum_queries / 2]) {
      shared.slopes_empty[sums_at.slot].arrive_as_warp();
      sums_at.advance();
      shared.sum_empty[group].wait(sum_parity ^ 1);
      sum_parity ^= 1;
      store_of_thread(shared.sums[group], sums);
      show_to_copies();
      shared.sum_full[group].arrive_as_warp();
    };
    auto multiply_queries = [&] {
      const auto queries_turned = summed_over_rows(shared.query[query.slot], queries).anew();
      [[maybe_unused]] const auto own_slopes =
          (summed_over_rows(shared.slopes[slopes_at.slot], queries) + group * (queries * box_row)).anew();
      if constexpr (!Plan::slopes_in_registers) all.wait();
      begin_products();
#pragma unroll
      for (int k = 0; k < queries; k += 16) {
        if constexpr (Plan::slopes_in_registers)
          multiply<T>(of_keys, rounded[k / 16], queries_turned + k * box_row, true);
        else
          multiply<T>(of_keys, own_slopes + k * box_row, queries_turned + k * box_row, true);
      }
      commit_products();
    };
    auto advance = [&] {
      query.advance();
      if (++tile == work.tiles.end) tile = work.tiles.begin;
    };
    // The products of slopes. Those for the gradient by queries need the slopes of the other group as well, so those of
    // the tile before are taken, if there is one: the groups need not go in step, and while one is at its exponentials,
    // the other can multiply. If there are `more` tiles, the scores of the next one are multiplied too. Which of the
    // orders is the faster was measured.
    auto end_tile = [&](auto has_more, auto has_before) {
      constexpr bool more = decltype(has_more)::value, before = decltype(has_before)::value;
      float sums[sum_queries / 2];
      const unsigned query_slot = query.slot;
      auto release = [&] {
        shared.cotangent_empty[cotangent.slot].arrive_as_warp();
        cotangent.advance();
        shared.query_empty[query_slot].arrive_as_warp();
        if constexpr (!more) shared.value_empty.arrive_as_warp();
        if constexpr (before) hand_over(sums);
      };
      if constexpr (Plan::slopes_in_registers) {
        if constexpr (before) multiply_slopes(sums);
        multiply_queries();
        advance();
        if constexpr (more) multiply_scores();
        show_slopes();  // which takes a while, and has time until the next tile
        wait_for_products<more>(sums, of_values, weights, of_keys, rounded);
        release();
        if constexpr (more) wait_for_products<0>(scores);
      } else {
        show_slopes();
        multiply_queries();
        advance();
        if constexpr (more) multiply_scores();
        if constexpr (before) multiply_slopes(sums);
        wait_for_products<0>(sums, of_values, weights, of_keys, scores);
        release();
      }
      slopes_at.advance();
    };
    if (steps > 0) {
      shared.key_full.wait(key_parity);
      multiply_scores();
      shared.value_full.wait(key_parity);
      key_parity ^= 1;
      wait_for_products<0>(scores);
      limit_tile(), begin_tile();
      if (steps == 1) {
        end_tile(std::false_type(), std::false_type());
      } else {
        end_tile(std::true_type(), std::false_type());
        // A loop of its own for what most tiles need. With limits in it, if only to be jumped over, heads of 64 took 5
        // per cent longer.
        for (int left = steps - 1; left > 1;) {
          limit_tile();
          do begin_tile(), end_tile(std::true_type(), std::true_type());
          while (--left > 1 && is_free());
        }
        limit_tile(), begin_tile();
        end_tile(std::false_type(), std::true_type());
      }
      float sums[sum_queries / 2];
      multiply_slopes(sums);
      wait_for_products<0>(sums);
      hand_over(sums);
      shared.key_empty.arrive_as_warp();
      if (!add_to_group(call, work, group, all, of_keys, of_values)) return;
    } else if (!work.last_of_group(call)) {
      return;
    }
    if (wide || work.are_fewer(call, first_key)) {
      if (steps > 0 || !call.adds_key)
        write_gradient<wide, T, size>(call.key_gradient, call.size, call.adds_key, call, work, first_key, of_keys,
                                      call.scale);
      if (steps > 0 || !call.adds_value)
        write_gradient<wide, T, size>(call.value_gradient, call.value_size, call.adds_value, call, work, first_key,
                                      of_values, 1.f);
    } else if constexpr (!wide) {
      // What the last piece left there has been read if a sum has been handed over since.
      if (steps == 0) shared.sum_empty[group].wait(sum_parity ^ 1);
      stage_rows<T, size>(shared.value_stage[group], [&](int i) { return of_values[i]; });
      shared.sum_empty[group].wait(sum_parity ^ 1);
      sum_parity ^= 1;
      stage_rows<T, size>(shared.key_stage(group), [&](int i) { return of_keys[i] * call.scale; });
      show_to_copies();
      shared.sum_full[group].arrive_as_warp();
    }
  });
}

}  // namespace jaxsoft::cuda
