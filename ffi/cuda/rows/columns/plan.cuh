// The choice of a tile, on the host: how many columns it has, and how many threads and blocks share it.
#pragma once

#include <algorithm>

#include "../../devices.cuh"
#include "tile.cuh"

namespace jaxsoft::cuda {

// The current device, with its shared memory.
struct ColumnsDevice : Device {
  // Bytes of shared memory: a multiprocessor's, a block's at most, and those that the system takes of each block's.
  int memory = 0, of_block = 0, reserved = 0;
  cudaError_t read() {
    if (auto e = Device::read()) return e;
    if (auto e = cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal)) return e;
    if (auto e = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, ordinal)) return e;
    return cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  }
  // Bytes for each of `share` blocks on a multiprocessor. Memory is given in units of 128 bytes.
  int shared(int share) const { return std::min(of_block, memory / share / 128 * 128 - reserved); }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Kind>
struct TilePlanner {
  using T = typename Kind::T;
  static constexpr int width = Kind::width;
  static constexpr int64_t bytes = Kind::access_bytes * Kind::operands;  // of an access, in all operands
  static constexpr int most_threads = ColumnsCode::most_threads;
  const Arguments<T>& args;
  const ColumnsDevice& device;
  const ColumnsTuning& tuning;

  // The tile for a device whose clusters have up to `most_blocks` blocks.
  Tile choose(unsigned most_blocks) const {
    const int across = choose_across();
    // A short tile is given to few threads, so that each has some rows.
    const int threads = is_short(across) ? most_threads / 2 : most_threads;
    const unsigned blocks = choose_blocks(across, threads / across, most_blocks);
    const int64_t of_row = accesses_of_row<width, Kind::straddles>(args.inner, across);
    const Divider row = accesses(across) <= INT32_MAX ? Divider(static_cast<uint32_t>(of_row)) : Divider();
    return with_slots({threads, across, 0, blocks, 0, row});
  }
  // How many tiles there are.
  int64_t tiles(int across) const { return divide_up(accesses(across), across); }

 private:
  int64_t accesses(int across) const {  // of equal position in n
    return args.rows * accesses_of_row<width, Kind::straddles>(args.inner, across);
  }
  bool is_short(int across) const { return across * bytes * args.n <= tuning.short_bytes; }

  // Accesses side by side: a line of the cache or two. Fewer where there are not so many; more where n is small, as
  // long as there are tiles for all multiprocessors.
  int choose_across() const {
    const int lines = args.inner * sizeof(T) % tuning.tile_bytes == 0 ? 1 : 2;
    int across = std::min(lines * tuning.tile_bytes / Kind::access_bytes, tuning.most_across);
    if constexpr (Kind::straddles) {
      const int other = tuning.straddled_across;
      if (accesses(other) < accesses(across)) across = other;
    } else {
      while (across > 1 && across / 2 >= accesses(across)) across /= 2;
      auto enough = [&](int across) {
        return accesses(across) >= int64_t(across) * ColumnsCode::blocks_at_once<T> * device.processors;
      };
      while (across < tuning.most_across && is_short(2 * across) && enough(2 * across)) across *= 2;
    }
    return across;
  }

  // Blocks that share n: more where one would have too much of a tile to hold, or where there are too few tiles for all
  // multiprocessors. `down` of a block's threads share a column.
  unsigned choose_blocks(int across, int down, unsigned most) const {
    unsigned blocks = 1;
    auto too_much = [&] { return divide_up(args.n, blocks) * across * bytes > tuning.held_bytes; };
    auto too_few = [&] {
      return tiles(across) * blocks <= device.processors && divide_up(args.n, blocks) >= tuning.least_rows * down;
    };
    while (blocks < most && (too_much() || too_few())) blocks *= 2;
    return blocks;
  }

  // As many slots as a block's part of n needs, and as many blocks on a multiprocessor as have room for them. Where not
  // even one has, the part goes through fewer slots in chunks.
  Tile with_slots(Tile tile) const {
    const int down = tile.threads / tile.across;
    const int64_t rows = divide_up(args.n, tile.blocks), slots = divide_up(rows, down);
    const int64_t unused = (slots * down - rows) * tile.across * Kind::access_bytes;  // of the last slots, at their end
    const int64_t fixed = TileLayout<Kind>(tile).end;  // bytes before the slots, of which `tile` has none yet
    auto slots_for = [&](int share) {
      const int64_t room = device.shared(share) - fixed;
      return room >= slots * tile.threads * bytes - unused ? slots : room / (tile.threads * bytes);
    };
    const int most_share = ColumnsCode::blocks_at_once<T> * most_threads / tile.threads;
    int share = most_share;
    while (Kind::reduces && share > 1 && slots_for(share) < slots) share--;
    if (slots_for(share) < slots) share = most_share;
    tile.share = share;
    tile.slots = static_cast<int>(std::max<int64_t>(1, slots_for(share)));
    return tile;
  }
};

}  // namespace jaxsoft::cuda
