// The table by which a strategy is chosen for a call: the first row that fits the call is taken (plan.cuh).
//
// A row of the table says which GPUs, kernels and calls it is for. GPUs and kernels are known when a kernel is
// compiled, so the table also decides what is compiled (compiled.cuh). Lengths are counted in packs of 16 bytes of each
// operand: 64 packs are 1 KB.
//
// The numbers for Hopper were chosen by measurements on an H200. Ampere, Ada and Blackwell have not been measured: they
// have the rows of the table that need no clusters and no launch of all blocks together.
#pragma once

#include <cstdint>

#include "sizes.cuh"

namespace jaxsoft::cuda {

enum class Strategy {
  register_row,    // a row in the registers of lanes, a warp or a block
  clustered,       // rows in the registers of clusters
  grid_registers,  // few rows in the registers of all blocks
  ring,            // rows in the shared memory of clusters
  grid_ring,       // rows in the shared memory of all blocks
  flat,            // rows without a reduction, as one array
  split,           // rows cut over blocks, in several launches; read twice
  tiled,           // a row for each block; read twice
};

// Sets of GPUs, by generation.
enum Gpus : unsigned { kAmpereAndAda = 1, kHopper = 2, kBlackwell = 4, kAllGpus = 7 };
struct Generation {
  int compute_capability;  // the first major one
  Gpus gpu;
};
constexpr Generation kGenerations[] = {{8, kAmpereAndAda}, {9, kHopper}, {10, kBlackwell}};
constexpr Gpus gpu_of(int compute_capability) {
  Gpus gpu = kGenerations[0].gpu;
  for (const Generation& generation : kGenerations)
    if (compute_capability >= generation.compute_capability) gpu = generation.gpu;
  return gpu;
}

// Sets of operations, by what they reduce and write. A gradient counts as its operation where it reduces.
enum Kinds : unsigned {
  kSoftmax = 1,      // softmax, softmax_vjp: all that is read is reduced, and whole rows are written
  kLogSoftmax = 2,   // log_softmax, log_softmax_vjp: the same, but the state takes more registers, or one operand is
                     // not reduced
  kState = 4,        // state: only statistics are written
  kSums = 8,         // label_sums, entropy: only statistics are written, sums beside the state
  kElementwise = 16  // logsumexp_vjp, entropy_vjp: nothing is reduced
};
constexpr unsigned kWriteAndReduce = kSoftmax | kLogSoftmax, kReduce = kWriteAndReduce | kState | kSums,
                   kAllKinds = kReduce | kElementwise;

// Sets of forms: of calls without extras, with extras but neither a bias nor a cap, with a bias, and with a cap.
enum Forms : unsigned { kPlain = 1, kExtrasAlone = 2, kBiased = 4, kCapped = 8, kAllForms = 15 };

// The facts about a kernel that the table asks for. Each is a set of one.
struct KernelFacts {
  unsigned element;   // bytes: 2, 4 or 8
  unsigned operands;  // arrays of whole rows that are read: 1 or 2, a bias included
  Kinds kind;
  Forms form;
};

// The facts about a call that the table asks for.
struct CallFacts {
  Gpus gpu;
  int processors;        // multiprocessors of the GPU
  int64_t rows, n;       // n elements in each row
  int64_t packs;         // of a row
  bool unaligned;        // rows begin at any element
  bool vector;           // packs of all operands are aligned together
  bool first_aligned;    // the first row begins at a multiple of 16 bytes
  int64_t workspace;     // bytes
  int64_t state, packet; // bytes in the workspace of a part's state, and of a state as `grid_ring` publishes it
};

constexpr int64_t kNoLimit = INT64_MAX;

// A row of the table.
struct Rule {
  Strategy strategy;
  // That a thread has in registers, of each operand: register_row, clustered, grid_registers; tiled, if it is not 0.
  int packs_a_thread;
  // The GPUs and kernels that the row is for.
  unsigned gpus = kAllGpus;
  unsigned elements = 2 | 4 | 8;
  unsigned operands = 1 | 2;
  unsigned kinds = kAllKinds;
  unsigned forms = kAllForms;
  // The calls that the row is for.
  int64_t longest = kNoLimit;            // packs of a row, at most
  int64_t longest_unaligned = kNoLimit;  // the same where rows begin at any element
  int64_t most_rows = kNoLimit;          // rows, at most
  int64_t least_of_all = 0;              // packs of all rows together, at least
  int64_t most_of_all = kNoLimit;        // the same, at most
  // How the strategy is used.
  int64_t least_part = 0, most_part = kNoLimit;  // packs of a row that a block has: clustered, ring, split
  int64_t blocks = 0;                    // of a cluster at most: clustered. Of each multiprocessor: split

  constexpr Rule on(unsigned set) const { Rule rule = *this; return rule.gpus = set, rule; }
  constexpr Rule of_bytes(unsigned set) const { Rule rule = *this; return rule.elements = set, rule; }
  constexpr Rule reading(unsigned set) const { Rule rule = *this; return rule.operands = set, rule; }
  constexpr Rule for_kinds(unsigned set) const { Rule rule = *this; return rule.kinds = set, rule; }
  constexpr Rule for_forms(unsigned set) const { Rule rule = *this; return rule.forms = set, rule; }
  constexpr Rule up_to(int64_t packs) const {
    Rule rule = *this;
    return rule.longest = rule.longest_unaligned = packs, rule;
  }
  constexpr Rule unaligned_up_to(int64_t packs) const {
    Rule rule = *this;
    return rule.longest_unaligned = packs, rule;
  }
  constexpr Rule aligned() const { return unaligned_up_to(0); }
  constexpr bool aligned_only() const { return longest_unaligned == 0; }
  constexpr Rule rows_up_to(int64_t rows) const { Rule rule = *this; return rule.most_rows = rows, rule; }
  constexpr Rule all_rows_from(int64_t packs) const { Rule rule = *this; return rule.least_of_all = packs, rule; }
  constexpr Rule all_rows_up_to(int64_t packs) const { Rule rule = *this; return rule.most_of_all = packs, rule; }
  constexpr Rule parts(int64_t least, int64_t most) const {
    Rule rule = *this;
    return rule.least_part = least, rule.most_part = most, rule;
  }
  constexpr Rule with_blocks(int64_t number) const { Rule rule = *this; return rule.blocks = number, rule; }

  // Whether the row may choose its strategy for a kernel, on some GPU of a set.
  constexpr bool compiles(const KernelFacts& kernel, unsigned on_gpus = kAllGpus) const {
    return (gpus & on_gpus) && (elements & kernel.element) && (operands & kernel.operands) && (kinds & kernel.kind) &&
           (forms & kernel.form);
  }
  constexpr bool allows(const CallFacts& call) const {
    return (gpus & call.gpu) && call.packs <= (call.unaligned ? longest_unaligned : longest) &&
           call.rows <= most_rows && call.rows * call.packs >= least_of_all &&
           call.rows * call.packs <= most_of_all;
  }
};
constexpr Rule use(Strategy strategy, int packs_a_thread = 0) { return {strategy, packs_a_thread}; }

// The most packs of rows that have kernels for Layout::halves: those that two packs a thread serve.
constexpr int64_t kLongestOfHalves = 31;

// Up to this number of rows, a row is distributed to a cluster or to all blocks if it fits there.
constexpr int64_t kFewRows = 64;

constexpr Rule kRules[] = {
    // Short rows, in the registers of up to 8, 16 and 32 lanes. Sums, which are rare, and calls with extras do without
    // kernels for the shortest ones, which saves compile time.
    use(Strategy::register_row, 1).for_forms(kPlain).for_kinds(kAllKinds & ~kSums).up_to(8),
    use(Strategy::register_row, 2).for_forms(kPlain).for_kinds(kAllKinds & ~kSums).up_to(kLongestOfHalves),
    use(Strategy::register_row, 4).up_to(4 * 32),

    // Few rows. A block of a cluster has 4 to 32 KB of its row: above 16 KB in 8 packs a thread, if only one operand is
    // read and rows are aligned. (One kernel for these and all others was 6 to 32 % slower.)
    use(Strategy::clustered, 8).on(kHopper).of_bytes(2 | 4).for_kinds(kReduce & ~kSums).for_forms(kPlain).reading(1)
        .aligned().rows_up_to(kFewRows).with_blocks(Clustered::most_blocks).parts(1025, 2048),
    use(Strategy::clustered, 4).on(kHopper).of_bytes(2 | 4).for_kinds(kReduce & ~kSums)
        .rows_up_to(kFewRows).with_blocks(Clustered::most_blocks).parts(256, 2048),

    // 16 bits with extras, up to 16 KB: more threads with 4 packs each instead of 8.
    use(Strategy::register_row, 4).of_bytes(2).for_forms(kExtrasAlone | kBiased | kCapped).up_to(1024),
    // 5 packs a thread: rows up to 2.5 KB in one warp, and longer ones where rows begin at any element.
    use(Strategy::register_row, 5).of_bytes(2).for_kinds(kWriteAndReduce).for_forms(kPlain)
        .up_to(5 * 32).unaligned_up_to(1280),
    use(Strategy::register_row, 5).of_bytes(4 | 8).for_kinds(kWriteAndReduce).for_forms(kPlain).reading(1)
        .up_to(5 * 32).unaligned_up_to(320),
    // Many rows of which only numbers are wanted: small blocks that read a row in several steps are faster than those
    // that hold it, if it is longer than 32 KB or has sums. For 8192 rows of 32000 bf16 with labels they have 1.00 to
    // 1.03 of a copy's speed, not .78 to .81. For 2048 rows of 262144 bf16, with an entropy, they have 1.02, where rows
    // that are split have .82.
    use(Strategy::register_row, 8).on(kHopper).of_bytes(2 | 4).for_kinds(kState).for_forms(kPlain).reading(1)
        .up_to(2048),
    use(Strategy::tiled, 8).on(kHopper).of_bytes(2 | 4).for_kinds(kState | kSums).for_forms(kPlain).reading(1)
        .all_rows_from(1 << 23),
    // Rows in the registers of a block: up to 64 KB (two operands: 32 KB of each) on Hopper, which has rings for longer
    // ones, and else as far as a block's threads go.
    use(Strategy::register_row, 8).on(kHopper).for_kinds(kAllKinds & ~kSums).for_forms(kPlain).reading(1).up_to(4096),
    use(Strategy::register_row, 8).on(kAllGpus & ~kHopper).for_kinds(kAllKinds & ~kSums).for_forms(kPlain).reading(1)
        .up_to(8 * RegisterRow::most_threads(false, 8)),
    use(Strategy::register_row, 8).for_kinds(kAllKinds & ~kSums).for_forms(kExtrasAlone).reading(1)
        .up_to(8 * RegisterRow::most_threads(true, 8)),
    // With a cap 4 packs a thread, below, are no slower, except where they spread a row over two warps instead of one.
    use(Strategy::register_row, 8).of_bytes(4 | 8).for_kinds(kAllKinds & ~kSums).for_forms(kCapped).up_to(8 * 32),
    use(Strategy::register_row, 4).on(kHopper).for_kinds(kAllKinds & ~kSums).reading(2).up_to(2048),
    use(Strategy::register_row, 4).on(kAllGpus & ~kHopper).for_kinds(kAllKinds & ~kSums).reading(2)
        .up_to(4 * RegisterRow::most_threads(true, 4)),

    // Few long rows, of at least 10 MB together, or 4 MB of each of two operands. For less, for extras, and for
    // operations that do not reduce all that they read or need more registers, splitting is no slower.
    use(Strategy::grid_registers, 8).on(kHopper).of_bytes(2 | 4).for_kinds(kSoftmax).for_forms(kPlain).reading(1)
        .rows_up_to(kFewRows).all_rows_from(5 << 17),
    use(Strategy::grid_registers, 4).on(kHopper).of_bytes(2 | 4).for_kinds(kSoftmax).for_forms(kPlain).reading(2)
        .rows_up_to(kFewRows).all_rows_from(1 << 18),

    // Long rows on chip, if they are more than 16 MB together; others are split.
    // First, aligned rows of the forward operations in the registers of clusters: up to 48 KB in each block, of which a
    // multiprocessor has three or more, or of 16 bits 60 to 64 KB in each, of which it has two. They reach .97 to .98
    // of a copy's speed, and do not take as long to begin and to end as a ring. Others are as fast or faster in a ring:
    // in between, where too many registers are left over, longer rows, for which larger clusters wait too much, and
    // rows in parts of 60 to 64 KB that are more than 512 MB together or of 32 bits.
    use(Strategy::clustered, 8).on(kHopper).of_bytes(2).for_kinds(kSoftmax).for_forms(kPlain).reading(1)
        .up_to(8192).aligned().all_rows_from((1 << 20) + 1).all_rows_up_to(1 << 25).with_blocks(2).parts(3841, 4096),
    use(Strategy::clustered, 8).on(kHopper).of_bytes(2).for_kinds(kWriteAndReduce).for_forms(kPlain).reading(1)
        .up_to(6144).aligned().all_rows_from((1 << 20) + 1).with_blocks(2).parts(0, 3072),
    use(Strategy::clustered, 8).on(kHopper).of_bytes(4).for_kinds(kWriteAndReduce).for_forms(kPlain).reading(1)
        .up_to(12288).aligned().all_rows_from((1 << 20) + 1).with_blocks(4).parts(0, 3072),
    // Others are in shared memory, where the next row should be when one is written. A block of a cluster has a part of
    // 48 to 128 KB (16 bits, whose arithmetic takes longer: of 64 to 128 KB). Of calls with two operands it has at most
    // half of what its shared memory holds. Extras take time for each row, so there it has up to three quarters.
    use(Strategy::ring).on(kHopper).of_bytes(2).for_kinds(kWriteAndReduce).for_forms(kPlain).reading(1)
        .all_rows_from((1 << 20) + 1).parts(4096, 8192),
    use(Strategy::ring).on(kHopper).of_bytes(4).for_kinds(kWriteAndReduce).for_forms(kPlain).reading(1)
        .all_rows_from((1 << 20) + 1).parts(3072, 8192),
    use(Strategy::ring).on(kHopper).of_bytes(2 | 4).for_kinds(kWriteAndReduce).for_forms(kExtrasAlone).reading(1)
        .all_rows_from((1 << 20) + 1).parts(0, Ring::most_packs(1) * 3 / 4),
    use(Strategy::ring).on(kHopper).of_bytes(2 | 4).for_kinds(kWriteAndReduce).for_forms(kPlain | kExtrasAlone)
        .reading(2).all_rows_from((1 << 20) + 1).parts(0, Ring::most_packs(2) / 2),
    use(Strategy::grid_ring).on(kHopper).of_bytes(2 | 4).for_kinds(kWriteAndReduce).for_forms(kPlain)
        .all_rows_from((1 << 20) + 1),

    // Rows with extras that are too long for 8 packs a thread, and those with a cap: 4 packs in more threads.
    use(Strategy::register_row, 4).for_forms(kExtrasAlone | kCapped).reading(1)
        .up_to(4 * RegisterRow::most_threads(true, 4)),

    // Everything else. What is reduced is read twice here. Rows are split where one block for each would be too few for
    // the GPU, or where a row is long: a part has at most 128 KB, if there is room in the workspace for so many states.
    use(Strategy::flat).of_bytes(2 | 4).for_kinds(kElementwise).for_forms(kPlain),
    use(Strategy::split).on(kHopper).with_blocks(2).parts(0, 8192),
    use(Strategy::split).on(kAllGpus & ~kHopper).with_blocks(4).parts(0, 8192),
    use(Strategy::tiled).for_kinds(kReduce),
};
constexpr int kRuleCount = sizeof kRules / sizeof kRules[0];

// Whether some row of the table chooses a strategy for a kernel on some GPU of a set.
constexpr bool chosen(Strategy strategy, int packs_a_thread, const KernelFacts& kernel, unsigned gpus) {
  for (const Rule& rule : kRules)
    if (rule.strategy == strategy && rule.packs_a_thread == packs_a_thread && rule.compiles(kernel, gpus)) return true;
  return false;
}

}  // namespace jaxsoft::cuda
