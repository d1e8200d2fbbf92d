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

// Whose turn it is to add to a tile, if the order matters: blocks of keys add from the last to the first.
struct Turn {
  unsigned* number;
  __device__ void wait(unsigned turn) const {
    unsigned found;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(number) : "memory");
    while (found != turn);
  }
  __device__ void set(unsigned turn) const {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(number), "r"(turn) : "memory");
  }
};

template <class T, int size>
__device__ void add_sums(const BackwardCall& call, BackwardShared<T, size>& shared, int group) {
  constexpr int sum = BackwardShared<T, size>::sum;
  const unsigned pieces = call.batch * call.key_heads * call.key_blocks;
  SlotPlace<BackwardCode::mails> mail;
  unsigned parity = 0;
  for (;; mail.advance()) {
    shared.ticket_full[mail.slot].wait(mail.parity);
    const unsigned ticket = *static_cast<volatile unsigned*>(&shared.tickets[mail.slot]);
    shared.ticket_empty[mail.slot].arrive();
    if (ticket >= pieces) return;
    const BackwardWork<size> work(call, ticket);
    for (int i = 0; i < call.group; i++) {
      const int64_t head = int64_t(work.batch) * call.heads + work.key_head * call.group + i;
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        const int64_t place = (head * call.query_tiles + tile) * BackwardCode::groups + group;
        const Turn turn{call.turns + place};
        if (call.deterministic && work.tiles_of_next.has(tile)) turn.wait(work.block + 1);
        shared.sum_full[group].wait(parity);
        add_floats(call.sums + place * sum, shared.sums[group], sum * sizeof(float));
        commit_stores();
        wait_for_reads_of_stores();
        shared.sum_empty[group].arrive();
        parity ^= 1;
        if (call.deterministic) {
          wait_for_stores();
          turn.set(work.block);
        }
      }
    }
  }
}

}  // namespace jaxsoft::cuda
