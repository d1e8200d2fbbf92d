// Operations on rows with labels. The label's score is left out of a row's state, so a row is cut at its label, and the
// states of what lies before and after it combine.
#pragma once

#include <cmath>

#include "arrays.h"
#include "schedule.h"
#include "short_rows.h"

namespace jaxsoft::cpu {

// The arrays of a call, and what happens to one row or to a segment of it. Copies of it are held by value, as for Rows.
struct LabelledRows {
  struct Reduced {
    State state{-infinity, 0};
    Sums sums;
  };

  Kernels kernels;
  Arrays arrays;
  Labels labels;
  Rows in;
  int64_t n;

  bool is_read(int64_t row) const { return labels.label[row] != kNoRow; }
  bool has_label(int64_t row, int64_t i, int64_t size) const {
    return labels.label[row] >= i && labels.label[row] < i + size;
  }

  Segment segment(int64_t row, int64_t i) const {
    Segment at = in.segment(row, i);
    at.cap = labels.cap;
    return at;
  }

  // The label's score before a cap, whether it counts or not.
  double uncapped_score(int64_t row) const {
    if (!has_label(row, 0, n)) return is_read(row) ? std::nan("") : 0;
    return kernels.get(arrays.a.at(row * n + labels.label[row]));
  }
  double score(int64_t row) const {
    const double x = uncapped_score(row);
    return labels.cap > 0 && has_label(row, 0, n) ? labels.cap * std::tanh(x / labels.cap) : x;
  }

  // Adds the elements [begin, end). The label is not one of them.
  void add(Reduced& part, int64_t row, int64_t begin, int64_t end) const {
    Segment at = segment(row, begin);
    const int64_t count = in.valid_count(row, begin, end - begin);
    if (count <= 0) return;
    Reduced here;
    if (kernels.reduce_with_sum) {
      const StateAndSum reduced = kernels.reduce_with_sum(at, count);
      here = {reduced.state, {reduced.sum, 0}};
    } else {
      here.state = kernels.reduce(at, count);
    }
    if (kernels.sums) {
      at.from = reference(score(row));
      here.sums = kernels.sums(at, count);
    }
    add(part, here);
  }
  void add(Reduced& total, const Reduced& part) const {
    const State state = combine(total.state, part.state);
    auto moved = [&](const Reduced& of) {
      return kernels.moved ? kernels.moved(of.sums.sum, of.state, state.m) : of.sums.sum;
    };
    total = {state, {moved(total) + moved(part), total.sums.count + part.sums.count}};
  }

  Reduced reduce(int64_t row, int64_t i, int64_t size) const {
    Reduced part;
    if (kernels.write || !is_read(row)) return part;
    if (!has_label(row, i, size)) {
      add(part, row, i, i + size);
    } else {
      add(part, row, i, labels.label[row]);
      add(part, row, labels.label[row] + 1, i + size);
    }
    return part;
  }

  RowNumbers finish(int64_t row, const Reduced& reduced) const {
    RowNumbers numbers{reduced.state};
    if (kernels.write) {
      numbers.given = {arrays.m.get(row), arrays.s.get(row)};
      numbers.cotangent = arrays.cotangent.get(row);
      if (labels.distance_cotangent.data) numbers.distance_cotangent = labels.distance_cotangent.get(row);
      if (labels.entropy_cotangent.data) numbers.entropy_cotangent = labels.entropy_cotangent.get(row);
      if (arrays.beside.data) numbers.beside = arrays.beside.get(row);
      return numbers;
    }
    const double t = score(row);
    arrays.m.set(row, reduced.state.m), arrays.s.set(row, reduced.state.s);
    labels.score.set(row, t);
    if (!arrays.beside.data) return numbers;
    const bool counts = labels.count.data;  // then the sum is of distances from t
    arrays.beside.set(row, reduced.sums.sum + (counts && t == infinity ? t : 0));
    if (counts) labels.count.set(row, reduced.sums.count + (is_read(row) && t > -infinity));
    return numbers;
  }

  void write(int64_t row, int64_t i, int64_t size, const RowNumbers& numbers) const {
    if (!kernels.write) return;
    char* const out = arrays.out.at(row * n + i);
    const int64_t count = is_read(row) ? in.valid_count(row, i, size) : 0;
    if (count > 0) kernels.write(segment(row, i), out, count, numbers);
    if (count < size) kernels.fill(arrays.out.at(row * n + i + count), size - count);
    if (has_label(row, i, size)) kernels.put(arrays.out.at(row * n + labels.label[row]), label_gradient(row, numbers));
  }

  double label_gradient(int64_t row, const RowNumbers& numbers) const {
    const double x = uncapped_score(row), cotangent = labels.cotangent.get(row);
    const bool is_above = labels.cap > 0 || x > -infinity || std::isnan(x);
    double slope = 1;
    if (labels.cap > 0) {
      const double e = std::exp(-2 * std::fabs(x) / labels.cap);
      slope = 4 * e / ((1 + e) * (1 + e));
    }
    return (is_above ? cotangent + numbers.distance_cotangent : cotangent) * slope;
  }
};

inline void run_cut_rows(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& arrays) {
  const int64_t n = call.shape.n;
  const LabelledRows rows{kernels, arrays, Labels(call), Rows(arrays, call), n};
  reduce_then_write(
      pool, call.shape.rows, n, n, [=](int64_t row, int64_t i, int64_t size) { return rows.reduce(row, i, size); },
      [=](LabelledRows::Reduced& total, const LabelledRows::Reduced& part) { rows.add(total, part); },
      [=](int64_t row, const LabelledRows::Reduced& reduced) { return rows.finish(row, reduced); },
      [=](int64_t row, int64_t i, int64_t size, const RowNumbers& numbers) { rows.write(row, i, size, numbers); });
}

// Rows of at most a tile, all of whose elements count, have kernels of their own.
inline void run_whole_rows(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call) {
  const Buffers& buffers = call.buffers;
  const LabelRows rows{buffers.first.data,           call.shape.n,
                       static_cast<const int32_t*>(buffers.label.data),
                       buffers.maximum.data,         buffers.sum.data,
                       buffers.beside.data,          buffers.label_score.data,
                       buffers.count.data,           buffers.cotangent.data,
                       buffers.label_cotangent.data, buffers.distance_cotangent.data,
                       buffers.entropy_cotangent.data, buffers.result.data};
  each_rows(pool, call.shape.rows, call.shape.n,
            [&](int64_t begin, int64_t end) { kernels.label_rows(rows, begin, end); });
}

// `plain`: all elements count, and the scores are the elements themselves.
inline void run_labels(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& arrays,
                       bool plain) {
  const int64_t n = call.shape.n;
  const bool state_alone = !kernels.write && !kernels.sums && !kernels.reduce_with_sum;
  if (plain && n > 0 && n <= kPlan.short_row && state_alone) {
    const Labels labels(call);
    run_short_rows(pool, kernels, call.shape, arrays, &labels);
  } else if (plain && n > 0 && n <= kPlan.tile) {
    run_whole_rows(pool, kernels, call);
  } else {
    run_cut_rows(pool, kernels, call, arrays);
  }
}

}  // namespace jaxsoft::cpu
