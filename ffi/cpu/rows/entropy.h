// Entropy of rows: their states, and one more sum. A segment's sum is taken right after its state, while the segment is
// in the cache.
#pragma once

#include <cmath>

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

// A state, and the sum of exp(z - m) * (z - m) over its scores.
struct StateAndProducts {
  State state{-infinity, 0};
  double products = 0;
};

// The sum of a part, relative to a maximum that is at least its own.
inline double products_from(double m, const StateAndProducts& part) {
  if (part.state.s == 0) return 0;
  const double below = part.state.m - m;
  return std::exp(below) * (part.products + below * part.state.s);
}

inline void run_entropy(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call);
  const int64_t n = call.shape.n;
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [=](int64_t row, int64_t i, int64_t size) {
        Segment at = in.segment(row, i);
        const int64_t count = in.counted(row, i, size);
        StateAndProducts part{k.reduce(at, count)};
        at.from = part.state.m;
        part.products = k.products(at, count);
        return part;
      },
      [](StateAndProducts& total, const StateAndProducts& part) {
        const State state = combine(total.state, part.state);
        total = {state, products_from(state.m, total) + products_from(state.m, part)};
      },
      [=](int64_t row, const StateAndProducts& total) {
        arrays.products.set(row, total.products);
        return arrays.finish(row, total.state);
      },
      [](int64_t, int64_t, int64_t, const RowNumbers&) {});
}

}  // namespace jaxsoft::cpu
