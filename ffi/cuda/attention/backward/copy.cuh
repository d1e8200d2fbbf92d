// The warp group that copies, of the backward kernel. One thread brings tiles to shared memory, and one for each warp
// group that multiplies adds what that group has of the gradient by queries to the sums in device memory, and stores
// its gradients by keys and values.
#pragma once

#include "../../counter.cuh"
#include "../../tensor_map.cuh"
#include "plan.cuh"

namespace jaxsoft::cuda {

// Copies a tile (rows, size), by its boxes of 64 columns.
template <int size, int rows, class T>
__device__ void copy_tile(T* to, const CUtensorMap& map, int head, int row, int batch, const Barrier& done) {
#pragma unroll
  for (int column = 0; column < size; column += 64) copy_box(to + column * rows, map, {column, head, row, batch}, done);
}

// The log-sum-exps and deltas of a head, tile by tile.
template <int queries>
__device__ const float* numbers_of_head(const BackwardCall& call, int batch, int head) {
  return call.numbers + (int64_t(batch) * call.heads + head) * call.query_tiles * (2 * queries);
}

template <class T, int size, bool segmented>
__device__ void bring_tiles(const BackwardCall& call, BackwardShared<T, size, segmented>& shared) {
  using Shared = BackwardShared<T, size, segmented>;
  using Plan = BackwardPlan<size>;
  constexpr unsigned tile_bytes = sizeof(T) * Plan::queries * size, key_bytes = sizeof(T) * Plan::keys * size;
  constexpr unsigned number_bytes = sizeof shared.numbers[0];
  SlotPlace<BackwardCode::work_slots> work_place;
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  unsigned key_parity = 0;
  wait_for_last_kernel();  // which writes the numbers of queries
  for (;; work_place.advance()) {
    const unsigned piece = take(call.counter);
    shared.work_empty[work_place.slot].wait(work_place.parity ^ 1);
    typename Shared::Work& work = shared.works[work_place.slot];
    work.set(call, piece);
    shared.work_full[work_place.slot].arrive();
    if (!work.there) return;
    bool first = true;
    for (int i = 0; i < call.heads_of_piece; i++) {
      const int head = work.first_head + i;
      const float* const numbers = numbers_of_head<Plan::queries>(call, work.batch, head);
      for (int number = work.tiles.begin; number < work.tiles.end; number++) {
        const int tile = work.tile(number);
        if (first) {
          shared.key_empty.wait(key_parity ^ 1);
          shared.key_full.arrive_expecting(key_bytes);
          copy_tile<size, Plan::keys>(shared.key, call.key, work.key_head, work.first_key(), work.batch,
                                      shared.key_full);
        }
        shared.query_empty[query.slot].wait(query.parity ^ 1);
        Barrier& full = shared.query_full[query.slot];
        full.arrive_expecting(tile_bytes + number_bytes);
        copy_tile<size, Plan::queries>(shared.query[query.slot], call.query, head, work.query(number), work.batch,
                                       full);
        copy_to_shared(shared.numbers[query.slot], numbers + int64_t(tile) * (2 * Plan::queries), number_bytes, full);
        query.advance();
        if (first) {
          shared.value_empty.wait(key_parity ^ 1);
          shared.value_full.arrive_expecting(key_bytes);
          copy_tile<size, Plan::keys>(shared.value, call.value, work.key_head, work.first_key(), work.batch,
                                      shared.value_full);
          key_parity ^= 1;
          first = false;
        }
        shared.cotangent_empty[cotangent.slot].wait(cotangent.parity ^ 1);
        Barrier& cotangent_full = shared.cotangent_full[cotangent.slot];
        cotangent_full.arrive_expecting(tile_bytes);
        copy_tile<size, Plan::queries>(shared.cotangent[cotangent.slot], call.cotangent, head, work.query(number),
                                       work.batch, cotangent_full);
        cotangent.advance();
      }
    }
  }
}

// Whose turn it is to add to a tile, if the order matters. For each head of queries, blocks of keys add from the last
// to the first, and tiles follow each other in all of them; in a reversed turn both have the other order. So a block
// needs to know how far the block of keys before it is, whose piece of work was taken before: it runs already, or has
// ended. Each of the threads that add signals how far it is. A microsecond passes until that is seen, so another thread
// waits for it, and runs ahead.
template <class Shared>
__device__ void wait_for_turns(const BackwardCall& call, Shared& shared) {
  static_assert(BackwardCode::groups == 2);
  const uint32_t turns = shared_address(&shared.turns);
  unsigned tiles = 0;
  for_pieces<false>(shared, [&](const auto& work) {
    for (int i = 0; i < call.heads_of_piece; i++) {
      const int2* before = call.ends + work.head_of_turns(call, i) * call.key_blocks + work.before_block;
      int end = 0;  // of the tiles that the block before has added to
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        while (work.tiles_before.has(tile) && end <= tile) {
          const int2 of_groups = load_acquired(before);
          end = min(of_groups.x, of_groups.y);
        }
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(turns), "r"(++tiles) : "memory");
      }
    }
  });
}

// Clears sums, if the order of additions does not matter. With each piece of work, a part of those of a later turn, so
// that they are still in the cache then. It takes a warp, and no time.
template <int size, class Shared>
__device__ void clear_sums(const BackwardCall& call, Shared& shared, unsigned rank = 0) {
  using Plan = BackwardPlan<size>;
  const int64_t of_turn = int64_t(call.heads_of_piece) * call.query_tiles * (Plan::queries * size) / 4;
  const int parts = call.key_blocks * Plan::blocks;
  const int64_t part = (of_turn + parts - 1) / parts;
  for_pieces<true>(shared, [&](const auto& work) {
    const int turn = work.turn + call.cleared_ahead;
    if (turn >= call.turns) return;
    auto* const sums = reinterpret_cast<float4*>(call.sums) + turn * of_turn;
    const int64_t begin = (int64_t(work.block) * Plan::blocks + rank) * part, end = min(begin + part, of_turn);
    for (int64_t i = begin + threadIdx.x % 32; i < end; i += 32) sums[i] = float4{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_released(call.cleared + turn, 1);
  });
}

// Waits until a counter has come to a number.
__device__ inline void wait_for_count(const unsigned* counter, unsigned number) {
  while (load_acquired(counter) != number) __nanosleep(200);
}

// Waits until the sums of a piece of work have been cleared, so that any order of additions will do.
template <class Work>
__device__ void wait_for_zeros(const BackwardCall& call, const Work& work) {
  if (work.turn < call.cleared_ahead) return;
  wait_for_count(call.cleared + work.turn, call.key_blocks * Work::Plan::blocks);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // threads have stored zeros, and copies add to them
}

// Says of a piece of work that `parts` of its additions are complete, of BackwardPlan::added_parts.
template <class Work>
__device__ void count_as_added(const BackwardCall& call, const Work& work, unsigned parts) {
  add_released(call.added + work.turn, parts);
}

// Adds what a warp group has of the gradient by queries to the sums. If the gradients by keys and values are `staged`,
// it also stores those that the warp group leaves in shared memory at the end of a piece of work.
template <bool staged, class T, int size, bool segmented>
__device__ void add_sums(const BackwardCall& call, BackwardShared<T, size, segmented>& shared, int group) {
  using Plan = BackwardPlan<size>;
  using Shared = BackwardShared<T, size, segmented>;
  using Sums = typename Shared::Sums;
  const uint32_t turns = shared_address(&shared.turns);
  unsigned parity = 0, tiles = 0;
  auto let_go = [&] {
    commit_stores();
    wait_for_reads_of_stores();
    shared.sum_empty[group].arrive();
    parity ^= 1;
  };
  for_pieces<false>(shared, [&](const auto& work) {
    if (!call.deterministic) wait_for_zeros(call, work);
    for (int i = 0; i < call.heads_of_piece; i++) {
      const int64_t head = work.head_of_turns(call, i);
      float* const sums = call.sums + head * call.query_tiles * Sums::count + group * Sums::half;
      int* const end = reinterpret_cast<int*>(call.ends + head * call.key_blocks + work.block) + group;
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        tiles++;
        unsigned turn = tiles;
        if (call.deterministic) {
          do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(turn) : "r"(turns) : "memory");
          while (static_cast<int>(turn - tiles) < 0);
        }
        shared.sum_full[group].wait(parity);
        float* const to = sums + int64_t(work.tile(tile)) * Sums::count;
        constexpr unsigned bytes = sizeof shared.sums[0];
        // Where the order matters, the first block stores, and there need not be zeros before.
        if (call.deterministic && !work.tiles_before.has(tile)) store_floats(to, shared.sums[group], bytes);
        else add_floats(to, shared.sums[group], bytes);
        let_go();
        if (call.deterministic) {
          // The release is needed: with a relaxed store, some runs had other bits, although the additions are complete.
          if (work.is_signalled(tile)) {
            wait_for_stores();
            store_released(end, tile + 1);
          }
        }
      }
    }
    wait_for_stores();
    count_as_added(call, work, 1);
    const int first_key = work.first_key() + group * 64;
    if (staged && work.last_of_group(call) && !work.are_fewer(call, first_key)) {
      shared.sum_full[group].wait(parity);
#pragma unroll
      for (int box = 0; box < Shared::boxes; box++) {
        const BoxPlace to{box * 64, work.key_head, first_key, work.batch};
        store_box(call.key_result, to, shared.key_stage(group) + box * Shared::stage_box);
        store_box(call.value_result, to, shared.value_stage[group] + box * Shared::stage_box);
      }
      let_go();
    }
  });
  wait_for_stores();
}

// Waits until all blocks of keys have added what they have for the heads of a turn. All threads of a block call it.
template <int size>
__device__ void wait_for_sums(const BackwardCall& call, int turn) {
  if (threadIdx.x == 0)
    wait_for_count(call.added + turn, BackwardPlan<size>::added_parts * call.key_blocks);
  __syncthreads();
}

}  // namespace jaxsoft::cuda
