// A row over a cluster of blocks, held on chip: one read of device memory for rows far past one block's registers.
//
// Every block of a cluster keeps its part of the row in shared memory, a ring of slots that one producer warp fills by
// bulk copies and the other warps read twice: to reduce, then, when the blocks have exchanged their parts' states, to
// write. The copies run ahead into the next row, so memory is busy while states are exchanged. Blocks are persistent,
// and a cluster takes its next row from a counter when it has room for it: multiprocessors are not equally fast, and
// rows dealt out in advance would wait for the slowest.
//
// Barriers: full[slot] is completed by the copies into a slot, empty[slot] by the warps that are done with it;
// mail[i] and states[i] by stores from other blocks of the cluster (Hopper's st.async).
#pragma once

#include <climits>

#include "../copies.cuh"
#include "../counter.cuh"
#include "../hopper.cuh"
#include "strategies.cuh"

namespace jaxsoft::cuda {

struct Ring {
  static constexpr int teams = 3;            // groups of threads that take turns with the rows
  static constexpr int consumers = 256;      // threads of a team; one warp more in a block produces
  static constexpr int threads = teams * consumers + 32;
  static constexpr int mails = 32;           // more rows than the blocks of a cluster can be apart
  static constexpr int exchanges = 2 * teams;
  static constexpr int most_blocks = 16;     // of a cluster
  static constexpr int few_rows = 8;         // a cluster: up to here rows are dealt out in advance
  static constexpr int bytes = 208 * 1024;   // of all slots together
  // What a slot holds: so many packs of each operand for each thread of a team.
  static constexpr int packs_each(int operands) { return operands == 1 ? 4 : 2; }
  static constexpr int slot_packs(int operands) { return packs_each(operands) * consumers; }
  static constexpr int slots(int operands) { return bytes / (slot_packs(operands) * operands * 16); }
  static constexpr int held_packs(int operands) { return slots(operands) * slot_packs(operands); }  // by a block
};

__device__ inline void synchronize_team(unsigned team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(Ring::consumers) : "memory");
}

// The packs of a row that lie in whole lines of the cache that are all the row's own. Rows are cut between lines, so
// that no two warps share one.
struct Lines {
  int begin, end;
  template <class Window>
  __device__ Lines(const Window& window, const void* row) {
    const int lead = static_cast<int>(reinterpret_cast<uintptr_t>(row) / 16 % kLine);  // packs of a line before pack 0
    begin = (window.whole_begin() + lead + kLine - 1) / kLine * kLine - lead;
    end = max(begin, (window.whole_end + lead) / kLine * kLine - lead);
  }
};

// The packs of these that a block of a cluster has.
struct BlockPart {
  int begin, end;
  // A row that fits a cluster has few enough packs for 32 bits; the blocks are a power of two.
  __device__ BlockPart(const Lines& lines, unsigned rank, unsigned blocks) {
    const int shift = __ffs(blocks) - 1, count = (lines.end - lines.begin) / kLine;
    begin = lines.begin + (count * rank >> shift) * kLine;
    end = lines.begin + (count * (rank + 1) >> shift) * kLine;
  }
};

// A row's first packs and its last ones, outside of whole lines: bulk copies leave them out, and a warp's lanes copy
// them to shared memory themselves, early, so that nobody waits for them. `ends`: of a row that a warp may have.
template <template <class> class Op, class T, int ends>
struct Ragged {
  using Memory = Pack<T>[ends * kLine][Op<T>::operands];
  Pack<T> (&kept)[Op<T>::operands];  // the lane's
  int pack = -1;                     // likewise
  bool present;                      // whether the warp has any

  // Whether the warp has the row's first packs, and its last.
  template <class Row>
  __device__ Ragged(const Row& row, const Lines& lines, Memory& memory, bool first, bool last)
      : kept(memory[threadIdx.x % (ends * kLine)]) {
    const int packs = row.window.packs, lane = threadIdx.x % 32, at_end = lines.end + lane - kLine;
    first = first && lines.begin > 0, last = last && packs > lines.end;
    present = first || last;
    if (first && lane < min(lines.begin, packs)) pack = lane;
    if (last && lane >= kLine && at_end < packs) pack = at_end;
    if (pack < 0) return;
    const int element = pack * Pack<T>::size - row.window.head;
    copy_access<16>(&kept[0], row.a + element);
    if constexpr (Op<T>::operands > 1) copy_access<16>(&kept[1], row.b + element);
  }
  // Before they are used: waits for the copies, and masks what is not the row's.
  template <class Row>
  __device__ void receive(const Row& row) const {
    if (pack < 0) return;
    Pack<T> a[1], b[1];
    wait_for_copies();
    row.load_held(&kept[0], &kept[Op<T>::operands - 1], pack, 0, row.window.packs, true, a, b);
    row.window.trim(a[0], pack, row.fill());
    kept[0] = a[0];
    if constexpr (Op<T>::operands > 1) {
      row.window.trim(b[0], pack, Op<T>::fill());
      kept[1] = b[0];
    }
  }
  template <class Row, class Use>
  __device__ void visit(const Row& row, Use use) const {
    if (!present) return;
    Pack<T> a[1], b[1];
    a[0].fill(row.fill()), b[0].fill(Op<T>::fill());
    if (pack >= 0) a[0] = kept[0], b[0] = kept[Op<T>::operands - 1];
    use(a, b);
  }
  template <class Row>
  __device__ void write(const Row& row, const typename Op<T>::Values& values) const {
    if (pack >= 0) row.write(pack, values, kept[0], kept[Op<T>::operands - 1]);
  }
};

template <class Part>
struct alignas(16) RingState {
  Part part;
};

template <template <class> class Op, class T>
struct alignas(128) RingMemory {
  static constexpr int operands = Op<T>::operands;
  static constexpr int slot_packs = Ring::slot_packs(operands);  // of each operand
  static constexpr int count = Ring::slots(operands);
  Pack<T> slots[count][operands][slot_packs];
  RingState<typename Op<T>::Part> states[Ring::exchanges][Ring::most_blocks];
  struct Team {
    typename Ragged<Op, T, 2>::Memory ragged;
    RingState<typename Op<T>::Part> warps[Ring::consumers / 32 + 1];
    typename Op<T>::Values values;
  } teams[Ring::teams];
  int64_t mail[Ring::mails];
  Barrier full[count], empty[count], mailed[Ring::mails], exchanged[Ring::exchanges], reduced[Ring::teams];
};

// What a producer puts into a slot: as many bytes of each operand, perhaps none.
template <class T, int operands>
struct Source {
  const T *a, *b;
  unsigned bytes;
  // So that they come from the L2 when there is room for them.
  __device__ void ask_cache() const {
    if (!bytes) return;
    prefetch_to_cache(a, bytes);
    if constexpr (operands > 1) prefetch_to_cache(b, bytes);
  }
  template <class Slot>
  __device__ void copy(Slot& slot, Barrier& full) const {
    full.arrive_expecting(bytes * operands);
    if (!bytes) return;
    copy_to_shared(slot[0], a, bytes, full);
    if constexpr (operands > 1) copy_to_shared(slot[1], b, bytes, full);
  }
};

template <template <class> class Op, class T>
__device__ void produce(const Arguments<T>& args, unsigned long long* counter, RingMemory<Op, T>& memory) {
  constexpr int slot_packs = RingMemory<Op, T>::slot_packs;
  const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster();
  const int64_t clusters = gridDim.x / blocks;
  // The leader posts a row one turn ahead, and asks for another, so that nobody waits for the counter.
  auto post = [&](unsigned turn, int64_t row) {
    row = row < args.rows ? row : -1;
    unsigned mail = turn % Ring::mails;
    for (unsigned block = 0; block < blocks; block++) send(row, &memory.mail[mail], memory.mailed[mail], block);
  };
  // Without a counter rows are dealt out in advance.
  int64_t dealt = blockIdx.x / blocks;
  unsigned long long taken = 0;
  if (rank == 0) {
    post(0, dealt);
    if (counter) taken = take(counter);
  }
  unsigned slot = 0, round = 0;
  for (unsigned turn = 0;; turn++) {
    unsigned mail = turn % Ring::mails;
    memory.mailed[mail].sleep_until(turn / Ring::mails % 2);
    int64_t index = *static_cast<volatile int64_t*>(&memory.mail[mail]);
    memory.mailed[mail].arrive_expecting(sizeof(int64_t));  // its next use
    if (index < 0) return;
    if (rank == 0) {
      dealt += clusters;
      post(turn + 1, counter ? static_cast<int64_t>(taken) + clusters : dealt);
      if (counter) taken = take(counter);
    }
    const T *x = args.a + index * args.n, *b = Op<T>::operands > 1 ? args.b + index * args.n : nullptr;
    const Window<T> window(x, static_cast<int>(args.n), true);
    const BlockPart part(Lines(window, x), rank, blocks);
    for (int chunk = part.begin; chunk < part.end; chunk += slot_packs) {
      const int element = chunk * Pack<T>::size - window.head;
      const unsigned bytes = min(slot_packs, part.end - chunk) * 16;
      const Source<T, Op<T>::operands> source{x + element, b + element, bytes};
      if (!memory.empty[slot].is_past(round % 2 ^ 1)) {
        source.ask_cache();
        memory.empty[slot].sleep_until(round % 2 ^ 1);
      }
      source.copy(memory.slots[slot], memory.full[slot]);
      if (++slot == RingMemory<Op, T>::count) slot = 0, round++;
    }
  }
}

template <template <class> class Op, class T, class Form>
__device__ void consume(const Arguments<T>& args, RingMemory<Op, T>& memory) {
  constexpr int slot_packs = RingMemory<Op, T>::slot_packs, each = slot_packs / Ring::consumers;
  using Part = typename Op<T>::Part;
  const unsigned rank = block_in_cluster(), blocks = blocks_of_cluster();
  const unsigned team = threadIdx.x / Ring::consumers, thread = threadIdx.x % Ring::consumers, lane = thread % 32;
  unsigned slot = 0, round = 0;
  auto advance = [&](unsigned by) {
    slot += by;
    while (slot >= RingMemory<Op, T>::count) slot -= RingMemory<Op, T>::count, round++;
  };
  for (unsigned turn = 0;; turn++) {
    memory.mailed[turn % Ring::mails].sleep_until(turn / Ring::mails % 2);
    int64_t index = *static_cast<volatile int64_t*>(&memory.mail[turn % Ring::mails]);
    if (index < 0) return;
    const T* first = args.a + index * args.n;
    const Lines lines(Window<T>(first, static_cast<int>(args.n), true), first);
    const BlockPart own(lines, rank, blocks);
    const int begin = own.begin, end = own.end;
    const unsigned first_slot = slot, first_round = round;
    if (turn % Ring::teams != team) {  // another team's row
      advance(static_cast<unsigned>((end - begin + slot_packs - 1) / slot_packs));
      continue;
    }
    Row<Op, T, Form> row(args, index);
    // A thread's packs of a slot are all loaded at once. A full slot has code of its own, which asks nothing of each.
    const int mine = thread - lane;  // the warp's first
    auto load = [&](int chunk, int k, auto& a, auto& b, bool both) {
      const auto& held = memory.slots[slot];
      const int at = thread + k * Ring::consumers, to = chunk + slot_packs <= end ? INT_MAX : end;
      row.load_held(held[0] + at, held[Op<T>::operands - 1] + at, chunk + at, Ring::consumers, to, both, a, b);
    };

    // Rows are reduced in turn: a barrier tells a phase from the next only, so no one may wait for a slot's later
    // filling.
    auto& shared = memory.teams[team];
    const bool last_warp = thread >= Ring::consumers - 32;  // has the least of a chunk that is not full
    const Ragged<Op, T, 2> ragged(row, lines, shared.ragged, last_warp && rank == 0, last_warp && rank == blocks - 1);
    if (turn > 0) memory.reduced[(turn - 1) % Ring::teams].sleep_until((turn - 1) / Ring::teams % 2);
    auto visit = [&](auto use) {
      constexpr bool both = Op<T>::reads_a_to_reduce || Form::extras;
      for (int chunk = begin; chunk < end; chunk += slot_packs) {
        memory.full[slot].sleep_until(round % 2);
        auto reduce_slot = [&] {
          Pack<T> a[each], b[each];
          load(chunk, 0, a, b, both);
          use(a, b);
        };
        if (chunk + slot_packs <= end) reduce_slot();
        else if (chunk + mine < end) reduce_slot();
        advance(1);
      }
      ragged.receive(row);
      ragged.visit(row, use);
      memory.reduced[team].arrive_as_warp();
    };
    constexpr int warps = Ring::consumers / 32;
    static_assert(warps <= 16);
    auto part = reduce_visited<Op<T>>(row.form, visit, [&](const auto& of_thread) {
      auto of_warp = reduce_lanes<T>(of_thread, 32);
      auto* of_warps = reinterpret_cast<decltype(of_warp)*>(shared.warps);
      if (lane == 0) of_warps[thread / 32] = of_warp;
      synchronize_team(team);
      if (thread < 32) {
        of_warp = reduce_lanes<T>(lane % 16 < warps ? of_warps[lane % 16] : decltype(of_warp){}, 16);
        if (lane == 0) of_warps[warps] = of_warp;
      }
      synchronize_team(team);
      return of_warps[warps];
    });
    if (thread < 32) {  // one warp speaks for the team; the others wait where they take no turns
      const unsigned exchange = turn % Ring::exchanges;
      if (lane < blocks) send(RingState<Part>{part}, &memory.states[exchange][rank], memory.exchanged[exchange], lane);
      memory.exchanged[exchange].sleep_until(turn / Ring::exchanges % 2);
      part = reduce_lanes<T>(memory.states[exchange][lane % blocks].part, blocks);
      auto found = Op<T>::finish(part, args, index, thread == 0 && rank == 0);
      if (lane == 0) {
        memory.exchanged[exchange].arrive_expecting(blocks * sizeof(RingState<Part>));  // its next use
        shared.values = found;
      }
    }
    synchronize_team(team);
    const auto values = shared.values;
    slot = first_slot, round = first_round;
    auto write = [&](auto quick) {
      auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(row.out) - row.window.head);
      for (int chunk = begin; chunk < end; chunk += slot_packs) {
        auto write_slot = [&](int to) {
          Pack<T> a[each], b[each];
          load(chunk, 0, a, b, true);
          memory.empty[slot].arrive_as_warp();
#pragma unroll
          for (int k = 0; k < each; k++)
            if (chunk + thread + k * Ring::consumers < to)
              out[chunk + thread + k * Ring::consumers] =
                  row.template result_pack<decltype(quick)::value>(values, a[k], b[k]);
        };
        if (row.writes_packs(values) && chunk + slot_packs <= end) {
          write_slot(INT_MAX);
        } else if (row.writes_packs(values)) {
          write_slot(end);
        } else {
#pragma unroll 1
          for (int k = 0; k < each && chunk + mine + k * Ring::consumers < end; k++) {
            Pack<T> a[1], b[1];
            load(chunk, k, a, b, true);
            const int pack = chunk + thread + k * Ring::consumers;
            if (pack < end) row.write(pack, values, a[0], b[0]);
          }
          memory.empty[slot].arrive_as_warp();
        }
        advance(1);
      }
    };
    if constexpr (Op<T>::has_quick) {
      if (row.quick(values)) write(std::true_type{});
      else write(std::false_type{});
    } else {
      write(std::false_type{});
    }
    ragged.write(row, values);
  }
}

template <template <class> class Op, class T, class Form>
__global__ void __launch_bounds__(Ring::threads, 1)
    ring(const __grid_constant__ Arguments<T> args, unsigned long long* counter) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& memory = *reinterpret_cast<RingMemory<Op, T>*>(bytes);
  if (threadIdx.x < 32) {  // every barrier has a thread that makes it
    const unsigned thread = threadIdx.x, warps = Ring::consumers / 32 * Barrier::warp_arrivals;
    if (thread < memory.count) memory.full[thread].init(1), memory.empty[thread].init(warps);
    if (thread < Ring::teams) memory.reduced[thread].init(warps);
    if (thread < Ring::mails) memory.mailed[thread].init(1);
    if (thread < Ring::exchanges) memory.exchanged[thread].init(1);
    show_barriers();
    __syncwarp();
    if (thread < Ring::mails) memory.mailed[thread].arrive_expecting(sizeof(int64_t));
    if (thread < Ring::exchanges)
      memory.exchanged[thread].arrive_expecting(blocks_of_cluster() * sizeof(RingState<typename Op<T>::Part>));
    __syncwarp();
  }
  synchronize_cluster();
  if (threadIdx.x >= Ring::teams * Ring::consumers) {
    if (threadIdx.x % 32 == 0) produce<Op, T>(args, counter, memory);
  } else {
    consume<Op, T, Form>(args, memory);
  }
  __syncwarp();
  synchronize_cluster();  // no block may leave while another may still store into it
#endif  // never launched on what has no clusters
}

// Whether a cluster of so many blocks holds a row of so many packs.
template <class Op>
bool ring_holds(int64_t packs, int64_t blocks) {
  return Op::reduces && Op::writes && packs <= blocks * Ring::held_packs(Op::operands);
}

// `workspace` has room for the counter, or is null.
template <template <class> class Op, class T, class Form>
cudaError_t launch_ring(const Arguments<T>& args, int blocks, void* workspace, cudaStream_t stream) {
  constexpr size_t bytes = sizeof(RingMemory<Op, T>);
  static_assert(bytes <= 227 * 1024);
  auto kernel = ring<Op, T, Form>;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Ring::threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  static Devices<Ring::most_blocks + 1> clusters_at_once;
  if (auto e = clusters_at_once.once(blocks, &clusters, [&](int* found) {
        if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
        if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
        if (auto e = cudaOccupancyMaxActiveClusters(found, kernel, &config)) return e;
        return *found < 1 ? cudaErrorInvalidConfiguration : cudaSuccess;
      }))
    return e;
  unsigned long long* counter = nullptr;
  if (auto e = clear_counter(args.rows > Ring::few_rows * clusters, workspace, stream, &counter)) return e;
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(clusters, args.rows) * blocks));
  return cudaLaunchKernelEx(&config, kernel, args, counter);
}

}  // namespace jaxsoft::cuda
