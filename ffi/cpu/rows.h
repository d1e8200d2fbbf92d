// What the CPU kernels do to a segment of a row. A row is one segment, or several that are reduced apart and combined
// (the fold over (m, s) of the README); the kernels do not know which.
#pragma once

#include <stdint.h>

namespace jaxsoft::cpu {

// The state of a set of scores: maximum and sum of exp(x - m). Sums are in f64, whatever the scores are.
// An m that is not finite stands for a reference of 0 in s (`reference`), so that no exp sees inf - inf.
struct State {
  double m, s;
};

inline constexpr double infinity = __builtin_inf();
inline double reference(double m) { return m - m == 0 ? m : 0; }

// The fold. exp(m - reference) of an m of -inf is 0: the guard that makes (-inf, 0) the identity. A NaN in s stays.
State combine(State a, State b);

// Elements reduced under one maximum: they are read twice, from the first-level cache.
inline constexpr int64_t kTile = 2048;

enum DType { F16, BF16, F32, F64, kDTypes };

// The kernels of one dtype. x, g, y and dx point to segments of n elements of that dtype.
struct Kernels {
  State (*state)(const void* x, int64_t n);
  double (*sum)(const void* g, int64_t n);
  double (*dot)(const void* y, const void* g, int64_t n);
  void (*softmax)(const void* x, void* y, int64_t n, State);
  void (*softmax_tile)(const void* x, void* y, int64_t n);  // a whole row, n <= kTile
  void (*log_softmax)(const void* x, void* y, int64_t n, State);
  void (*softmax_vjp)(const void* y, const void* g, void* dx, int64_t n, double dot);
  void (*log_softmax_vjp)(const void* x, const void* g, void* dx, int64_t n, State, double sum);
  void (*logsumexp_vjp)(const void* x, void* dx, int64_t n, State, double g);
};

// One table for each instruction set that rows.cc was compiled for.
extern const Kernels kernels_baseline[kDTypes];
extern const Kernels kernels_avx2[kDTypes];
extern const Kernels kernels_avx512[kDTypes];

}  // namespace jaxsoft::cpu
