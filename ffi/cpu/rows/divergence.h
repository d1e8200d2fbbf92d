// The fold of the KL divergence over parts of a row, by the chain rule. All functions are static, as in fold.h.
#pragma once

#include "../fold.h"

namespace jaxsoft::cpu {

// A part of a row of scores z, of p, and of w, of q: their states, the ratio c, which is the logsumexp of w less that
// of z, each relative to its maximum, and the divergence k of the part alone. Where there is no p, c is the logsumexp
// of w, relative to its maximum.
struct DivergenceState {
  State p = {-infinity, 0}, q = {-infinity, 0};
  double c = -infinity, k = 0;

  // Whether w - z has all its digits, where both are near their maxima.
  bool near() const { return fabs(q.m - p.m) <= 8; }
};

// exp(d) - 1 - d.
static inline double beyond_linear(double d) {
  if (!(fabs(d) < 0.5)) return expm1(d) - d;
  double series = 1;
  for (int i = 18; i > 2; i--) series = 1 + d / i * series;
  return d * d / 2 * series;
}

// log(1 + x) - x.
static inline double beyond_log(double x) {
  if (!(fabs(x) < 0.1)) return log1p(x) - x;
  double series = 0;
  for (int i = 18; i >= 2; i--) series = (i % 2 ? 1.0 : -1.0) / i + x * series;
  return x * x * series;
}

// With the weights u and v of the parts in p, u being the larger, and d the second ratio less the first:
//   c = c1 + log1p(x),  k = u * k1 + v * k2 + (log1p(x) - v * d),  where x = v * (exp(d) - 1)
// A part without p has no ratio: then x is its weight in q beside the other's.
static inline DivergenceState combine(const DivergenceState& a, const DivergenceState& b) {
  DivergenceState both{combine(a.p, b.p), combine(a.q, b.q)};
  const double ref = reference(both.p.m), of_a = a.p.s * exp(a.p.m - ref), of_b = b.p.s * exp(b.p.m - ref);
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
    log = more_of_q < 600 ? log1p(u * exp(more_of_q) - v) : more_of_q + ::log(u);
    more = v > 0 ? log - v * d : log;
  }
  if (fabs(log) < 32) both.c = first.c + log + ((first.q.m - both.q.m) - (first.p.m - both.p.m));  // else as above
  both.k = u * first.k + (v > 0 ? v * second.k : 0) + more;
  return both;
}

}  // namespace jaxsoft::cpu
