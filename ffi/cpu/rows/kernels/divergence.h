// The KL divergence of rows of two arrays of scores, and its gradients.
//
// With d = log(q / p), the sum of p * (exp(d) - 1) is 0. So the divergence is the sum of p * h(d), of which no term is
// negative, with h(d) = exp(d) - 1 - d. An error of the ratio in d is corrected by what the first sum differs from 0.
#pragma once

#include "extras.h"
#include "loops.h"
#include "operations.h"
#include "write.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Numbers;

// A part of a row of scores z, of p, and of w, of q: their states, the ratio c, which is the logsumexp of w less that
// of z, each relative to its maximum, and the divergence k of the part alone. Where there is no p, c is the logsumexp
// of w, relative to its maximum.
struct DivergenceState {
  State p = {-infinity, 0}, q = {-infinity, 0};
  double c = -infinity, k = 0;

  DivergenceState() = default;
  DivergenceState(const State& p, const State& q) : p(p), q(q) {}
  explicit DivergenceState(const Numbers& n)
      : p{n.of[0], n.of[1]}, q{n.of[2], n.of[3]}, c(n.of[4]), k(n.of[5]) {}
  Numbers numbers() const { return {p.m, p.s, q.m, q.s, c, k}; }

  // Whether w - z has all its digits, where both are near their maxima.
  bool near() const { return fabs(q.m - p.m) <= 8; }
};

// exp(d) - 1 - d.
inline double beyond_linear(double d) {
  if (!(fabs(d) < 0.5)) return expm1(d) - d;
  double series = 1;
  for (int i = 18; i > 2; i--) series = 1 + d / i * series;
  return d * d / 2 * series;
}

// log(1 + x) - x.
inline double beyond_log(double x) {
  if (!(fabs(x) < 0.1)) return log1p(x) - x;
  double series = 0;
  for (int i = 18; i >= 2; i--) series = (i % 2 ? 1.0 : -1.0) / i + x * series;
  return x * x * series;
}

// With the weights u and v of the parts in p, u being the larger, and d the second ratio less the first:
//   c = c1 + log1p(x),  k = u * k1 + v * k2 + (log1p(x) - v * d),  where x = v * (exp(d) - 1)
// A part without p has no ratio: then x is its weight in q beside the other's.
inline DivergenceState combine(const DivergenceState& a, const DivergenceState& b) {
  DivergenceState both(combine(a.p, b.p), combine(a.q, b.q));
  const double ref = reference(both.p.m), of_a = a.p.s * ::exp(a.p.m - ref), of_b = b.p.s * ::exp(b.p.m - ref);
  const DivergenceState &first = of_a >= of_b ? a : b, &second = of_a >= of_b ? b : a;
  const double sum = of_a + of_b, v = sum > 0 ? (of_a >= of_b ? of_b : of_a) / sum : 0, u = 1 - v;
  both.c = log(both.q.s) - (sum > 0 ? log(both.p.s) : 0);
  if (!(sum > 0) || first.q.s == 0) {  // there is no p, or no q beside it
    both.k = sum > 0 ? infinity : 0;
    return both;
  }
  const double to_second = second.q.m - first.q.m, d = second.c - first.c + (to_second - (second.p.m - first.p.m));
  double log, more;  // log1p(x), and that less v * d
  if (v > 0 && fabs(d) < 0.5) {
    const double x = v * expm1(d);
    log = log1p(x), more = beyond_log(x) + v * beyond_linear(d);
  } else {
    const double more_of_q = second.q.s == 0 ? -infinity : to_second + ::log(second.q.s / first.q.s);
    log = more_of_q < 600 ? log1p(u * ::exp(more_of_q) - v) : more_of_q + ::log(u);
    more = v > 0 ? log - v * d : log;
  }
  if (fabs(log) < 32) both.c = first.c + log + ((first.q.m - both.q.m) - (first.p.m - both.p.m));  // else as above
  both.k = u * first.k + (v > 0 ? v * second.k : 0) + more;
  return both;
}

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
// --8<-- [start:reduce]
template <class T, bool extras>
Numbers reduce_divergence(const Segment& at, int64_t n) {
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
    const S p_ref = (S)reference(part.p.m), q_ref = (S)reference(part.q.m);
    const S z0 = near ? 0 : p_ref, w0 = near ? 0 : q_ref;
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
  return total.numbers();
}
// --8<-- [end:reduce]

inline Numbers combine_divergence(const Numbers& a, const Numbers& b) {
  return combine(DivergenceState(a), DivergenceState(b)).numbers();
}

// The results that are one a row, in the order of the operation's record.
inline Numbers finish_divergence(const Numbers& row) {
  const DivergenceState total(row);
  const State &p = total.p, &q = total.q;
  const bool near = total.near(), undefined = p.m == infinity || q.m == infinity || p.s != p.s || q.s != q.s;
  const double divergence = undefined ? __builtin_nan("") : total.k < 0 ? 0 : total.k;
  return {p.m, p.s, near ? p.m : q.m, near ? total.c + (q.m - p.m) : total.c, divergence};
}

// Writes scale * g * p * (-d - k) to `out`, where it is not null, and other_scale * g * (q - p) to `other_out`. 0 takes
// the place of a divergence or a d that is infinite.
template <class T, class Out, bool extras>
void write_divergence(const Segment& at, void* out, void* other_out, int64_t n, const Numbers& row) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  // The operands that are one a row, in the order of the operation's record.
  const double maximum = row.of[0], sum = row.of[1], other_reference = row.of[2], ratio = row.of[3],
               divergence = row.of[4], cotangent = row.of[5];
  if (sum == 0) {  // without scores there are no gradients
    if (out) fill<LogsumexpVjp, Out>(out, n);
    return fill<LogsumexpVjp, Out>(other_out, n);
  }
  const Reader<T, extras> reader(at);
  const bool near = other_reference == maximum, none = ratio == -infinity;  // no q
  const S m = (S)reference(maximum), o = (S)reference(other_reference), c = none ? 0 : (S)ratio;
  const S z0 = near ? 0 : m, w0 = near ? 0 : o;
  const S inverse = divergence == divergence ? inverse_sum<S>(sum) : (S)divergence;  // a NaN is everywhere
  const S of_q = none ? 0 * inverse : inverse * (S)::exp(-ratio);
  const S k = divergence == infinity ? 0 : (S)divergence;
  const S by_first = (S)(cotangent * at.scale), by_other = (S)(cotangent * at.other_scale);
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
