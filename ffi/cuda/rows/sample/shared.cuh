// What the threads of a block share.
#pragma once

#include "row.cuh"

namespace jaxsoft::cuda {

// Those elements of a row of which the first histogram does not tell whether the filters leave them.
struct Bracket {
  static constexpr uint32_t no_bin = ~0u;
  uint32_t begin, end;   // the bins in which top-p ends; elements of bins before these are left by it
  uint32_t last;         // the bin in which top-k ends; no_bin where it leaves all that are valid
  uint32_t before_last;  // the number of elements in the bins before `last`
  uint32_t in_last;      // the number of elements in that bin
  float mass;            // about that of all that top-k leaves
  uint32_t count;        // of candidates: elements of the bins [begin, end) and of the last bin
  uint32_t own;          // candidates of this block

  __device__ bool is_candidate(uint32_t bin) const { return (bin >= begin && bin < end) || bin == last; }
};

// Masses that many threads add to. They are added in two words, as shared memory has atomic additions of 32 bits. There
// is room for as many masses as there are candidates.
template <int size>
struct Masses {
  static constexpr int half = SampleCode::octaves / 2;
  static_assert(Mass(SampleCode::room) << half <= ~0u);
  uint32_t high[size], low[size];

  __device__ void clear(int i) { high[i] = low[i] = 0; }
  __device__ void add(int i, Mass mass) {
    atomicAdd(&high[i], static_cast<uint32_t>(mass >> half));
    atomicAdd(&low[i], static_cast<uint32_t>(mass) & ((1u << half) - 1));
  }
  __device__ Mass operator[](int i) const { return (Mass(high[i]) << half) + low[i]; }
};

// The warp's range in which the token is, and at which mass; the mass before the range, and that of the whole row.
struct Range {
  int warp;
  Mass target, before, all;
};

// The number and the mass of a block's elements from the threshold on, and the mass of all its elements. The masses are
// not added up where top-p is not of the mass of all elements.
struct FewOfBlock {
  Mass count, above, total;
};

// The elements from the threshold on, each with its mass; what it and the greater ones are together; and those that are
// left.
struct Few {
  ulonglong2 elements[SampleCode::most_few], left[SampleCode::most_few];
  Mass until[SampleCode::most_few];
};

// The counts of all blocks together, and those that the blocks send for this block's part of the bins, one block's
// after another's.
struct CountsOfRow {
  static constexpr unsigned quads = SampleCode::bins / 4;
  // Four counts each: those of every block but the last, which has what is left, and of one block.
  __device__ static unsigned quads_of_block(unsigned blocks) { return small_quotient(quads + blocks - 1, blocks); }
  __device__ static unsigned quads_of_block(unsigned block, unsigned blocks) {
    const unsigned part = quads_of_block(blocks);
    return min(part, quads - block * part);
  }

  alignas(16) uint32_t all[SampleCode::bins];
  alignas(16) uint32_t sent[SampleCode::bins + 4 * SampleCode::most_blocks];
};

// Of a draw from one read of a row: see values.cuh.
struct ByValue {
  static constexpr uint32_t room = SampleCode::value_room;
  ulonglong2 list[room];  // elements that are not counted: their keys, and their masses
  uint32_t listed;        // as many
  // The end of top-p: the value, the mass of what is greater, and the group of the list in which it is, or -1. In the
  // list it is the element of the last index. Else the elements that equal it are counted in each section, and those of
  // them that are left, which have this mass.
  float end;
  Mass before;
  int in_list, last;
  uint32_t equal[SampleCode::value_sections], equal_left[SampleCode::value_sections];
  Mass equal_mass[SampleCode::value_sections];
  static constexpr int groups = 4, sums_in_all = groups + SampleCode::value_sections;
  Masses<sums_in_all> sums;  // of the groups of the list, and of those of its elements in each section that are left
};

struct SampleShared {
  // The first of all, as it follows the slots: where values are counted, the counts are in both.
  union {
    Key keys[SampleCode::room];      // of the block's candidates; in the first block of a cluster then of all
    Mass sums[SampleCode::threads];  // where there is no room for the candidates: a bin for each thread
    CountsOfRow row;                 // before there are keys
    uint32_t more_values[SampleCode::value_memory / 4 - SampleCode::value_slots * SampleCode::threads * 4];
  };

  static constexpr int most_warps = SampleCode::most_blocks * SampleCode::warps;
  // The place of a warp of the cluster in the tables: each lane has as many warps that follow each other, and the
  // lanes' first ones lie side by side. of_lane is a power of two, as it is for clusters of 1, 2, 3, 4, 8 and 16
  // blocks.
  __device__ static int place_of_warp(int warp, int of_lane) {
    return (warp & (of_lane - 1)) * 32 + (warp >> (__ffs(of_lane) - 1));
  }

  union {
    alignas(16) uint32_t counts[SampleCode::bins + 1];  // of the block's elements; the last one of those without a bin
    Few few_elements;
    Masses<SampleCode::threads> bins;   // of candidates, when all blocks are done with the counts: one for each thread
  };
  // For sums and scans of the block. Those that follow each other without a barrier have places of their own.
  Mass warps[4][SampleCode::warps];
  float float_warps[SampleCode::warps];
  uint32_t count_warps[SampleCode::warps];
  // In the first block of a cluster, for each warp of the cluster: the mass of its elements that are certain to be left
  // by all filters; by top-k and top-p; and by top-k alone. The first two are without candidates, and the last without
  // those of the bin in which top-k ends.
  Mass left[most_warps], above[most_warps], total[most_warps];
  Masses<most_warps> candidates;  // the mass of the candidates that are left
  alignas(16) uint32_t groups[SampleCode::groups];  // the order of each one's largest element
  uint32_t top, threshold;  // the orders of the block's largest element, and of its threshold
  alignas(16) uint32_t tops[SampleCode::most_blocks], thresholds[SampleCode::most_blocks];  // those of all blocks
  FewOfBlock few_of_block[SampleCode::most_blocks];
  uint32_t candidates_of_block[SampleCode::most_blocks];
  Bracket bracket;
  // Each counts the bytes of one exchange. Those of the last two come to the first block alone, which learns only later
  // how many they are.
  Barrier tops_sent, few_sent, counts_sent, sums_sent, candidates_sent, few_keys_sent, totals_sent;
  uint32_t placed_few, placed;  // elements from the threshold on, and candidates, of the block that have a place
  Range range;
  Key found;        // what one thread or warp has found for all
  Mass found_rest;
  uint32_t found_count;
  Key few[SampleCode::few];
  union {
    // Of the elements from the threshold on, in the first block, which has room for each.
    Key few_keys[SampleCode::few_room];
    ByValue by_value;
  };
};

// Prepares the barriers of the exchanges between several blocks. All threads of the block call it, and the blocks may
// send after wait_for_cluster().
__device__ inline void start_exchanges(unsigned block, unsigned blocks, SampleShared& shared) {
  if constexpr (kHopperCode) {
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        shared.tops_sent.init(1), shared.few_sent.init(1), shared.counts_sent.init(1), shared.sums_sent.init(1);
        shared.candidates_sent.init(1), shared.few_keys_sent.init(1), shared.totals_sent.init(1);
        show_barriers();
        shared.tops_sent.arrive_expecting(blocks * 2 * sizeof(uint32_t));
        shared.few_sent.arrive_expecting(blocks * sizeof(FewOfBlock));
        const unsigned own = CountsOfRow::quads_of_block(block, blocks);
        shared.counts_sent.arrive_expecting(own * blocks * sizeof(uint4));
        shared.sums_sent.arrive_expecting((CountsOfRow::quads - own) * sizeof(uint4));
        shared.candidates_sent.arrive_expecting(blocks * sizeof(uint32_t));
      }
      __syncwarp();
    }
    arrive_at_cluster();
  }
}

// So much and the fewest slots have room twice in the shared memory of a multiprocessor of Hopper, and once in that of
// any GPU from Ampere on.
static_assert(sizeof(SampleShared) + SampleCode::ring * SampleCode::threads * 16 <= 99 << 10);

}  // namespace jaxsoft::cuda
