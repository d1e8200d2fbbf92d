// Loops over the vectors of a segment, whose last one may be partial. Terms and values are functions of an element's
// index and of how many elements are left from there on.
#pragma once

#include "../../formats.h"
#include "../kernels.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::infinity;

// The sum of term(i, left). Eight terms are added as a tree before they are widened; without `trees`, each is widened.
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

// The maximum of term(i, left). Four maxima are carried side by side, so that none waits for the one before it.
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

// Writes out[i] = value(i, left). Where value can be taken `anywhere`, and not only at multiples of the lanes, the last
// vector is a whole one, and some elements are written twice.
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

}  // namespace JAXSOFT_ISA
