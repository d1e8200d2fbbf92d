// What a team of consumers does with its row in a ring (ring.cuh): reduce the slots, exchange states with the other
// blocks of the cluster, and write.
#pragma once

#include <type_traits>

#include "reduce.cuh"
#include "ring_memory.cuh"

namespace jaxsoft::cuda {

// Waits for all threads of a team.
__device__ inline void synchronize_team(unsigned team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(Ring::consumers) : "memory");
}

// A row as a team of consumers has it: the block's part of it in the ring, and perhaps its ragged ends.
template <template <class> class Op, class T, class Form>
struct TeamRow {
  using Memory = RingMemory<Op, T>;
  using Place = RingPlace<Memory::count>;
  static constexpr int slot_packs = Memory::slot_packs, each = slot_packs / Ring::consumers;
  Memory& memory;
  const Row<Op, T, Form>& row;
  const Ragged<Op, T, 2>& ragged;
  int begin, end;   // the block's packs
  unsigned thread;  // of the team
  int mine;         // the warp's first pack of a slot, counted from the slot's

  // The thread's packs k, k + 1, ... of a slot, which holds packs from `chunk` on. A full slot has code of its own,
  // without a check for each pack.
  template <bool full, int count>
  __device__ __forceinline__ void load(unsigned slot, int chunk, int k, Pack<T> (&a)[count], Pack<T> (&b)[count],
                                       bool both) const {
    const auto& packs = memory.slots[slot];
    const int at = thread + k * Ring::consumers;
    row.template load_shared<full>(packs[0] + at, packs[Op<T>::operands - 1] + at, chunk + at, Ring::consumers, end,
                                   both, a, b);
  }

  // Calls use(a, b) with all packs of the thread, as the slots become full. The packs stay in the slots.
  template <class Use>
  __device__ __forceinline__ void visit(Place& place, Barrier& reduced, Use use) const {
    constexpr bool both = Op<T>::reads_a_to_reduce || Form::extras;
    for (int chunk = begin; chunk < end; chunk += slot_packs) {
      memory.full[place.slot].sleep_until(place.round % 2);
      auto reduce_packs = [&](auto full, auto number, int k) {
        constexpr int count = decltype(number)::value;
        Pack<T> a[count], b[count];
        load<decltype(full)::value>(place.slot, chunk, k, a, b, both);
        use(a, b);
      };
      if (chunk + slot_packs <= end) {
        reduce_packs(std::true_type(), std::integral_constant<int, each>(), 0);
      } else {  // a slot that is half full takes half the time
        constexpr int half = (each + 1) / 2;
#pragma unroll 1
        for (int k = 0; k < each && chunk + mine + k * Ring::consumers < end; k += half)
          reduce_packs(std::false_type(), std::integral_constant<int, half>(), k);
      }
      place.advance(1);
    }
    ragged.receive(row);
    ragged.visit(row, use);
    reduced.arrive_as_warp();
  }

  // Writes the packs of one slot from registers, to which they are read first, so that the slot can be filled again.
  template <bool quick, bool full>
  __device__ __forceinline__ void write_slot(Pack<T>* out, unsigned slot, int chunk,
                                             const typename Op<T>::Values& values) const {
    Pack<T> a[each], b[each];
    load<full>(slot, chunk, 0, a, b, true);
    memory.empty[slot].arrive_as_warp();
#pragma unroll
    for (int k = 0; k < each; k++)
      if (full || chunk + int(thread) + k * Ring::consumers < end)
        out[chunk + thread + k * Ring::consumers] = row.template result_pack<quick>(values, a[k], b[k]);
  }
  // The same where results are not written as packs, or the mask is looked up again.
  __device__ __forceinline__ void write_slot_by_elements(unsigned slot, int chunk,
                                                         const typename Op<T>::Values& values) const {
#pragma unroll 1
    for (int k = 0; k < each && chunk + mine + k * Ring::consumers < end; k++) {
      Pack<T> a[1], b[1];
      load<false>(slot, chunk, k, a, b, true);
      const int pack = chunk + thread + k * Ring::consumers;
      if (pack < end) row.write(pack, values, a[0], b[0]);
    }
    memory.empty[slot].arrive_as_warp();
  }
  // Writes the block's part of the row, and gives its slots back to the producer.
  template <bool quick>
  __device__ __forceinline__ void write(Place& place, const typename Op<T>::Values& values) const {
    auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(row.out) - row.window.head);
    for (int chunk = begin; chunk < end; chunk += slot_packs) {
      if (row.writes_packs(values) && chunk + slot_packs <= end)
        write_slot<quick, true>(out, place.slot, chunk, values);
      else if (row.writes_packs(values)) write_slot<quick, false>(out, place.slot, chunk, values);
      else write_slot_by_elements(place.slot, chunk, values);
      place.advance(1);
    }
  }
};

// Combines what the threads of a team have, and every thread of the team gets the result.
template <class T, class Warps, class Part>
__device__ __forceinline__ auto reduce_team(Warps& of_all_warps, unsigned team, unsigned thread,
                                            const Part& of_thread) {
  constexpr int warps = Ring::consumers / 32;
  static_assert(warps <= 16);
  const unsigned lane = thread % 32;
  auto of_warp = reduce_lanes<T>(of_thread, 32);
  auto* of_warps = reinterpret_cast<decltype(of_warp)*>(of_all_warps);
  if (lane == 0) of_warps[thread / 32] = of_warp;
  synchronize_team(team);
  if (thread < 32) {
    of_warp = reduce_lanes<T>(lane % 16 < warps ? of_warps[lane % 16] : decltype(of_warp){}, 16);
    if (lane == 0) of_warps[warps] = of_warp;
  }
  synchronize_team(team);
  return of_warps[warps];
}

// Sends the state of the block's part to all blocks of the cluster, merges the states that have come, and finishes the
// row. One warp does this for the team, and the others wait where they take no issue slots.
template <template <class> class Op, class T>
__device__ __forceinline__ void exchange(const Arguments<T>& args, RingMemory<Op, T>& memory, unsigned turn,
                                         int64_t index, typename Op<T>::Part part, unsigned rank, unsigned blocks,
                                         unsigned thread, typename Op<T>::Values& values) {
  using Part = typename Op<T>::Part;
  const unsigned lane = thread % 32;
  const unsigned exchange = turn % Ring::exchanges;
  if (lane < blocks)
    deliver(RingState<Part>{part}, &memory.states[exchange][rank], memory.exchanged[exchange], lane, blocks);
  memory.exchanged[exchange].sleep_until(turn / Ring::exchanges % 2);
  part = reduce_lanes<T>(memory.states[exchange][lane % blocks].part, blocks);
  auto found = Op<T>::finish(part, args, index, thread == 0 && rank == 0);
  if (lane == 0) {
    expect<RingState<Part>>(memory.exchanged[exchange], blocks, blocks);  // for its next use
    values = found;
  }
}

}  // namespace jaxsoft::cuda
