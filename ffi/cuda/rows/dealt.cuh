// Rows in the shared memory of all blocks: one read of device memory for rows that only all multiprocessors together
// can hold.
//
// Rows are cut into chunks, and the chunks are dealt out round-robin to the blocks of a persistent grid. (Dealt out by
// a counter, they were no faster.) A block keeps its chunks in shared memory, in a ring of slots. Each warp has a role:
//
//   producer   fills slots by bulk copies
//   reducers   reduce the slots to states
//   poster     sends the state of the block's part of a row to device memory
//   pollers    wait until the states of the whole row are there, and merge them
//   writers    take a slot's packs into registers, give the slot back, and write when the row's values are known
//
// Only pollers wait for other blocks, so memory stays busy as long as a block has room for more than what is in flight.
// All blocks must run at the same time.
//
// Barriers: full[slot] is completed by the copies into a slot, reduced[slot] by the warps that have reduced it,
// empty[slot] by those that have taken its packs, and a chunk's `ready` by the poller. A role of several teams or warps
// takes turns. So one of them may come to a slot before another has come to the slot's filling before, and a barrier
// tells a phase only from the next one. Hence there are barriers for two fillings of each slot.
#pragma once

#include <climits>

#include "../attributes.cuh"
#include "../devices.cuh"
#include "compiled.cuh"
#include "deal.cuh"
#include "lines.cuh"
#include "reduce.cuh"

namespace jaxsoft::cuda {

// The roles of a block's threads, as far as they depend on the operation.
template <class Op, class T>
struct DealtRoles {
  static constexpr int writers = Dealt::writers(Op::operands, sizeof(T));  // teams
  static constexpr int threads = (Dealt::reducers + writers) * Dealt::team + (2 + Dealt::pollers) * 32;
  static constexpr int chunks = Dealt::slots + writers;  // that a block may have at once
  static_assert(Dealt::slots % writers == 0);            // so turn t is written before turn t + chunks is reduced
};

// The shared memory of a block.
template <template <class> class Op, class T>
struct alignas(128) DealtMemory {
  static constexpr int operands = Op<T>::operands;
  static constexpr int slot_packs = Dealt::slot_packs(operands), most_chunks = DealtRoles<Op<T>, T>::chunks;
  Pack<T> slots[Dealt::slots][operands][slot_packs];
  typename Ragged<Op, T, 1>::Memory ragged[Dealt::reducers + DealtRoles<Op<T>, T>::writers];
  struct Chunk {  // of turn % most_chunks
    typename Op<T>::Part states[Dealt::warps];
    typename Op<T>::Values values;
    Barrier ready;
  } chunks[most_chunks];
  Barrier full[2 * Dealt::slots], reduced[2 * Dealt::slots], empty[Dealt::slots];
  __device__ Chunk& chunk(const Hand& hand) { return chunks[hand.turn % most_chunks]; }
};

// The packs of a row's whole cache lines that are in a chunk. There may be none.
struct ChunkPart {
  int begin, end;
  __device__ ChunkPart(const Lines& lines, const Hand& hand) {
    begin = min(lines.begin + hand.chunk * hand.deal->packs, lines.end);
    end = min(begin + hand.deal->packs, lines.end);
  }
};

// The producer, one thread.
template <template <class> class Op, class T, class Form>
__device__ void fill_slots(const Arguments<T>& args, const Deal& deal, DealtMemory<Op, T>& memory) {
  using Chunk = Source<T, Op<T>::operands>;
  auto source = [&](const Hand& hand) {
    if (hand.ended()) return Chunk{};
    Row<Op, T, Form> row(args, hand.row);
    const ChunkPart part(Lines(row.window, row.a), hand);
    const int element = part.begin * Pack<T>::size - row.window.head;
    return Chunk{row.a + element, row.b + element, (part.end - part.begin) * 16u};
  };
  Hand hand(deal);
  for (Chunk chunk = source(hand); !hand.ended();) {
    auto &full = memory.full[hand.barrier()], &empty = memory.empty[hand.slot];
    auto& slot = memory.slots[hand.slot];
    const unsigned parity = hand.round % 2 ^ 1;
    hand.advance();
    const Chunk next = source(hand);
    // Chunks for which there is no slot yet are fetched into the L2 cache: with one operand the chunk after this one,
    // because anything earlier is too early; with two operands this one, and only if it has to wait.
    if constexpr (Op<T>::operands == 1) {
      if (hand.turn >= Dealt::slots) next.ask_cache();
    } else if (!empty.is_past(parity)) {
      chunk.ask_cache();
    }
    empty.sleep_until(parity);
    chunk.copy(slot, full);
    chunk = next;
  }
}

// A thread's share of a slot, some packs at a time, and of the row's ragged ends.
template <template <class> class Op, class T, class Form, int count>
struct SlotShare : ChunkPart {
  static constexpr int each = count / Op<T>::operands;
  const Pack<T> (&slot)[Op<T>::operands][Dealt::slot_packs(Op<T>::operands)];
  const Row<Op, T, Form>& row;
  const Ragged<Op, T, 1> ragged;  // a chunk has at most one end of the row, as rows have many chunks

  // `team` counts all teams: reducers, then writers.
  __device__ SlotShare(DealtMemory<Op, T>& memory, const Row<Op, T, Form>& row, const Lines& lines, const Hand& hand,
                  int team, int thread)
      : ChunkPart(lines, hand), slot(memory.slots[hand.slot]), row(row),
        ragged(row, lines, memory.ragged[team], thread >= Dealt::team - 32 && hand.chunk == 0,
               thread >= Dealt::team - 32 && hand.chunk == hand.deal->chunks - 1) {}
  // Whether the chunk has all of the packs that the lanes of this warp load from `first` on.
  __device__ bool full(int first) const {
    return first - static_cast<int>(threadIdx.x % 32) + (each - 1) * Dealt::team + 32 <= end;
  }
  __device__ void load(int first, Pack<T> (&a)[each], Pack<T> (&b)[each], bool both) const {
    const int at = first - begin, to = full(first) ? INT_MAX : end;
    row.load_held(slot[0] + at, slot[Op<T>::operands - 1] + at, first, Dealt::team, to, both, a, b);
  }
};

// A team of reducers.
template <template <class> class Op, class T, class Form>
__device__ void reduce_slots(const Arguments<T>& args, const Deal& deal, DealtMemory<Op, T>& memory, int team,
                             int thread) {
  for (Hand hand(deal); !hand.ended(); hand.advance()) {
    if (hand.turn % Dealt::reducers != team) continue;
    Row<Op, T, Form> row(args, hand.row);
    const SlotShare<Op, T, Form, Dealt::at_once> held(memory, row, Lines(row.window, row.a), hand, team, thread);
    memory.full[hand.barrier()].sleep_until(hand.parity());
    auto visit = [&](auto use) {
      for (int first = held.begin + thread; first - thread % 32 < held.end; first += held.each * Dealt::team) {
        Pack<T> a[held.each], b[held.each];
        held.load(first, a, b, Op<T>::reads_a_to_reduce || Form::extras);
        use(a, b);
      }
      held.ragged.receive(row);
      held.ragged.visit(row, use);
    };
    auto part = reduce_visited<Op<T>>(row.form, visit, [](const auto& part) { return reduce_lanes<T>(part, 32); });
    if (thread % 32 == 0) memory.chunk(hand).states[thread / 32] = part;
    memory.reduced[hand.barrier()].arrive_as_warp();
  }
}

// The poster, one warp.
template <template <class> class Op, class T>
__device__ void post_states(const Deal& deal, Packet* packets, DealtMemory<Op, T>& memory, int lane) {
  const int posts = deal.posts(gridDim.x);
  typename Op<T>::Part part;
  int first = 0;
  bool begins = true;
  for (Hand hand(deal); !hand.ended(); hand.advance()) {
    memory.reduced[hand.barrier()].sleep_until(hand.parity());
    auto of_chunk = reduce_lanes<T>(memory.chunk(hand).states[lane % Dealt::warps], Dealt::warps);
    if (begins) part = of_chunk, first = hand.chunk;
    else part = combine<T>(part, of_chunk);
    begins = !hand.continues();
    if (begins && lane == 0) post(packets + hand.row * posts + first, part);
  }
}

// Waits until all `posts` packets of a row have been posted, and merges their states. The lanes of a warp share the
// packets.
template <template <class> class Op, class T>
__device__ __forceinline__ typename Op<T>::Part await_row(const Packet* of_row, int posts, int lane) {
  typename Op<T>::Part whole;
  for (int first = lane; first < posts; first += 32 * Dealt::looks) {
    Packet found[Dealt::looks] = {};
    bool all;
    do {  // every packet is looked at until it has been posted
      all = true;
#pragma unroll
      for (int k = 0; k < Dealt::looks; k++)
        if (first + 32 * k < posts && !is_posted(found[k])) found[k] = look(of_row + first + 32 * k);
#pragma unroll
      for (int k = 0; k < Dealt::looks; k++) all &= first + 32 * k >= posts || is_posted(found[k]);
    } while (!all);
#pragma unroll
    for (int k = 0; k < Dealt::looks; k++) {
      typename Op<T>::Part part;
      memcpy(&part, &found[k], sizeof part);
      if (first + 32 * k < posts) whole = combine<T>(whole, part);
    }
  }
  __syncwarp();
  return reduce_lanes<T>(whole, 32);
}

// A poller, one warp: finishes rows, and tells the writers of the block's chunks. Pollers take turns with the rows.
template <template <class> class Op, class T>
__device__ void poll_rows(const Arguments<T>& args, const Deal& deal, const Packet* packets, DealtMemory<Op, T>& memory,
                          int poller, int lane) {
  const int posts = deal.posts(gridDim.x);
  int visit = 0;
  for (Hand hand(deal); !hand.ended();) {
    Hand last = hand;  // the block's last chunk of the row
    while (last.continues()) last.advance();
    if (visit++ % deal.pollers != poller) {
      hand = last;
      hand.advance();
      continue;
    }
    memory.reduced[last.barrier()].sleep_until(last.parity());  // the row cannot be complete before that
    const auto whole = await_row<Op, T>(packets + hand.row * posts, posts, lane);
    auto values = Op<T>::finish(whole, args, hand.row, lane == 0 && hand.chunk == 0);
    for (bool more = true; more; hand.advance()) {
      more = hand.continues();
      if (lane == 0) {
        memory.chunk(hand).values = values;
        memory.chunk(hand).ready.arrive();
      }
    }
  }
}

// A team of writers.
template <template <class> class Op, class T, class Form>
__device__ void write_slots(const Arguments<T>& args, const Deal& deal, DealtMemory<Op, T>& memory, int team,
                            int thread) {
  using Roles = DealtRoles<Op<T>, T>;
  for (Hand hand(deal); !hand.ended(); hand.advance()) {
    if (hand.turn % Roles::writers != team) continue;
    Row<Op, T, Form> row(args, hand.row);
    const SlotShare<Op, T, Form, Dealt::slot_bytes / 16 / Dealt::team> held(memory, row, Lines(row.window, row.a), hand,
                                                                            Dealt::reducers + team, thread);
    memory.reduced[hand.barrier()].sleep_until(hand.parity());
    const int first = held.begin + thread;
    Pack<T> a[held.each], b[held.each];
    held.load(first, a, b, true);
    memory.empty[hand.slot].arrive_as_warp();
    auto& chunk = memory.chunk(hand);
    chunk.ready.sleep_until(hand.turn / Roles::chunks % 2);
    const auto values = chunk.values;
    auto write = [&](auto quick) {
      auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(row.out) - row.window.head);
#pragma unroll
      for (int k = 0; k < held.each; k++)
        if (first + k * Dealt::team < held.end)
          out[first + k * Dealt::team] = row.template result_pack<decltype(quick)::value>(values, a[k], b[k]);
    };
    if constexpr (Op<T>::has_quick) {
      if (row.quick(values)) write(std::true_type{});
      else write(std::false_type{});
    } else {
      write(std::false_type{});
    }
    held.ragged.receive(row);
    held.ragged.write(row, values);
  }
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(DealtRoles<Op<T>, T>::threads, 1)
    dealt(const __grid_constant__ Arguments<T> args, const __grid_constant__ Deal deal, Packet* packets) {
  if constexpr (kChosenHere<Strategy::dealt, Op<T>, T, Form>) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& memory = *reinterpret_cast<DealtMemory<Op, T>*>(bytes);
    if (threadIdx.x < 2 * Dealt::slots) {
      const unsigned i = threadIdx.x;
      memory.full[i].init(1), memory.reduced[i].init(Dealt::warps * Barrier::warp_arrivals);
      if (i < Dealt::slots) memory.empty[i].init(Dealt::warps * Barrier::warp_arrivals);
      if (i < memory.most_chunks) memory.chunks[i].ready.init(1);
      show_barriers();
    }
    __syncthreads();
    constexpr int writers = DealtRoles<Op<T>, T>::writers;
    int thread = threadIdx.x, lane = thread % 32, team = thread / Dealt::team;
    if (team < Dealt::reducers) return reduce_slots<Op, T, Form>(args, deal, memory, team, thread % Dealt::team);
    team -= Dealt::reducers;
    if (team < writers) return write_slots<Op, T, Form>(args, deal, memory, team, thread % Dealt::team);
    int warp = (thread - (Dealt::reducers + writers) * Dealt::team) / 32;
    if (warp == 0) return post_states<Op, T>(deal, packets, memory, lane);
    if (warp == 1 && lane == 0) return fill_slots<Op, T, Form>(args, deal, memory);
    if (warp >= 2 && warp - 2 < deal.pollers) poll_rows<Op, T>(args, deal, packets, memory, warp - 2, lane);
  }
}

template <template <class> class Op, class T, class Form>
cudaError_t launch_dealt(const Arguments<T>& args, int64_t packs, int processors, void* workspace,
                         cudaStream_t stream) {
  constexpr size_t bytes = sizeof(DealtMemory<Op, T>);
  static_assert(bytes <= 227 * 1024);
  auto kernel = dealt<Op, T, Form>;
  static Devices<> prepared;
  if (auto e = prepared.once([&] {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      }))
    return e;
  const Deal deal = deal_out<Op<T>>(args.rows, packs, processors);
  const auto blocks = static_cast<unsigned>(deal.rows_a_turn * deal.chunks + deal.chunks_a_turn);
  auto* packets = static_cast<Packet*>(workspace);
  if (auto e = cudaMemsetAsync(packets, 0, args.rows * deal.posts(blocks) * sizeof(Packet), stream)) return e;
  cudaLaunchAttribute attribute = all_at_once();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(DealtRoles<Op<T>, T>::threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, deal, packets);
}

}  // namespace jaxsoft::cuda
