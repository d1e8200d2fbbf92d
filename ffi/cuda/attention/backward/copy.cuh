// The warp group that copies, of the backward kernel. One thread brings tiles to shared memory, and one for each warp
// group that multiplies adds what that group has of the gradient by queries to the sums in device memory.
#pragma once

#include "../../counter.cuh"
#include "../../tensor_map.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

// Copies a tile (rows, size), by its boxes of 64 columns.
template <int size, int rows, class T>
__device__ void copy_tile(T* to, const CUtensorMap& map, int head, int row, int batch, const Barrier& done) {
#pragma unroll
  for (int column = 0; column < size; column += 64) copy_box(to + column * rows, map, {column, head, row, batch}, done);
}

template <class T, int size>
__device__ void bring_tiles(const BackwardCall& call, BackwardShared<T, size>& shared) {
  using Plan = BackwardPlan<size>;
  constexpr unsigned tile_bytes = sizeof(T) * Plan::queries * size, key_bytes = sizeof(T) * Plan::keys * size;
  constexpr unsigned number_bytes = sizeof shared.numbers[0];
  const unsigned pieces = call.batch * call.key_heads * call.key_blocks;
  SlotPlace<BackwardCode::mails> mail;
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  unsigned key_parity = 0;
  for (;; mail.advance()) {
    const unsigned ticket = take(call.counter);
    shared.ticket_empty[mail.slot].wait(mail.parity ^ 1);
    shared.tickets[mail.slot] = ticket;
    shared.ticket_full[mail.slot].arrive();
    if (ticket >= pieces) return;
    const BackwardWork<size> work(call, ticket);
    if (work.tiles.length() == 0) continue;
    bool first = true;
    for (int i = 0; i < call.group; i++) {
      const int head = work.key_head * call.group + i;
      const float* numbers =
          call.numbers + (int64_t(work.batch) * call.heads + head) * call.query_tiles * (2 * Plan::queries);
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        if (first) {
          shared.key_empty.wait(key_parity ^ 1);
          shared.key_full.arrive_expecting(key_bytes);
          copy_tile<size, Plan::keys>(shared.key, call.key, work.key_head, work.block * Plan::keys, work.batch,
                                      shared.key_full);
        }
        shared.query_empty[query.slot].wait(query.parity ^ 1);
        Barrier& full = shared.query_full[query.slot];
        full.arrive_expecting(tile_bytes + number_bytes);
        copy_tile<size, Plan::queries>(shared.query[query.slot], call.query, head, tile * Plan::queries, work.batch,
                                       full);
        copy_to_shared(shared.numbers[query.slot], numbers + int64_t(tile) * (2 * Plan::queries), number_bytes, full);
        query.advance();
        if (first) {
          shared.value_empty.wait(key_parity ^ 1);
          shared.value_full.arrive_expecting(key_bytes);
          copy_tile<size, Plan::keys>(shared.value, call.value, work.key_head, work.block * Plan::keys, work.batch,
                                      shared.value_full);
          key_parity ^= 1;
          first = false;
        }
        shared.cotangent_empty[cotangent.slot].wait(cotangent.parity ^ 1);
        Barrier& cotangent_full = shared.cotangent_full[cotangent.slot];
        cotangent_full.arrive_expecting(tile_bytes);
        copy_tile<size, Plan::queries>(shared.cotangent[cotangent.slot], call.cotangent, head, tile * Plan::queries,
                                       work.batch, cotangent_full);
        cotangent.advance();
      }
    }
  }
}

// Whose turn it is to add to a tile, if the order matters: blocks of keys add from the last to the first. A block's
// number is set when it has added.
struct Turn {
  unsigned* number;
  __device__ void wait(unsigned turn) const {
    unsigned found;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(number) : "memory");
    while (found != turn);
  }
  __device__ void set(unsigned turn) const {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(number), "r"(turn) : "memory");
  }
};

// Calls `visit(work)` for each of the block's pieces of work.
template <class T, int size, class Visit>
__device__ void for_pieces(const BackwardCall& call, BackwardShared<T, size>& shared, Visit visit) {
  const unsigned pieces = call.batch * call.key_heads * call.key_blocks;
  for (SlotPlace<BackwardCode::mails> mail;; mail.advance()) {
    shared.ticket_full[mail.slot].wait(mail.parity);
    const unsigned ticket = *static_cast<volatile unsigned*>(&shared.tickets[mail.slot]);
    shared.ticket_empty[mail.slot].arrive();
    if (ticket >= pieces) return;
    visit(BackwardWork<size>(call, ticket));
  }
}

// Where the numbers of a tile are, of a head of queries of a piece of work, counted in those of one warp group.
template <int size>
__device__ int64_t place_of_sums(const BackwardCall& call, const BackwardWork<size>& work, int head, int tile,
                                 int group) {
  const int64_t heads = int64_t(work.batch) * call.heads + work.key_head * call.group + head;
  return (heads * call.query_tiles + tile) * BackwardCode::groups + group;
}

// Waits for turns, ahead of the thread that adds: it takes a microsecond to see one.
template <class T, int size>
__device__ void wait_for_turns(const BackwardCall& call, BackwardShared<T, size>& shared, int group) {
  unsigned reached = 0;
  for_pieces(call, shared, [&](const BackwardWork<size>& work) {
    for (int i = 0; i < call.group; i++) {
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        if (call.deterministic && work.tiles_of_next.has(tile))
          Turn{call.turns + place_of_sums(call, work, i, tile, group)}.wait(work.block + 1);
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&shared.reached[group])), "r"(++reached)
                     : "memory");
      }
    }
  });
}

template <class T, int size>
__device__ void add_sums(const BackwardCall& call, BackwardShared<T, size>& shared, int group) {
  using Shared = BackwardShared<T, size>;
  unsigned parity = 0, tiles = 0;
  for_pieces(call, shared, [&](const BackwardWork<size>& work) {
    for (int i = 0; i < call.group; i++) {
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        const int64_t place = place_of_sums(call, work, i, tile, group);
        tiles++;
        if (call.deterministic) {
          unsigned reached;
          do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                          : "=r"(reached) : "r"(shared_address(&shared.reached[group])) : "memory");
          while (static_cast<int>(reached - tiles) < 0);
        }
        for (int part = 0; part < Shared::parts; part++) {
          shared.sum_full[group].wait(parity);
          add_floats(call.sums + (place * Shared::parts + part) * Shared::sum, shared.sums[group],
                     Shared::sum * sizeof(float));
          commit_stores();
          wait_for_reads_of_stores();
          shared.sum_empty[group].arrive();
          parity ^= 1;
        }
        if (call.deterministic) {
          wait_for_stores();
          Turn{call.turns + place}.set(work.block);
        }
      }
    }
  });
  wait_for_stores();
}

}  // namespace jaxsoft::cuda
