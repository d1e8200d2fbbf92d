// The sizes of the top-k kernels: those that their code is compiled with, and those that a launch is chosen by.
//
// All of them were chosen on an H200 in November 2026. Where no reason is given, no gain was recorded for the number.
#pragma once

namespace jaxsoft::cuda {

// The sizes in the kernels' code. They are the same for every GPU.
struct TopKCode {
  static constexpr int threads = 512;          // of a block, at most
  static constexpr int blocks = 2;             // that a multiprocessor should hold
  static constexpr int tile_packs = 4;         // of a thread in a tile
  static constexpr int gathered = 448;         // keys in the buffer from which on they are cut, or 2 k if that is more
  static constexpr int ranked_of_part = 192;   // up to so many are put in order without being cut before
  static constexpr int ranked_of_row = 128;    // the same of a row that is not split: other blocks have work for the
                                               // time of a cut
  static constexpr int least_spare = 4;        // a search for the k largest ends when it has found up to k / 4 more, or
                                               // up to so many: it is not worth while to tell them apart
  static constexpr int merge_threads = 1024;   // of a block that merges the parts of a row, at most
  static constexpr int least_merge_threads = 128;
};

// The sizes that a launch is chosen by, on the host: one row for each kind of GPU.
struct TopKTuning {
  int major;                 // the row is for compute capabilities from `major`.0 on, up to the next row's
  bool overlaps;             // whether the merging launch can begin while the one before it still runs
  int blocks_at_once = TopKCode::blocks;  // for each multiprocessor: fewer rows than blocks are split
  int buffer = 2048;         // keys in a block's buffer. A part of fewer packs than k, which is 256 at most, puts all
                             // elements of these packs there, 8 of each at most
  int merged = 4096;         // keys of all parts of a row, at most
  int few_parts = 16;        // a row has more parts than this only where each of them has `least_tiles` tiles
  int least_tiles = 2;
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
