// Operations on rows that lie along the last dimension.
#pragma once

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

inline void run_rows(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call);
  const int64_t n = call.shape.n;
  auto fill = [=](int64_t row, int64_t begin, int64_t end) {
    if (begin < end && arrays.out.data) k.fill(arrays.out.at(row * n + begin), end - begin);
  };
  if (n <= kPlan.segment) {  // rows that are not cut
    each_row(pool, call.shape.rows, n, [=](int64_t row) {
      const Segment at = in.segment(row, 0);
      const int64_t count = in.valid_count(row, 0, n);
      char* out = arrays.out.at(row * n);
      if (k.at_once && n <= kPlan.tile) {
        k.at_once(at, out, count);
      } else {
        State reduced = k.reduce ? k.reduce(at, count) : State{};
        RowNumbers numbers = arrays.finish(row, reduced);
        if (k.write) k.write(at, out, count, numbers);
      }
      fill(row, count, n);
    });
    return;
  }
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [=](int64_t row, int64_t i, int64_t size) {
        return k.reduce ? k.reduce(in.segment(row, i), in.valid_count(row, i, size)) : State{};
      },
      [](State& total, State part) { total = combine(total, part); },
      [=](int64_t row, State reduced) { return arrays.finish(row, reduced); },
      [=](int64_t row, int64_t i, int64_t size, const RowNumbers& numbers) {
        if (!k.write) return;
        int64_t count = in.valid_count(row, i, size);
        k.write(in.segment(row, i), arrays.out.at(row * n + i), count, numbers);
        fill(row, i + count, i + size);
      });
}

// Rows that are reduced to their state and a sum beside it.
inline void run_rows_with_sum(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call);
  const int64_t n = call.shape.n;
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [=](int64_t row, int64_t i, int64_t size) {
        return k.reduce_with_sum(in.segment(row, i), in.valid_count(row, i, size));
      },
      [=](StateAndSum& total, const StateAndSum& part) {
        const State state = combine(total.state, part.state);
        total = {state, k.moved(total.sum, total.state, state.m) + k.moved(part.sum, part.state, state.m)};
      },
      [=](int64_t row, const StateAndSum& total) {
        arrays.beside.set(row, total.sum);
        return arrays.finish(row, total.state);
      },
      [](int64_t, int64_t, int64_t, const RowNumbers&) {});
}

}  // namespace jaxsoft::cpu
