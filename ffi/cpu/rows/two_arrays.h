// Operations on rows of two arrays of scores.
#pragma once

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

inline void run_rows_of_two(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call);
  const int64_t n = call.shape.n;
  if (k.reduce_two) {
    reduce_then_write(
        pool, call.shape.rows, n, n,
        [=](int64_t row, int64_t i, int64_t size) {
          return k.reduce_two(in.segment(row, i), in.valid_count(row, i, size));
        },
        [](DivergenceState& total, const DivergenceState& part) { total = combine(total, part); },
        [=](int64_t row, const DivergenceState& total) { return arrays.finish(row, total); },
        [](int64_t, int64_t, int64_t, bool) {});
    return;
  }
  auto write = [=](int64_t row, int64_t i, int64_t size, const RowNumbers& numbers) {
    char *const out = arrays.out.at(row * n + i), *const other_out = arrays.other_out.at(row * n + i);
    // Without scores there are no gradients.
    const int64_t count = numbers.given.s == 0 ? 0 : in.valid_count(row, i, size);
    if (count > 0) k.write_two(in.segment(row, i), out, other_out, count, numbers);
    if (count == size) return;
    if (out) k.fill(out + count * arrays.out.size, size - count);
    k.fill(other_out + count * arrays.other_out.size, size - count);
  };
  reduce_then_write(
      pool, call.shape.rows, n, n, [](int64_t, int64_t, int64_t) { return State{}; }, [](State&, State) {},
      [=](int64_t row, State) { return arrays.finish(row, State{}); }, write);
}

}  // namespace jaxsoft::cpu
