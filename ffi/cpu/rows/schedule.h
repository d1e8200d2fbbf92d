// How rows are shared between threads.
//
// Rows are scheduled whole where there are enough of them; else all threads share each row. A row is always cut at the
// same places and its parts are combined in order, so its bits depend neither on the threads nor on other rows.
#pragma once

#include <algorithm>
#include <vector>

#include "../parallel.h"
#include "plan.h"

namespace jaxsoft::cpu {

// Calls f(begin, end) for all rows, several rows a task.
template <class F>
void each_rows(ffi::ThreadPool& pool, int64_t rows, int64_t elements, F f) {
  // Tasks are few and large: threads that write side by side would wait for each other's new pages of memory.
  int64_t rows_a_task = std::max({int64_t{1}, kPlan.task_elements / std::max<int64_t>(1, elements),
                                  rows / (kPlan.tasks_a_thread * std::max<int64_t>(1, pool.num_threads()))});
  parallel_for(pool, (rows + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
    f(task * rows_a_task, std::min(rows, (task + 1) * rows_a_task));
  });
}

template <class F>
void each_row(ffi::ThreadPool& pool, int64_t rows, int64_t elements, F f) {
  each_rows(pool, rows, elements, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) f(row);
  });
}

// Reduces every row, cut in segments, then writes it: reduce(row, start, size) -> Part, add(Part&, Part),
// finish(row, Part) -> Total, write(row, start, size, Total). A row has n steps, of `elements` elements in all.
template <class Reduce, class Add, class Finish, class Write>
void reduce_then_write(ffi::ThreadPool& pool, int64_t rows, int64_t n, int64_t elements, Reduce reduce, Add add,
                       Finish finish, Write write) {
  int64_t length = std::max<int64_t>(1, kPlan.segment * n / std::max<int64_t>(1, elements));
  int64_t segments = std::max<int64_t>(1, (n + length - 1) / length);
  auto start = [&](int64_t i) { return i * length; };
  auto size = [&](int64_t i) { return std::min(length, n - start(i)); };

  if (segments > 1 && rows < kPlan.rows_a_thread * pool.num_threads()) {
    std::vector<decltype(reduce(0, 0, 0))> parts(segments);
    for (int64_t row = 0; row < rows; row++) {
      parallel_for(pool, segments, [&](int64_t i) { parts[i] = reduce(row, start(i), size(i)); });
      for (int64_t i = 1; i < segments; i++) add(parts[0], parts[i]);
      auto total = finish(row, parts[0]);
      parallel_for(pool, segments, [&](int64_t i) { write(row, start(i), size(i), total); });
    }
    return;
  }
  each_row(pool, rows, elements, [&](int64_t row) {
    auto part = reduce(row, 0, size(0));
    for (int64_t i = 1; i < segments; i++) add(part, reduce(row, start(i), size(i)));
    auto total = finish(row, part);
    for (int64_t i = 0; i < segments; i++) write(row, start(i), size(i), total);
  });
}

}  // namespace jaxsoft::cpu
