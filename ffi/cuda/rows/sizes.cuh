// The sizes that the row kernels are compiled with: threads of a block, packs in flight, slots of a ring. The plan
// (plan.cuh) computes with them too. They were chosen by measurements on an H200, except where a comment says what they
// follow from. No other GPU has been measured. A pack is 16 bytes.
#pragma once

#include <cstdint>

namespace jaxsoft::cuda {

// A row in the registers of lanes, a warp or a block (register_row.cuh).
struct RegisterRow {
  // Threads of a block whose rows take a warp or a part of one each. The block has several rows.
  static constexpr int short_threads = 128;
  // The most threads of a block. With extras, more registers for each thread are worth more than more threads.
  static constexpr int most_threads(bool extras, int packs) { return extras && packs > 4 ? 256 : 1024; }
  // The least number of blocks for which a multiprocessor must have registers.
  static constexpr int blocks(bool extras, int packs) { return most_threads(extras, packs) == 256 ? 3 : 1; }
};

// A row that is read twice (tiled.cuh, split.cuh).
struct Tiled {
  // Threads of a block. Without a reduction, smaller blocks are faster.
  static constexpr int threads(bool reduces) { return reduces ? 512 : 128; }
  // Packs that a thread reads before it uses the first.
  static constexpr int in_flight(bool reduces, bool extras) { return reduces || extras ? 4 : 2; }
  // The least number of blocks of so many threads for which a multiprocessor must have registers. `most_threads` is the
  // most that a multiprocessor can have. `wide`: whether rows are written, or have sums beside their state.
  static constexpr int blocks(int element_bytes, bool reduces, bool wide, bool extras, int most_threads) {
    if (element_bytes == 8) return 1;
    if (!reduces) return most_threads / threads(reduces) / (extras ? 2 : 1);
    return extras ? 1 : wide ? 2 : 3;
  }
  // Sums beside a state take a block's threads long to combine. So a row has fewer threads, as long as all rows
  // together have this number for each multiprocessor.
  static constexpr int64_t enough_threads = 896;
};

// Many rows that are read only once, as nothing but their state is wanted (tiled.cuh). Small blocks wait less for their
// own threads, if there are enough of them.
struct Streamed {
  static constexpr int most_threads = 256, least_threads = 128;  // of a block
  static constexpr int resident = 1024;  // threads for which a multiprocessor must have registers
  static int threads(int64_t rows, int processors) {
    return rows * least_threads >= int64_t(2) * resident * processors ? least_threads : most_threads;
  }
  // Sums beside a state take a block's threads long to combine, so a thread has at least 31 packs, or the row a single
  // warp. A row of up to 64 KB has one, too, if the rows fill the GPU three times: 2 to 3 % faster where they do, and
  // up to 9 % slower where the last warps leave much of the GPU idle.
  static int threads_of_sums(int64_t rows, int64_t packs, int processors) {
    if (packs <= 4096 && rows * 32 >= int64_t(3) * resident * processors) return 32;
    int threads = most_threads;
    while (threads > 32 && packs < int64_t(31) * threads) threads /= 2;
    return threads;
  }
  static constexpr int64_t never_split = 8192;  // packs: rows up to this length are not split
  // Whether the blocks that run last nearly fill the GPU, as those before them do.
  static bool even(int64_t rows, int threads, int processors) {
    const int64_t at_once = int64_t(resident) / threads * processors, turns = (rows + at_once - 1) / at_once;
    return 10 * rows >= 9 * turns * at_once;
  }
};

// A row that is split over blocks in several launches (split.cuh).
struct Splitting {
  static constexpr int64_t few_parts = 512;  // a kernel of its own merges more parts of a row than that
  static constexpr int merge_threads = 512;  // of its blocks
  static constexpr int finish_threads = 256;  // of a block that merges the parts where no rows are written
};

// A row in the registers of the blocks of one cooperative launch (grid_registers.cuh).
struct GridRegisters {
  static constexpr int threads = 512;  // the most threads of a block
  static constexpr int blocks = 2;     // of each multiprocessor
};

// Rows without a reduction, as one array (flat.cuh).
struct Flat {
  static constexpr int threads = 128;           // of a block
  static constexpr int each = 8;                // packs of a thread
  static constexpr int packs = threads * each;  // of a block
};

// A row in the registers of a cluster (clustered.cuh).
struct Clustered {
  static constexpr int most_blocks = 16;  // of a cluster: the most that Hopper allows
  static constexpr int threads = 512;     // the most threads of a block
  // The launch bounds. Of aligned rows there may be many: two blocks of 576 threads leave 56 registers for a thread, so
  // that a multiprocessor has room for three blocks of up to 384 threads.
  static constexpr int bound(bool aligned) { return aligned ? 576 : threads; }
  static constexpr int blocks(bool aligned) { return aligned ? 2 : 1; }
};

// A row in the shared memory of a cluster (ring.cuh).
struct Ring {
  static constexpr int teams = 3;            // groups of threads that take turns with the rows
  static constexpr int consumers = 256;      // threads of a team; one warp more in a block is the producer
  static constexpr int threads = teams * consumers + 32;
  static constexpr int announcements = 32;   // more than the number of rows by which blocks of a cluster can be apart
  static constexpr int exchanges = 2 * teams;
  static constexpr int first_rows = 2;  // of a cluster: the cache is asked for them at the start
  // While it waits for a free slot, the producer has asked the cache for what comes into so many slots. One of them
  // was .5 to 1.5 % slower, three and four up to 1 and 3 % where parts are long.
  static constexpr int ahead = 2;
  // If a part has so many slots, the next row is taken from the counter when only `slots_after_announcement` of them
  // are still to be filled. This was .3 to 1.5 % faster, and most where parts are long.
  static constexpr int delay_slots = 3, slots_after_announcement = 2;
  static constexpr int most_blocks = 16;     // of a cluster: the most that Hopper allows
  static constexpr int few_blocks = 8;       // of a cluster, as long as a part is not too long for them
  static constexpr int64_t least_half = 3584;  // packs of a part: two blocks that have as many each replace one
  static constexpr int few_rows = 8;         // for each cluster: up to this number, rows are distributed in advance
  static constexpr int bytes = 208 * 1024;   // of all slots, out of the 227 KB of shared memory that a block can have
  // Packs of a slot: of each operand for each thread of a team, and of each operand.
  static constexpr int packs_each(int operands) { return operands == 1 ? 4 : 2; }
  static constexpr int slot_packs(int operands) { return packs_each(operands) * consumers; }
  static constexpr int slots(int operands) { return bytes / (slot_packs(operands) * operands * 16); }
  // Packs of each operand that a block can hold.
  static constexpr int most_packs(int operands) { return slots(operands) * slot_packs(operands); }
};

// A row in the shared memory of all blocks (grid_ring.cuh).
struct GridRing {
  static constexpr int team = 128;         // threads of a team
  static constexpr int warps = team / 32;  // of a team
  static constexpr int reducers = 4;       // teams that reduce
  static constexpr int pollers = 2;        // warps that wait for others; one where a row has many chunks in a block
  static constexpr int slots = 14, slot_bytes = 16 * 1024;
  static constexpr int most_slots = slots - 1;  // that one row may take
  static constexpr int at_once = 4;  // packs of all operands that a reducer's thread reads before it uses the first
  static constexpr int looks = 5;    // packets that a lane of a poller looks at together
  static constexpr int slot_packs(int operands) { return slot_bytes / 16 / operands; }  // of each operand
  // Teams that write. One is fast enough for f32 with one operand, and spreads what is written over time.
  static constexpr int writers(int operands, int element_bytes) { return operands == 1 && element_bytes == 4 ? 1 : 2; }
};

}  // namespace jaxsoft::cuda
