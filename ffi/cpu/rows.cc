// The CPU kernels: reductions of a row's segment to its state, and the writing passes.
// Compiled once for each instruction set (see simd.h); `choose` in handlers.cc picks a table at run time.
#include "rows.h"

#include <math.h>

#include "simd.h"

namespace JAXSOFT_ISA {
namespace {

using jaxsoft::cpu::infinity;
using jaxsoft::cpu::Kernels;
using jaxsoft::cpu::State;

using jaxsoft::cpu::kTile;

// Sum over i of term(vector i of a segment). Eight terms are added as a tree before they are widened.
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
  for (; i < n; i += L::lanes) sum = plus(sum, term(i, n - i < L::lanes ? n - i : L::lanes));
  return reduce_sum(sum);
}

// Loads vector i of a segment that has `left` elements from there on.
template <class T>
inline typename Lanes<T>::V load(const T* p, int64_t left, typename Lanes<T>::Scalar fill) {
  return left >= Lanes<T>::lanes ? Lanes<T>::load(p) : Lanes<T>::load_part(p, left, fill);
}

// y[i] = value(x vector, g vector) over a segment; g may be absent.
template <class T, class Value>
inline void write(const T* x, const T* g, T* y, int64_t n, Value value) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  int64_t i = 0;
  for (; i + L::lanes <= n; i += L::lanes) L::store(y + i, value(L::load(x + i), g ? L::load(g + i) : V{}));
  if (i < n) {
    V v = value(L::load_part(x + i, n - i, 0), g ? L::load_part(g + i, n - i, 0) : V{});
    L::store_part(y + i, v, n - i);
  }
}

template <class T>
inline double max_of(const T* x, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V a = V{} - (S)infinity, b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * L::lanes <= n; i += 4 * L::lanes) {
    a = maximum(a, L::load(x + i));
    b = maximum(b, L::load(x + i + L::lanes));
    c = maximum(c, L::load(x + i + 2 * L::lanes));
    d = maximum(d, L::load(x + i + 3 * L::lanes));
  }
  for (; i < n; i += L::lanes) a = maximum(a, load<T>(x + i, n - i, (S)-infinity));
  return reduce_max<S>(maximum(maximum(a, b), maximum(c, d)));
}

template <class T>
State state(const void* x_, int64_t n) {
  typedef typename Lanes<T>::Scalar S;
  const T* x = (const T*)x_;
  State st = {-infinity, 0};
  for (int64_t start = 0; start < n; start += kTile) {
    const T* tile = x + start;
    int64_t size = n - start < kTile ? n - start : kTile;
    double m = max_of<T>(tile, size);
    if (m > st.m) {
      st = {m, st.s * ::exp(st.m - jaxsoft::cpu::reference(m))};
    }
    S ref = (S)jaxsoft::cpu::reference(st.m);
    st.s += sum_terms<T>(size, [=](int64_t i, int64_t left) { return exp(load<T>(tile + i, left, (S)-infinity) - ref); });
  }
  return st;
}

template <class T>
double sum(const void* g_, int64_t n) {
  const T* g = (const T*)g_;
  return sum_terms<T>(n, [=](int64_t i, int64_t left) { return load<T>(g + i, left, 0); });
}

template <class T>
double dot(const void* y_, const void* g_, int64_t n) {
  const T *y = (const T*)y_, *g = (const T*)g_;
  return sum_terms<T>(n, [=](int64_t i, int64_t left) { return load<T>(y + i, left, 0) * load<T>(g + i, left, 0); });
}

// softmax and log_softmax of a row that holds +inf are NaN everywhere, as inf / inf has no value.
template <class T>
void softmax(const void* x, void* y, int64_t n, State st) {
  typedef typename Lanes<T>::Scalar S;
  typedef typename Lanes<T>::V V;
  S ref = (S)jaxsoft::cpu::reference(st.m);
  S inverse = st.m == infinity ? (S)__builtin_nan("") : (S)(1 / st.s);
  write<T>((const T*)x, nullptr, (T*)y, n, [=](V v, V) { return exp(v - ref) * inverse; });
}

// A row of at most kTile elements: its exponentials stay in the first-level cache and are computed once.
template <class T>
void softmax_tile(const void* x_, void* y_, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  const T* x = (const T*)x_;
  T* y = (T*)y_;
  S m = (S)max_of<T>(x, n), ref = (S)jaxsoft::cpu::reference(m);
  V exps[kTile / L::lanes];
  double s = sum_terms<T>(n, [&](int64_t i, int64_t left) {
    return exps[i / L::lanes] = exp(load<T>(x + i, left, (S)-infinity) - ref);
  });
  S inverse = m == (S)infinity ? (S)__builtin_nan("") : (S)(1 / s);
  int64_t i = 0;
  for (; i + L::lanes <= n; i += L::lanes) L::store(y + i, exps[i / L::lanes] * inverse);
  if (i < n) L::store_part(y + i, exps[i / L::lanes] * inverse, n - i);
}

template <class T>
void log_softmax(const void* x, void* y, int64_t n, State st) {
  typedef typename Lanes<T>::Scalar S;
  typedef typename Lanes<T>::V V;
  S ref = (S)jaxsoft::cpu::reference(st.m);
  S log_s = st.m - st.m == 0 ? (S)::log(st.s) : (S)__builtin_nan("");
  write<T>((const T*)x, nullptr, (T*)y, n, [=](V v, V) { return (v - ref) - log_s; });
}

template <class T>
void softmax_vjp(const void* y, const void* g, void* dx, int64_t n, double dot) {
  typedef typename Lanes<T>::V V;
  typename Lanes<T>::Scalar d = dot;
  write<T>((const T*)y, (const T*)g, (T*)dx, n, [=](V p, V v) { return p * (v - d); });
}

// p = exp(x - m) / s, and 0 for a row that is all -inf.
template <class T>
inline typename Lanes<T>::Scalar inverse_sum(State st) {
  return st.s == 0 ? 0 : (typename Lanes<T>::Scalar)(1 / st.s);
}

template <class T>
void log_softmax_vjp(const void* x, const void* g, void* dx, int64_t n, State st, double sum) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  S ref = (S)jaxsoft::cpu::reference(st.m), inverse = inverse_sum<T>(st), total = sum;
  if (st.m - st.m != 0) inverse = (S)__builtin_nan("");  // log_softmax has no value there
  write<T>((const T*)x, (const T*)g, (T*)dx, n, [=](V v, V gv) { return gv - (exp(v - ref) * inverse) * total; });
}

template <class T>
void logsumexp_vjp(const void* x, void* dx, int64_t n, State st, double g) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  S ref = (S)jaxsoft::cpu::reference(st.m), inverse = inverse_sum<T>(st), scale = g;
  write<T>((const T*)x, nullptr, (T*)dx, n, [=](V v, V) { return (exp(v - ref) * inverse) * scale; });
}

template <class T>
constexpr Kernels kernels = {state<T>,       sum<T>,         dot<T>,
                             softmax<T>,     softmax_tile<T>,    log_softmax<T>,
                             softmax_vjp<T>, log_softmax_vjp<T>, logsumexp_vjp<T>};

}  // namespace
}  // namespace JAXSOFT_ISA

#define JAXSOFT_JOIN_(a, b) a##b
#define JAXSOFT_JOIN(a, b) JAXSOFT_JOIN_(a, b)

namespace jaxsoft::cpu {
const Kernels JAXSOFT_JOIN(kernels_, JAXSOFT_ISA)[kDTypes] = {
    JAXSOFT_ISA::kernels<JAXSOFT_ISA::Float16>, JAXSOFT_ISA::kernels<JAXSOFT_ISA::BFloat16>,
    JAXSOFT_ISA::kernels<float>, JAXSOFT_ISA::kernels<double>};
}  // namespace jaxsoft::cpu
