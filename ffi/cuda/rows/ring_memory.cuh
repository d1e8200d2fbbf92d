// The shared memory of a block in a cluster that holds rows in rings (ring.cuh): slots, states, messages and barriers.
#pragma once

#include "lines.cuh"
#include "sizes.cuh"

namespace jaxsoft::cuda {

// The packs of a row's whole cache lines that a block of a cluster has.
struct BlockPart {
  int begin, end;
  // 32 bits are enough for a row that fits a cluster. The number of blocks is a power of two.
  __device__ BlockPart(const Lines& lines, unsigned rank, unsigned blocks) {
    const int shift = __ffs(blocks) - 1, count = (lines.end - lines.begin) / kLine;
    begin = lines.begin + (count * rank >> shift) * kLine;
    end = lines.begin + (count * (rank + 1) >> shift) * kLine;
  }
};

// A part's state, as blocks send it to each other.
template <class Part>
struct alignas(16) RingState {
  Part part;
};

// The shared memory of a block.
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
  int64_t next_rows[Ring::announcements];
  Barrier full[count], empty[count], announced[Ring::announcements], exchanged[Ring::exchanges], reduced[Ring::teams];
};

// Sends a message to a block of the cluster. A cluster of one block, which has nobody to send to, stores as usual, and
// its barrier counts the sender instead of the bytes.
template <class V>
__device__ __forceinline__ void deliver(const V& value, V* to, Barrier& done, unsigned block, unsigned blocks) {
  if (blocks > 1) return send(value, to, done, block);
  *to = value;
  done.arrive();
}
// Prepares a barrier of this block for the messages that complete it, one from each of `senders` blocks.
template <class V>
__device__ __forceinline__ void expect(Barrier& done, unsigned senders, unsigned blocks) {
  if (blocks > 1) done.arrive_expecting(senders * sizeof(V));
}

// A place in the ring: a slot, and how often all slots have been filled before.
template <int slots>
struct RingPlace {
  unsigned slot = 0, round = 0;
  __device__ __forceinline__ void advance(unsigned by) {
    slot += by;
    while (slot >= slots) slot -= slots, round++;
  }
};

}  // namespace jaxsoft::cuda
