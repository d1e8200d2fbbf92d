// The kernel for row operations over an axis that is not the last: arrays (rows, n, inner), reduced over n, without a
// transpose.
//
// A column is one of the rows * inner sets of n scores. A block takes a tile of neighbouring columns, 128 bytes wide or
// wider, so that what a warp reads is contiguous, and a part of n; a cluster of blocks has all of n. Every thread
// copies its accesses into shared memory and is the only one to read them again, to reduce and then to write: one read
// of device memory. Shared memory serves as a large register file here, and what it holds needs no unrolled code.
//
// Blocks are persistent, and take their next tile from a counter, as multiprocessors are not equally fast. While a
// thread writes what it holds of a tile, it copies its accesses of the next tile into their place, so that memory has
// something to read throughout; and several blocks share a multiprocessor, so that one reduces while others read and
// write.
//
// Parts of n that do not fit go through shared memory in chunks, twice: reduced, then read again and written.
//
// Where 16 bits are read and written, exp(x) itself is summed, so that no maximum has to be found first. Scores are
// seldom so large or small that f32 does not hold the sum; where they are, they are summed again, below their maximum.
#pragma once

#include "exchange.cuh"
#include "reduce.cuh"
#include "write.cuh"

namespace jaxsoft::cuda {

// The phases are members of small types that refer to the kernel's variables, and all of it is inlined.
template <template <class> class Op, class T, int width, bool straddles,
          class Kind = ColumnsKind<Op, T, width, straddles>>
__global__ void __launch_bounds__(ColumnsCode::most_threads, ColumnsCode::blocks_at_once<T>)
columns(const __grid_constant__ Arguments<T> args, const __grid_constant__ Tile tile,
        const __grid_constant__ TileLayout<Kind> layout, unsigned long long* counter) {
  extern __shared__ __align__(16) unsigned char tile_memory[];
  const SharedTile<Kind> shared(tile_memory, layout);
  const Tiling<Kind> tiling{args, tile};
  const Slots<Kind> slots{tiling, shared.slots};
  const Exchange<Kind> exchange{tiling, shared, layout, counter};

  exchange.open();
  unsigned index = tiling.first_tile();
  Place here = tiling.place(index, tiling.begin);  // the chunk that is in the slots, or on its way there
  slots.copy_all(here);
  unsigned next;
  for (unsigned turn = 0; tiling.exists(index); index = next, turn ^= 1) {
    const unsigned taken = exchange.take_tile();
    const TileColumns<Kind> tile_columns(tiling, index);

    // 1. Each group of threads reduces what it holds of the columns.
    if constexpr (Kind::reduces) {
      const int group = tiling.across < 32 ? tiling.thread / 32 : tiling.y;
      const bool leads = tiling.across >= 32 || tiling.thread % 32 < tiling.across;
      Reducer<Kind>{tiling, slots, shared, layout, tile_columns, group, leads, here}.reduce();
    }
    __syncthreads();

    // 2. What the groups, and the blocks of a cluster, have of a column is merged. All threads learn which tile
    // follows.
    exchange.begin(taken);
    if (counter && !exchange.clustered && tiling.thread == 0) shared.next_tile = taken + tiling.tiles_at_once;
    exchange.merge_groups(tile_columns);
    if constexpr (kHopperCode && Kind::reduces) {
      if (exchange.clustered) {
        shared.barrier.wait(turn);
        if (counter) next = shared.next_tile;
        exchange.merge_blocks(tile_columns);
      }
    }
    __syncthreads();
    if (!counter) next = index + tiling.tiles_at_once;
    else if (!exchange.clustered) next = shared.next_tile;
    if constexpr (kHopperCode)
      if (exchange.clustered) arrive_at_cluster();

    // 3. Each thread writes its results, and copies its part of the next tile.
    if constexpr (Kind::writes) Writer<Kind>{tiling, slots, tile_columns, shared.values, here}.write(next);
  }
  exchange.close();
}

}  // namespace jaxsoft::cuda
