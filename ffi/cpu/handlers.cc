// The CPU side of the custom calls: buffers in, rows dealt out to threads, kernels of rows.cc called on segments.
//
// Every operation is: reduce a row to something small, then write the row from it. Rows are dealt out whole where
// there are enough of them; else each row is reduced and written in segments by all threads. A row is always cut at
// the same places and its parts are combined in order, so its bits depend neither on the threads nor on other rows.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../rows.h"
#include "pages.h"
#include "parallel.h"
#include "rows.h"

namespace jaxsoft::cpu {

State combine(State a, State b) {
  double m = a.m > b.m ? a.m : b.m, ref = reference(m);
  return {m, a.s * std::exp(a.m - ref) + b.s * std::exp(b.m - ref)};
}

namespace {

constexpr int64_t kSegment = 1 << 16;      // elements in which a long row is cut
constexpr int64_t kTaskElements = 1 << 15;  // the least work worth handing to another thread
constexpr int64_t kTasksPerThread = 8;      // more would even out little

// The widest instruction set that the machine has. JAXSOFT_CPU_ISA names a narrower one, for tests of its kernels.
const Kernels* choose() {
#if defined(JAXSOFT_X86)
  const char* named = std::getenv("JAXSOFT_CPU_ISA");
  auto may_be = [&](const char* isa) { return named == nullptr || std::strcmp(named, isa) == 0; };
  if (may_be("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return kernels_avx512;
  if (may_be("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return kernels_avx2;
#endif
  return kernels_baseline;
}

struct Elements {
  const Kernels& kernels;
  int64_t size;  // bytes an element
};

Elements elements_of(ffi::DataType dtype) {
  static const Kernels* const table = choose();
  switch (dtype) {
    case ffi::F16: return {table[F16], 2};
    case ffi::BF16: return {table[BF16], 2};
    case ffi::F64: return {table[F64], 8};
    default: return {table[F32], 4};
  }
}

// f(row) for every row, several rows a task.
template <class F>
void each_row(ffi::ThreadPool& pool, Shape shape, F f) {
  // Few large tasks: threads that write side by side would wait for each other's new pages of memory.
  int64_t rows_a_task = std::max({int64_t{1}, kTaskElements / std::max<int64_t>(1, shape.n),
                                  shape.rows / (kTasksPerThread * std::max<int64_t>(1, pool.num_threads()))});
  parallel_for(pool, (shape.rows + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
    int64_t end = std::min(shape.rows, (task + 1) * rows_a_task);
    for (int64_t row = task * rows_a_task; row < end; row++) f(row);
  });
}

// Reduces every row, then writes it: reduce(row, start, size) -> Part; add(Part, Part) -> Part; write(row, start, size, Part).
template <class Reduce, class Add, class Write>
void reduce_then_write(ffi::ThreadPool& pool, Shape shape, Reduce reduce, Add add, Write write) {
  auto [rows, n] = shape;
  int64_t segments = std::max<int64_t>(1, (n + kSegment - 1) / kSegment);
  auto start = [&](int64_t i) { return i * kSegment; };
  auto size = [&](int64_t i) { return std::min(kSegment, n - start(i)); };

  if (segments > 1 && rows < 4 * pool.num_threads()) {
    std::vector<decltype(reduce(0, 0, 0))> parts(segments);
    for (int64_t row = 0; row < rows; row++) {
      parallel_for(pool, segments, [&](int64_t i) { parts[i] = reduce(row, start(i), size(i)); });
      auto total = parts[0];
      for (int64_t i = 1; i < segments; i++) total = add(total, parts[i]);
      parallel_for(pool, segments, [&](int64_t i) { write(row, start(i), size(i), total); });
    }
    return;
  }
  each_row(pool, shape, [&](int64_t row) {
    auto total = reduce(row, 0, size(0));
    for (int64_t i = 1; i < segments; i++) total = add(total, reduce(row, start(i), size(i)));
    for (int64_t i = 0; i < segments; i++) write(row, start(i), size(i), total);
  });
}

// A buffer of whole rows, addressed by row and element.
struct Rows {
  char* data;
  int64_t n, size;
  Rows(ffi::AnyBuffer b, int64_t n, int64_t size) : data(static_cast<char*>(b.untyped_data())), n(n), size(size) {}
  Rows(ffi::Result<ffi::AnyBuffer> b, int64_t n, int64_t size) : Rows(*b, n, size) {
    advise_large_pages(data, b->size_bytes());
  }
  void* at(int64_t row, int64_t i) const { return data + (row * n + i) * size; }
};

// A buffer of one number a row, f32 or f64.
struct Statistic {
  void* data;
  bool wide;
  explicit Statistic(ffi::AnyBuffer b) : data(b.untyped_data()), wide(b.element_type() == ffi::F64) {}
  double get(int64_t row) const { return wide ? static_cast<double*>(data)[row] : static_cast<float*>(data)[row]; }
  void set(int64_t row, double v) const {
    if (wide) static_cast<double*>(data)[row] = v;
    else static_cast<float*>(data)[row] = static_cast<float>(v);
  }
};

double plus(double a, double b) { return a + b; }

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

ffi::Error softmax(ffi::ThreadPool pool, In x, Out y, Out) {
  if (auto error = check(x, {*y}, {}); error.failure()) return error;
  auto [k, size] = elements_of(x.element_type());
  Shape shape = shape_of(x);
  Rows in(x, shape.n, size), out(y, shape.n, size);
  if (shape.n <= kTile) {
    each_row(pool, shape, [&, &k = k](int64_t row) { k.softmax_tile(in.at(row, 0), out.at(row, 0), in.n); });
    return ffi::Error::Success();
  }
  reduce_then_write(
      pool, shape, [&, &k = k](int64_t row, int64_t i, int64_t n) { return k.state(in.at(row, i), n); }, combine,
      [&, &k = k](int64_t row, int64_t i, int64_t n, State st) { k.softmax(in.at(row, i), out.at(row, i), n, st); });
  return ffi::Error::Success();
}

ffi::Error log_softmax(ffi::ThreadPool pool, In x, Out y, Out m, Out s, Out) {
  if (auto error = check(x, {*y}, {*m, *s}); error.failure()) return error;
  auto [k, size] = elements_of(x.element_type());
  Shape shape = shape_of(x);
  Rows in(x, shape.n, size), out(y, shape.n, size);
  Statistic ms(*m), ss(*s);
  reduce_then_write(
      pool, shape, [&, &k = k](int64_t row, int64_t i, int64_t n) { return k.state(in.at(row, i), n); }, combine,
      [&, &k = k](int64_t row, int64_t i, int64_t n, State st) {
        if (i == 0) ms.set(row, st.m), ss.set(row, st.s);
        k.log_softmax(in.at(row, i), out.at(row, i), n, st);
      });
  return ffi::Error::Success();
}

ffi::Error state(ffi::ThreadPool pool, In x, Out m, Out s, Out) {
  if (auto error = check(x, {}, {*m, *s}); error.failure()) return error;
  auto [k, size] = elements_of(x.element_type());
  Shape shape = shape_of(x);
  Rows in(x, shape.n, size);
  Statistic ms(*m), ss(*s);
  reduce_then_write(
      pool, shape, [&, &k = k](int64_t row, int64_t i, int64_t n) { return k.state(in.at(row, i), n); }, combine,
      [&](int64_t row, int64_t i, int64_t, State st) {
        if (i == 0) ms.set(row, st.m), ss.set(row, st.s);
      });
  return ffi::Error::Success();
}

ffi::Error softmax_vjp(ffi::ThreadPool pool, In y, In g, Out dx, Out) {
  if (auto error = check(y, {g, *dx}, {}); error.failure()) return error;
  auto [k, size] = elements_of(y.element_type());
  Shape shape = shape_of(y);
  Rows ys(y, shape.n, size), gs(g, shape.n, size), out(dx, shape.n, size);
  reduce_then_write(
      pool, shape, [&, &k = k](int64_t row, int64_t i, int64_t n) { return k.dot(ys.at(row, i), gs.at(row, i), n); },
      plus, [&, &k = k](int64_t row, int64_t i, int64_t n, double dot) {
        k.softmax_vjp(ys.at(row, i), gs.at(row, i), out.at(row, i), n, dot);
      });
  return ffi::Error::Success();
}

ffi::Error log_softmax_vjp(ffi::ThreadPool pool, In x, In m, In s, In g, Out dx, Out) {
  if (auto error = check(x, {g, *dx}, {m, s}); error.failure()) return error;
  auto [k, size] = elements_of(x.element_type());
  Shape shape = shape_of(x);
  Rows xs(x, shape.n, size), gs(g, shape.n, size), out(dx, shape.n, size);
  Statistic ms(m), ss(s);
  reduce_then_write(
      pool, shape, [&, &k = k](int64_t row, int64_t i, int64_t n) { return k.sum(gs.at(row, i), n); }, plus,
      [&, &k = k](int64_t row, int64_t i, int64_t n, double sum) {
        State st{ms.get(row), ss.get(row)};
        k.log_softmax_vjp(xs.at(row, i), gs.at(row, i), out.at(row, i), n, st, sum);
      });
  return ffi::Error::Success();
}

ffi::Error logsumexp_vjp(ffi::ThreadPool pool, In x, In m, In s, In g, Out dx) {
  if (auto error = check(x, {*dx}, {m, s, g}); error.failure()) return error;
  auto [k, size] = elements_of(x.element_type());
  Shape shape = shape_of(x);
  Rows xs(x, shape.n, size), out(dx, shape.n, size);
  Statistic ms(m), ss(s), gs(g);
  reduce_then_write(
      pool, shape, [](int64_t, int64_t, int64_t) { return 0; }, [](int, int) { return 0; },
      [&, &k = k](int64_t row, int64_t i, int64_t n, int) {
        k.logsumexp_vjp(xs.at(row, i), out.at(row, i), n, State{ms.get(row), ss.get(row)}, gs.get(row));
      });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsoft::cpu

JAXSOFT_EXPORT_API_VERSION
JAXSOFT_TARGETS(jaxsoft::cpu, .Ctx<xla::ffi::ThreadPool>());
