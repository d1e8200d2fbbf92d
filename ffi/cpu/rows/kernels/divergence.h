// The KL divergence of rows of two arrays of scores, and its gradients.
//
// With d = log(q / p), the sum of p * (exp(d) - 1) is 0. So the divergence is the sum of p * h(d), of which no term is
// negative, with h(d) = exp(d) - 1 - d. An error of the ratio in d is corrected by what the first sum differs from 0.
#pragma once

#include "../divergence.h"
#include "extras.h"
#include "loops.h"
#include "operations.h"
#include "reduce.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::beyond_log;
using jaxsoft::cpu::DivergenceState;

// Where |d| is below 0.5, h(d) is a series: d^2 / 2! + d^3 / 3! + ...
template <class V>
inline auto is_small(V d) { return (d < 0.5f) & (d > -0.5f); }
template <class V>
inline V beyond_small(V d) {
  constexpr int terms = sizeof d[0] == 4 ? 8 : 16;
  V series = V{} + 1;
#pragma GCC unroll 16
  for (int i = terms; i > 2; i--) series = series * (d * (decltype(d[0] + 0))(1.0 / i)) + 1;
  return d * d * (series * (decltype(d[0] + 0))0.5);
}

// The state of both arrays' scores in a segment. What is kept of a tile: weights of p, of q, and the distances w - z.
template <class T, bool extras>
DivergenceState divergence(const Segment& at, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V of_p[tile_vectors<T>], of_q[tile_vectors<T>], apart[tile_vectors<T>];
  V *const a = of_p, *const b = of_q, *const distances = apart;
  const Reader<T, extras> reader(at);
  DivergenceState total;
  for (int64_t start = 0; start < n; start += kPlan.tile) {
    const int64_t size = n - start < kPlan.tile ? n - start : kPlan.tile;
    DivergenceState part;
    part.p.m = max_terms<T>(size, [=](int64_t i, int64_t left) {
      return a[i / L::lanes] = reader.counted_score(start + i, left);
    });
    part.q.m = max_terms<T>(size, [=](int64_t i, int64_t left) {
      return b[i / L::lanes] = reader.counted_other_score(start + i, left);
    });
    const bool near = part.near();
    const S p_ref = (S)reference(part.p.m), q_ref = (S)reference(part.q.m), z0 = near ? 0 : p_ref, w0 = near ? 0 : q_ref;
    part.p.s = sum_exp<T>(size, true, part.p.m, a, [=](int64_t i, int64_t) {
      const V z = a[i / L::lanes];
      distances[i / L::lanes] = (b[i / L::lanes] - w0) - (z - z0);
      return z - p_ref;
    });
    part.q.s = sum_exp<T>(size, true, part.q.m, b, [=](int64_t i, int64_t) { return b[i / L::lanes] - q_ref; });
    part.c = log(part.q.s) - (part.p.s == 0 ? 0 : log(part.p.s));
    if (part.p.s > 0 && part.q.s == 0) part.k = infinity;
    if (part.p.s > 0 && part.c - part.c == 0) {
      const double apart = near ? part.q.m - part.p.m : 0;
      const S c = (S)(part.c + apart), grown = (S)::exp(apart - c);  // b * grown is a * exp(d)
      // In the place of the distances are, after this, the terms a * h(d).
      const double excess = sum_terms<T>(size, [=](int64_t i, int64_t) {
        const V weight = a[i / L::lanes], other = b[i / L::lanes] * grown, d = distances[i / L::lanes] - c;
        const V h = beyond_small(d), difference = other - weight;
        const auto none = weight == 0, small = is_small(d);
        distances[i / L::lanes] = none ? other : small ? weight * h : difference - weight * d;
        return none ? other : small ? weight * (d + h) : difference;
      });
      const double sum = sum_terms<T>(size, [=](int64_t i, int64_t) { return distances[i / L::lanes]; });
      const double x = excess / part.p.s;
      part.c = c - apart + log1p(x);
      part.k = sum / part.p.s + beyond_log(x);
    }
    total = start == 0 ? part : combine(total, part);
  }
  return total;
}

// Writes scale * g * p * (-d - k) to `out`, where it is not null, and other_scale * g * (q - p) to `other_out`. 0 takes
// the place of a divergence or a d that is infinite.
template <class T, class Out, bool extras>
void write_divergence(const Segment& at, void* out, void* other_out, int64_t n, const RowNumbers& row) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  const Reader<T, extras> reader(at);
  const bool near = row.other_reference == row.given.m, none = row.ratio == -infinity;  // no q
  const S m = (S)reference(row.given.m), o = (S)reference(row.other_reference), c = none ? 0 : (S)row.ratio;
  const S z0 = near ? 0 : m, w0 = near ? 0 : o;
  const S inverse = row.beside == row.beside ? inverse_sum<S>(row.given.s) : (S)row.beside;  // a NaN is everywhere
  const S of_q = none ? 0 * inverse : inverse * (S)::exp(-row.ratio);
  const S k = row.beside == infinity ? 0 : (S)row.beside;
  const S by_first = (S)(row.cotangent * at.scale), by_other = (S)(row.cotangent * at.other_scale);
  struct Slopes { V first, other; };
  auto slopes = [=](int64_t i, int64_t left) __attribute__((always_inline)) {
    const V z = reader.score(i, left), w = reader.other_score(i, left);
    const V p = exp(z - m) * inverse, d = ((w - w0) - (z - z0)) - c;
    const auto none = p == 0, small = is_small(d) & ~none, far = (d == -(S)infinity) | (d == (S)infinity);
    const V first = none ? V{} : p * ((far ? V{} : d) + k) * -by_first;
    const V other = (small ? p * (d + beyond_small(d)) : exp(w - o) * of_q - p) * by_other;
    return Slopes{reader.valid_or(first, i, left, 0), reader.valid_or(other, i, left, 0)};
  };
  if (out) write_values<Out>(out, n, [=](int64_t i, int64_t left) { return slopes(i, left).first; });
  write_values<Out>(other_out, n, [=](int64_t i, int64_t left) { return slopes(i, left).other; });
}

}  // namespace JAXSOFT_ISA
