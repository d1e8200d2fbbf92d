// Rows in the shared memory of all blocks: one read of device memory for rows that only all multiprocessors together
// can hold.
//
// Rows are cut into chunks, and the chunks are distributed round-robin to the blocks of a persistent grid. (By a
// counter they were no faster.) A block keeps its chunks in shared memory, in a ring of slots. Each warp has a role:
//
//   producer   fills slots by bulk copies
//   reducers   reduce the slots to states
//   sender     sends the state of the block's part of a row to device memory
//   pollers    wait until the states of the whole row are there, and merge them
//   writers    take a slot's packs into registers, give the slot back, and write when the row's values are known
//
// Only pollers wait for other blocks, so memory stays busy as long as a block has room for more than what is in flight.
// All blocks must run at the same time.
//
// Barriers: full[slot] is completed by the copies into a slot, reduced[slot] by the warps that have reduced it,
// empty[slot] by those that have taken its packs, and a chunk's `ready` by the poller. A role of several teams or warps
// takes turns. So one of them may come to a slot before another has come to the slot's filling before, and a barrier
// distinguishes a phase only from the next one. Hence there are barriers for two fillings of each slot.
#pragma once

#include <climits>

#include "../attributes.cuh"
#include "../devices.cuh"
#include "compiled.cuh"
#include "grid_schedule.cuh"
#include "lines.cuh"
#include "reduce.cuh"

namespace jaxsoft::cuda {

// The roles of a block's threads, as far as they depend on the operation.
template <class Op, class T>
struct GridRingRoles {
  static constexpr int writers = GridRing::writers(Op::operands, sizeof(T));  // teams
  static constexpr int threads = (GridRing::reducers + writers) * GridRing::team + (2 + GridRing::pollers) * 32;
  static constexpr int chunks = GridRing::slots + writers;  // that a block may have at once
  static_assert(GridRing::slots % writers == 0);            // so turn t is written before turn t + chunks is reduced
};

// The shared memory of a block.
template <template <class> class Op, class T>
struct alignas(128) GridRingMemory {
  static constexpr int operands = Op<T>::operands;
  static constexpr int slot_packs = GridRing::slot_packs(operands), most_chunks = GridRingRoles<Op<T>, T>::chunks;
  Pack<T> slots[GridRing::slots][operands][slot_packs];
  typename Ragged<Op, T, 1>::Memory ragged[GridRing::reducers + GridRingRoles<Op<T>, T>::writers];
  struct Chunk {  // of turn % most_chunks
    typename Op<T>::Part states[GridRing::warps];
    typename Op<T>::Values values;
    Barrier ready;
  } chunks[most_chunks];
  Barrier full[2 * GridRing::slots], reduced[2 * GridRing::slots], empty[GridRing::slots];
  __device__ Chunk& chunk(const ChunkIterator& it) { return chunks[it.turn % most_chunks]; }
};

// The packs of a row's whole cache lines that are in a chunk. There may be none.
struct ChunkPart {
  int begin, end;
  __device__ ChunkPart(const Lines& lines, const ChunkIterator& it) {
    begin = min(lines.begin + it.chunk * it.schedule->packs, lines.end);
    end = min(begin + it.schedule->packs, lines.end);
  }
};

// The producer, one thread.
template <template <class> class Op, class T, class Form>
__device__ void fill_slots(const Arguments<T>& args, const GridSchedule& schedule, GridRingMemory<Op, T>& memory) {
  using Chunk = Source<T, Op<T>::operands>;
  auto source = [&](const ChunkIterator& it) {
    if (it.ended()) return Chunk{};
    Row<Op, T, Form> row(args, it.row);
    const ChunkPart part(Lines(row.window, row.a), it);
    const int element = part.begin * Pack<T>::size - row.window.head;
    return Chunk{row.a + element, row.b + element, (part.end - part.begin) * 16u};
  };
  ChunkIterator it{&schedule};
  for (Chunk chunk = source(it); !it.ended();) {
    auto &full = memory.full[it.barrier()], &empty = memory.empty[it.slot];
    auto& slot = memory.slots[it.slot];
    const unsigned parity = it.round % 2 ^ 1;
    it.advance();
    const Chunk next = source(it);
    // Chunks for which there is no slot yet are fetched into the L2 cache: with one operand the chunk after this one,
    // because anything earlier is too early; with two operands this one, and only if it has to wait.
    if constexpr (Op<T>::operands == 1) {
      if (it.turn >= GridRing::slots) next.ask_cache();
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
  const Pack<T> (&slot)[Op<T>::operands][GridRing::slot_packs(Op<T>::operands)];
  const Row<Op, T, Form>& row;
  const Ragged<Op, T, 1> ragged;  // a chunk has at most one end of the row, as rows have many chunks

  // `team` counts all teams: reducers, then writers.
  __device__ SlotShare(GridRingMemory<Op, T>& memory, const Row<Op, T, Form>& row, const Lines& lines,
                       const ChunkIterator& it, int team, int thread)
      : ChunkPart(lines, it), slot(memory.slots[it.slot]), row(row),
        ragged(row, lines, memory.ragged[team], thread >= GridRing::team - 32 && it.chunk == 0,
               thread >= GridRing::team - 32 && it.chunk == it.schedule->chunks - 1) {}
  // Whether the chunk has all of the packs that the lanes of this warp load from `first` on.
  __device__ bool full(int first) const {
    return first - static_cast<int>(threadIdx.x % 32) + (each - 1) * GridRing::team + 32 <= end;
  }
  __device__ void load(int first, Pack<T> (&a)[each], Pack<T> (&b)[each], bool both) const {
    const int at = first - begin, to = full(first) ? INT_MAX : end;
    row.load_shared(slot[0] + at, slot[Op<T>::operands - 1] + at, first, GridRing::team, to, both, a, b);
  }
};

// A team of reducers.
template <template <class> class Op, class T, class Form>
__device__ void reduce_slots(const Arguments<T>& args, const GridSchedule& schedule, GridRingMemory<Op, T>& memory,
                             int team, int thread) {
  for (ChunkIterator it{&schedule}; !it.ended(); it.advance()) {
    if (it.turn % GridRing::reducers != team) continue;
    Row<Op, T, Form> row(args, it.row);
    const SlotShare<Op, T, Form, GridRing::at_once> share(memory, row, Lines(row.window, row.a), it, team, thread);
    memory.full[it.barrier()].sleep_until(it.parity());
    auto visit = [&](auto use) {
      for (int first = share.begin + thread; first - thread % 32 < share.end; first += share.each * GridRing::team) {
        Pack<T> a[share.each], b[share.each];
        share.load(first, a, b, Op<T>::reads_a_to_reduce || Form::extras);
        use(a, b);
      }
      share.ragged.receive(row);
      share.ragged.visit(row, use);
    };
    auto part = reduce_visited<Op<T>>(row.form, visit, [](const auto& part) { return reduce_lanes<T>(part, 32); });
    if (thread % 32 == 0) memory.chunk(it).states[thread / 32] = part;
    memory.reduced[it.barrier()].arrive_as_warp();
  }
}

// The sender, one warp.
template <template <class> class Op, class T>
__device__ void send_states(const GridSchedule& schedule, Packet* packets, GridRingMemory<Op, T>& memory, int lane) {
  const int parts = schedule.parts(gridDim.x);
  typename Op<T>::Part part;
  int first = 0;
  bool begins = true;
  for (ChunkIterator it{&schedule}; !it.ended(); it.advance()) {
    memory.reduced[it.barrier()].sleep_until(it.parity());
    auto of_chunk = reduce_lanes<T>(memory.chunk(it).states[lane % GridRing::warps], GridRing::warps);
    if (begins) part = of_chunk, first = it.chunk;
    else part = combine<T>(part, of_chunk);
    begins = !it.continues();
    if (begins && lane == 0) publish(packets + it.row * parts + first, part);
  }
}

// Waits until all `parts` packets of a row have been published, and merges their states. The lanes of a warp share the
// packets.
template <template <class> class Op, class T>
__device__ __forceinline__ typename Op<T>::Part await_row(const Packet* of_row, int parts, int lane) {
  typename Op<T>::Part whole;
  for (int first = lane; first < parts; first += 32 * GridRing::looks) {
    Packet found[GridRing::looks] = {};
    bool all;
    do {  // every packet is looked at until it has been published
      all = true;
#pragma unroll
      for (int k = 0; k < GridRing::looks; k++)
        if (first + 32 * k < parts && !is_published(found[k])) found[k] = look(of_row + first + 32 * k);
#pragma unroll
      for (int k = 0; k < GridRing::looks; k++) all &= first + 32 * k >= parts || is_published(found[k]);
    } while (!all);
#pragma unroll
    for (int k = 0; k < GridRing::looks; k++) {
      typename Op<T>::Part part;
      memcpy(&part, &found[k], sizeof part);
      if (first + 32 * k < parts) whole = combine<T>(whole, part);
    }
  }
  __syncwarp();
  return reduce_lanes<T>(whole, 32);
}

// A poller, one warp: finishes rows, and informs the writers of the block's chunks. Pollers take turns with the rows.
template <template <class> class Op, class T>
__device__ void poll_rows(const Arguments<T>& args, const GridSchedule& schedule, const Packet* packets,
                          GridRingMemory<Op, T>& memory, int poller, int lane) {
  const int parts = schedule.parts(gridDim.x);
  int visit = 0;
  for (ChunkIterator it{&schedule}; !it.ended();) {
    ChunkIterator last = it;  // the block's last chunk of the row
    while (last.continues()) last.advance();
    if (visit++ % schedule.pollers != poller) {
      it = last;
      it.advance();
      continue;
    }
    memory.reduced[last.barrier()].sleep_until(last.parity());  // the row cannot be complete before that
    const auto whole = await_row<Op, T>(packets + it.row * parts, parts, lane);
    auto values = Op<T>::finish(whole, args, it.row, lane == 0 && it.chunk == 0);
    for (bool more = true; more; it.advance()) {
      more = it.continues();
      if (lane == 0) {
        memory.chunk(it).values = values;
        memory.chunk(it).ready.arrive();
      }
    }
  }
}

// A team of writers.
template <template <class> class Op, class T, class Form>
__device__ void write_slots(const Arguments<T>& args, const GridSchedule& schedule, GridRingMemory<Op, T>& memory,
                            int team, int thread) {
  using Roles = GridRingRoles<Op<T>, T>;
  for (ChunkIterator it{&schedule}; !it.ended(); it.advance()) {
    if (it.turn % Roles::writers != team) continue;
    Row<Op, T, Form> row(args, it.row);
    const SlotShare<Op, T, Form, GridRing::slot_bytes / 16 / GridRing::team> share(
        memory, row, Lines(row.window, row.a), it, GridRing::reducers + team, thread);
    memory.reduced[it.barrier()].sleep_until(it.parity());
    const int first = share.begin + thread;
    Pack<T> a[share.each], b[share.each];
    share.load(first, a, b, true);
    memory.empty[it.slot].arrive_as_warp();
    auto& chunk = memory.chunk(it);
    chunk.ready.sleep_until(it.turn / Roles::chunks % 2);
    const auto values = chunk.values;
    auto write = [&](auto quick) {
      auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(row.out) - row.window.head);
#pragma unroll
      for (int k = 0; k < share.each; k++)
        if (first + k * GridRing::team < share.end)
          out[first + k * GridRing::team] = row.template result_pack<decltype(quick)::value>(values, a[k], b[k]);
    };
    if (row.quick(values)) write(std::true_type{});
    else write(std::false_type{});
    share.ragged.receive(row);
    share.ragged.write(row, values);
  }
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(GridRingRoles<Op<T>, T>::threads, 1)
    grid_ring(const __grid_constant__ Arguments<T> args, const __grid_constant__ GridSchedule schedule,
              Packet* packets) {
  if constexpr (kChosenHere<Strategy::grid_ring, Op<T>, T, Form>) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& memory = *reinterpret_cast<GridRingMemory<Op, T>*>(bytes);
    if (threadIdx.x < 2 * GridRing::slots) {
      const unsigned i = threadIdx.x;
      memory.full[i].init(1), memory.reduced[i].init(GridRing::warps * Barrier::warp_arrivals);
      if (i < GridRing::slots) memory.empty[i].init(GridRing::warps * Barrier::warp_arrivals);
      if (i < memory.most_chunks) memory.chunks[i].ready.init(1);
      show_barriers();
    }
    __syncthreads();
    constexpr int writers = GridRingRoles<Op<T>, T>::writers;
    int thread = threadIdx.x, lane = thread % 32, team = thread / GridRing::team;
    if (team < GridRing::reducers)
      return reduce_slots<Op, T, Form>(args, schedule, memory, team, thread % GridRing::team);
    team -= GridRing::reducers;
    if (team < writers) return write_slots<Op, T, Form>(args, schedule, memory, team, thread % GridRing::team);
    int warp = (thread - (GridRing::reducers + writers) * GridRing::team) / 32;
    if (warp == 0) return send_states<Op, T>(schedule, packets, memory, lane);
    if (warp == 1 && lane == 0) return fill_slots<Op, T, Form>(args, schedule, memory);
    if (warp >= 2 && warp - 2 < schedule.pollers) poll_rows<Op, T>(args, schedule, packets, memory, warp - 2, lane);
  }
}

template <template <class> class Op, class T, class Form>
cudaError_t launch_grid_ring(const Arguments<T>& args, int64_t packs, int processors, void* workspace,
                         cudaStream_t stream) {
  constexpr size_t bytes = sizeof(GridRingMemory<Op, T>);
  constexpr auto kernel = grid_ring<Op, T, Form>;
  if (auto e = allow_shared_memory<kernel, bytes>()) return e;
  const GridSchedule schedule = make_grid_schedule<Op<T>>(args.rows, packs, processors);
  const auto blocks = static_cast<unsigned>(schedule.rows_a_turn * schedule.chunks + schedule.chunks_a_turn);
  auto* packets = static_cast<Packet*>(workspace);
  if (auto e = cudaMemsetAsync(packets, 0, args.rows * schedule.parts(blocks) * sizeof(Packet), stream)) return e;
  cudaLaunchAttribute attribute = all_at_once();
  constexpr int threads = GridRingRoles<Op<T>, T>::threads;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(threads), bytes, stream, &attribute, 1};
  return cudaLaunchKernelEx(&config, kernel, args, schedule, packets);
}

}  // namespace jaxsoft::cuda
