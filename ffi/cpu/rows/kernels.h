// The interface of the CPU kernels of row operations, which are compiled once for each instruction set.
//
// A kernel works on a segment of a row, or on a block of columns. A row is one segment, or several that are reduced
// apart and combined; the kernels do not know which.
#pragma once

#include <stdint.h>

#include "../../rows/limits.h"
#include "../../rows/operations.h"
#include "../fold.h"
#include "plan.h"

namespace jaxsoft::cpu {

// The dtypes of the first operand and of the result.
enum DTypes { F16, BF16, F32, F64, F16ToF32, BF16ToF32, F32ToF16, F32ToBF16, kDTypes };

// What a kernel reads of a segment.
struct Segment {
  const void* a;                // scores or probabilities
  const void* b = nullptr;      // cotangents or other scores, where the operation has them
  const bool* where = nullptr;  // null: everything counts
  const void* bias = nullptr;   // null: nothing is added
  double scale = 1;
  bool masked = false;  // softmax_vjp: elements whose probability is 0 are masked
  double cap = 0;       // 0: scores are not capped
  double from = 0;      // what the sums beside the state are relative to
  double other_scale = 1;
};

// The numbers of one row: what it was reduced to, and those that it came with.
struct RowNumbers {
  State reduced = {-infinity, 0}, given = {};
  double cotangent = 0, distance_cotangent = 0, entropy_cotangent = 0, beside = 0;
};

// Sums beside a state: of terms that are relative to Segment::from, and of their number where an operation wants it.
struct Sums {
  double sum = 0, count = 0;
};

// A state, and a sum beside it that is relative to its maximum.
struct StateAndSum {
  State state;
  double sum;
};

// Of a row of two arrays: its numbers, in the order of the operation's record; or what a part of it was reduced to, in
// an order that only the kernels know.
struct Numbers {
  double of[8];
};

// Neighbouring columns: `lines` lines of `columns` elements, `stride` elements apart, and one more line of `rest`
// elements. Columns that are `period` apart are parts of the same row.
struct Block {
  int64_t lines, columns, stride, rest, period;
};

// The states that columns were reduced to.
struct ColumnStates {
  double m[kPlan.columns], s[kPlan.columns];
};

// The numbers of columns that their results are computed from, in a layout that only the kernels know.
struct ColumnNumbers {
  char bytes[4 * (kPlan.columns + 16) * sizeof(double)];
};

// Elements that may be among the k largest of a row, in the order of their indices. Their keys are integers in the
// order of the elements: of 8 bytes for f64, of 4 bytes for the others.
struct Candidates {
  static constexpr int most = 2 * (kMostK + kPlan.candidate_block);
  int count = 0;
  int limit;                  // the most candidates that are kept before they are cut
  int64_t least = INT64_MIN;  // elements with a key up to this one are not wanted
  int32_t indices[most];
  alignas(64) int64_t keys[most + 16];
};

// Neighbouring rows with a label each, of at most kPlan.tile elements, all of which are valid. Arrays of one number a
// row have the state's dtype, and are null where the operation has none.
struct LabelRows {
  const void* a;
  int64_t n;
  const int32_t* label;
  void *maximum, *sum, *beside;  // results of the reductions, operands of the derivatives
  void *label_score, *count;     // results
  const void *cotangent, *label_cotangent, *distance_cotangent, *entropy_cotangent;
  void* out;
};

// The kernels of one operation and one pair of dtypes. Those that the operation lacks are null.
struct Kernels {
  State (*reduce)(const Segment&, int64_t n);
  void (*write)(const Segment&, void* out, int64_t n, const RowNumbers&);
  void (*at_once)(const Segment&, void* out, int64_t n);  // softmax of a row of at most kPlan.tile elements
  void (*fill)(void* out, int64_t n);                     // writes the result of masked elements
  void (*put)(void* out, double value);                   // writes one element
  double (*get)(const void* a);                           // reads one element of the first operand
  Sums (*sums)(const Segment&, int64_t n);                // sums beside the state
  StateAndSum (*reduce_with_sum)(const Segment&, int64_t n);
  double (*moved)(double sum, State part, double m);      // a part's sum relative to m, which is at least the part's

  // Of two arrays of scores. A row's parts are reduced and combined, and its numbers are made of them. Or both
  // gradients are written; `out` is null where the first is not asked for.
  Numbers (*reduce_two)(const Segment&, int64_t n);
  Numbers (*combine_two)(const Numbers&, const Numbers&);
  Numbers (*finish_two)(const Numbers&);
  void (*write_two)(const Segment&, void* out, void* other_out, int64_t n, const Numbers&);

  // Of columns, which have no extras.
  void (*reduce_columns)(const Segment&, const Block&, ColumnStates*);
  void (*combine_columns)(ColumnStates* total, const ColumnStates&, int64_t columns);
  void (*finish_columns)(const ColumnStates&, const Block&, void* m, void* s, const void* cotangent, ColumnNumbers*);
  void (*write_columns)(const Segment&, void* out, const Block&, const ColumnNumbers&);

  void (*label_rows)(const LabelRows&, int64_t begin, int64_t end) = nullptr;

  // top_k. `find` appends the wanted ones of n elements, of which the first has this index. It returns how many it has
  // looked at: all, or those before a block of elements that might not have room.
  int64_t (*find)(const Segment&, int64_t n, int64_t index, Candidates*) = nullptr;
  void (*cut)(Candidates*, int k) = nullptr;                      // drops candidates until few more than k are left
  void (*order)(Candidates*, int k, int32_t* indices) = nullptr;  // the indices of the k largest, in descending order
};

// A table for each instruction set, by whether there are extras, the dtypes and the operation's name.
struct KernelTable {
  Kernels of[2][kDTypes][kOperations];
};
extern const KernelTable kernels_baseline;
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;

}  // namespace jaxsoft::cpu
