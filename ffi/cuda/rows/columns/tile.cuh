// A tile of columns: how it is distributed to blocks and threads, and how its arrays lie in shared memory.
//
// The host works out both, so that the kernel has them as parameters, which cost it no instructions.
#pragma once

#include "../../hopper.cuh"
#include "../arguments.cuh"
#include "../operations/operation.cuh"
#include "tuning.cuh"

namespace jaxsoft::cuda {

// An access is what a thread loads at once: a pack, or two elements or one where packs do not lie on 16-byte
// boundaries. The threads of a block form a rectangle: `across` of them stand side by side, `threads / across` below
// each other.
struct Tile {
  int threads;      // of a block
  int across;       // accesses side by side
  int slots;        // accesses that a thread holds of each operand
  unsigned blocks;  // that share n; like `across`, a power of two
  int share;        // how many blocks share a multiprocessor's memory
  Divider row;      // divides by the accesses that are side by side in a row; not set where there are 2^31 or more
};

// An access of two elements of 16 bits must begin at a multiple of 4 bytes. If `inner` is odd, this is at the first,
// third, ... column of a tile in every second row, and one column to the left in the rows between. All rows of a thread
// are of the same kind, as they are an even number of rows apart, so the thread always has the same two columns. A tile
// has the columns that the accesses cover in both kinds of rows.
__host__ __device__ constexpr int straddled_columns(int across) { return 2 * across - 1; }

// The accesses that are side by side in a row of `inner` columns.
template <int width, bool straddles>
__host__ __device__ int64_t accesses_of_row(int64_t inner, int across) {
  if (!straddles) return inner / width;
  return (inner + straddled_columns(across) - 1) / straddled_columns(across) * across;
}

// What the parts of one instantiation of the kernel know of it at compile time: operation, dtype, the elements of an
// access, and whether accesses straddle columns.
template <template <class> class Operation, class Element, int elements, bool straddling>
struct ColumnsKind {
  using T = Element;
  using A = Accumulator<T>;
  using Op = Operation<T>;
  using Values = typename Op::Values;
  // A group's sum of a column. Only where a maximum is to be taken out of it again is it compensated.
  using GroupSum = std::conditional_t<Op::separates_maximum, Sum<A>, A>;
  static constexpr int width = elements, access_bytes = width * sizeof(T), operands = Op::operands;
  static constexpr int in_flight = (access_bytes < 16 ? 2 : 1) * ColumnsCode::packs_in_flight / operands;
  static constexpr bool straddles = straddling, scores = Op::scores, reduces = Op::reduces, writes = Op::writes;
  static constexpr bool may_be_quick = writes && Op::has_quick && width > 1;
  static constexpr bool may_be_masked = !scores && !Op::a_is_scores;  // softmax_vjp
  static constexpr bool compensates = sizeof(T) > 2 || Op::separates_maximum;
  static constexpr bool copies = access_bytes >= 4;  // asynchronously; a single element of 16 bits is loaded
};

// What blocks of a cluster send each other of a column.
template <class Kind, bool = Kind::scores>
struct Message {
  typename Kind::A m;
  typename Kind::GroupSum sum;
};
template <class Kind>
struct Message<Kind, false> {
  typename Kind::GroupSum sum;
};

// The offsets of a block's arrays in shared memory.
template <class Kind>
struct TileLayout {
  using T = typename Kind::T;
  int columns, groups;  // a group: the threads of one warp that share a column, perhaps only one
  unsigned barrier, next, values, received, sums, maxima, slots, end = 0;
  explicit TileLayout(Tile tile) {
    columns = tile.across * Kind::width;
    groups = tile.threads / (tile.across < 32 ? 32 : tile.across);
    barrier = add(sizeof(Barrier));
    next = add(sizeof(unsigned));
    values = add(columns * sizeof(typename Kind::Values));
    received = add(tile.blocks > 1 ? columns * tile.blocks * sizeof(Message<Kind>) : 0);
    sums = add(Kind::reduces ? groups * columns * sizeof(typename Kind::GroupSum) : 0);
    maxima = add(Kind::scores ? groups * columns * sizeof(T) : 0);
    slots = end;
  }

 private:
  unsigned add(size_t bytes) {
    unsigned begin = end;
    end += (bytes + 15) / 16 * 16;
    return begin;
  }
};

// The arrays themselves.
template <class Kind>
struct SharedTile {
  using T = typename Kind::T;
  Barrier& barrier;                  // completed by the messages of the cluster's blocks
  volatile unsigned& next_tile;      // the index of the tile that follows
  typename Kind::Values* values;     // of each column: what its elements are written from
  Message<Kind>* received;               // of each column: a message of each block
  typename Kind::GroupSum* sums;     // of each group: its sum of each column
  T* maxima;                         // of each group: its maximum of each column, access by access
  T* slots;
  __device__ SharedTile(unsigned char* memory, const TileLayout<Kind>& layout)
      : barrier(*reinterpret_cast<Barrier*>(memory + layout.barrier)),
        next_tile(*reinterpret_cast<volatile unsigned*>(memory + layout.next)),
        values(reinterpret_cast<typename Kind::Values*>(memory + layout.values)),
        received(reinterpret_cast<Message<Kind>*>(memory + layout.received)),
        sums(reinterpret_cast<typename Kind::GroupSum*>(memory + layout.sums)),
        maxima(reinterpret_cast<T*>(memory + layout.maxima)),
        slots(reinterpret_cast<T*>(memory + layout.slots)) {}
};

}  // namespace jaxsoft::cuda
