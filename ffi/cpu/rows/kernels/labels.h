// Rows with labels: the sums beside the state, and whole rows of at most a tile, all of whose elements count.
#pragma once

#include "entropy.h"
#include "reduce.h"
#include "write.h"

namespace JAXSOFT_ISA {

using jaxsoft::kNoRow;
using jaxsoft::cpu::LabelRows;
using jaxsoft::cpu::Sums;

// Of the scores above -inf, the sum of their distances from `from` and their number.
template <class T, class Score>
inline Sums sums_above(int64_t n, typename Lanes<T>::Scalar from, Score score) {
  typedef typename Lanes<T>::V V;
  typedef typename Lanes<T>::Scalar S;
  auto sum = [=](auto value) {
    return sum_terms<T>(n, [=](int64_t i, int64_t left) {
      V z = score(i, left);
      return z > V{} - (S)infinity ? value(z) : V{};
    });
  };
  return {sum([=](V z) { return z - from; }), sum([](V) { return V{} + (S)1; })};
}

template <class T, bool extras>
Sums distances(const Segment& at, int64_t n) {
  const Reader<T, extras> reader(at);
  return sums_above<T>(n, (typename Lanes<T>::Scalar)at.from,
                       [=](int64_t i, int64_t left) { return reader.counted_score(i, left); });
}

// The vector 0, 1, 2, ...
template <class V>
inline V lane_numbers() {
  V v;
  for (unsigned i = 0; i < sizeof v / sizeof v[0]; i++) v[i] = i;
  return v;
}

// A row in the first-level cache. Its label's score is kept apart, and -inf stands in its place.
template <class T>
struct KeptRow {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  V scores[tile_vectors<T>];
  S label_score;
  double m;
  bool is_read;

  void read(const LabelRows& rows, int64_t row) {
    const int64_t n = rows.n, label = rows.label[row];
    const T* a = (const T*)rows.a + row * n;
    const S none = (S)-infinity;
    is_read = label != kNoRow;
    label_score = is_read ? (S)__builtin_nan("") : 0;
    m = -infinity;
    if (!is_read) return;
    V* const to = scores;
    const V no_label = V{} + (S)label, lane = lane_numbers<V>();
    m = max_terms<T>(n, [=](int64_t i, int64_t left) {
      V z = load<T>(a + i, left, none);
      z = lane + (S)i == no_label ? V{} + none : z;
      return to[i / L::lanes] = z;
    });
    if (label >= 0 && label < n) label_score = (S)get<T>(a + label);
  }

  // Leaves the exponentials in `terms`, which may be the scores' place. As many elements at `next` will be read soon.
  double sum_exp_of_scores(int64_t n, const T* next, V* terms) const {
    if (!is_read) return 0;
    const S ref = (S)reference(m);
    const V* const kept = scores;
    return sum_exp<T>(n, true, m, terms, [=](int64_t i, int64_t) {
      __builtin_prefetch(next + i);
      return kept[i / L::lanes] - ref;
    });
  }

  // The sum for the entropy, given the exponentials. It has no value where the maximum is infinite.
  double sum_of_products(int64_t n, const V* terms) const {
    if (!is_read || !(m - m == 0)) return 0;
    const S ref = (S)m;
    const V* const kept = scores;
    return sum_terms<T>(n, [=](int64_t i, int64_t) {
      return product(kept[i / L::lanes] - ref, terms[i / L::lanes]);
    });
  }

  Sums sums(S from, int64_t n) const {
    const V* const kept = scores;
    return is_read ? sums_above<T>(n, from, [=](int64_t i, int64_t) { return kept[i / L::lanes]; }) : Sums{};
  }
};

// What is summed beside the state: nothing, the distances from the label's score, or the products of the entropy.
enum Beside { kNothing, kDistances, kProducts };

// The states of rows, and the sums beside them. The maximum of a row is found before the sum of the row before it, so
// that the processor has something to do while it waits for either.
template <class T, Beside beside>
void label_states(const LabelRows& rows, int64_t begin, int64_t end) {
  typedef typename Lanes<T>::Scalar S;
  KeptRow<T> kept[2];
  typename Lanes<T>::V apart[beside == kProducts ? tile_vectors<T> : 1];
  const int64_t n = rows.n;
  auto set = [](void* to, int64_t row, double value) { ((S*)to)[row] = (S)value; };
  if (begin < end) kept[0].read(rows, begin);
  for (int64_t row = begin; row < end; row++) {
    KeptRow<T>& here = kept[(row - begin) % 2];
    if (row + 1 < end) kept[(row + 1 - begin) % 2].read(rows, row + 1);
    const S t = here.label_score;
    if constexpr (beside == kDistances) {
      const Sums above = here.sums((S)reference(t), n);
      set(rows.beside, row, above.sum + (t > 0 && t == (S)infinity ? t : 0));
      set(rows.count, row, above.count + (here.is_read && t > (S)-infinity));
    }
    set(rows.maximum, row, here.m), set(rows.label_score, row, t);
    auto* const terms = beside == kProducts ? apart : here.scores;
    set(rows.sum, row, here.sum_exp_of_scores(n, (const T*)rows.a + (row + 2) * n, terms));
    if constexpr (beside == kProducts) set(rows.beside, row, here.sum_of_products(n, terms));
  }
}

template <class S>
inline S number_of(const void* numbers, int64_t row) {
  return numbers ? ((const S*)numbers)[row] : 0;
}

// Computes the numbers that the gradients of a row need.
template <class Op, class S>
inline void gradient_numbers(const LabelRows& rows, int64_t row, S* numbers) {
  RowNumbers of_row;
  of_row.given = {number_of<S>(rows.maximum, row), number_of<S>(rows.sum, row)};
  of_row.cotangent = number_of<S>(rows.cotangent, row);
  of_row.distance_cotangent = number_of<S>(rows.distance_cotangent, row);
  of_row.entropy_cotangent = number_of<S>(rows.entropy_cotangent, row);
  of_row.beside = number_of<S>(rows.beside, row);
  Op::finish(of_row, numbers);
}

// Writes the gradient at a row's label, and fills a row that is not read with zeros.
template <class Op, class T, class Out>
inline void finish_label_gradient(const LabelRows& rows, int64_t row) {
  typedef typename Lanes<T>::Scalar S;
  const int64_t n = rows.n, label = rows.label[row];
  Out* const out = (Out*)rows.out + row * n;
  if (label == kNoRow) fill<Op, Out>(out, n);
  if (label < 0 || label >= n) return;
  const double score = get<T>((const T*)rows.a + row * n + label), gradient = number_of<S>(rows.label_cotangent, row);
  put<Out>(out + label, score == -infinity ? gradient : gradient + number_of<S>(rows.distance_cotangent, row));
}

// The gradients of rows. Rows of a few vectors are written several together, each element with its row's numbers.
template <class Op, class T, class Out>
void label_gradients(const LabelRows& rows, int64_t begin, int64_t end) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  constexpr int64_t few = kPlan.short_gradient_vectors * L::lanes, room = kPlan.short_gradient_elements;
  const int64_t n = rows.n, together = n <= few ? room / n : 1;
  S numbers[kNumbers][room + few + L::lanes];  // of each element of the rows, and past their end
  for (int64_t first = begin; first < end; first += together) {
    const int64_t last = first + together < end ? first + together : end;
    const T* const a = (const T*)rows.a + first * n;
    Out* const out = (Out*)rows.out + first * n;
    S p[kNumbers] = {};
    if (together == 1) {
      gradient_numbers<Op>(rows, first, p);
      write_values<Out>(out, n, [=](int64_t i, int64_t left) { return Op::value(load<T>(a + i, left, 0), V{}, p); });
    } else {
      for (int64_t row = first; row < last; row++) {
        gradient_numbers<Op>(rows, row, p);
        for (int j = 0; j < kNumbers; j++)  // the next row writes over what is written past this one's end
          for (int64_t i = 0; i < n; i += L::lanes) Lanes<S>::store(numbers[j] + (row - first) * n + i, V{} + p[j]);
      }
      const auto* const from = numbers;
      write_values<Out>(out, (last - first) * n, [=](int64_t i, int64_t left) {
        V q[kNumbers];
        for (int j = 0; j < kNumbers; j++) q[j] = Lanes<S>::load(from[j] + i);
        return Op::value(load<T>(a + i, left, 0), V{}, q);
      });
    }
    for (int64_t row = first; row < last; row++) finish_label_gradient<Op, T, Out>(rows, row);
  }
}

}  // namespace JAXSOFT_ISA
