// The CPU kernels: reductions of a row's segment to its state, and the writing passes.
// Compiled once for each instruction set (see simd.h); `choose` in handlers.cc picks a table at run time.
#include "rows.h"

#include "columns.h"
#include "operations.h"
#include "simd.h"

namespace JAXSOFT_ISA {
namespace {

using jaxsoft::cpu::Kernels;
using jaxsoft::cpu::kTile;
using jaxsoft::cpu::State;

// Sum over i of term(i, elements left) of a segment. Eight terms are added as a tree before they are widened.
template <class T, class Term>
inline double sum_terms(int64_t n, Term term) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  F64 sum{};
  int64_t i = 0;
  for (; i + 8 * L::lanes <= n; i += 8 * L::lanes) {
    V t[8];
    for (int k = 0; k < 8; k++) t[k] = term(i + k * L::lanes, L::lanes);
    sum = plus(sum, ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7])));
  }
  for (; i + L::lanes <= n; i += L::lanes) sum = plus(sum, term(i, L::lanes));
  if (i < n) sum = plus(sum, term(i, n - i));
  return reduce_sum(sum);
}

// The maximum of the terms, likewise.
template <class T, class Term>
inline double max_terms(int64_t n, Term term) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V m[4];
  for (V& v : m) v = V{} - (S)infinity;
  int64_t i = 0;
  for (; i + 4 * L::lanes <= n; i += 4 * L::lanes)
    for (int k = 0; k < 4; k++) m[k] = maximum(m[k], term(i + k * L::lanes, L::lanes));
  for (; i + L::lanes <= n; i += L::lanes) m[0] = maximum(m[0], term(i, L::lanes));
  if (i < n) m[0] = maximum(m[0], term(i, n - i));
  return reduce_max<S>(maximum(maximum(m[0], m[1]), maximum(m[2], m[3])));
}

// out[i] = value(i, elements left) over a segment.
template <class Out, class Value>
inline void write_values(void* out_, int64_t n, Value value) {
  typedef Lanes<Out> L;
  Out* out = (Out*)out_;
  int64_t i = 0;
  for (; i + L::lanes <= n; i += L::lanes) L::store(out + i, value(i, L::lanes));
  if (i < n) L::store_part(out + i, value(i, n - i), n - i);
}

// A segment's vectors. Without `extras`, nothing but `a` and `b` is looked at.
template <class T, bool extras>
struct Reader {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  const Segment& at;

  V a(int64_t i, int64_t left, S fill) const { return load<T>((const T*)at.a + i, left, fill); }
  V b(int64_t i, int64_t left) const { return at.b ? load<T>((const T*)at.b + i, left, 0) : V{}; }

  V score(int64_t i, int64_t left) const {
    if constexpr (!extras) return a(i, left, (S)-infinity);
    V scaled = a(i, left, 0) * (S)at.scale;
    return at.bias ? scaled + load<T>((const T*)at.bias + i, left, 0) : rounded(scaled);
  }

  V counted_score(int64_t i, int64_t left) const {
    V z = score(i, left);
    if constexpr (!extras) return z;
    if (!at.where && left >= L::lanes) return z;
    return load_mask(at.where ? at.where + i : nullptr, left, V{}) ? z : V{} - (S)infinity;
  }

  // v, and `otherwise` where elements do not count.
  V counted(V v, int64_t i, int64_t left, S otherwise) const {
    if constexpr (!extras) return v;
    if (at.where) return load_mask(at.where + i, left, V{}) ? v : V{} + otherwise;
    if (at.masked) return a(i, left, 0) == 0 ? V{} + otherwise : v;
    return v;
  }
};

// The scores of at most kTile elements as they are needed twice: those that extras make are kept.
template <class T, bool extras>
struct Tile {
  typedef Lanes<T> L;
  typedef typename L::V V;
  Reader<T, extras> reader;
  int64_t start, n;
  V kept[kTile / L::lanes];

  double maximum() {
    return max_terms<T>(n, [&](int64_t i, int64_t left) {
      V z = reader.counted_score(start + i, left);
      if constexpr (extras) kept[i / L::lanes] = z;
      return z;
    });
  }
  V score(int64_t i, int64_t left) const {
    if constexpr (extras) return kept[i / L::lanes];
    return reader.score(start + i, left);
  }
};

template <class T, bool extras>
State state(const Segment& at, int64_t n) {
  typedef typename Lanes<T>::Scalar S;
  State st = {-infinity, 0};
  Tile<T, extras> tile{{at}, 0, 0, {}};
  for (; tile.start < n; tile.start += kTile) {
    tile.n = n - tile.start < kTile ? n - tile.start : kTile;
    double m = tile.maximum();
    if (m > st.m) st = {m, st.s * ::exp(st.m - reference(m))};
    S ref = (S)reference(st.m);
    st.s += sum_terms<T>(tile.n, [&](int64_t i, int64_t left) { return exp(tile.score(i, left) - ref); });
  }
  return st;
}

template <Reduction reduction, class T, bool extras>
State reduce(const Segment& at, int64_t n) {
  if constexpr (reduction == kScores) return state<T, extras>(at, n);
  if constexpr (reduction == kNone) return {0, 0};
  Reader<T, extras> reader{at};
  return {0, sum_terms<T>(n, [&](int64_t i, int64_t left) {
            auto term = reader.b(i, left);
            if constexpr (reduction == kDot) term *= reader.a(i, left, 0);
            return reader.counted(term, i, left, 0);
          })};
}

template <class Op, class T, class Out, bool extras>
void write(const Segment& at, void* out, int64_t n, const Row& row) {
  typename Lanes<T>::Scalar numbers[kNumbers];
  Op::finish(row, numbers);
  Reader<T, extras> reader{at};
  write_values<Out>(out, n, [&](int64_t i, int64_t left) {
    constexpr bool scores = Op::reduction != kDot;  // else a is y, which is no score
    auto a = scores ? reader.score(i, left) : reader.a(i, left, 0);
    return reader.counted(Op::value(a, reader.b(i, left), numbers), i, left, Op::uncounted);
  });
}

// The exponentials of a row of at most kTile elements stay in the first-level cache and are computed once.
template <class T, class Out, bool extras>
void softmax_at_once(const Segment& at, void* out, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::Scalar S;
  Tile<T, extras> tile{{at}, 0, n, {}};
  double m = tile.maximum();
  S ref = (S)reference(m);
  double s = sum_terms<T>(n, [&](int64_t i, int64_t left) {
    return tile.kept[i / L::lanes] = exp(tile.score(i, left) - ref);
  });
  S inverse = m == infinity ? (S)__builtin_nan("") : (S)(1 / s);
  write_values<Out>(out, n, [&](int64_t i, int64_t left) {
    return tile.reader.counted(tile.kept[i / L::lanes] * inverse, i, left, 0);
  });
}

template <class Op, class Out>
void fill(void* out, int64_t n) {
  write_values<Out>(out, n, [](int64_t, int64_t) { return typename Lanes<Out>::V{} + (typename Lanes<Out>::Scalar)Op::uncounted; });
}

template <class Op, class T, class Out, bool extras>
constexpr Kernels kernels = {reduce<Op::reduction, T, extras>, write<Op, T, Out, extras>, nullptr, fill<Op, Out>,
                             reduce_columns<Op::reduction, T>, combine_columns, finish_columns<Op, T>,
                             write_columns<Op, T, Out>};

template <class T, class Out, bool extras>
constexpr Kernels softmax = [] {
  Kernels k = kernels<Softmax, T, Out, extras>;
  k.at_once = softmax_at_once<T, Out, extras>;
  return k;
}();

template <class T, bool extras>
constexpr Kernels state_of = [] {
  Kernels k = kernels<Softmax, T, T, extras>;
  k.write = nullptr;
  return k;
}();

}  // namespace
}  // namespace JAXSOFT_ISA

#define JAXSOFT_JOIN_(a, b) a##b
#define JAXSOFT_JOIN(a, b) JAXSOFT_JOIN_(a, b)
#define JAXSOFT_OPERATIONS(T, Out, extras)                                                          {JAXSOFT_ISA::softmax<T, Out, extras>, JAXSOFT_ISA::kernels<LogSoftmax, T, Out, extras>,           JAXSOFT_ISA::state_of<T, extras>, JAXSOFT_ISA::kernels<SoftmaxVjp, T, Out, extras>,               JAXSOFT_ISA::kernels<LogSoftmaxVjp, T, Out, extras>, JAXSOFT_ISA::kernels<LogsumexpVjp, T, Out, extras>}
#define JAXSOFT_DTYPES(extras)                                                                            {JAXSOFT_OPERATIONS(Float16, Float16, extras), JAXSOFT_OPERATIONS(BFloat16, BFloat16, extras),           JAXSOFT_OPERATIONS(float, float, extras), JAXSOFT_OPERATIONS(double, double, extras),                   JAXSOFT_OPERATIONS(Float16, float, extras), JAXSOFT_OPERATIONS(BFloat16, float, extras),                JAXSOFT_OPERATIONS(float, Float16, extras), JAXSOFT_OPERATIONS(float, BFloat16, extras)}

namespace jaxsoft::cpu {
using namespace JAXSOFT_ISA;
const KernelTable JAXSOFT_JOIN(kernels_, JAXSOFT_ISA) = {JAXSOFT_DTYPES(false), JAXSOFT_DTYPES(true)};
}  // namespace jaxsoft::cpu
