// The sizes of the sampling kernel.
#pragma once

#include <cstdint>

namespace jaxsoft::cuda {

struct SampleCode {
  static constexpr int threads = 512;
  static constexpr int warps = threads / 32;
  static constexpr int blocks = 2;          // that a multiprocessor should hold
  static constexpr int most_blocks = 16;    // of a cluster
  static constexpr int shared_slots = 8;    // packs of a thread that stay in shared memory, if two blocks share it
  static constexpr int most_slots = 20;     // as many if a multiprocessor has one block
  static constexpr int batch = 3;           // packs of a thread in flight, where not all of them stay
  static constexpr int ring = 2 * batch;    // slots for these, and for those that it goes over
  static constexpr int octaves = 40;        // weights below 2^-octaves of the largest count as 0
  static constexpr int bins = 2048;         // of the first histogram, over these octaves
  static constexpr float octaves_of_bin = float(octaves) / (bins - 1);  // the last bin has what counts as 0, too
  static constexpr int room = 3072;         // candidates that the first block of a cluster can hold
  static constexpr int few = 32;            // candidates that one warp puts in order
  static constexpr int groups = 128;        // of threads of a block, for the threshold of the short way
  static constexpr int rank_by_warps = 6;   // the greatest rank of a threshold for which warps are the groups
  static constexpr uint32_t most_sought = 100;    // elements that the threshold must leave
  static constexpr uint32_t sought_by_mass = 64;  // as many where top-p is of the mass of all elements
  static constexpr int most_few = 256;      // elements that the short way puts in order
  static constexpr int few_room = 512;      // as many that the first block can hold, of all blocks
  // Where the values of bf16 are counted, in one read of a row:
  static constexpr int values = 2048;       // of each sign
  static constexpr int value_sections = 8;  // of the row, each with counts of its own
  static constexpr int value_memory = 2 * values * value_sections * 2;  // bytes, for counts of 16 bits
  static constexpr int value_ring = batch;  // slots for packs in flight
  static constexpr int value_slots = shared_slots - value_ring;  // those that counts are in
  static constexpr int value_packs = 0xffff / (threads / value_sections * 8);  // of a thread, so that counts have room
  static constexpr int value_room = 256;    // elements that are listed, as their values have no counts
};

}  // namespace jaxsoft::cuda
