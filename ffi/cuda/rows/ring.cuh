// A row in the shared memory of a cluster of blocks: one read of device memory for rows far too long for one block's
// registers.
//
// Every block of a cluster keeps its part of the row in shared memory, in a ring of slots that one producer warp fills
// by bulk copies. The other warps are consumers, in teams that take turns with the rows. A team reads the block's slots
// twice: to reduce them and, when the blocks have exchanged the states of their parts, to write. The copies run ahead
// into the next row, so memory stays busy while states are exchanged. Blocks are persistent, and a cluster takes its
// next row from a counter when it has room for one: multiprocessors are not equally fast, and rows that are distributed
// in advance would wait for the slowest.
//
// Barriers: full[slot] is completed by the copies into a slot, and empty[slot] by the warps that no longer need it;
// announced[i] and exchanged[i] by messages from the blocks of the cluster, which Hopper's st.async brings to other
// blocks; reduced[team] by the team's warps when they have reduced a row.
#pragma once

#include <algorithm>

#include "../attributes.cuh"
#include "../counter.cuh"
#include "../devices.cuh"
#include "compiled.cuh"
#include "ring_team.cuh"

namespace jaxsoft::cuda {

// A block's part of a row, as its producer sees it.
template <template <class> class Op, class T>
struct BlockRow {
  const T *a, *b;  // the part's first element in each operand
  int packs;
  __device__ BlockRow(const Arguments<T>& args, int64_t index, unsigned rank, unsigned blocks)
      : a(args.a + index * args.n), b(Op<T>::operands > 1 ? args.b + index * args.n : nullptr) {
    const Window<T> window(a, static_cast<int>(args.n), true);
    const BlockPart part(Lines(window, a), rank, blocks);
    const int first = part.begin * Pack<T>::size - window.head;
    a += first, b += Op<T>::operands > 1 ? first : 0;
    packs = part.end - part.begin;
  }
  // At most `count` packs, from pack `first` on.
  __device__ Source<T, Op<T>::operands> source(int first, int count) const {
    const int64_t element = int64_t(first) * Pack<T>::size;
    return {a + element, b + element, static_cast<unsigned>(min(count, packs - first)) * 16};
  }
  // Asks the cache for packs [from, to), as far as they exist. Returns the first pack that it has not been asked for.
  __device__ int ask_cache(int from, int to, bool keep) const {
    to = min(to, packs);
    if (from >= to) return from;
    source(from, to - from).ask_cache(keep);
    return to;
  }
};

// The producer, one thread of each block: takes rows, and fills slots with the block's part of them.
template <template <class> class Op, class T>
__device__ void produce(const Arguments<T>& args, unsigned long long* counter, RingMemory<Op, T>& memory) {
  constexpr int slot_packs = RingMemory<Op, T>::slot_packs;
  const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster();
  const int64_t clusters = gridDim.x / blocks;
  // The first block of the cluster announces the next row to all blocks before this one is copied entirely. It has
  // asked the counter for that row before, so that nobody waits for the counter.
  auto announce = [&](unsigned turn, int64_t row) {
    row = row < args.rows ? row : -1;
    unsigned slot_of_next = turn % Ring::announcements;
    for (unsigned block = 0; block < blocks; block++)
      deliver(row, &memory.next_rows[slot_of_next], memory.announced[slot_of_next], block, blocks);
  };
  // A row that is taken early waits while another cluster might have taken it, and so clusters that are fast end before
  // those that are slow. If a part has enough slots, all but the last of them are filled before the next row is
  // announced.
  const auto part_slots = static_cast<int>(args.n * sizeof(T) / 16 / blocks) / slot_packs;
  const bool delayed = counter && part_slots >= Ring::delay_slots;
  const int announce_at = delayed ? (part_slots - Ring::slots_after_announcement) * slot_packs : -1;
  const int take_at = delayed ? announce_at - slot_packs : counter ? 0 : -1;
  // Where rows are many, the cache keeps what it is asked for. This was 1 to 1.5 % faster, but up to 10 % slower for a
  // few rows a cluster.
  const bool keep = counter;
  // Without a counter, rows are distributed in advance.
  int64_t scheduled = blockIdx.x / blocks;
  unsigned taken = 0;
  if (rank == 0) {
    announce(0, scheduled);
    if (counter && !delayed) taken = take(counter);
  }
  auto announce_next = [&](unsigned turn) {
    scheduled += clusters;
    announce(turn + 1, counter ? taken + clusters : scheduled);
  };
  unsigned slot = 0, round = 0;
  int asked = 0;  // packs of the row that the cache has been asked for
  for (unsigned turn = 0;; turn++) {
    unsigned slot_of_next = turn % Ring::announcements;
    memory.announced[slot_of_next].sleep_until(turn / Ring::announcements % 2);
    int64_t index = *static_cast<volatile int64_t*>(&memory.next_rows[slot_of_next]);
    expect<int64_t>(memory.announced[slot_of_next], 1, blocks);  // for its next use
    if (index < 0) return;
    if (rank == 0 && !delayed) announce_next(turn);
    const BlockRow<Op, T> row(args, index, rank, blocks);
    int asked_of_next = 0;  // the same of the next row
    for (int chunk = 0; chunk < row.packs; chunk += slot_packs) {
      if (rank == 0 && chunk == announce_at) announce_next(turn);
      if (rank == 0 && chunk == take_at) taken = take(counter);
      if (!memory.empty[slot].is_past(round % 2 ^ 1)) {
        // The cache is asked for what comes into this slot and the next ones, be it of the next row, if that is known.
        const int reach = chunk + Ring::ahead * slot_packs;
        asked = row.ask_cache(max(asked, chunk), reach, keep);
        slot_of_next = (turn + 1) % Ring::announcements;
        if (reach > row.packs && memory.announced[slot_of_next].is_past((turn + 1) / Ring::announcements % 2)) {
          index = *static_cast<volatile int64_t*>(&memory.next_rows[slot_of_next]);
          if (index >= 0)
            asked_of_next =
                BlockRow<Op, T>(args, index, rank, blocks).ask_cache(asked_of_next, reach - row.packs, keep);
        }
        memory.empty[slot].sleep_until(round % 2 ^ 1);
      }
      row.source(chunk, slot_packs).copy(memory.slots[slot], memory.full[slot]);
      if (++slot == RingMemory<Op, T>::count) slot = 0, round++;
    }
    asked = asked_of_next;
  }
}

// Asks the cache for the block's part of the first rows, as it takes microseconds until the first copies start. Which
// cluster takes which of the rows after the first does not matter for this.
template <template <class> class Op, class T>
__device__ void ask_for_first_rows(const Arguments<T>& args, bool keep) {
  const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster(), clusters = gridDim.x / blocks;
  const int64_t row_bytes = args.n * sizeof(T);
  const unsigned part = static_cast<unsigned>(row_bytes) / blocks;
  int64_t index = blockIdx.x / blocks;
  for (int row = 0; row < Ring::first_rows && index < args.rows; row++, index += clusters) {
    auto ask = [&](const T* operand) {  // for the packs that lie in the part entirely
      const auto begin = reinterpret_cast<uintptr_t>(operand) + index * row_bytes + rank * part, end = begin + part;
      const auto from = (begin + 15) / 16 * 16;
      prefetch_to_cache(reinterpret_cast<const void*>(from), static_cast<unsigned>(end / 16 * 16 - from), keep);
    };
    ask(args.a);
    if constexpr (Op<T>::operands > 1) ask(args.b);
  }
}

// The consumers of a block: reduce and write the rows that the producer brings.
template <template <class> class Op, class T, class Form>
__device__ void consume(const Arguments<T>& args, RingMemory<Op, T>& memory) {
  constexpr int slot_packs = RingMemory<Op, T>::slot_packs;
  const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster();
  const unsigned team = threadIdx.x / Ring::consumers, thread = threadIdx.x % Ring::consumers, lane = thread % 32;
  RingPlace<RingMemory<Op, T>::count> place;
  for (unsigned turn = 0;; turn++) {
    memory.announced[turn % Ring::announcements].sleep_until(turn / Ring::announcements % 2);
    int64_t index = *static_cast<volatile int64_t*>(&memory.next_rows[turn % Ring::announcements]);
    if (index < 0) return;
    const T* first = args.a + index * args.n;
    const Lines lines(Window<T>(first, static_cast<int>(args.n), true), first);
    const BlockPart own(lines, rank, blocks);
    const auto first_place = place;
    if (turn % Ring::teams != team) {  // another team's row
      place.advance(static_cast<unsigned>((own.end - own.begin + slot_packs - 1) / slot_packs));
      continue;
    }
    Row<Op, T, Form> row(args, index);
    auto& shared = memory.teams[team];
    const bool last_warp = thread >= Ring::consumers - 32;  // it has the least of a slot that is not full
    const Ragged<Op, T, 2> ragged(row, lines, shared.ragged, last_warp && rank == 0, last_warp && rank == blocks - 1);
    const TeamRow<Op, T, Form> team_row{memory,  row,    ragged, own.begin,
                                        own.end, thread, static_cast<int>(thread - lane)};

    // Rows are reduced one after the other. A barrier tells a phase only from the next one, so nobody may wait for a
    // later filling of a slot.
    if (turn > 0) memory.reduced[(turn - 1) % Ring::teams].sleep_until((turn - 1) / Ring::teams % 2);
    auto part = reduce_visited<Op<T>>(
        row.form, [&](auto use) { team_row.visit(place, memory.reduced[team], use); },
        [&](const auto& of_thread) { return reduce_team<T>(shared.warps, team, thread, of_thread); });
    if (thread < 32) exchange<Op>(args, memory, turn, index, part, rank, blocks, thread, shared.values);
    synchronize_team(team);
    const auto values = shared.values;

    place = first_place;
    if (row.quick(values)) team_row.template write<true>(place, values);
    else team_row.template write<false>(place, values);
    ragged.write(row, values);
  }
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(Ring::threads, 1)
    ring(const __grid_constant__ Arguments<T> args, unsigned long long* counter) {
  if constexpr (kChosenHere<Strategy::ring, Op<T>, T, Form>) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& memory = *reinterpret_cast<RingMemory<Op, T>*>(bytes);
    if (threadIdx.x == Ring::threads - 1) ask_for_first_rows<Op>(args, counter);
    if (threadIdx.x < 32) {  // one warp has a thread for every barrier
      const unsigned thread = threadIdx.x, warps = Ring::consumers / 32 * Barrier::warp_arrivals;
      if (thread < memory.count) memory.full[thread].init(1), memory.empty[thread].init(warps);
      if (thread < Ring::teams) memory.reduced[thread].init(warps);
      if (thread < Ring::announcements) memory.announced[thread].init(1);
      if (thread < Ring::exchanges) memory.exchanged[thread].init(1);
      show_barriers();
      __syncwarp();
      const unsigned blocks = blocks_of_cluster();
      if (thread < Ring::announcements) expect<int64_t>(memory.announced[thread], 1, blocks);
      if (thread < Ring::exchanges)
        expect<RingState<typename Op<T>::Part>>(memory.exchanged[thread], blocks, blocks);
      __syncwarp();
    }
    synchronize_cluster();
    if (threadIdx.x >= Ring::teams * Ring::consumers) {
      if (threadIdx.x % 32 == 0) produce<Op, T>(args, counter, memory);
    } else {
      consume<Op, T, Form>(args, memory);
    }
    __syncwarp();
    synchronize_cluster();  // no block may end while another may still store into its shared memory
  }
}

// The workspace must have room for the counter, or be null.
template <template <class> class Op, class T, class Form>
cudaError_t launch_ring(const Arguments<T>& args, int blocks, void* workspace, cudaStream_t stream) {
  constexpr int bytes = sizeof(RingMemory<Op, T>);
  constexpr auto kernel = ring<Op, T, Form>;
  cudaLaunchAttribute attribute = in_clusters_of(static_cast<unsigned>(blocks));
  cudaLaunchConfig_t config{dim3(blocks), dim3(Ring::threads), bytes, stream, &attribute, 1};
  int clusters = 0;
  static Devices<Ring::most_blocks + 1> clusters_at_once;
  if (auto e = clusters_at_once.once(blocks, &clusters, [&](int* found) {
        if (auto e = allow_shared_memory<kernel, bytes>()) return e;
        return find_clusters(kernel, config, found);
      }))
    return e;
  if (clusters == 0) return cudaErrorInvalidClusterSize;
  unsigned long long* counter = nullptr;
  if (auto e = clear_counter(args.rows > Ring::few_rows * clusters, workspace, stream, &counter)) return e;
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(clusters, args.rows) * blocks));
  return cudaLaunchKernelEx(&config, kernel, args, counter);
}

}  // namespace jaxsoft::cuda
