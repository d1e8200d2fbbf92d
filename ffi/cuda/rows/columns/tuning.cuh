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

// The sizes that a tile is chosen by, on the host. No GPU but Hopper has been measured.
struct ColumnsTuning {
  // Blocks that can exchange what they have reduced, by the GPU's compute capability; 1: there are no clusters.
  static constexpr int most_cluster_blocks(int major) { return major >= 9 ? ColumnsCode::most_blocks : 1; }
  // Breadth of a tile, a line of the cache; twice that where rows are not a multiple of it, as neighbouring tiles then
  // share lines.
  static constexpr int tile_bytes = 128;
  static constexpr int most_across = 64;         // accesses side by side, in a tile made broader as n is small
  static constexpr int straddled_across = 32;    // as many where accesses straddle columns, if a row has fewer so
  static constexpr int short_bytes = 32 * 1024;  // a tile up to here is made broader, or has half of the threads
  static constexpr int held_bytes = 64 * 1024;   // of a tile, that a block should hold: else more blocks share n
  static constexpr int least_rows = 4;           // of a thread, where tiles are few and more blocks share n
  static constexpr int few_tiles = 4;            // for each cluster, that are distributed without a counter
};

}  // namespace jaxsoft::cuda
