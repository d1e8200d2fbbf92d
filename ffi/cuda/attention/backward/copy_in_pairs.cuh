// The warp group that copies, of each block of a pair (pair.cuh). One thread brings tiles to shared memory, and one
// sends slopes to the other block. The block's part of the gradient by queries is added to the sums in device memory by
// one thread for each of two parts, if the order matters. Else one thread adds both, and a warp clears sums (copy.cuh).
#pragma once

#include "copy.cuh"
#include "pair.cuh"

namespace jaxsoft::cuda {

template <class T, int size, bool segmented>
__device__ void bring_tiles(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  using Plan = typename Pair::Plan;
  using Sums = typename Pair::Sums;
  constexpr int value_size = Pair::value_size, queries = Pair::queries, keys = Pair::keys;
  constexpr unsigned query_bytes = sizeof shared.query[0], cotangent_bytes = sizeof shared.cotangent[0];
  constexpr unsigned number_bytes = sizeof shared.numbers[0];
  SlotPlace<Pair::work_slots> work_place;
  SlotPlace<Plan::query_slots> query;
  SlotPlace<Plan::cotangent_slots> cotangent;
  unsigned key_parity = 0;
  wait_for_last_kernel();  // which writes the numbers of queries
  for (;; work_place.advance()) {
    // The first block takes work, and sends it to the second, which says when it has read it for the last time.
    typename Pair::Work& work = shared.works[work_place.slot];
    Barrier& work_full = shared.work_full[work_place.slot];
    auto release = [&] {
      if (rank == 1) shared.work_empty[work_place.slot].arrive_in(0);
    };
    if (rank == 0) {
      const unsigned piece = take(call.counter);
      shared.work_empty[work_place.slot].wait(work_place.parity ^ 1);
      work.set(call, piece);
      work_full.arrive();
      send(work, &work, work_full, 1);
    } else {
      work_full.arrive_expecting(sizeof work);
      work_full.wait(work_place.parity);
    }
    if (!work.there) return;
    if (work.tiles.length() == 0) {
      release();
      continue;
    }
    const int own = work.first_key() + rank * keys, other = work.first_key() + other_block(rank) * keys;
#pragma unroll
    for (int column = 0; column < size; column += 64) {
      prefetch_box(call.key, {column, work.key_head, own, work.batch});
      if (column < value_size) prefetch_box(call.value, {column, work.key_head, own, work.batch});
    }
    bool first = true;
    for (int i = 0; i < call.heads_of_piece; i++) {
      const int head = work.first_head + i;
      const float* const numbers = numbers_of_head<queries>(call, work.batch, head);
      for (int number = work.tiles.begin; number < work.tiles.end; number++) {
        const int tile = work.tile(number);
        shared.query_empty[query.slot].wait(query.parity ^ 1);
        Barrier& full = shared.query_full[query.slot];
        full.arrive_expecting(query_bytes + number_bytes);
        copy_tile<size, queries>(shared.query[query.slot], call.query, head, work.query(number), work.batch, full);
        copy_to_shared(shared.numbers[query.slot], numbers + int64_t(tile) * (2 * queries), number_bytes, full);
        query.advance();
        if (first) {
          shared.value_empty.wait(key_parity ^ 1);
          shared.value_full.arrive_expecting(sizeof shared.value);
          copy_tile<value_size, keys>(shared.value, call.value, work.key_head, own, work.batch, shared.value_full);
        }
        shared.cotangent_empty[cotangent.slot].wait(cotangent.parity ^ 1);
        Barrier& cotangent_full = shared.cotangent_full[cotangent.slot];
        cotangent_full.arrive_expecting(cotangent_bytes);
        copy_tile<value_size, queries>(shared.cotangent[cotangent.slot], call.cotangent, head, work.query(number),
                                       work.batch, cotangent_full);
        cotangent.advance();
        // Keys come last, as what takes the longest is to multiply the last slopes with the keys before.
        if (first) {
          shared.key_empty.wait(key_parity ^ 1);
          shared.key_full.arrive_expecting(sizeof shared.key + sizeof shared.other_key);
          copy_tile<size, keys>(shared.key, call.key, work.key_head, own, work.batch, shared.key_full);
#pragma unroll
          for (int part = 0; part < Pair::parts; part++)
            copy_box(shared.other_key + part * (keys * 64), call.key,
                     {Sums::first_column(rank, part), work.key_head, other, work.batch}, shared.key_full);
          key_parity ^= 1;
          first = false;
        }
      }
    }
    release();
  }
}

// Sends the slopes of each tile to the other block as soon as it has room for them.
template <class T, int size, bool segmented>
__device__ void send_slopes(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  using Plan = typename Pair::Plan;
  SlotPlace<Plan::slope_slots> slopes;
  unsigned parity = 0;
  bool any = false;  // whether slopes have been sent
  for_pieces<false>(shared, [&](const auto& work) {
    for (int step = work.steps(call); step > 0; step--) {
      shared.slopes_full[slopes.slot].wait(slopes.parity);
      // The other block no longer needs the slopes that it got before. So they have been read here as well: those in
      // the slot that is next.
      shared.other_slopes_empty.wait(parity ^ 1);
      if (any) shared.slopes_empty[slopes.slot ^ 1].arrive();
      any = true;
      shared.other_slopes_full.wait(parity ^ 1);  // what this block got before
      shared.other_slopes_full.arrive_expecting(sizeof shared.other_slopes);
      copy_to_block(shared.other_slopes, shared.slopes[slopes.slot], sizeof shared.other_slopes,
                    shared.other_slopes_full, other_block(rank));
      slopes.advance(), parity ^= 1;
    }
  });
}

// The sums of one part of the block's columns: of the first tile of a head of the piece, and then one for each tile.
template <class Pair>
__device__ float* sums_of_part(const BackwardCall& call, const typename Pair::Work& work, int of_piece, unsigned rank,
                               int part) {
  using Sums = typename Pair::Sums;
  return call.sums + work.head_of_turns(call, of_piece) * call.query_tiles * Sums::count + rank * Sums::half +
         Sums::begin(part);
}

// Adds the block's part of the gradient by queries to the sums, in any order.
template <class T, int size, bool segmented>
__device__ void add_sums(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank) {
  using Pair = BackwardPair<T, size, segmented>;
  unsigned parity = 0;
  for_pieces<false>(shared, [&](const auto& work) {
    wait_for_zeros(call, work);
    for (int i = 0; i < call.heads_of_piece; i++) {
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
#pragma unroll
        for (int part = 0; part < Pair::parts; part++) {
          const int slot = part % Pair::Plan::sum_slots;
          shared.sum_full[part].wait(parity);
          add_floats(sums_of_part<Pair>(call, work, i, rank, part) + int64_t(tile) * Pair::Sums::count,
                     shared.sums[slot], Pair::sum_bytes(part));
          commit_stores();
          wait_for_reads_of_stores();
          shared.sum_empty[slot].arrive();
        }
        parity ^= 1;
      }
    }
    wait_for_stores();
    count_as_added(call, work, Pair::parts);
  });
}

// Adds one part of it, in a fixed order. A thread waits for its turn as in copy.cuh, but only for what has the same
// columns, and without another thread that looks ahead: it has the time of two parts for each of its own.
template <class T, int size, bool segmented>
__device__ void add_part_in_order(const BackwardCall& call, BackwardPair<T, size, segmented>& shared, unsigned rank,
                                  int part) {
  using Pair = BackwardPair<T, size, segmented>;
  constexpr int parts = Pair::parts * Pair::Plan::blocks;
  const int slot = part % Pair::Plan::sum_slots;
  unsigned parity = 0;
  for_pieces<false>(shared, [&](const auto& work) {
    for (int i = 0; i < call.heads_of_piece; i++) {
      float* const sums = sums_of_part<Pair>(call, work, i, rank, part);
      int* const end = reinterpret_cast<int*>(call.ends) +
                       (work.head_of_turns(call, i) * call.key_blocks + work.block) * parts + rank * Pair::parts + part;
      const int* const end_before = end + (work.before_block - work.block) * parts;
      int end_seen = 0;  // of the tiles that the block of keys before has added to
      for (int tile = work.tiles.begin; tile < work.tiles.end; tile++) {
        const bool first = !work.tiles_before.has(tile);
        while (!first && end_seen <= tile) end_seen = load_acquired(end_before);
        shared.sum_full[part].wait(parity);
        parity ^= 1;
        float* const to = sums + int64_t(work.tile(tile)) * Pair::Sums::count;
        // There need not be zeros before.
        if (first) store_floats(to, shared.sums[slot], Pair::sum_bytes(part));
        else add_floats(to, shared.sums[slot], Pair::sum_bytes(part));
        commit_stores();
        wait_for_reads_of_stores();
        shared.sum_empty[slot].arrive();
        if (work.is_signalled(tile)) {
          wait_for_stores();
          store_released(end, tile + 1);
        }
      }
    }
    count_as_added(call, work, 1);
  });
}

}  // namespace jaxsoft::cuda
