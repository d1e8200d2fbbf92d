// Rows in whole cache lines, which bulk copies bring to shared memory, and the ragged ends beside these lines.
#pragma once

#include <cstdint>

#include "../copies.cuh"
#include "../hopper.cuh"
#include "row.cuh"

namespace jaxsoft::cuda {

// The packs of a row that lie in cache lines that belong to the row entirely. Rows are cut between lines, so that no
// two warps share one.
struct Lines {
  int begin, end;
  template <class Window>
  __device__ Lines(const Window& window, const void* row) {
    // Packs of the first line that lie before pack 0.
    const int lead = static_cast<int>(reinterpret_cast<uintptr_t>(row) / 16 % kLine);
    begin = (window.whole_begin() + lead + kLine - 1) / kLine * kLine - lead;
    end = max(begin, (window.whole_end + lead) / kLine * kLine - lead);
  }
};

// The ragged ends of a row: its first and its last packs, which lie outside of whole cache lines. Bulk copies leave
// them out. The lanes of one warp copy them to shared memory themselves, so early that nobody waits for them. A warp
// has at most `ends` ends of a row.
template <template <class> class Op, class T, int ends>
struct Ragged {
  using Memory = Pack<T>[ends * kLine][Op<T>::operands];
  Pack<T> (&kept)[Op<T>::operands];  // the lane's pack of each operand
  int pack = -1;                     // its place in the row; -1 if the lane has none
  bool present;                      // whether any lane of the warp has one

  // Starts the copies. `first` and `last` say whether the warp has the row's first packs, and its last ones.
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
  // Waits for the copies, and masks the packs. Must be called before they are used.
  template <class Row>
  __device__ void receive(const Row& row) const {
    if (pack < 0) return;
    Pack<T> a[1], b[1];
    wait_for_copies();
    row.load_shared(&kept[0], &kept[Op<T>::operands - 1], pack, 0, row.window.packs, true, a, b);
    row.window.trim(a[0], pack, row.fill());
    kept[0] = a[0];
    if constexpr (Op<T>::operands > 1) {
      row.window.trim(b[0], pack, Op<T>::fill());
      kept[1] = b[0];
    }
  }
  // Calls use(a, b) with the packs, to reduce them.
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

// The part of a row that a producer copies into a slot: the same number of bytes of each operand, perhaps none.
template <class T, int operands>
struct Source {
  const T *a, *b;
  unsigned bytes;
  // Fetches the bytes into the L2 cache, while there is no slot for them yet.
  __device__ void ask_cache(bool keep = false) const {
    if (!bytes) return;
    prefetch_to_cache(a, bytes, keep);
    if constexpr (operands > 1) prefetch_to_cache(b, bytes, keep);
  }
  template <class Slot>
  __device__ void copy(Slot& slot, Barrier& full) const {
    full.arrive_expecting(bytes * operands);
    if (!bytes) return;
    copy_to_shared(slot[0], a, bytes, full);
    if constexpr (operands > 1) copy_to_shared(slot[1], b, bytes, full);
  }
};

}  // namespace jaxsoft::cuda
