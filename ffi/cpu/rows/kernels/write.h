// The writing pass: a segment of the result, given what the row was reduced to.
#pragma once

#include "reduce.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::RowNumbers;

template <class Op, class T, class Out, bool extras>
void write(const Segment& at, void* out, int64_t n, const RowNumbers& row) {
  typedef typename Lanes<T>::Scalar S;
  S numbers[kNumbers] = {};
  Op::finish(row, numbers);
  Reader<T, extras> reader(at);
  [[maybe_unused]] const S scale = (S)at.scale;
  write_values<Out>(out, n, [=](int64_t i, int64_t left) {
    decltype(reader.a(i, left, 0)) a, b{};
    if constexpr (Op::reduction == kDot) a = reader.a(i, left, 0);  // a probability, which is no score
    else a = reader.score(i, left);
    if constexpr (reads_b(Op::reduction)) b = reader.b(i, left);
    auto value = Op::value(a, b, numbers);
    if constexpr (extras && Op::reduction != kScores) value *= scale;  // a gradient of the score becomes one of x
    if constexpr (extras && Op::reduction == kNone)
      if (reader.at.cap > 0) value *= soft_cap_slope(reader.a(i, left, 0), (S)reader.at.cap);
    return reader.valid_or(value, i, left, Op::masked_result);
  });
}

// Softmax of a row of at most one tile: its exponentials are computed once and stay in the first-level cache.
template <class T, class Out, bool extras>
void softmax_at_once(const Segment& at, void* out, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V kept[tile_vectors<T>], *const tile = kept;
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
    return reader.valid_or(tile[i / L::lanes] * inverse, i, left, 0);
  });
}

template <class Op, class Out>
void fill(void* out, int64_t n) {
  typedef Lanes<Out> L;
  write_values<Out>(out, n, [](int64_t, int64_t) { return typename L::V{} + (typename L::Scalar)Op::masked_result; });
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

}  // namespace JAXSOFT_ISA
