// The arithmetic of each operation: what a row is reduced to, and an element of the result, given that.
//
// Each is a struct with
//   reduction                  what is reduced
//   masked_result              the result of an element that is masked
//   finish(row, numbers)       computes the numbers of a row that `value` needs
//   value(a, b, numbers)       a vector of the result; numbers are scalars, or vectors where each lane is another row
#pragma once

#include <math.h>

#include "../../exp.h"
#include "../kernels.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::infinity;
using jaxsoft::cpu::reference;
using jaxsoft::cpu::RowNumbers;

enum Reduction {
  kScores,  // the scores, to their state
  kDot,     // the products of probabilities and cotangents, to their sum
  kSum,     // the cotangents, to their sum
  kNone,
};
constexpr bool reads_b(Reduction r) { return r == kDot || r == kSum; }

constexpr int kNumbers = 4;  // the most that an operation has

// Whether log(s) is part of a result, which may be near 0: where one score dominates, log(s) depends on the other terms
// of s, and these would keep few digits if they were added to its term of 1 in f32.
template <class Op> constexpr bool keeps_digits = false;

// softmax and log_softmax of a row that holds +inf are NaN everywhere, as inf / inf has no value.
struct Softmax {
  static constexpr Reduction reduction = kScores;
  static constexpr double masked_result = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    p[0] = (S)reference(row.reduced.m);
    p[1] = row.reduced.m == infinity ? (S)__builtin_nan("") : (S)(1 / row.reduced.s);
  }
  template <class V, class N>
  static V value(V z, V, const N* p) { return exp(z - p[0]) * p[1]; }
};

struct LogSoftmax {
  static constexpr Reduction reduction = kScores;
  static constexpr double masked_result = -infinity;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    p[0] = (S)reference(row.reduced.m);
    p[1] = row.reduced.m - row.reduced.m == 0 ? (S)::log(row.reduced.s) : (S)__builtin_nan("");
  }
  template <class V, class N>
  static V value(V z, V, const N* p) { return (z - p[0]) - p[1]; }
};

template <> constexpr bool keeps_digits<LogSoftmax> = true;

struct SoftmaxVjp {
  static constexpr Reduction reduction = kDot;
  static constexpr double masked_result = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    p[0] = (S)row.reduced.s;
  }
  template <class V, class N>
  static V value(V y, V g, const N* p) { return y * (g - p[0]); }
};

// 1 / s of a row with scores, and 0 of one that is all -inf.
template <class S>
inline S inverse_sum(double s) {
  return s == 0 ? 0 : (S)(1 / s);
}

struct LogSoftmaxVjp {
  static constexpr Reduction reduction = kSum;
  static constexpr double masked_result = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    double m = row.given.m;
    p[0] = (S)reference(m);
    p[1] = m - m == 0 ? inverse_sum<S>(row.given.s) : (S)__builtin_nan("");  // log_softmax has no value here
    p[2] = (S)row.reduced.s;
  }
  template <class V, class N>
  static V value(V z, V g, const N* p) { return g - (exp(z - p[0]) * p[1]) * p[2]; }
};

struct LogsumexpVjp {
  static constexpr Reduction reduction = kNone;
  static constexpr double masked_result = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    p[0] = (S)reference(row.given.m);
    p[1] = inverse_sum<S>(row.given.s);
    p[2] = (S)row.cotangent;
  }
  template <class V, class N>
  static V value(V z, V, const N* p) { return (exp(z - p[0]) * p[1]) * p[2]; }
};

struct LabelSumsVjp {
  static constexpr Reduction reduction = kNone;
  static constexpr double masked_result = 0;
  template <class S>
  static void finish(const RowNumbers& row, S* p) {
    LogsumexpVjp::finish(row, p);
    p[3] = (S)row.distance_cotangent;
  }
  template <class V, class N>
  static V value(V z, V b, const N* p) {
    return LogsumexpVjp::value(z, b, p) + (z == V{} - (decltype(z[0] + 0))infinity ? V{} : V{} + p[3]);
  }
};

}  // namespace JAXSOFT_ISA
