// Operations on rows that do not lie along the last dimension: they are columns.
#pragma once

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

// How the columns of an operand (rows, n, inner) are taken together where they are neighbours. Where they are few, n is
// folded onto them: (n, inner) is the same memory as (n / fold, fold * inner), where each column is one of `fold` parts
// of a row.
struct ColumnGroups {
  int64_t n, inner, fold, width, lines;
  int64_t together, groups;  // columns of a group, and groups of a row

  explicit ColumnGroups(const Shape& shape) : n(shape.n), inner(shape.inner) {
    fold = inner < kPlan.few_columns ? std::max<int64_t>(1, std::min(n, kPlan.folded_columns / inner)) : 1;
    width = fold * inner, lines = (n + fold - 1) / fold;
    together = std::min(kPlan.columns, width), groups = (width + together - 1) / together;
  }
  int64_t row(int64_t group) const { return group / groups; }
  int64_t column(int64_t group) const { return group % groups * together; }

  // The element at which a group's part of a line begins.
  int64_t begin(int64_t group, int64_t line) const { return row(group) * n * inner + line * width + column(group); }

  // A group's part of some lines. The last line of all may hold fewer parts of rows.
  Block block(int64_t group, int64_t line, int64_t size) const {
    const int64_t whole = std::clamp<int64_t>(n / fold - line, 0, size);
    return {whole, std::min(together, width - column(group)), width, whole < size ? n % fold * inner : 0,
            std::min(together, inner)};
  }
};

inline void run_columns(ffi::ThreadPool& pool, const Kernels& k, const Shape& shape, bool masked,
                        const Arrays& arrays) {
  const ColumnGroups all(shape);
  auto segment = [&](int64_t i) { return Segment{arrays.a.at(i), arrays.b.at(i), nullptr, nullptr, 1, masked}; };
  reduce_then_write(
      pool, shape.rows * all.groups, all.lines, all.lines * all.together,
      [&](int64_t group, int64_t line, int64_t size) {
        ColumnStates states;
        k.reduce_columns(segment(all.begin(group, line)), all.block(group, line, size), &states);
        return states;
      },
      [&](ColumnStates& total, const ColumnStates& part) { k.combine_columns(&total, part, all.together); },
      [&](int64_t group, const ColumnStates& states) {
        ColumnNumbers numbers;
        const int64_t row = all.row(group) * shape.inner + all.column(group);
        k.finish_columns(states, all.block(group, 0, 0), arrays.m.at(row), arrays.s.at(row), arrays.cotangent.at(row),
                         &numbers);
        return numbers;
      },
      [&](int64_t group, int64_t line, int64_t size, const ColumnNumbers& numbers) {
        if (!k.write) return;
        const int64_t i = all.begin(group, line);
        k.write_columns(segment(i), arrays.out.at(i), all.block(group, line, size), numbers);
      });
}

}  // namespace jaxsoft::cpu
