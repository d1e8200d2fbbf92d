// Kernels of rows that are columns, as the reduced dimension is not the last. Each lane of a vector is in another row.
//
// A line holds one element of each column. Lines are read from end to end, several at a time; the states of the columns
// so far wait in the first-level cache.
#pragma once

#include "../../exp.h"
#include "../../formats.h"
#include "operations.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Block;
using jaxsoft::cpu::ColumnNumbers;
using jaxsoft::cpu::ColumnStates;
using jaxsoft::cpu::kPlan;
using jaxsoft::cpu::RowNumbers;
using jaxsoft::cpu::Segment;

template <int n> struct Count { static constexpr int value = n; };

// Calls f(line, how many, columns) for all lines, eight at a time as long as there are eight.
template <class F>
inline void each_lines(const Block& block, F f) {
  int64_t line = 0, all = block.lines + (block.rest > 0);
  for (; line + 8 <= block.lines; line += 8) f(line, Count<8>(), block.columns);
  for (; line < all; line++) f(line, Count<1>(), line < block.lines ? block.columns : block.rest);
}

// Calls f(column, count, known) for the vectors of a line. The last vector has `count` lanes if the columns do not fill
// one, and else overlaps the vector before it by `known` lanes.
template <class T, class F>
inline void each_vector(int64_t columns, F f) {
  constexpr int64_t lanes = Lanes<T>::lanes;
  int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) f(c, lanes, 0);
  if (c == columns) return;
  if (columns < lanes) f(0, columns, 0);
  else f(columns - lanes, lanes, lanes - (columns - c));
}

// Columns that the accumulators have room for: the last vector may be partial.
constexpr int64_t kRoom = kPlan.columns + 16;

// v with 0 in its first lanes.
template <class V>
inline V without(V v, int64_t lanes) {
  for (int64_t i = 0; i < lanes; i++) v[i] = 0;
  return v;
}

// Adds a vector to sums in f64.
inline void accumulate(double* to, F64 v) { Lanes<double>::store(to, Lanes<double>::load(to) + v); }
inline void accumulate(double* to, F32 v) {
  F32Half half[2];
  memcpy(half, &v, sizeof v);
  accumulate(to, __builtin_convertvector(half[0], F64));
  accumulate(to + Lanes<double>::lanes, __builtin_convertvector(half[1], F64));
}

// Folds the columns that are parts of one row, and leaves the total in each of them.
template <class A, class Fold>
inline void fold_columns(A* a, const Block& block, Fold fold) {
  for (int64_t c = block.columns - 1; c >= block.period; c--) a[c - block.period] = fold(a[c - block.period], a[c]);
  for (int64_t c = block.period; c < block.columns; c++) a[c] = a[c - block.period];
}

// Sets m to the maxima of the scores.
template <class T, class Read, class S>
inline void max_columns(const Block& block, Read read, S* m) {
  typedef typename Lanes<T>::V V;
  typedef Lanes<S> Memory;
  each_lines(block, [&](int64_t line, auto lines, int64_t columns) {
    each_vector<T>(columns, [&](int64_t c, int64_t count, int64_t) {
      V top = Memory::load(m + c);
      for (int k = 0; k < lines.value; k++) top = maximum(top, read(line + k, c, count));
      Memory::store(m + c, top);
    });
  });
  fold_columns(m, block, [](S a, S b) { return b > a ? b : a; });
}

// Adds the sums of term(line, column, count) to s. The terms of eight lines are added as a tree before they are
// widened, unless each has to be widened for `keeps_digits`.
template <class T, bool keeps_digits, class Term>
inline void sum_columns(const Block& block, Term term, double* s) {
  typedef typename Lanes<T>::V V;
  each_lines(block, [&](int64_t line, auto lines, int64_t columns) {
    each_vector<T>(columns, [&](int64_t c, int64_t count, int64_t known) {
      V t[lines.value];
      for (int k = 0; k < lines.value; k++) t[k] = term(line + k, c, count);
      if constexpr (keeps_digits) {
        for (V v : t) accumulate(s + c, known > 0 ? without(v, known) : v);
        return;
      }
      for (int k = lines.value / 2; k > 0; k /= 2)
        for (int i = 0; i < k; i++) t[i] += t[i + k];
      if (known > 0) t[0] = without(t[0], known);
      accumulate(s + c, t[0]);
    });
  });
  fold_columns(s, block, [](double a, double b) { return a + b; });
}

template <Reduction reduction, class T, bool keeps_digits>
void reduce_columns(const Segment& at, const Block& block, ColumnStates* states) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  typedef Lanes<S> Memory;
  // Lanes past the end of a short line belong to columns too, so what is read there must change nothing.
  auto read = [&](const void* p, int64_t line, int64_t column, int64_t count) {
    return load<T>((const T*)p + line * block.stride + column, count, reduction == kScores ? (S)-infinity : 0);
  };
  S m[kRoom], ref[kRoom];
  double s[kRoom];
  const int64_t room = block.columns + Lanes<T>::lanes;
  for (int64_t c = 0; c < room; c++) m[c] = reduction == kScores ? (S)-infinity : 0, s[c] = 0;

  if constexpr (reduction == kScores) {
    max_columns<T>(block, [&](int64_t line, int64_t c, int64_t count) { return read(at.a, line, c, count); }, m);
    for (int64_t c = 0; c < room; c++) ref[c] = m[c] - m[c] == 0 ? m[c] : 0;
  }
  if constexpr (reduction != kNone) {
    sum_columns<T, keeps_digits>(block, [&](int64_t line, int64_t c, int64_t count) {
      if constexpr (reduction == kScores) {
        return exp(read(at.a, line, c, count) - Memory::load(ref + c));
      } else {
        V b = read(at.b, line, c, count);
        if constexpr (reduction == kDot) {
          V y = read(at.a, line, c, count);
          b = at.masked ? (y == 0 ? V{} : y * b) : y * b;
        }
        return b;
      }
    }, s);
  }
  for (int64_t c = 0; c < block.columns; c++) states->m[c] = m[c], states->s[c] = s[c];
}

inline void combine_columns(ColumnStates* total, const ColumnStates& part, int64_t columns) {
  typedef Lanes<double> L;
  for (int64_t c = 0; c < columns; c += L::lanes) {
    F64 a = L::load(total->m + c), b = L::load(part.m + c), m = maximum(a, b), ref = m - m == 0 ? m : F64{};
    L::store(total->m + c, m);
    L::store(total->s + c, L::load(total->s + c) * exp(a - ref) + L::load(part.s + c) * exp(b - ref));
  }
}

// Computes what write_columns needs. The states (m, s) are results of an operation that reduces scores, if it has them,
// and operands of the others.
template <class Op, class T>
void finish_columns(const ColumnStates& states, const Block& block, void* m, void* s, const void* cotangent,
                    ColumnNumbers* to) {
  typedef typename Lanes<T>::Scalar S;
  S* numbers = (S*)to->bytes;
  for (int64_t c = 0; c < block.period && c < block.columns; c++) {
    RowNumbers row{{states.m[c], states.s[c]}};
    if (cotangent) row.cotangent = ((const S*)cotangent)[c];
    if (m && Op::reduction == kScores) ((S*)m)[c] = (S)states.m[c], ((S*)s)[c] = (S)states.s[c];
    else if (m) row.given = {((S*)m)[c], ((S*)s)[c]};
    S p[kNumbers] = {};
    Op::finish(row, p);
    for (int j = 0; j < kNumbers; j++) numbers[j * kRoom + c] = p[j];
  }
  for (int64_t c = block.period; c < block.columns; c++)
    for (int j = 0; j < kNumbers; j++) numbers[j * kRoom + c] = numbers[j * kRoom + c - block.period];
}

template <class Op, class T, class Out>
void write_columns(const Segment& at, void* out_, const Block& block, const ColumnNumbers& numbers) {
  const T *first = (const T*)at.a, *second = (const T*)at.b;
  Out* out = (Out*)out_;
  const bool masked = at.masked;
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  for (int64_t line = 0; line < block.lines + (block.rest > 0); line++)
    each_vector<T>(line < block.lines ? block.columns : block.rest, [&](int64_t c, int64_t count, int64_t) {
      int64_t i = line * block.stride + c;
      V p[kNumbers];
      for (int j = 0; j < kNumbers; j++) p[j] = Lanes<S>::load((const S*)numbers.bytes + j * kRoom + c);
      V a = load<T>(first + i, count, 0), b{};
      if constexpr (reads_b(Op::reduction)) b = load<T>(second + i, count, 0);
      V v = Op::value(a, b, p);
      if (masked) v = a == 0 ? V{} : v;
      if (count < Lanes<T>::lanes) Lanes<Out>::store_part(out + i, v, count);
      else Lanes<Out>::store(out + i, v);
    });
}

}  // namespace JAXSOFT_ISA
