// Entropy: its sum beside the state, and its gradient, also beside that of the logsumexp.
#pragma once

#include "extras.h"
#include "loops.h"
#include "operations.h"
#include "reduce.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Sums;

// A term of the sum, given z - m and exp(z - m).
template <class V>
inline V product(V below, V term) {
  return below == V{} - (decltype(below[0] + 0))infinity ? V{} : term * below;
}

// The sum of exp(z - m) * (z - m) over a segment's scores, where m is their maximum, which `at.from` has. A score of
// -inf adds nothing.
template <class T, bool extras>
Sums products(const Segment& at, int64_t n) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  const Reader<T, extras> reader(at);
  const S m = (S)reference(at.from);
  return {sum_terms<T>(n, [=](int64_t i, int64_t left) {
    const V below = reader.counted_score(i, left) - m;
    return product(below, exp_term(below));
  })};
}

// That sum, of a part, relative to a maximum m that is at least the part's own.
static double moved_products(double sum, State part, double m) {
  if (part.s == 0) return 0;
  const double below = part.m - m;
  return ::exp(below) * (sum + below * part.s);
}

struct EntropyVjp {
  static constexpr Reduction reduction = kNone;
  static constexpr double uncounted = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    LogsumexpVjp::finish(row, p);
    p[3] = row.given.s == 0 ? 0 : (S)(row.beside / row.given.s);
  }
  template <class V, class N>
  static V value(V z, V b, const N* p) {
    const V below = z - p[0];
    const V above_mean = below == V{} - (decltype(z[0] + 0))infinity ? V{} : below - p[3];
    return -LogsumexpVjp::value(z, b, p) * above_mean;
  }
};

// p * (g - h * ((z - m) - mean)), as p * ((g + h * mean) - h * (z - m)).
struct LabelEntropyVjp {
  static constexpr Reduction reduction = kNone;
  static constexpr double uncounted = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    const double mean = row.given.s == 0 ? 0 : row.beside / row.given.s;
    p[0] = (S)reference(row.given.m);
    p[1] = inverse_sum<S>(row.given.s);
    p[2] = (S)(row.cotangent + row.entropy_cotangent * mean);
    p[3] = (S)row.entropy_cotangent;
  }
  template <class V, class N>
  static V value(V z, V, const N* p) {
    const V below = z - p[0];
    const V slope = below == V{} - (decltype(z[0] + 0))infinity ? V{} : p[2] - p[3] * below;
    return (exp(below) * p[1]) * slope;
  }
};

}  // namespace JAXSOFT_ISA
