// The warp group that copies, of each block of a pair (pair.cuh). One thread brings tiles to shared memory, one adds the
// block's part of the gradient by queries to the sums in device memory, one sends slopes to the other block, and one
// waits for the turn to add, if the order matters (see copy.cuh).
#pragma once

#include "../../counter.cuh"
#include "../../tensor_map.cuh"
#include "pair.cuh"
#include "work.cuh"

namespace jaxsoft::cuda {

template <class T>
__device__ void bring_tiles(const BackwardCall& call, BackwardPair<T>& shared, unsigned rank) {
  using Pair = BackwardPair<T>;
  using Plan = typename Pair::Plan;
  constexpr int size = Pair::size, half = Pair::half, queries = Pair::queries, keys = Pair::keys;
  constexpr unsigned tile_bytes = sizeof(T) * queries * size, key_bytes = sizeof(T) * keys * size;
  constexpr unsigned number_bytes = sizeof shared.numbers[0];
  SlotPlace<Pair::mails> mail;
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  unsigned key_parity = 0;
  // The block's half of a tile, for both blocks.
  auto bring_half = [&](T* to, const CUtensorMap& map, int head, int tile, int batch, const Barrier& full) {
#pragma unroll
    for (int i = 0; i < half; i += 64) {
      const int column = rank * half + i;
      copy_box_to_blocks(to + column * queries, map, {column, head, tile * queries, batch}, full, 3);
    }
  };
  for (;; mail.advance()) {
    // The first block takes tickets, and sends them to the second.
    unsigned ticket;
    Barrier& mailed = shared.ticket_full[mail.slot];
    if (rank == 0) {
      ticket = take(call.counter);
      shared.ticket_empty[mail.slot].wait(mail.parity ^ 1);
      shared.tickets[mail.slot] = ticket;
      mailed.arrive();
      send(ticket, &shared.tickets[mail.slot], mailed, 1);
    } else {
      mailed.arrive_expecting(sizeof ticket);
      mailed.wait(mail.parity);
      ticket = *static_cast<volatile unsigned*>(&shared.tickets[mail.slot]);
      shared.ticket_empty[mail.slot].arrive_in(0);
    }
    if (ticket >= call.pieces) return;
    const BackwardWork<size> work(call, {call, ticket});
    if (work.tiles.length() == 0) continue;
    bool first = true;
    const int first_key = work.block * Plan::keys;
    for (int i = 0; i < call.group; i++) {
      const int head = work.key_head * call.group + i;
      const float* numbers = call.numbers + (int64_t(work.batch) * call.heads + head) * call.query_tiles * (2 * queries);
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        shared.query_empty[query.slot].wait(query.parity ^ 1);
        Barrier& full = shared.query_full[query.slot];
        full.arrive_expecting(tile_bytes + number_bytes);
        bring_half(shared.query[query.slot], call.query, head, tile, work.batch, full);
        copy_to_shared(shared.numbers[query.slot], numbers + int64_t(tile) * (2 * queries), number_bytes, full);
        query.advance();
        if (first) {
          first = false;
          const int own = first_key + rank * keys, other = first_key + other_block(rank) * keys;
          shared.key_empty.wait(key_parity ^ 1);
          shared.key_full.arrive_expecting(key_bytes + key_bytes / 2);
          copy_tile<size, keys>(shared.key, call.key, work.key_head, own, work.batch, shared.key_full);
#pragma unroll
          for (int column = 0; column < half; column += 64)
            copy_box(shared.other_key + column * keys, call.key,
                     {static_cast<int>(rank * half + column), work.key_head, other, work.batch}, shared.key_full);
          shared.value_empty.wait(key_parity ^ 1);
          shared.value_full.arrive_expecting(key_bytes);
          copy_tile<size, keys>(shared.value, call.value, work.key_head, own, work.batch, shared.value_full);
          key_parity ^= 1;
        }
        shared.cotangent_empty[cotangent.slot].wait(cotangent.parity ^ 1);
        Barrier& cotangent_full = shared.cotangent_full[cotangent.slot];
        cotangent_full.arrive_expecting(tile_bytes);
        bring_half(shared.cotangent[cotangent.slot], call.cotangent, head, tile, work.batch, cotangent_full);
        cotangent.advance();
      }
    }
  }
}

template <class T>
__device__ void send_slopes(const BackwardCall& call, BackwardPair<T>& shared, unsigned rank) {
  unsigned parity = 0;
  for_pieces<false>(call, shared, [&](const BackwardWork<BackwardPair<T>::size>& work) {
    for (int step = work.tiles.length() * call.group; step > 0; step--) {
      shared.slopes_full.wait(parity);
      parity ^= 1;
      // The products with the slopes that came before are complete, else the block would not have the next ones.
      shared.other_slopes_full.arrive_expecting(sizeof shared.other_slopes);
      copy_to_block(shared.other_slopes, shared.slopes, sizeof shared.slopes, shared.other_slopes_full,
                    other_block(rank));
    }
  });
}

// As in copy.cuh. A block waits only for the block that has the same columns.
template <class T>
__device__ void wait_for_turns(const BackwardCall& call, BackwardPair<T>& shared, unsigned rank) {
  const uint32_t turns = shared_address(&shared.turns);
  unsigned tiles = 0;
  for_pieces<false>(call, shared, [&](const BackwardWork<BackwardPair<T>::size>& work) {
    for (int i = 0; i < call.group; i++) {
      const int* next =
          reinterpret_cast<const int*>(call.ends + work.head(call, i) * call.key_blocks + work.block + 1) + rank;
      int end = 0;  // of the tiles that the next block of keys has added to
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        while (work.tiles_of_next.has(tile) && end <= tile)
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(end) : "l"(next) : "memory");
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(turns), "r"(++tiles) : "memory");
      }
    }
  });
}

template <class T>
__device__ void add_sums(const BackwardCall& call, BackwardPair<T>& shared, unsigned rank) {
  using Pair = BackwardPair<T>;
  using Plan = typename Pair::Plan;
  constexpr int sum = Pair::queries * 64;
  const uint32_t turns = shared_address(&shared.turns);
  unsigned parity = 0, tiles = 0;
  for_pieces<false>(call, shared, [&](const BackwardWork<Pair::size>& work) {
    for (int i = 0; i < call.group; i++) {
      const int64_t head = work.head(call, i);
      float* const sums = call.sums + head * call.query_tiles * (Pair::queries * Pair::size) + rank * Pair::parts * sum;
      int* const end = reinterpret_cast<int*>(call.ends + head * call.key_blocks + work.block) + rank;
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        tiles++;
        unsigned turn = tiles;
        if (call.deterministic) {
          do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(turn) : "r"(turns) : "memory");
          while (static_cast<int>(turn - tiles) < 0);
        }
        for (int part = 0; part < Pair::parts; part++) {
          shared.sum_full.wait(parity);
          float* const to = sums + int64_t(tile) * (Pair::queries * Pair::size) + part * sum;
          // Where the order matters, the first block stores, and there need not be zeros before.
          if (call.deterministic && !work.tiles_of_next.has(tile)) store_floats(to, shared.sums, sizeof shared.sums);
          else add_floats(to, shared.sums, sizeof shared.sums);
          commit_stores();
          wait_for_reads_of_stores();
          shared.sum_empty.arrive();
          parity ^= 1;
        }
        if (call.deterministic) {
          if ((tile - work.tiles.begin) % Plan::told == Plan::told - 1 || tile + 1 == work.tiles.end) {
            wait_for_stores();
            asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(end), "r"(tile + 1) : "memory");
          }
        }
      }
    }
  });
  wait_for_stores();
}

}  // namespace jaxsoft::cuda
