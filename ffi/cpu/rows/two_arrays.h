// Operations on rows of two arrays of scores.
#pragma once

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

// The arrays of one number a row among an operation's operands or results.
struct NumberArrays {
  PerRow arrays[8];
  int count = 0;

  NumberArrays(const List<Operand>& operands, const Buffers& buffers) {
    for (const Operand& each : operands)
      if (each.kind == Kind::number) arrays[count++] = buffers.*each.place;
  }
  Numbers get(int64_t row) const {
    Numbers numbers{};
    for (int i = 0; i < count; i++) numbers.of[i] = arrays[i].get(row);
    return numbers;
  }
  void set(int64_t row, const Numbers& numbers) const {
    for (int i = 0; i < count; i++) arrays[i].set(row, numbers.of[i]);
  }
};

inline void run_rows_of_two(ffi::ThreadPool& pool, const Operation& operation, const Kernels& kernels, const Call& call,
                            const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call);
  const NumberArrays operands(operation.operands, call.buffers), results(operation.results, call.buffers);
  const int64_t n = call.shape.n;
  if (k.reduce_two) {
    reduce_then_write(
        pool, call.shape.rows, n, n,
        [=](int64_t row, int64_t i, int64_t size) {
          return k.reduce_two(in.segment(row, i), in.valid_count(row, i, size));
        },
        [=](Numbers& total, const Numbers& part) { total = k.combine_two(total, part); },
        [=](int64_t row, const Numbers& total) {
          results.set(row, k.finish_two(total));
          return 0;
        },
        [](int64_t, int64_t, int64_t, int) {});
    return;
  }
  auto write = [=](int64_t row, int64_t i, int64_t size, const Numbers& numbers) {
    char *const out = arrays.out.at(row * n + i), *const other_out = arrays.other_out.at(row * n + i);
    const int64_t count = in.valid_count(row, i, size);
    if (count > 0) k.write_two(in.segment(row, i), out, other_out, count, numbers);
    if (count == size) return;
    if (out) k.fill(out + count * arrays.out.size, size - count);
    k.fill(other_out + count * arrays.other_out.size, size - count);
  };
  reduce_then_write(
      pool, call.shape.rows, n, n, [](int64_t, int64_t, int64_t) { return 0; }, [](int, int) {},
      [=](int64_t row, int) { return operands.get(row); }, write);
}

}  // namespace jaxsoft::cpu
