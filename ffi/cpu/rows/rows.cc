// The CPU kernels: reductions of a row's segment to its state, and the writing passes.
// Compiled once for each instruction set (see simd.h); `choose` in handlers.cc picks a table at run time.
#include "rows.h"

#include "columns.h"
#include "operations.h"
#include "../simd.h"
#include "top_k.h"

namespace JAXSOFT_ISA {
namespace {

using jaxsoft::cpu::Kernels;
using jaxsoft::cpu::LabelRows;
using jaxsoft::cpu::kTile;
using jaxsoft::cpu::State;

// Sum over i of term(i, elements left) of a segment. Eight terms are added as a tree before they are widened, or each is
// widened.
template <class T, bool trees = true, class Term>
inline double sum_terms(int64_t n, Term term) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  F64 sum{};
  int64_t i = 0;
  for (; trees && i + 8 * L::lanes <= n; i += 8 * L::lanes) {
    V t[8];
#pragma GCC unroll 8
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
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) m[k] = maximum(m[k], term(i + k * L::lanes, L::lanes));
  for (; i + L::lanes <= n; i += L::lanes) m[0] = maximum(m[0], term(i, L::lanes));
  if (i < n) m[0] = maximum(m[0], term(i, n - i));
  return reduce_max<S>(maximum(maximum(m[0], m[1]), maximum(m[2], m[3])));
}

// out[i] = value(i, elements left) over a segment. `anywhere`: i need not be a multiple of the lanes, so that the last
// vector may be a whole one, of which some elements are written twice.
template <class Out, bool anywhere = true, class Value>
inline void write_values(void* out_, int64_t n, Value value) {
  typedef Lanes<Out> L;
  Out* out = (Out*)out_;
  int64_t i = 0;
  for (; i + L::lanes <= n; i += L::lanes) L::store(out + i, value(i, L::lanes));
  if (i == n) return;
  if (anywhere && n > L::lanes) L::store(out + n - L::lanes, value(n - L::lanes, L::lanes));
  else L::store_part(out + i, value(i, n - i), n - i);
}

// A segment's vectors. Without `extras`, nothing but its arrays is looked at.
template <class T, bool extras>
struct Reader {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  const T *first, *second;  // not read through `at` in a loop: a result that is stored could change that
  const Segment& at;

  explicit Reader(const Segment& at) : first((const T*)at.a), second((const T*)at.b), at(at) {}
  V a(int64_t i, int64_t left, S fill) const { return load<T>(first + i, left, fill); }
  V b(int64_t i, int64_t left) const { return load<T>(second + i, left, 0); }

  V score(int64_t i, int64_t left) const {
    if constexpr (!extras) return a(i, left, (S)-infinity);
    V scaled = a(i, left, 0) * (S)at.scale;
    if (at.cap > 0) return capped(scaled);
    return at.bias ? scaled + load<T>((const T*)at.bias + i, left, 0) : rounded(scaled);
  }

  // cap * tanh(x / cap), and its derivative.
  V capped(V x) const {
    V e = exp((x < 0 ? x : -x) * (S)(2 / at.cap)), y = (S)at.cap * ((1 - e) / (1 + e));
    return x < 0 ? -y : y;
  }
  V cap_slope(V x) const {
    V e = exp((x < 0 ? x : -x) * (S)(2 / at.cap));
    return 4 * e / ((1 + e) * (1 + e));
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

// The sum of exp of some distances from m, or from 0 if that is not finite, which are kept in `terms`. `has_maximum`:
// one of the distances is 0.
template <class T, class Distance>
inline double sum_exp(int64_t n, bool has_maximum, double m, typename Lanes<T>::V* terms, Distance distance) {
  typedef Lanes<T> L;
  if (m == infinity) return sum_terms<T>(n, [=](int64_t i, int64_t left) { return exp(distance(i, left)); });
  const double sum = sum_terms<T>(n, [=](int64_t i, int64_t left) {
    return terms[i / L::lanes] = exp_term(distance(i, left));
  });
  // As `keeps_digits` says; only tiles that one score dominates take longer, and not those without any.
  const bool trees = sizeof(typename L::Scalar) == 4 && n >= 8 * L::lanes;
  if (!trees || !has_maximum || sum == 0 || !(sum < 2)) return sum;
  return sum_terms<T, false>(n, [=](int64_t i, int64_t) { return terms[i / L::lanes]; });
}

// The state of a segment. Scores that extras make are kept between the two times that a tile of them is needed.
template <class T, bool extras>
State state(const Segment& at, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V kept[kTile / L::lanes], *const tile = kept;
  const Reader<T, extras> reader(at);
  State st = {-infinity, 0};
  for (int64_t start = 0; start < n; start += kTile) {
    int64_t size = n - start < kTile ? n - start : kTile;
    double m = max_terms<T>(size, [=](int64_t i, int64_t left) {
      V z = reader.counted_score(start + i, left);
      if constexpr (extras) tile[i / L::lanes] = z;
      return z;
    });
    if (m > st.m) st = {m, st.s == 0 ? 0 : st.s * ::exp(st.m - reference(m))};
    S ref = (S)reference(st.m);
    st.s += sum_exp<T>(size, m == st.m, st.m, tile, [=](int64_t i, int64_t left) {
      __builtin_prefetch(reader.first + start + size + i);
      if constexpr (extras) return tile[i / L::lanes] - ref;
      else return reader.score(start + i, left) - ref;
    });
  }
  return st;
}

template <Reduction reduction, class T, bool extras>
State reduce(const Segment& at, int64_t n) {
  if constexpr (reduction == kScores) return state<T, extras>(at, n);
  Reader<T, extras> reader(at);
  return {0, sum_terms<T>(n, [=](int64_t i, int64_t left) {
            auto term = reader.b(i, left);
            if constexpr (reduction == kDot) term *= reader.a(i, left, 0);
            return reader.counted(term, i, left, 0);
          })};
}

template <class Op, class T, class Out, bool extras>
void write(const Segment& at, void* out, int64_t n, const Row& row) {
  typename Lanes<T>::Scalar numbers[kNumbers] = {};
  Op::finish(row, numbers);
  Reader<T, extras> reader(at);
  [[maybe_unused]] const auto scale = (typename Lanes<T>::Scalar)at.scale;
  write_values<Out>(out, n, [=](int64_t i, int64_t left) {
    decltype(reader.a(i, left, 0)) a, b{};
    if constexpr (Op::reduction == kDot) a = reader.a(i, left, 0);  // y, which is no score
    else a = reader.score(i, left);
    if constexpr (reads_b(Op::reduction)) b = reader.b(i, left);
    auto value = Op::value(a, b, numbers);
    if constexpr (extras && Op::reduction != kScores) value *= scale;  // a gradient for z becomes one for x
    if constexpr (extras && Op::reduction == kNone)
      if (reader.at.cap > 0) value *= reader.cap_slope(reader.a(i, left, 0));
    return reader.counted(value, i, left, Op::uncounted);
  });
}

// The exponentials of a row of at most kTile elements stay in the first-level cache and are computed once.
template <class T, class Out, bool extras>
void softmax_at_once(const Segment& at, void* out, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V kept[kTile / L::lanes], *const tile = kept;
  const Reader<T, extras> reader(at);
  double m = max_terms<T>(n, [=](int64_t i, int64_t left) {
    V z = reader.counted_score(i, left);
    if constexpr (extras) tile[i / L::lanes] = z;
    return z;
  });
  S ref = (S)reference(m);
  double s = sum_terms<T>(n, [=](int64_t i, int64_t left) {
    if constexpr (extras) return tile[i / L::lanes] = exp(tile[i / L::lanes] - ref);
    else return tile[i / L::lanes] = exp(reader.score(i, left) - ref);
  });
  S inverse = m == infinity ? (S)__builtin_nan("") : (S)(1 / s);
  write_values<Out, false>(out, n, [=](int64_t i, int64_t left) {
    return reader.counted(tile[i / L::lanes] * inverse, i, left, 0);
  });
}

template <class Op, class Out>
void fill(void* out, int64_t n) {
  typedef Lanes<Out> L;
  write_values<Out>(out, n, [](int64_t, int64_t) { return typename L::V{} + (typename L::Scalar)Op::uncounted; });
}

template <class Out>
void put(void* out, double value) {
  typedef Lanes<Out> L;
  L::store_part((Out*)out, typename L::V{} + (typename L::Scalar)value, 1);
}

template <class T>
double get(const void* a) {
  return load<T>((const T*)a, 1, 0)[0];
}

// The number of scores above -inf, and the sum of their distances from `from`.
template <class T, class Score>
inline State sums_above(int64_t n, typename Lanes<T>::Scalar from, Score score) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  auto sum = [=](auto value) {
    return sum_terms<T>(n, [=](int64_t i, int64_t left) {
      V z = score(i, left);
      return z > V{} - (S)infinity ? value(z) : V{};
    });
  };
  return {sum([](V) { return V{} + (S)1; }), sum([=](V z) { return z - from; })};
}

template <class T, bool extras>
State above(const Segment& at, int64_t n) {
  const Reader<T, extras> reader(at);
  return sums_above<T>(n, (typename Lanes<T>::Scalar)at.from,
                       [=](int64_t i, int64_t left) { return reader.counted_score(i, left); });
}

template <class V>
inline V first_lanes() {
  V v;
  for (unsigned i = 0; i < sizeof v / sizeof v[0]; i++) v[i] = i;
  return v;
}

// A row in the first-level cache, without its label's score, whose place has -inf.
template <class T>
struct KeptRow {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V scores[kTile / L::lanes];
  S t;
  double m;
  bool is_read;

  void read(const LabelRows& rows, int64_t row) {
    const int64_t n = rows.n, label = rows.labels[row];
    const T* a = (const T*)rows.a + row * n;
    const S none = (S)-infinity;
    is_read = label != rows.no_row;
    t = is_read ? (S)__builtin_nan("") : 0;
    m = -infinity;
    if (!is_read) return;
    V* const to = scores;
    const V no_label = V{} + (S)label, lane = first_lanes<V>();
    m = max_terms<T>(n, [=](int64_t i, int64_t left) {
      V z = load<T>(a + i, left, none);
      z = lane + (S)i == no_label ? V{} + none : z;
      return to[i / L::lanes] = z;
    });
    if (label >= 0 && label < n) t = (S)get<T>(a + label);
  }
  // Their place is taken by the exponentials. `next`: so many elements that will be read soon.
  double sum_exp_of_scores(int64_t n, const T* next) {
    if (!is_read) return 0;
    const S ref = (S)reference(m);
    V* const kept = scores;
    return sum_exp<T>(n, true, m, kept, [=](int64_t i, int64_t) {
      __builtin_prefetch(next + i);
      return kept[i / L::lanes] - ref;
    });
  }
  State sums(S from, int64_t n) const {
    const V* const kept = scores;
    return is_read ? sums_above<T>(n, from, [=](int64_t i, int64_t) { return kept[i / L::lanes]; }) : State{0, 0};
  }
};

// Of rows with labels. A row's maximum is found before the sum of the one before it, so that the processor has something
// to do while it waits for either.
template <class T, bool sums>
void label_states(const LabelRows& rows, int64_t begin, int64_t end) {
  typedef typename Lanes<T>::Scalar S;
  KeptRow<T> kept[2];
  const int64_t n = rows.n;
  auto set = [](void* to, int64_t row, double value) { ((S*)to)[row] = (S)value; };
  if (begin < end) kept[0].read(rows, begin);
  for (int64_t row = begin; row < end; row++) {
    KeptRow<T>& here = kept[(row - begin) % 2];
    if (row + 1 < end) kept[(row + 1 - begin) % 2].read(rows, row + 1);
    const S t = here.t;
    if constexpr (sums) {
      const State above = here.sums((S)reference(t), n);
      set(rows.u, row, above.s + (t > 0 && t == (S)infinity ? t : 0));
      set(rows.k, row, above.m + (here.is_read && t > (S)-infinity));
    }
    set(rows.m, row, here.m), set(rows.t, row, t);
    set(rows.s, row, here.sum_exp_of_scores(n, (const T*)rows.a + (row + 2) * n));
  }
}

// Rows shorter than a few vectors are written together: each element's numbers are those of its row.
template <class Op, class T, class Out>
void label_gradients(const LabelRows& rows, int64_t begin, int64_t end) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  constexpr int64_t few = 3 * L::lanes, room = 1024;
  const int64_t n = rows.n, together = n <= few ? room / n : 1;
  auto get_number = [](const void* from, int64_t row) { return from ? ((const S*)from)[row] : 0; };
  S numbers[kNumbers][room + few + L::lanes];
  for (int64_t first = begin; first < end; first += together) {
    const int64_t last = first + together < end ? first + together : end;
    const T* a = (const T*)rows.a + first * n;
    Out* out = (Out*)rows.out + first * n;
    S p[kNumbers] = {};
    for (int64_t row = first; row < last; row++) {
      Row of_row;
      of_row.given = {get_number(rows.m, row), get_number(rows.s, row)};
      of_row.g = get_number(rows.g, row), of_row.v = get_number(rows.v, row);
      Op::finish(of_row, p);
      if (together == 1) break;
      for (int j = 0; j < kNumbers; j++)  // what is written past the row's end is written over
        for (int64_t i = 0; i < n; i += L::lanes) Lanes<S>::store(numbers[j] + (row - first) * n + i, V{} + p[j]);
    }
    if (together == 1) {
      write_values<Out>(out, n, [=](int64_t i, int64_t left) { return Op::value(load<T>(a + i, left, 0), V{}, p); });
    } else {
      const auto* const from = numbers;
      write_values<Out>(out, (last - first) * n, [=](int64_t i, int64_t left) {
        V q[kNumbers];
        for (int j = 0; j < kNumbers; j++) q[j] = Lanes<S>::load(from[j] + i);
        return Op::value(load<T>(a + i, left, 0), V{}, q);
      });
    }
    for (int64_t row = first; row < last; row++, a += n, out += n) {
      const int32_t label = rows.labels[row];
      if (label == rows.no_row) fill<Op, Out>(out, n);
      if (label < 0 || label >= n) continue;
      const double x = get<T>(a + label), h = get_number(rows.h, row);
      put<Out>(out + label, x == -infinity ? h : h + get_number(rows.v, row));
    }
  }
}

template <Reduction reduction, class T, bool extras>
constexpr auto reduces() -> State (*)(const Segment&, int64_t) {
  if constexpr (reduction == kNone) return nullptr;
  else return reduce<reduction, T, extras>;
}

template <class Op, class T, class Out, bool extras>
constexpr Kernels kernels = {reduces<Op::reduction, T, extras>(), write<Op, T, Out, extras>, nullptr, fill<Op, Out>,
                             put<Out>, get<T>, nullptr,
                             reduce_columns<Op::reduction, T, keeps_digits<Op>>, combine_columns, finish_columns<Op, T>,
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
  k.find = find<T>, k.cut = cut<T>, k.order = order<T>;
  k.label_rows = extras ? nullptr : label_states<T, false>;
  return k;
}();

template <class T, bool extras>
constexpr Kernels label_sums = [] {
  Kernels k = state_of<T, extras>;
  k.above = above<T, extras>;
  k.label_rows = extras ? nullptr : label_states<T, true>;
  return k;
}();

template <class Op, class T, class Out, bool extras>
constexpr Kernels label_pullback = [] {
  Kernels k = kernels<Op, T, Out, extras>;
  k.label_rows = extras ? nullptr : label_gradients<Op, T, Out>;
  return k;
}();

}  // namespace
}  // namespace JAXSOFT_ISA

#define JAXSOFT_JOIN_(a, b) a##b
#define JAXSOFT_JOIN(a, b) JAXSOFT_JOIN_(a, b)
#define JAXSOFT_OPERATIONS(T, Out, extras)                                                  \
  {JAXSOFT_ISA::softmax<T, Out, extras>, JAXSOFT_ISA::kernels<LogSoftmax, T, Out, extras>,  \
   JAXSOFT_ISA::state_of<T, extras>, JAXSOFT_ISA::label_sums<T, extras>,                    \
   JAXSOFT_ISA::kernels<SoftmaxVjp, T, Out, extras>,                                        \
   JAXSOFT_ISA::kernels<LogSoftmaxVjp, T, Out, extras>,                                     \
   JAXSOFT_ISA::label_pullback<LogsumexpVjp, T, Out, extras>,                               \
   JAXSOFT_ISA::label_pullback<LabelSumsVjp, T, Out, extras>}
#define JAXSOFT_DTYPES(extras)                                                                   \
  {JAXSOFT_OPERATIONS(Float16, Float16, extras), JAXSOFT_OPERATIONS(BFloat16, BFloat16, extras), \
   JAXSOFT_OPERATIONS(float, float, extras),     JAXSOFT_OPERATIONS(double, double, extras),     \
   JAXSOFT_OPERATIONS(Float16, float, extras),   JAXSOFT_OPERATIONS(BFloat16, float, extras),    \
   JAXSOFT_OPERATIONS(float, Float16, extras),   JAXSOFT_OPERATIONS(float, BFloat16, extras)}

namespace jaxsoft::cpu {
using namespace JAXSOFT_ISA;
const KernelTable JAXSOFT_JOIN(kernels_, JAXSOFT_ISA) = {JAXSOFT_DTYPES(false), JAXSOFT_DTYPES(true)};
}  // namespace jaxsoft::cpu
