// Long rows over the whole grid, held on chip: one read of device memory for rows that only all multiprocessors can
// hold.
//
// Rows are cut into chunks, and the chunks are dealt out in turn to the blocks of a persistent grid. (Dealt out by a
// counter, they were no faster.) A block keeps its chunks in shared memory, a ring of slots, each of which goes through
// several hands: the producer fills it by bulk copies, reducers reduce it, a writer takes what it holds into registers
// and gives the slot back; the poster sends the state of what the block has of a row to device memory, a poller waits
// until the states of the whole row are there, and the writer writes. Only pollers wait for other blocks, so memory is
// kept busy as long as a block has room for more than what is on its way. All blocks must run at once.
//
// Barriers: full[slot] is completed by the copies into a slot, reduced[slot] by the warps that have reduced it,
// empty[slot] by those that have taken it, and a chunk's `ready` by the poller. A role of several teams or warps deals
// the turns out to them. One may then come to a slot before another has come to its filling before this one, and a
// barrier tells a phase from the next only; so there are barriers for two fillings of each slot.
#pragma once

#include "ring.cuh"

namespace jaxsoft::cuda {

struct Dealt {
  static constexpr int team = 128;         // threads
  static constexpr int warps = team / 32;  // of a team
  static constexpr int reducers = 4;       // teams
  static constexpr int pollers = 2;        // warps; one where a row has many chunks in each block
  static constexpr int slots = 14, slot_bytes = 16 * 1024;
  static constexpr int most_slots = slots - 1;  // that a row may take
  static constexpr int at_once = 4;  // packs that a reducer's thread reads before it uses the first, of all operands
  static constexpr int looks = 5;    // packets that a lane of a poller looks at together
  static constexpr int slot_packs(int operands) { return slot_bytes / 16 / operands; }  // of each operand
};

// What depends on the operation. One team of writers is fast enough for f32, and spreads what is written over time.
template <class Op, class T>
struct DealtRoles {
  static constexpr int writers = Op::operands == 1 && sizeof(T) == 4 ? 1 : 2;  // teams
  static constexpr int threads = (Dealt::reducers + writers) * Dealt::team + (2 + Dealt::pollers) * 32;
  static constexpr int chunks = Dealt::slots + writers;  // that a block may have at once
  static_assert(Dealt::slots % writers == 0);            // so turn t is written before turn t + chunks is reduced
};

// What a row's states are posted in. Words are zero before; a packet is there when its last word is not.
struct alignas(16) Packet {
  uint64_t words[2];
};
template <class Part>
__device__ void post(Packet* to, const Part& part) {
  static_assert(sizeof(Part) <= 12);
  Packet packet{};
  memcpy(&packet, &part, sizeof part);
  packet.words[1] |= uint64_t(1) << 32;
  asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(to),
               "l"(packet.words[0]), "l"(packet.words[1]) : "memory");
}
__device__ inline Packet look(const Packet* at) {
  Packet packet;
  asm volatile("{\n.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
               : "=l"(packet.words[0]), "=l"(packet.words[1]) : "l"(at) : "memory");
  return packet;
}
__device__ inline bool is_posted(const Packet& packet) { return packet.words[1] >> 32; }

// How rows are dealt out: all in chunks of so many packs. Chunk c of row r belongs to block (r * chunks + c) % blocks.
struct Deal {
  int64_t rows;
  int chunks, packs;                    // of a row; of a chunk
  unsigned rows_a_turn, chunks_a_turn;  // the number of blocks, in rows and chunks
  int pollers;
  __host__ __device__ int posts(int blocks) const { return chunks < blocks ? chunks : blocks; }  // of a row
};

// The chunks that a block has, one after the other.
struct Hand {
  const Deal* deal;
  int64_t row;
  int chunk;
  int turn = 0;
  unsigned slot = 0, round = 0;  // round: how often all slots have been filled before
  __device__ explicit Hand(const Deal& of) : deal(&of) {
    row = blockIdx.x / static_cast<unsigned>(deal->chunks);
    chunk = blockIdx.x % static_cast<unsigned>(deal->chunks);
  }
  __device__ bool ended() const { return row >= deal->rows; }
  __device__ void advance() {
    turn++;
    if (++slot == Dealt::slots) slot = 0, round++;
    row += deal->rows_a_turn;
    chunk += deal->chunks_a_turn;
    if (chunk >= deal->chunks) chunk -= deal->chunks, row++;
  }
  __device__ unsigned barrier() const { return slot + round % 2 * Dealt::slots; }
  __device__ unsigned parity() const { return round / 2 % 2; }
  // Whether the block's next chunk is of the same row.
  __device__ bool continues() const { return deal->rows_a_turn == 0 && chunk + deal->chunks_a_turn < deal->chunks; }
};

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

// The packs of a row that a chunk has: of those in whole lines, perhaps none.
struct ChunkPart {
  int begin, end;
  __device__ ChunkPart(const Lines& lines, const Hand& hand) {
    begin = min(lines.begin + hand.chunk * hand.deal->packs, lines.end);
    end = min(begin + hand.deal->packs, lines.end);
  }
};

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
    // The L2 is asked for what there is no slot for yet: with one operand for the chunk after this one, as earlier is
    // too early, with two for this one, and only if it has to wait.
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

// What a thread of a team has of a slot, some packs at a time, and of the row's ragged ends.
template <template <class> class Op, class T, class Form, int count>
struct Held : ChunkPart {
  static constexpr int each = count / Op<T>::operands;
  const Pack<T> (&slot)[Op<T>::operands][Dealt::slot_packs(Op<T>::operands)];
  const Row<Op, T, Form>& row;
  const Ragged<Op, T, 1> ragged;  // a row has many chunks

  // `team`: of all, reducers and then writers.
  __device__ Held(DealtMemory<Op, T>& memory, const Row<Op, T, Form>& row, const Lines& lines, const Hand& hand,
                  int team, int thread)
      : ChunkPart(lines, hand), slot(memory.slots[hand.slot]), row(row),
        ragged(row, lines, memory.ragged[team], thread >= Dealt::team - 32 && hand.chunk == 0,
               thread >= Dealt::team - 32 && hand.chunk == hand.deal->chunks - 1) {}
  // Whether the warp has all of the packs that its lanes have from `first` on.
  __device__ bool full(int first) const {
    return first - static_cast<int>(threadIdx.x % 32) + (each - 1) * Dealt::team + 32 <= end;
  }
  __device__ void load(int first, Pack<T> (&a)[each], Pack<T> (&b)[each], bool both) const {
    const int at = first - begin, to = full(first) ? INT_MAX : end;
    row.load_held(slot[0] + at, slot[Op<T>::operands - 1] + at, first, Dealt::team, to, both, a, b);
  }
};

template <template <class> class Op, class T, class Form>
__device__ void reduce_slots(const Arguments<T>& args, const Deal& deal, DealtMemory<Op, T>& memory, int team,
                             int thread) {
  for (Hand hand(deal); !hand.ended(); hand.advance()) {
    if (hand.turn % Dealt::reducers != team) continue;
    Row<Op, T, Form> row(args, hand.row);
    const Held<Op, T, Form, Dealt::at_once> held(memory, row, Lines(row.window, row.a), hand, team, thread);
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
    memory.reduced[last.barrier()].sleep_until(last.parity());  // before that no one needs to look
    typename Op<T>::Part whole;
    const Packet* of_row = packets + hand.row * posts;
    for (int first = lane; first < posts; first += 32 * Dealt::looks) {
      Packet found[Dealt::looks] = {};
      bool all;
      do {  // each is looked at until it is there
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
    whole = reduce_lanes<T>(whole, 32);
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

template <template <class> class Op, class T, class Form>
__device__ void write_slots(const Arguments<T>& args, const Deal& deal, DealtMemory<Op, T>& memory, int team,
                            int thread) {
  using Roles = DealtRoles<Op<T>, T>;
  for (Hand hand(deal); !hand.ended(); hand.advance()) {
    if (hand.turn % Roles::writers != team) continue;
    Row<Op, T, Form> row(args, hand.row);
    const Held<Op, T, Form, Dealt::slot_bytes / 16 / Dealt::team> held(memory, row, Lines(row.window, row.a), hand,
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
#if __CUDA_ARCH__ >= 900
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
#endif  // never launched on what has no bulk copies
}

// How rows of so many packs are dealt out to so many blocks.
template <class Op>
Deal deal_out(int64_t rows, int64_t packs, int processors) {
  constexpr int most = Dealt::slot_packs(Op::operands);
  Deal deal;
  deal.rows = rows;
  deal.chunks = static_cast<int>((packs + most - 1) / most);
  deal.packs = static_cast<int>((packs + deal.chunks - 1) / deal.chunks + kLine - 1) / kLine * kLine;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(processors, rows * deal.chunks));
  deal.rows_a_turn = blocks / deal.chunks, deal.chunks_a_turn = blocks % deal.chunks;
  deal.pollers = deal.chunks > 3 * processors ? 1 : Dealt::pollers;
  return deal;
}

// Whether the grid holds a row, with room for some of the next, and `bytes` of workspace the packets of all rows.
template <class Op>
bool can_deal(int64_t rows, int64_t packs, int processors, int64_t bytes) {
  const int64_t chunks = packs / Dealt::slot_packs(Op::operands) + 1;
  return chunks <= Dealt::most_slots * processors &&
         rows <= bytes / int64_t(sizeof(Packet)) / std::min<int64_t>(chunks, processors);
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
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
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
