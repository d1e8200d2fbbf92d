// The plan for a call: the row of the table that fits it, and the numbers with which the row's strategy is launched.
// This is host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "table.cuh"

namespace jaxsoft::cuda {

// A row is split into parts of equally many packs, but for its ends. This number is a multiple of a cache line's, so
// that blocks share no lines where rows begin with one.
struct Split {
  unsigned parts;
  int64_t packs;
  // Splits a row of `of_row` packs into at most `most` parts.
  Split(int64_t of_row, int64_t most) : packs(((of_row + most - 1) / most + line - 1) / line * line) {
    parts = static_cast<unsigned>((of_row + packs - 1) / packs);
  }
  static constexpr int line = 8;  // packs of a cache line
};

// A strategy and all that it takes to launch it.
struct Plan {
  int rule = -1;           // in the table; -1 if no kernel can serve the call
  int64_t packs = 0;       // of a row
  int blocks = 1;          // of a cluster, which is as many parts of a row: clustered, ring
  int threads = 0;         // of a block: split, tiled
  bool overlap = false;    // whether a launch may start while the one before still runs: split
  int processors = 0;      // multiprocessors of the GPU: grid_ring
  Split split{1, 1};       // split, grid_registers
};

// The most blocks of which each has at least 4 KB of a row. Rows below 256 KB take only half of the most, if all rows
// together have more than 256 blocks even so.
inline int blocks_of_cluster(const CallFacts& call, int most) {
  constexpr int64_t least_part = 256, large_part = 1024, enough_blocks = 256;
  int blocks = most;
  if (call.packs < most * large_part && call.rows * most / 2 > enough_blocks) blocks /= 2;
  while (blocks > 1 && call.packs < blocks * least_part) blocks /= 2;
  return blocks;
}

inline bool fit_clustered(const Rule& rule, const CallFacts& call, Plan& plan) {
  if (rule.most_rows == kNoLimit)  // many rows keep all multiprocessors busy, and small clusters wait less
    while (plan.blocks < rule.blocks && call.packs > plan.blocks * rule.most_part) plan.blocks *= 2;
  else
    plan.blocks = blocks_of_cluster(call, static_cast<int>(rule.blocks));
  const int64_t part = (call.packs + plan.blocks - 1) / plan.blocks;
  return plan.blocks > 1 && part >= rule.least_part && part <= rule.most_part;
}

inline bool fit_grid_registers(const Rule& rule, const CallFacts& call, Plan& plan) {
  const int64_t blocks = int64_t(GridRegisters::blocks) * call.processors;
  // A part of a GPU (MIG) may have room for fewer blocks than there are rows.
  if (call.rows > blocks || call.workspace < blocks * call.state) return false;
  plan.split = Split(call.packs, blocks / call.rows);
  return plan.split.packs <= GridRegisters::threads * rule.packs_a_thread;
}

inline bool fit_ring(const Rule& rule, const KernelFacts& kernel, const CallFacts& call, Plan& plan) {
  const int operands = static_cast<int>(kernel.operands);
  if (!call.vector || call.packs > int64_t(Ring::most_blocks) * Ring::most_packs(operands)) return false;
  // Smaller parts leave more room for the next rows, but a cluster's blocks wait for each other: two hardly do, and
  // sixteen do most.
  auto least_part = [&] { return plan.blocks == 1 ? Ring::least_half : rule.least_part; };
  if (rule.least_part)
    while (plan.blocks < Ring::few_blocks && call.packs >= 2 * plan.blocks * least_part()) plan.blocks *= 2;
  while (plan.blocks < Ring::most_blocks && call.packs > plan.blocks * rule.most_part) plan.blocks *= 2;
  return true;
}

// Whether all blocks together hold a row, with room for some of the next, and the workspace the packets of all rows.
inline bool fit_grid_ring(const KernelFacts& kernel, const CallFacts& call) {
  const int64_t chunks = call.packs / GridRing::slot_packs(static_cast<int>(kernel.operands)) + 1;
  return call.vector && chunks <= int64_t(GridRing::most_slots) * call.processors &&
         call.rows <= call.workspace / call.packet / std::min<int64_t>(chunks, call.processors);
}

inline bool fit_flat(const KernelFacts& kernel, const CallFacts& call) {
  return call.vector && call.first_aligned && call.n >= Flat::packs * 16 / int64_t(kernel.element) && call.n <= 1 << 30;
}

inline bool fit_split(const Rule& rule, const KernelFacts& kernel, const CallFacts& call, Plan& plan) {
  const bool reduces = kernel.kind != kElementwise;
  const int in_flight = Tiled::in_flight(reduces, kernel.form != kPlain);
  plan.threads = Tiled::threads(reduces);
  int64_t parts = call.packs / (in_flight * plan.threads);
  if (reduces) {
    const int64_t all = call.rows * call.packs;
    int64_t blocks = rule.blocks * call.processors;
    // Where threads go round more than once, smaller blocks wait less for each other.
    if (all > blocks * plan.threads * in_flight && all <= blocks * rule.most_part) {
      plan.threads /= 2, parts *= 2;
      blocks = std::min<int64_t>(2 * blocks, Splitting::few_parts * call.rows);
    }
    blocks = std::max(blocks, all / rule.most_part);
    parts = std::min({parts, call.workspace / call.state / call.rows - 1, blocks / call.rows});
  }
  if (parts < 2 || call.rows * parts > INT32_MAX || call.n / parts > 1 << 30) return false;
  plan.split = Split(call.packs, parts);
  plan.overlap = call.gpu != kAmpereAndAda;
  return true;
}

// A kernel counts the elements of a row in ints. Rows that are only read come in small blocks. Long ones had better be
// split if these blocks do not come out even.
inline bool fit_tiled(const Rule& rule, const KernelFacts& kernel, const CallFacts& call, Plan& plan) {
  if (call.n > 1 << 30) return false;
  if (rule.packs_a_thread) {
    plan.threads = kernel.kind == kSums ? Streamed::threads_of_sums(call.rows, call.packs, call.processors)
                                        : Streamed::threads(call.rows, call.processors);
    return call.packs <= Streamed::never_split || Streamed::even(call.rows, plan.threads, call.processors);
  }
  plan.threads = Tiled::threads(kernel.kind != kElementwise);
  const int64_t enough = Tiled::enough_threads * call.processors;
  while (kernel.kind == kSums && plan.threads > 32 && call.rows * plan.threads / 2 >= enough) plan.threads /= 2;
  return true;
}

// Whether a strategy can serve the call as the rule says. If so, fills in the plan.
inline bool fit(const Rule& rule, const KernelFacts& kernel, const CallFacts& call, Plan& plan) {
  switch (rule.strategy) {
    case Strategy::register_row: return true;
    case Strategy::clustered: return fit_clustered(rule, call, plan);
    case Strategy::grid_registers: return fit_grid_registers(rule, call, plan);
    case Strategy::ring: return fit_ring(rule, kernel, call, plan);
    case Strategy::grid_ring: return fit_grid_ring(kernel, call);
    case Strategy::flat: return fit_flat(kernel, call);
    case Strategy::split: return fit_split(rule, kernel, call, plan);
    case Strategy::tiled: return fit_tiled(rule, kernel, call, plan);
  }
  return false;
}

// Whether there is a kernel for rows that all begin at multiples of 8 bytes (Layout::halves).
constexpr bool serves_halves(const KernelFacts& kernel, int64_t packs) {
  return kernel.form == kPlain && kernel.element == 2 && packs <= kLongestOfHalves;
}

// The plan by the first row of the table that fits, of those from `first` on.
inline Plan make_plan(const KernelFacts& kernel, const CallFacts& call, int first = 0) {
  for (int i = first; i < kRuleCount; i++) {
    Plan plan;
    plan.rule = i, plan.packs = call.packs, plan.processors = call.processors;
    if (kRules[i].compiles(kernel) && kRules[i].allows(call) && fit(kRules[i], kernel, call, plan)) return plan;
  }
  return {};
}

}  // namespace jaxsoft::cuda
