// The CPU kernels where the reduced dimension is not the last: a lane a row.
//
// What is a row of scores elsewhere is here a column, and a line holds one element of each. Lines are read from end to
// end, several at a time; what the columns were reduced to so far waits in the first-level cache.
#pragma once

#include "operations.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Block;
using jaxsoft::cpu::kColumns;
using jaxsoft::cpu::Numbers;
using jaxsoft::cpu::Part;
using jaxsoft::cpu::Segment;

template <int n> struct Count { static constexpr int value = n; };

// f(line, how many, columns) for all lines, eight at a time as long as there are.
template <class F>
inline void each_lines(const Block& block, F f) {
  int64_t line = 0, all = block.lines + (block.rest > 0);
  for (; line + 8 <= block.lines; line += 8) f(line, Count<8>(), block.columns);
  for (; line < all; line++) f(line, Count<1>(), line < block.lines ? block.columns : block.rest);
}

// f(column, count, known) for the vectors of a line. The last one has `count` lanes where the columns do not fill one,
// and else overlaps the one before it by `known` lanes.
template <class T, class F>
inline void each_vector(int64_t columns, F f) {
  constexpr int64_t lanes = Lanes<T>::lanes;
  int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) f(c, lanes, 0);
  if (c == columns) return;
  if (columns < lanes) f(0, columns, 0);
  else f(columns - lanes, lanes, lanes - (columns - c));
}

// The accumulators have room for a vector that the columns do not fill.
constexpr int64_t kRoom = kColumns + 16;

// v with its first lanes 0.
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

// Every column c becomes fold(columns c, c + period, ...).
template <class A, class Fold>
inline void fold_columns(A* a, const Block& block, Fold fold) {
  for (int64_t c = block.columns - 1; c >= block.period; c--) a[c - block.period] = fold(a[c - block.period], a[c]);
  for (int64_t c = block.period; c < block.columns; c++) a[c] = a[c - block.period];
}

template <Reduction reduction, class T, bool keeps_digits>
void reduce_columns(const Segment& at, const Block& block, Part* part) {
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
    each_lines(block, [&](int64_t line, auto lines, int64_t columns) {
      each_vector<T>(columns, [&](int64_t c, int64_t count, int64_t) {
        V top = Memory::load(m + c);
        for (int k = 0; k < lines.value; k++) top = maximum(top, read(at.a, line + k, c, count));
        Memory::store(m + c, top);
      });
    });
    fold_columns(m, block, [](S a, S b) { return b > a ? b : a; });
    for (int64_t c = 0; c < room; c++) ref[c] = m[c] - m[c] == 0 ? m[c] : 0;
  }
  if constexpr (reduction != kNone) {
    each_lines(block, [&](int64_t line, auto lines, int64_t columns) {
      each_vector<T>(columns, [&](int64_t c, int64_t count, int64_t known) {
        V t[lines.value];
        for (int k = 0; k < lines.value; k++) {
          if constexpr (reduction == kScores) {
            t[k] = exp(read(at.a, line + k, c, count) - Memory::load(ref + c));
          } else {
            t[k] = read(at.b, line + k, c, count);
            if constexpr (reduction == kDot) {
              V y = read(at.a, line + k, c, count);
              t[k] = at.masked ? (y == 0 ? V{} : y * t[k]) : y * t[k];
            }
          }
        }
        if constexpr (keeps_digits) {
          for (V v : t) accumulate(s + c, known > 0 ? without(v, known) : v);
          return;
        }
        for (int k = lines.value / 2; k > 0; k /= 2)  // added as a tree before they are widened
          for (int i = 0; i < k; i++) t[i] += t[i + k];
        if (known > 0) t[0] = without(t[0], known);
        accumulate(s + c, t[0]);
      });
    });
    fold_columns(s, block, [](double a, double b) { return a + b; });
  }
  for (int64_t c = 0; c < block.columns; c++) part->m[c] = m[c], part->s[c] = s[c];
}

inline void combine_columns(Part* total, const Part& part, int64_t columns) {
  typedef Lanes<double> L;
  for (int64_t c = 0; c < columns; c += L::lanes) {
    F64 a = L::load(total->m + c), b = L::load(part.m + c), m = maximum(a, b), ref = m - m == 0 ? m : F64{};
    L::store(total->m + c, m);
    L::store(total->s + c, L::load(total->s + c) * exp(a - ref) + L::load(part.s + c) * exp(b - ref));
  }
}

// The statistics (m, s) are results of an operation that reduces scores, if it has them, and operands of the others.
template <class Op, class T>
void finish_columns(const Part& part, const Block& block, void* m, void* s, const void* g, Numbers* to) {
  typedef typename Lanes<T>::Scalar S;
  S* numbers = (S*)to->bytes;
  for (int64_t c = 0; c < block.period && c < block.columns; c++) {
    Row row{{part.m[c], part.s[c]}};
    if (g) row.g = ((const S*)g)[c];
    if (m && Op::reduction == kScores) ((S*)m)[c] = (S)part.m[c], ((S*)s)[c] = (S)part.s[c];
    else if (m) row.given = {((S*)m)[c], ((S*)s)[c]};
    S p[kNumbers] = {};
    Op::finish(row, p);
    for (int j = 0; j < kNumbers; j++) numbers[j * kRoom + c] = p[j];
  }
  for (int64_t c = block.period; c < block.columns; c++)
    for (int j = 0; j < kNumbers; j++) numbers[j * kRoom + c] = numbers[j * kRoom + c - block.period];
}

template <class Op, class T, class Out>
void write_columns(const Segment& at, void* out_, const Block& block, const Numbers& numbers) {
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
