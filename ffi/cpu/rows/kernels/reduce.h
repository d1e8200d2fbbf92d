// What a segment of a row is reduced to: the state of its scores, or a sum.
#pragma once

#include "extras.h"
#include "loops.h"
#include "operations.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::kPlan;
using jaxsoft::cpu::State;

// The vectors that hold a tile.
template <class T>
constexpr int64_t tile_vectors = kPlan.tile / Lanes<T>::lanes;

// The sum of exp(distance(i, left)). Distances are from m or, if that is not finite, from 0; if `has_maximum`, one of
// them is 0. `terms` keeps the exponentials.
template <class T, class Distance>
inline double sum_exp(int64_t n, bool has_maximum, double m, typename Lanes<T>::V* terms, Distance distance) {
  typedef Lanes<T> L;
  if (m == infinity) return sum_terms<T>(n, [=](int64_t i, int64_t left) { return exp(distance(i, left)); });
  const double sum = sum_terms<T>(n, [=](int64_t i, int64_t left) {
    return terms[i / L::lanes] = exp_term(distance(i, left));
  });
  // Where one score dominates, the sum is taken again in f64, for the digits that `keeps_digits` is about. Other tiles
  // take no longer, nor do those without a score above -inf.
  const bool trees = sizeof(typename L::Scalar) == 4 && n >= 8 * L::lanes;
  if (!trees || !has_maximum || sum == 0 || !(sum < 2)) return sum;
  return sum_terms<T, false>(n, [=](int64_t i, int64_t) { return terms[i / L::lanes]; });
}

// The state of a segment's scores. Each tile is needed twice; scores that extras make are kept in between.
template <class T, bool extras>
State state(const Segment& at, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V kept[tile_vectors<T>], *const tile = kept;
  const Reader<T, extras> reader(at);
  State st = {-infinity, 0};
  for (int64_t start = 0; start < n; start += kPlan.tile) {
    int64_t size = n - start < kPlan.tile ? n - start : kPlan.tile;
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
            return reader.valid_or(term, i, left, 0);
          })};
}

}  // namespace JAXSOFT_ISA
