// Entropy: its sum beside the state, and its gradient, also beside that of the logsumexp.
#pragma once

#include "extras.h"
#include "loops.h"
#include "operations.h"
#include "reduce.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::StateAndSum;

// A term of the sum, given z - m and exp(z - m).
template <class V>
inline V product(V below, V term) {
  return below == V{} - (decltype(below[0] + 0))infinity ? V{} : term * below;
}

// The sum of exp(z - m) * (z - m) of a part, relative to a maximum m that is at least the part's own.
static double moved_products(double sum, State part, double m) {
  if (part.s == 0) return 0;
  const double below = part.m - m;
  const double weight = ::exp(below);
  return weight == 0 ? 0 : weight * (sum + below * part.s);  // where it is 0, the product may be infinite
}

// The state of a segment's scores, and that sum. A score of -inf adds nothing to it, and it has no value where the
// maximum is infinite. The scores and the exponentials of a tile are kept for it.
template <class T, bool extras>
StateAndSum products(const Segment& at, int64_t n) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V kept[tile_vectors<T>], apart[tile_vectors<T>], *const tile = kept, *const terms = apart;
  const Reader<T, extras> reader(at);
  StateAndSum part{{-infinity, 0}, 0};
  State& st = part.state;
  for (int64_t start = 0; start < n; start += kPlan.tile) {
    const int64_t size = n - start < kPlan.tile ? n - start : kPlan.tile;
    const double m = max_terms<T>(size, [=](int64_t i, int64_t left) {
      return tile[i / L::lanes] = reader.counted_score(start + i, left);
    });
    if (m > st.m) {
      part.sum = moved_products(part.sum, st, m);
      st = {m, st.s == 0 ? 0 : st.s * ::exp(st.m - reference(m))};
    }
    const S ref = (S)reference(st.m);
    st.s += sum_exp<T>(size, m == st.m, st.m, terms, [=](int64_t i, int64_t) {
      __builtin_prefetch(reader.first + start + size + i);
      return tile[i / L::lanes] - ref;
    });
    if (st.m - st.m == 0)
      part.sum += sum_terms<T>(size, [=](int64_t i, int64_t) {
        return product(tile[i / L::lanes] - ref, terms[i / L::lanes]);
      });
  }
  return part;
}

struct EntropyVjp {
  static constexpr Reduction reduction = kNone;
  static constexpr double masked_result = 0;
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
  static constexpr double masked_result = 0;
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
