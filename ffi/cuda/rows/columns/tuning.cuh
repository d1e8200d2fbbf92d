// The sizes of the columns kernel: those that its code is compiled with, and those that a tile is chosen by.
//
// All of them were chosen on an H200 in November 2026, together; what the kernel reaches with them is in the
// benchmarks' record. No gain was recorded for a single one.
#pragma once

namespace jaxsoft::cuda {

// The sizes in the kernel's code. They are the same for every GPU.
struct ColumnsCode {
  static constexpr int most_threads = 256;  // of a block
  // Blocks of `most_threads` that a multiprocessor should hold; of smaller blocks it holds more. While one of them
  // reduces, others read and write.
  template <class T> static constexpr int blocks_at_once = sizeof(T) == 8 ? 2 : 3;
  static constexpr int most_blocks = 16;       // that share a tile
  static constexpr int packs_in_flight = 2;    // that a thread reads from shared memory before it uses the first
  static constexpr int elements_in_flight = 8; // the same from device memory, of single elements of 16 bits
  // Terms of a plain sum before it is added to a compensated one. (Sums of 16 bits are not compensated.)
  template <class T> static constexpr int terms = sizeof(T) == 2 ? 16 : 32 / sizeof(T);
  static constexpr int log_helpers = 3;        // 2^3 lanes at most finish a column together
};

// The sizes that a tile is chosen by, on the host: one row for each kind of GPU.
struct ColumnsTuning {
  int major;                       // the row is for compute capabilities from `major`.0 on, up to the next row's
  int most_cluster_blocks;         // blocks that can exchange what they have reduced; 1: there are no clusters
  int tile_bytes = 128;            // breadth of a tile, a line of the cache; twice that where rows are not a multiple
                                   // of it, as neighbouring tiles then share lines
  int most_across = 64;            // accesses side by side, in a tile that is made broader as n is small
  int straddled_across = 32;       // the same where accesses straddle columns, if that takes fewer accesses a row
  int short_bytes = 32 * 1024;     // a tile up to here is made broader, or has half of the threads
  int held_bytes = 64 * 1024;      // what a block should hold of a tile; where it is more, more blocks share n
  int least_rows = 4;              // where tiles are few, more blocks share n as long as a thread has so many rows
  int few_tiles = 4;               // for each cluster: up to here tiles are distributed in advance, without a counter
};
constexpr ColumnsTuning kColumnsTuning[] = {
    {/*major=*/8, /*most_cluster_blocks=*/1},                             // Ampere and Ada: not measured
    {/*major=*/9, /*most_cluster_blocks=*/ColumnsCode::most_blocks},      // Hopper: measured on an H200, 2026-11
    {/*major=*/10, /*most_cluster_blocks=*/ColumnsCode::most_blocks},     // Blackwell: as Hopper, not measured
};

inline const ColumnsTuning& columns_tuning(int major) {
  const ColumnsTuning* found = kColumnsTuning;
  for (const ColumnsTuning& row : kColumnsTuning)
    if (row.major <= major) found = &row;
  return *found;
}

}  // namespace jaxsoft::cuda
