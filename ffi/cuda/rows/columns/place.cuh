// The place of a thread: which elements of a tile it reads and writes, and which columns they belong to.
#pragma once

#include "tile.cuh"

namespace jaxsoft::cuda {

// A thread's part of a chunk: the offset of its first element in an operand, and the number of its rows, 0 if it has
// none.
struct Place {
  int64_t offset;
  int count;
};

// The exponent of a power of two. (Where no argument depends on a template parameter, some host compilers want `__ffs`
// declared, although they never compile its call.)
__device__ inline int log2_of(int power) { return __ffs(power) - 1; }

// Where a thread stands among the threads that share the array. A chunk is what a block holds of a tile at once.
template <class Kind>
struct Tiling {
  using T = typename Kind::T;
  static constexpr int width = Kind::width;
  const Arguments<T>& args;
  const Tile& tile;
  // The rectangle of threads, log2(across), and the thread's place in it.
  const int across = tile.across, shift = log2_of(across), down = tile.threads >> shift;
  const int thread = threadIdx.x, x = thread & (across - 1), y = thread >> shift;
  const unsigned rank = blockIdx.x & (tile.blocks - 1);  // of the block, among those that share n
  const unsigned tiles_at_once = gridDim.x / tile.blocks;
  // Accesses side by side in a row, and in all rows, of equal position in n.
  const int64_t row_accesses = accesses_of_row<width, Kind::straddles>(args.inner, across);
  const int64_t accesses = args.rows * row_accesses;
  // The block's part of n.
  const int64_t begin = args.n * rank / tile.blocks, end = args.n * (rank + 1) / tile.blocks;
  const int chunk_rows = tile.slots * down;
  const int64_t step = down * args.inner;  // elements from one of the thread's rows to its next
  // Whether the block's part is held from being reduced to being written.
  const bool stays = Kind::reduces && Kind::writes && end - begin <= chunk_rows;

  // Tiles are counted from 0. There are fewer than 2^31, as more do not fit into memory.
  __device__ unsigned first_tile() const { return blockIdx.x / tile.blocks; }
  __device__ int64_t first_access(unsigned index) const { return int64_t(index) << shift; }
  __device__ bool exists(unsigned index) const { return first_access(index) < accesses; }

  // A tile's columns are counted so that those at the same position in their accesses are neighbours.
  __device__ int access_of(int column) const { return column & (across - 1); }
  __device__ int element_of(int column) const { return column >> shift; }

  __device__ int64_t row_of(int64_t access) const {
    return accesses <= INT32_MAX ? int64_t(tile.row.quotient(static_cast<uint32_t>(access))) : access / row_accesses;
  }

  // Where accesses straddle columns: the row that a tile is of, and the first of its columns there.
  struct Begin {
    int64_t row, column;
  };
  __device__ Begin begin_of(unsigned index) const {
    const int64_t access = first_access(index), row = row_of(access);
    return {row, (access - row * row_accesses >> shift) * straddled_columns(across)};
  }

  // The thread's part of the chunk of a tile that begins at row `chunk` of n.
  __device__ Place place(unsigned index, int64_t chunk) const {
    const int64_t access = first_access(index) + x;
    const int rows = static_cast<int>(min(end - chunk, int64_t(chunk_rows))) - y;
    if (access >= accesses || rows <= 0) return {0, 0};
    const int count = (rows + down - 1) >> log2_of(down);
    if constexpr (Kind::straddles) {
      const Begin of = begin_of(index);
      const int64_t to = (of.row * args.n + chunk + y) * args.inner + of.column, two = 2 * x - (to & 1);
      return of.column + two < args.inner ? Place{to + two, count} : Place{0, 0};
    }
    const int64_t row = row_of(access), column = access - row * row_accesses;
    return {(row * args.n + chunk + y) * args.inner + column * width, count};
  }
  // The same of what comes after a chunk: the tile's next chunk, or after the last one the first of the tile that
  // follows.
  __device__ Place place_after(int64_t chunk, unsigned index, unsigned follows) const {
    chunk += chunk_rows;
    return chunk < end ? place(index, chunk) : place(follows, begin);
  }
};

// The columns of one tile.
template <class Kind>
struct TileColumns {
  const Tiling<Kind>& tiling;
  const unsigned& index;  // of the tile
  // Where accesses straddle columns: the tile's first column, of all rows' columns; how many it has; and whether the
  // thread's columns are one to the left.
  int64_t first = 0;
  int count = 0;
  bool left = false;

  __device__ TileColumns(const Tiling<Kind>& tiling, const unsigned& index) : tiling(tiling), index(index) {
    if constexpr (Kind::straddles) {
      const Arguments<typename Kind::T>& args = tiling.args;
      const auto of = tiling.begin_of(index);
      first = of.row * args.inner + of.column;
      count = static_cast<int>(min(args.inner - of.column, int64_t(straddled_columns(tiling.across))));
      left = ((of.row * args.n + tiling.begin + tiling.y) * args.inner + of.column) & 1;
    }
  }
  // The column of element e of the thread's accesses.
  __device__ int column_of(int e) const {
    const int across = tiling.across, x = tiling.x;
    if (Kind::straddles && left) return e == 0 ? max(across + x - 1, across) : x;
    return e * across + x;
  }
  // Whether element e is in one of the tile's columns. Where accesses straddle columns, elements at the tile's ends may
  // lie outside of it.
  __device__ bool is_own(int e) const {
    const int at = tiling.x * Kind::width + e;
    return !Kind::straddles || (at >= left && at - left < count);
  }
};

}  // namespace jaxsoft::cuda
