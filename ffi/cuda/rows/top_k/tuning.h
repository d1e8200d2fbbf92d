// The sizes of the top-k kernels: those that their code is compiled with, and those that a launch is chosen by.
//
// All of them were chosen on an H200 in November 2026. Where no reason is given, no gain was recorded for the number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../anywhere.h"

namespace jaxsoft::cuda {

// A row in the registers of lanes (short.cuh). They form four groups of elements each, of which there should be two for
// each of the k largest at least, to tell those apart.
struct ShortRows {
  // Of a block. Small blocks leave less to do at the end, when not all multiprocessors are busy: 65536 rows of 256 bf16
  // took 17.9 us with 64 threads, 18.1 with 128 and 18.4 with 256. Rows in four lanes are soon done, and starting
  // blocks takes time then: 32768 rows of 128 bf16 took 7.7 us with 128 threads and 7.8 us with 256.
  JAXSOFT_ANYWHERE static constexpr int threads(int lanes) { return lanes == 4 ? 128 : 64; }
  // Packs of a lane: 32 elements, of each of which a word has a bit. Four lanes have no more than four packs: 32768
  // rows of 128 f32 took 9.9 us with four packs in each of eight lanes, and 11.2 us with eight packs in each of four.
  static constexpr int most_packs(int element_bytes) { return element_bytes == 2 ? 4 : 8; }
  static constexpr int most_of_four = 4;
  // Blocks that a multiprocessor should hold, as many as there are without spilling more than a few registers. With
  // more, 65536 rows of 256 f32 took 3 % longer.
  static constexpr int blocks(int lanes, int packs) {
    return (packs == 8 ? 1152 : packs == 4 ? 1280 : 1536) / threads(lanes);
  }
  // Keys of a lane whose places are counted at the same time, so that all lanes together have 16 at least, since mostly
  // hardly more than 8 are found; and keys that they are compared with at the same time.
  JAXSOFT_ANYWHERE static constexpr int compared_at_once(int lanes) { return lanes == 4 ? 4 : 2; }
  static constexpr int keys_at_once = 4;
  JAXSOFT_ANYWHERE static constexpr int most_k(int lanes) { return 2 * lanes; }
  // Keys of a row: mostly hardly more than k are found.
  JAXSOFT_ANYWHERE static constexpr int room(int lanes) { return lanes < 32 ? 4 * lanes + 16 : 128; }
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
  static constexpr int ranked = 192;           // the most keys that are put in order without being cut before,
  static constexpr int ranked_of_warp = 64;    // and by a warp
  static constexpr int most_groups = 32;       // of a lane: where it has more tiles, several are a group
  // Groups of a warp of a block that reach the threshold. If there are more, the search is another.
  static constexpr int most_found = 128;
  static constexpr int most_compared = 8;      // maxima of a lane that a warp finds its threshold from
  // A search for the k largest ends when it has found up to k / spare_part more, or up to least_spare more: it is not
  // worth while to tell them apart.
  static constexpr int spare_part = 4;
  static constexpr int least_spare = 4;
  // Keys of a row that are found, by a warp and by a block.
  static constexpr int room_of_warp(int k) { return std::max(192, 3 * k); }
  static constexpr int room_of_block(int k) { return std::max(1536, 3 * k); }
  static constexpr int merge_threads = 1024;   // of a block that merges the parts of a row, at most
  static constexpr int least_merge_threads = 128;
  static constexpr int key_bytes = 8, state_bytes = 12;  // of a key, and of the state of a part of a row
};

// A row by a cluster of blocks (by_clusters.cuh).
struct TopKClusters {
  static constexpr int threads = 512;  // of a block, at most
  static constexpr int blocks = 2;     // that a multiprocessor should hold
  static constexpr int most_blocks = 8;  // of a cluster, which every GPU with clusters can run
  static constexpr int most_warps = most_blocks * threads / 32;
  static constexpr int most_slots = 512;    // two at least for each of the k largest
  static constexpr int slots_for_each = 4;  // of the k largest, if there are not too many then
  // Keys that a block sends to the first one: of a row in no order, k / blocks or so.
  JAXSOFT_ANYWHERE static constexpr int room(int k) { return k < 86 ? 128 : k + k / 2; }
  static constexpr int most_packs = 64;  // of a thread: a longer row had better be split over more blocks
  // Dynamic shared memory of a block: at most, and mostly no more than this. How many clusters a GPU can hold is asked
  // for these two sizes.
  static constexpr int most_memory = 160 << 10;
  static constexpr int usual_memory = 48 << 10;
};

// Where rows lie over several devices (exchange.cu): a part of a row has more elements than this, as kernels for short
// rows write no candidates; and so many candidates of a row a device may get from all together.
constexpr int64_t kShortPart = 1024, kMostReceived = 2048;

// The sizes of a launch of blocks that take a row, or a part of one, each.
struct TopKSizes {
  int groups, tiles;  // the groups of a lane, and the tiles that are one
  int room;           // keys that are found
};

// A row may have a cluster of so many blocks of so many warps where the launch has at most `most` blocks for each
// multiprocessor. The first of these choices that fits is taken. Rows of 128256 f32 took, for a k of 64, in us:
//
//     rows   8 x 16 warps   8 x 8   4 x 16   4 x 8   2 x 16   split, in two launches
//        8            8.7     9.1     10.0    11.1     13.0                     12.3
//       32           16.1    12.5     13.9    13.2     13.6                     17.3
//       64           28.0    19.0     23.6    16.7     14.1                     17.7
//      132                   37.9             34.0     26.3                     30.1
struct ClusterChoice {
  int blocks, warps;
  float most;
};
constexpr ClusterChoice kClusterChoices[] = {{8, 16, 0.5}, {8, 8, 2.5}, {2, 16, 2}};

// The sizes that a launch is chosen by, on the host: one row for each kind of GPU.
struct TopKTuning {
  int major;                 // the row is for compute capabilities from `major`.0 on, up to the next row's
  bool overlaps;             // whether the merging launch can begin while the one before it still runs
  int blocks_at_once = 3;    // for each multiprocessor: fewer rows than blocks are split
  int merged = 4096;         // keys of all parts of a row, at most
  int few_parts = 16;        // a row has more parts than this only where each of them has `least_tiles` tiles
  int least_tiles = 2;
  int64_t row_packs = 4096;  // the longest rows that take a warp each,
  int waves = 4;             // if there are rows for this many waves of warps,
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
