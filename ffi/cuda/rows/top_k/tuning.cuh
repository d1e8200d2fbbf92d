// The sizes of the top-k kernels: those that their code is compiled with, and those that a launch is chosen by.
//
// All of them were chosen on an H200 in November 2026. Where no reason is given, no gain was recorded for the number.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jaxsoft::cuda {

// A row in the registers of lanes (short.cuh). They form four groups of elements each, of which there should be two for
// each of the k largest at least, to tell those apart.
struct ShortRows {
  static constexpr int threads = 128;  // of a block
  // Packs of a lane: 32 elements, of each of which a word has a bit.
  static constexpr int most_packs(int element_bytes) { return element_bytes == 2 ? 4 : 8; }
  __host__ __device__ static constexpr int most_k(int lanes) { return 2 * lanes; }
  // Keys of a row: mostly hardly more than k are found.
  __host__ __device__ static constexpr int room(int lanes) { return lanes < 32 ? 4 * lanes + 16 : 128; }
};

// The sizes in the code of the kernels that read longer rows. They are the same for every GPU.
struct TopKCode {
  static constexpr int warps = 8;              // of a block, at most
  static constexpr int threads = 32 * warps;
  static constexpr int blocks = 4;             // that a multiprocessor should hold
  static constexpr int rows = 4;               // of a block whose warps take a row each
  static constexpr int row_blocks = 7;         // of these blocks that a multiprocessor should hold
  static constexpr int tile_packs = 4;         // of a lane in a tile
  static constexpr int warp_packs = 32 * tile_packs;  // of a warp in a tile
  static constexpr int ranked = 192;           // up to so many keys are put in order without being cut before,
  static constexpr int ranked_of_warp = 64;    // and by a warp
  static constexpr int most_groups = 32;       // of a lane: where it has more tiles, several are a group
  static constexpr int most_found = 128;       // groups of a warp of a block that reach the bar, or the search is another
  static constexpr int least_spare = 4;        // a search for the k largest ends when it has found up to k / 4 more, or
                                               // up to so many: it is not worth while to tell them apart
  // Keys of a row that are found, by a warp and by a block.
  static constexpr int room_of_warp(int k) { return std::max(192, 3 * k); }
  static constexpr int room_of_block(int k) { return std::max(1536, 3 * k); }
  static constexpr int merge_threads = 1024;   // of a block that merges the parts of a row, at most
  static constexpr int least_merge_threads = 128;
};

// The sizes of a launch of blocks that take a row, or a part of one, each.
struct TopKSizes {
  int groups, tiles;  // the groups of a lane, and the tiles that are one
  int room;           // keys that are found
};

// The sizes that a launch is chosen by, on the host: one row for each kind of GPU.
struct TopKTuning {
  int major;                 // the row is for compute capabilities from `major`.0 on, up to the next row's
  bool overlaps;             // whether the merging launch can begin while the one before it still runs
  int blocks_at_once = 3;    // for each multiprocessor: fewer rows than blocks are split
  int merged = 4096;         // keys of all parts of a row, at most
  int few_parts = 16;        // a row has more parts than this only where each of them has `least_tiles` tiles
  int least_tiles = 2;
  int64_t row_packs = 4096;  // rows of at most so many packs take a warp each,
  int waves = 4;             // if there are rows for so many times the warps that run at once,
  int row_k = 128;           // and k is at most this
};
constexpr TopKTuning kTopKTuning[] = {
    {/*major=*/8, /*overlaps=*/false},  // Ampere and Ada: not measured
    {/*major=*/9, /*overlaps=*/true},   // Hopper: measured on an H200, 2026-11
    {/*major=*/10, /*overlaps=*/true},  // Blackwell: as Hopper, not measured
};

inline const TopKTuning& top_k_tuning(int major) {
  const TopKTuning* found = kTopKTuning;
  for (const TopKTuning& row : kTopKTuning)
    if (row.major <= major) found = &row;
  return *found;
}

}  // namespace jaxsoft::cuda
