// The interface of the CPU kernels, which work on segments of rows. A row is one segment, or several that are reduced
// apart and combined (the fold over (m, s) of the README); the kernels do not know which.
#pragma once

#include <stdint.h>

namespace jaxsoft::cpu {

// The state of a set of scores: maximum and sum of exp(x - m). Sums are in f64, whatever the scores are.
// An m that is not finite stands for a reference of 0 in s (`reference`), so that no exp sees inf - inf.
// A plain sum is a state with m = 0.
struct State {
  double m, s;
};

inline constexpr double infinity = __builtin_inf();
inline double reference(double m) { return m - m == 0 ? m : 0; }

// The fold. exp(m - reference) of an m of -inf is 0: the guard that makes (-inf, 0) the identity. A NaN in s stays.
State combine(State a, State b);

// Elements reduced under one maximum: they are read twice, from the first-level cache.
inline constexpr int64_t kTile = 2048;

enum Operation {
  kSoftmax, kLogSoftmax, kState, kLabelSums, kSoftmaxVjp, kLogSoftmaxVjp, kLogsumexpVjp, kLabelSumsVjp, kOperations
};

// The dtypes of the first operand and of the result.
enum DTypes { F16, BF16, F32, F64, F16ToF32, BF16ToF32, F32ToF16, F32ToBF16, kDTypes };

// What a kernel reads.
struct Segment {
  const void* a;                // x, or y
  const void* b = nullptr;      // g, where it has x's shape
  const bool* where = nullptr;  // null: everything counts
  const void* bias = nullptr;   // null: nothing is added
  double scale = 1;
  bool masked = false;  // softmax_vjp: elements with y = 0 do not count
  double cap = 0;       // 0: scores are not capped
  double from = 0;      // label_sums: what distances are taken from
};

// One row's numbers: what it was reduced to, and the statistics that it came with.
struct Row {
  State reduced = {-infinity, 0}, given = {};
  double g = 0, v = 0;
};

// Rows that do not lie along the last dimension are columns: `lines` lines of `columns` elements, `stride` apart, and
// one more of `rest`. Columns a period apart are parts of the same row.
struct Block {
  int64_t lines, columns, stride, rest, period;
};

inline constexpr int64_t kColumns = 256;  // the most that are taken together

struct Part {  // what columns were reduced to
  double m[kColumns], s[kColumns];
};

struct Numbers {  // and what that makes for the writing pass, as the kernels keep it
  char bytes[4 * (kColumns + 16) * sizeof(double)];
};

// Elements that may be among the k largest of a row, in the order of their indices. Their keys are integers that are
// ordered as the elements are, of 8 bytes for f64 and of 4 for others.
struct Candidates {
  static constexpr int block = 128;               // elements that are looked at together, at most
  static constexpr int most = 2 * (256 + block);  // of kMostK
  int count = 0, limit;                           // limit: so many, at most
  int64_t least = INT64_MIN;                      // what is not above it is not wanted
  int32_t indices[most];
  alignas(64) int64_t keys[most + 16];
};

// Rows next to each other with a label each, of at most kTile elements of which all count. Arrays of one number a row are
// of the accumulator's dtype, and null where the operation has none.
struct LabelRows {
  const void* a;
  int64_t n;
  const int32_t* labels;
  int32_t no_row;         // the label of rows that are not read
  void *m, *s;            // results, or operands of the pullbacks
  void *t, *u, *k;        // results
  const void *g, *h, *v;  // operands
  void* out;
};

// The kernels of one operation and of one pair of dtypes.
struct Kernels {
  State (*reduce)(const Segment&, int64_t n);                       // null where nothing is reduced
  void (*write)(const Segment&, void* out, int64_t n, const Row&);  // null where nothing is written
  void (*at_once)(const Segment&, void* out, int64_t n);            // softmax: a row of at most kTile elements
  void (*fill)(void* out, int64_t n);                               // with what stands where elements do not count
  void (*put)(void* out, double value);                             // one element
  double (*get)(const void* a);                                     // likewise of the operand
  State (*above)(const Segment&, int64_t n);  // label_sums: of the scores above -inf, their number and sum(z - from)
  // Of columns, without extra operands.
  void (*reduce_columns)(const Segment&, const Block&, Part*);
  void (*combine_columns)(Part* total, const Part&, int64_t columns);
  void (*finish_columns)(const Part&, const Block&, void* m, void* s, const void* g, Numbers*);
  void (*write_columns)(const Segment&, void* out, const Block&, const Numbers&);
  void (*label_rows)(const LabelRows&, int64_t begin, int64_t end) = nullptr;  // of operations with labels, plain
  // top_k: appends those of the elements, of which the first has this index, that are wanted. Returns how many it has
  // looked at: all, or so many that there is no room for those of a block.
  int64_t (*find)(const Segment&, int64_t n, int64_t index, Candidates*) = nullptr;
  void (*cut)(Candidates*, int k) = nullptr;                      // to the k largest, where they are many more
  void (*order)(Candidates*, int k, int32_t* indices) = nullptr;  // the indices of the k largest, the largest first
};

// One table for each instruction set that rows.cc was compiled for: without extra operands, and with them.
typedef Kernels KernelTable[2][kDTypes][kOperations];
extern const KernelTable kernels_baseline;
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;

}  // namespace jaxsoft::cpu
