// The CPU side of the custom calls: buffers in, rows dealt out to threads, kernels of rows.cc called on segments.
//
// Every operation is: reduce a row to something small, then write the row from it. Rows are dealt out whole where
// there are enough of them; else each row is reduced and written in segments by all threads. A row is always cut at
// the same places and its parts are combined in order, so its bits depend neither on the threads nor on other rows.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../rows/call.h"
#include "../pages.h"
#include "../parallel.h"
#include "rows.h"

namespace jaxsoft::cpu {

State combine(State a, State b) {
  double m = a.m > b.m ? a.m : b.m, ref = reference(m);
  return {m, a.s * std::exp(a.m - ref) + b.s * std::exp(b.m - ref)};
}

namespace {

constexpr int64_t kSegment = 1 << 16;      // elements in which a long row is cut
constexpr int64_t kFewColumns = 16;         // fewer do not fill a vector
constexpr int64_t kShort = 24;              // rows up to here are worked on as columns
constexpr int64_t kShortElements = 2048;    // so many elements at a time
constexpr int64_t kTaskElements = 1 << 15;  // the least work worth handing to another thread
constexpr int64_t kTasksPerThread = 8;      // more would even out little

// The widest instruction set that the machine has. JAXSOFT_CPU_ISA names a narrower one, for tests of its kernels.
const KernelTable& choose() {
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

DTypes dtypes_of(ffi::DataType x, ffi::DataType y) {
  if (x == ffi::F64) return F64;
  if (x == ffi::F16) return y == ffi::F32 ? F16ToF32 : F16;
  if (x == ffi::BF16) return y == ffi::F32 ? BF16ToF32 : BF16;
  return y == ffi::F16 ? F32ToF16 : y == ffi::BF16 ? F32ToBF16 : F32;
}

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using Rest = ffi::RemainingArgs;

// A buffer of x's shape. What an operation does not have is null.
struct Elements {
  char* data = nullptr;
  int64_t size = 0;  // bytes an element
  ffi::DataType dtype = ffi::DataType::INVALID;
  Elements() = default;
  Elements(In b)
      : data(static_cast<char*>(b.untyped_data())), size(ffi::ByteWidth(b.element_type())), dtype(b.element_type()) {}
  Elements(Out b) : Elements(*b) { advise_large_pages(data, b->size_bytes()); }
  char* at(int64_t i) const { return data ? data + i * size : nullptr; }
};

// A buffer of one number a row, f32 or f64.
struct Statistic {
  void* data = nullptr;
  bool wide = false;
  Statistic() = default;
  Statistic(In b) : data(b.untyped_data()), wide(b.element_type() == ffi::F64) {}
  Statistic(Out b) : Statistic(*b) {}
  void* at(int64_t row) const { return data ? static_cast<char*>(data) + row * (wide ? 8 : 4) : nullptr; }
  double get(int64_t row) const { return wide ? static_cast<double*>(data)[row] : static_cast<float*>(data)[row]; }
  void set(int64_t row, double v) const {
    if (wide) static_cast<double*>(data)[row] = v;
    else static_cast<float*>(data)[row] = static_cast<float>(v);
  }
};

struct Arrays {
  Elements a, b, out;
  Statistic m, s, g;  // (m, s): results of an operation that reduces scores, operands of the others
};

// What an operation with labels has beside them.
struct Labels {
  const int32_t* index;
  double cap;
  Statistic t, u, k;  // results
  Statistic h, v;     // operands
};

// The numbers of a row that has been reduced. Writes those that are results.
Row finish(Operation operation, const Arrays& arrays, int64_t row, State reduced) {
  Row numbers{reduced};
  if (arrays.g.data) numbers.g = arrays.g.get(row);
  if (!arrays.m.data) return numbers;
  if (operation <= kState) {
    arrays.m.set(row, reduced.m);
    arrays.s.set(row, reduced.s);
  } else {
    numbers.given = {arrays.m.get(row), arrays.s.get(row)};
  }
  return numbers;
}

// f(begin, end) for all rows, several a task.
template <class F>
void each_rows(ffi::ThreadPool& pool, int64_t rows, int64_t elements, F f) {
  // Few large tasks: threads that write side by side would wait for each other's new pages of memory.
  int64_t rows_a_task = std::max({int64_t{1}, kTaskElements / std::max<int64_t>(1, elements),
                                  rows / (kTasksPerThread * std::max<int64_t>(1, pool.num_threads()))});
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

// Reduces every row of n, cut in segments, then writes it: reduce(row, start, size) -> Part, add(Part&, Part),
// finish(row, Part) -> Total, write(row, start, size, Total).
template <class Reduce, class Add, class Finish, class Write>
void reduce_then_write(ffi::ThreadPool& pool, int64_t rows, int64_t n, int64_t elements, Reduce reduce, Add add,
                       Finish finish, Write write) {
  int64_t length = std::max<int64_t>(1, kSegment * n / std::max<int64_t>(1, elements));
  int64_t segments = std::max<int64_t>(1, (n + length - 1) / length);
  auto start = [&](int64_t i) { return i * length; };
  auto size = [&](int64_t i) { return std::min(length, n - start(i)); };

  if (segments > 1 && rows < 4 * pool.num_threads()) {
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

// What is read of rows (rows, n). Lambdas hold it by value: it is looked at for every row, however short.
struct Rows {
  Elements a, b;
  int64_t n;
  bool masked, wide, has_extras;
  Extras extras;

  Rows(const Arrays& arrays, const Call& call, bool masked)
      : a(arrays.a), b(arrays.b), n(call.shape.n), masked(masked), wide(a.dtype == ffi::F64), extras(call.extras) {
    has_extras = extras.scale.data || extras.limit.data || extras.where.data || extras.bias.data;
  }
  Segment segment(int64_t row, int64_t i) const {
    Segment at{a.at(row * n + i), b.at(row * n + i), nullptr, nullptr, scale(row), masked};
    if (!has_extras) return at;
    if (extras.where.data)
      at.where = static_cast<const bool*>(extras.where.data) + extras.offset(extras.where, row) + i;
    if (extras.bias.data)
      at.bias = static_cast<const char*>(extras.bias.data) + (extras.offset(extras.bias, row) + i) * a.size;
    return at;
  }
  double scale(int64_t row) const {
    if (!has_extras || !extras.scale.data) return 1;
    int64_t i = extras.offset(extras.scale, row);
    return wide ? static_cast<const double*>(extras.scale.data)[i] : static_cast<const float*>(extras.scale.data)[i];
  }
  // How many of the `size` elements from i on come before the row's limit.
  int64_t counted(int64_t row, int64_t i, int64_t size) const {
    if (!has_extras || !extras.limit.data) return size;
    int64_t limit = static_cast<const int32_t*>(extras.limit.data)[extras.offset(extras.limit, row)];
    return std::clamp<int64_t>(limit - i, 0, size);
  }
};

void run_rows(ffi::ThreadPool& pool, Operation operation, const Kernels& kernels, const Call& call, bool masked,
              const Arrays& all) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Rows in(arrays, call, masked);
  const int64_t n = call.shape.n;
  auto fill = [=](int64_t row, int64_t begin, int64_t end) {
    if (begin < end && arrays.out.data) k.fill(arrays.out.at(row * n + begin), end - begin);
  };
  if (n <= kSegment) {  // rows that are not cut
    each_row(pool, call.shape.rows, n, [=](int64_t row) {
      const Segment at = in.segment(row, 0);
      const int64_t count = in.counted(row, 0, n);
      char* out = arrays.out.at(row * n);
      if (k.at_once && n <= kTile) {
        k.at_once(at, out, count);
      } else {
        State reduced = k.reduce ? k.reduce(at, count) : State{};
        Row numbers = finish(operation, arrays, row, reduced);
        if (k.write) k.write(at, out, count, numbers);
      }
      fill(row, count, n);
    });
    return;
  }
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [=](int64_t row, int64_t i, int64_t size) {
        return k.reduce ? k.reduce(in.segment(row, i), in.counted(row, i, size)) : State{};
      },
      [](State& total, State part) { total = combine(total, part); },
      [=](int64_t row, State reduced) { return finish(operation, arrays, row, reduced); },
      [=](int64_t row, int64_t i, int64_t size, const Row& total) {
        if (!k.write) return;
        int64_t count = in.counted(row, i, size);
        k.write(in.segment(row, i), arrays.out.at(row * n + i), count, total);
        fill(row, i + count, i + size);
      });
}

// Rows with labels. A row is cut at its label: without it, it is two segments more, whose states combine.
void run_labels(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& all,
                const Labels& given) {
  const Kernels k = kernels;
  const Arrays arrays = all;
  const Labels labels = given;
  const Rows in(arrays, call, false);
  const int64_t n = call.shape.n;
  auto segment = [=](int64_t row, int64_t i) {
    Segment at = in.segment(row, i);
    at.cap = labels.cap;
    return at;
  };
  auto has = [=](int64_t row, int64_t i, int64_t size) { return labels.index[row] >= i && labels.index[row] < i + size; };
  // The label's score, whether it counts or not.
  auto label_score = [=](int64_t row, double cap) {
    if (!has(row, 0, n)) return labels.index[row] == kNoRow ? 0 : std::nan("");
    const double x = k.get(arrays.a.at(row * n + labels.index[row]));
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  };
  struct Reduced {
    State state{-infinity, 0}, above{0, 0};
  };
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [=](int64_t row, int64_t i, int64_t size) {
        Reduced part;
        if (k.write || labels.index[row] == kNoRow) return part;
        auto add = [&](int64_t begin, int64_t end) {
          Segment at = segment(row, begin);
          const int64_t count = in.counted(row, begin, end - begin);
          if (count <= 0) return;
          part.state = combine(part.state, k.reduce(at, count));
          if (!k.above) return;
          at.from = reference(label_score(row, labels.cap));
          State above = k.above(at, count);
          part.above.m += above.m, part.above.s += above.s;
        };
        if (!has(row, i, size)) {
          add(i, i + size);
        } else {
          add(i, labels.index[row]);
          add(labels.index[row] + 1, i + size);
        }
        return part;
      },
      [](Reduced& total, const Reduced& part) {
        total.state = combine(total.state, part.state);
        total.above.m += part.above.m, total.above.s += part.above.s;
      },
      [=](int64_t row, const Reduced& reduced) {
        Row numbers{reduced.state};
        if (k.write) {
          numbers.given = {arrays.m.get(row), arrays.s.get(row)};
          numbers.g = arrays.g.get(row);
          if (labels.v.data) numbers.v = labels.v.get(row);
          return numbers;
        }
        const double t = label_score(row, labels.cap);
        arrays.m.set(row, reduced.state.m), arrays.s.set(row, reduced.state.s);
        labels.t.set(row, t);
        if (!labels.u.data) return numbers;
        labels.u.set(row, reduced.above.s + (t > 0 && t == infinity ? t : 0));
        labels.k.set(row, reduced.above.m + (labels.index[row] != kNoRow && t > -infinity));
        return numbers;
      },
      [=](int64_t row, int64_t i, int64_t size, const Row& numbers) {
        if (!k.write) return;
        char* out = arrays.out.at(row * n + i);
        const int64_t count = labels.index[row] == kNoRow ? 0 : in.counted(row, i, size);
        if (count > 0) k.write(segment(row, i), out, count, numbers);
        if (count < size) k.fill(arrays.out.at(row * n + i + count), size - count);
        if (!has(row, i, size)) return;
        const double x = label_score(row, 0), h = labels.h.get(row);
        double value = labels.cap > 0 || x > -infinity || std::isnan(x) ? h + numbers.v : h, slope = 1;
        if (labels.cap > 0) {
          const double e = std::exp(-2 * std::fabs(x) / labels.cap);
          slope = 4 * e / ((1 + e) * (1 + e));
        }
        k.put(arrays.out.at(row * n + labels.index[row]), value * slope);
      });
}

// x is (rows, n, inner). Columns are taken together where they are neighbours. Where they are few, n is folded onto
// them: (n, inner) is the same memory as (n / fold, fold * inner), where each column is one of `fold` parts of a row.
void run_columns(ffi::ThreadPool& pool, const Kernels& k, Shape shape, bool masked, const Arrays& arrays) {
  auto [rows, n, inner] = shape;
  const int64_t fold = inner < kFewColumns ? std::max<int64_t>(1, std::min(n, 4 * kFewColumns / inner)) : 1;
  const int64_t width = fold * inner, lines = (n + fold - 1) / fold;
  const int64_t together = std::min(kColumns, width), groups = (width + together - 1) / together;

  // f(Segment, first element, Block) for some lines of a group of columns.
  auto with_block = [&, rows = rows, n = n, inner = inner](int64_t group, int64_t line, int64_t size, auto f) {
    int64_t row = group / groups, column = group % groups * together;
    int64_t i = row * n * inner + line * width + column, whole = std::clamp<int64_t>(n / fold - line, 0, size);
    f(Segment{arrays.a.at(i), arrays.b.at(i), nullptr, nullptr, 1, masked}, i,
      Block{whole, std::min(together, width - column), width, whole < size ? n % fold * inner : 0,
            std::min(together, inner)});
  };
  reduce_then_write(
      pool, rows * groups, lines, lines * together,
      [&](int64_t group, int64_t line, int64_t size) {
        Part part;
        with_block(group, line, size, [&](const Segment& at, int64_t, const Block& block) {
          k.reduce_columns(at, block, &part);
        });
        return part;
      },
      [&](Part& total, const Part& part) { k.combine_columns(&total, part, together); },
      [&, inner = inner](int64_t group, const Part& part) {
        Numbers numbers;
        int64_t row = group / groups * inner + group % groups * together;
        with_block(group, 0, 0, [&](const Segment&, int64_t, const Block& block) {
          k.finish_columns(part, block, arrays.m.at(row), arrays.s.at(row), arrays.g.at(row), &numbers);
        });
        return numbers;
      },
      [&](int64_t group, int64_t line, int64_t size, const Numbers& numbers) {
        if (!k.write) return;
        with_block(group, line, size, [&](const Segment& at, int64_t i, const Block& block) {
          k.write_columns(at, arrays.out.at(i), block, numbers);
        });
      });
}

// to[j][i] = from[i][j]
template <class Word>
void transpose(const char* from, char* to, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j++)
    for (int64_t i = 0; i < rows; i++)
      reinterpret_cast<Word*>(to)[j * rows + i] = reinterpret_cast<const Word*>(from)[i * columns + j];
}
void transpose(const char* from, char* to, int64_t rows, int64_t columns, int64_t size) {
  if (size == 2) transpose<uint16_t>(from, to, rows, columns);
  else if (size == 4) transpose<uint32_t>(from, to, rows, columns);
  else transpose<uint64_t>(from, to, rows, columns);
}

// Of columns with labels, moves the labels' scores to t, and leaves -inf in their place, and in that of all scores of
// rows that are not read.
template <class Word, class Score>
void take_label_scores(const Kernels& k, char* columns, int64_t n, int64_t rows, const int32_t* labels, void* t) {
  auto* const scores = reinterpret_cast<Word*>(columns);
  Word none;
  k.put(&none, -infinity);
  for (int64_t j = 0; j < rows; j++) {
    const int64_t label = labels[j];
    Score score = label == kNoRow ? 0 : static_cast<Score>(std::nan(""));
    if (label >= 0 && label < n) {
      Word& at = scores[label * rows + j];
      if constexpr (sizeof(Word) == sizeof(Score)) std::memcpy(&score, &at, sizeof score);
      else score = static_cast<Score>(k.get(&at));
      at = none;
    }
    for (int64_t c = 0; label == kNoRow && c < n; c++) scores[c * rows + j] = none;
    static_cast<Score*>(t)[j] = score;
  }
}
void take_label_scores(const Kernels& k, char* columns, int64_t size, int64_t n, int64_t rows, const int32_t* labels,
                       void* t) {
  if (size == 2) take_label_scores<uint16_t, float>(k, columns, n, rows, labels, t);
  else if (size == 4) take_label_scores<uint32_t, float>(k, columns, n, rows, labels, t);
  else take_label_scores<uint64_t, double>(k, columns, n, rows, labels, t);
}

// Short rows are made columns, some at a time in the first-level cache: a row by itself would leave lanes of its vectors
// idle, and cost as much as several. The results of rows with labels are statistics alone.
void run_short_rows(ffi::ThreadPool& pool, const Kernels& k, Shape shape, const Arrays& arrays,
                    const Labels* labels = nullptr) {
  const int64_t n = shape.n, together = std::min(kColumns, kShortElements / n / 16 * 16);
  each_row(pool, (shape.rows + together - 1) / together, n * together, [&](int64_t group) {
    alignas(64) char a[kShortElements * 8], b[kShortElements * 8], out[kShortElements * 8];
    const int64_t row = group * together, rows = std::min(together, shape.rows - row);
    const Block block{n, rows, rows, 0, rows};
    transpose(arrays.a.at(row * n), a, rows, n, arrays.a.size);
    if (arrays.b.data) transpose(arrays.b.at(row * n), b, rows, n, arrays.b.size);
    if (labels) take_label_scores(k, a, arrays.a.size, n, rows, labels->index + row, labels->t.at(row));
    const Segment at{a, b};
    Part part;
    Numbers numbers;
    k.reduce_columns(at, block, &part);
    k.finish_columns(part, block, arrays.m.at(row), arrays.s.at(row), arrays.g.at(row), &numbers);
    if (!k.write) return;
    k.write_columns(at, out, block, numbers);
    transpose(out, arrays.out.at(row * n), n, rows, arrays.out.size);
  });
}

const KernelTable& table() {
  static const KernelTable& chosen = choose();
  return chosen;
}

// to[j] = from[at[j]]
template <class Word>
void gather(const char* from, const int32_t* at, int64_t n, char* to) {
  for (int64_t j = 0; j < n; j++) reinterpret_cast<Word*>(to)[j] = reinterpret_cast<const Word*>(from)[at[j]];
}
void gather(const char* from, const int32_t* at, int64_t n, char* to, int64_t size) {
  if (size == 2) gather<uint16_t>(from, at, n, to);
  else if (size == 4) gather<uint32_t>(from, at, n, to);
  else gather<uint64_t>(from, at, n, to);
}

// What a segment of a row is reduced to.
struct Found {
  State state{-infinity, 0};
  Candidates candidates;
};

// A tile's state is taken and its candidates are found while it is in the first-level cache.
void run_top_k(ffi::ThreadPool& pool, const Kernels& kernels, Shape shape, int k, const Arrays& arrays,
               int32_t* indices) {
  const int64_t n = shape.n, tile = 2 * kTile, key_size = arrays.a.size == 8 ? 8 : 4;
  reduce_then_write(
      pool, shape.rows, n, n,
      [&](int64_t row, int64_t begin, int64_t size) {
        Found found;
        found.candidates.limit = 2 * (k + Candidates::block);
        for (int64_t i = begin; i < begin + size; i += tile) {
          const int64_t length = std::min(tile, begin + size - i);
          State state = kernels.reduce({arrays.a.at(row * n + i)}, length);
          found.state = i == begin ? state : combine(found.state, state);
          for (int64_t at = 0;;) {
            at += kernels.find({arrays.a.at(row * n + i + at)}, length - at, i + at, &found.candidates);
            if (at == length) break;
            kernels.cut(&found.candidates, k);
          }
        }
        kernels.cut(&found.candidates, k);
        return found;
      },
      [&](Found& total, const Found& part) {
        Candidates& all = total.candidates;
        const Candidates& of_part = part.candidates;
        total.state = combine(total.state, part.state);
        std::copy_n(of_part.indices, of_part.count, all.indices + all.count);
        std::memcpy(reinterpret_cast<char*>(all.keys) + all.count * key_size, of_part.keys, of_part.count * key_size);
        all.count += of_part.count;
        kernels.cut(&all, k);
      },
      [&](int64_t row, Found& found) {
        finish(kState, arrays, row, found.state);
        int32_t* const to = indices + row * k;
        if (std::isfinite(found.state.m) && !std::isnan(found.state.s)) kernels.order(&found.candidates, k, to);
        else std::iota(to, to + k, 0);  // the softmax has no value
        gather(arrays.a.at(row * n), to, k, arrays.out.at(row * k), arrays.a.size);
        return 0;
      },
      [](int64_t, int64_t, int64_t, int) {});
}

ffi::Error run(ffi::ThreadPool& pool, Operation operation, const ffi::ErrorOr<Call>& call, bool masked,
               const Arrays& arrays) {
  if (call.has_error()) return call.error();
  const Extras& extras = call->extras;
  bool with = masked || extras.scale.data || extras.where.data || extras.bias.data;  // a limit makes rows shorter
  auto result = arrays.out.data ? arrays.out.dtype : arrays.a.dtype;
  const Kernels& kernels = table()[with][dtypes_of(arrays.a.dtype, result)][operation];
  const bool is_short = call->shape.n > 0 && call->shape.n <= kShort && !with && !extras.limit.data;
  if (call->shape.inner == 1 && is_short) run_short_rows(pool, kernels, call->shape, arrays);
  else if (call->shape.inner == 1) run_rows(pool, operation, kernels, *call, masked, arrays);
  else if (call->shape.inner > 0) run_columns(pool, kernels, call->shape, masked, arrays);
  return ffi::Error::Success();
}

ffi::Error run(ffi::ThreadPool& pool, Operation operation, const ffi::ErrorOr<Call>& call, const Arrays& arrays,
               const Labels& labels) {
  if (call.has_error()) return call.error();
  const auto result = arrays.out.data ? arrays.out.dtype : arrays.a.dtype;
  const bool with = labels.cap > 0 || call->extras.where.data;
  const auto& kernels = table()[with][dtypes_of(arrays.a.dtype, result)];
  const bool plain = call->shape.n > 0 && !with && !call->extras.limit.data;
  if (plain && call->shape.n <= kShort && operation == kState) {
    run_short_rows(pool, kernels[operation], call->shape, arrays, &labels);
    return ffi::Error::Success();
  }
  if (plain && call->shape.n <= kTile) {
    const LabelRows rows{arrays.a.data, call->shape.n, labels.index,  kNoRow,        arrays.m.data,
                         arrays.s.data, labels.t.data, labels.u.data, labels.k.data, arrays.g.data,
                         labels.h.data, labels.v.data, arrays.out.data};
    each_rows(pool, call->shape.rows, call->shape.n,
              [&](int64_t begin, int64_t end) { kernels[operation].label_rows(rows, begin, end); });
    return ffi::Error::Success();
  }
  run_labels(pool, kernels[operation], *call, arrays, labels);
  return ffi::Error::Success();
}

ffi::Error softmax(ffi::ThreadPool pool, In x, Out y, Out, Rest rest, Form form) {
  return run(pool, kSoftmax, read_call({x, {}, {*y}, {}, "slwb", false}, rest, form), false, {x, {}, y, {}, {}, {}});
}

ffi::Error log_softmax(ffi::ThreadPool pool, In x, Out y, Out m, Out s, Out, Rest rest, Form form) {
  auto call = read_call({x, {}, {*y}, {*m, *s}, "slwb", false}, rest, form);
  return run(pool, kLogSoftmax, call, false, {x, {}, y, m, s, {}});
}

ffi::Error state(ffi::ThreadPool pool, In x, Out m, Out s, Out, Rest rest, Form form) {
  auto call = read_call({x, {}, {}, {*m, *s}, "slwb", false}, rest, form);
  return run(pool, kState, call, false, {x, {}, {}, m, s, {}});
}

ffi::Error top_k(ffi::ThreadPool pool, In x, Out values, Out indices, Out m, Out s, Out, Rest rest, Form form) {
  auto call = read_top_k_call(x, *values, *indices, *m, *s, rest, form);
  if (call.has_error()) return call.error();
  run_top_k(pool, table()[false][dtypes_of(x.element_type(), x.element_type())][kState], call->shape,
            static_cast<int>(values->dimensions().back()), {x, {}, values, m, s, {}},
            static_cast<int32_t*>(indices->untyped_data()));
  return ffi::Error::Success();
}

ffi::Error softmax_vjp(ffi::ThreadPool pool, In y, In g, Out dx, Out, Rest rest, Form form) {
  return run(pool, kSoftmaxVjp, read_call({y, {g}, {*dx}, {}, "sl", true}, rest, form), form.masked,
             {y, g, dx, {}, {}, {}});
}

ffi::Error log_softmax_vjp(ffi::ThreadPool pool, In x, In m, In s, In g, Out dx, Out, Rest rest, Form form) {
  auto call = read_call({x, {g}, {*dx}, {m, s}, "slw", false}, rest, form);
  return run(pool, kLogSoftmaxVjp, call, false, {x, g, dx, m, s, {}});
}

ffi::Error logsumexp_vjp(ffi::ThreadPool pool, In x, In m, In s, In g, Out dx, Rest rest, Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g}, "slwb", false}, rest, form);
  return run(pool, kLogsumexpVjp, call, false, {x, {}, dx, m, s, g});
}

const int32_t* indices(In b) { return static_cast<const int32_t*>(b.untyped_data()); }

ffi::Error label_state(ffi::ThreadPool pool, In x, In i, Out m, Out s, Out t, Out, Rest rest, Form form) {
  auto call = read_call({x, {}, {}, {*m, *s, *t}, "lw", false, {i}}, rest, form);
  return run(pool, kState, call, {x, {}, {}, m, s, {}}, {indices(i), form.cap, t, {}, {}, {}, {}});
}

ffi::Error label_sums(ffi::ThreadPool pool, In x, In i, Out m, Out s, Out t, Out u, Out k, Out, Rest rest, Form form) {
  auto call = read_call({x, {}, {}, {*m, *s, *t, *u, *k}, "lw", false, {i}}, rest, form);
  return run(pool, kLabelSums, call, {x, {}, {}, m, s, {}}, {indices(i), form.cap, t, u, k, {}, {}});
}

ffi::Error label_state_vjp(ffi::ThreadPool pool, In x, In i, In m, In s, In g, In h, Out dx, Rest rest, Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g, h}, "lw", false, {i}}, rest, form);
  return run(pool, kLogsumexpVjp, call, {x, {}, dx, m, s, g}, {indices(i), form.cap, {}, {}, {}, h, {}});
}

ffi::Error label_sums_vjp(ffi::ThreadPool pool, In x, In i, In m, In s, In g, In h, In v, Out dx, Rest rest,
                          Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g, h, v}, "lw", false, {i}}, rest, form);
  return run(pool, kLabelSumsVjp, call, {x, {}, dx, m, s, g}, {indices(i), form.cap, {}, {}, {}, h, v});
}

}  // namespace
}  // namespace jaxsoft::cpu

JAXSOFT_EXPORT_API_VERSION
JAXSOFT_TARGETS(jaxsoft::cpu, .Ctx<xla::ffi::ThreadPool>());
