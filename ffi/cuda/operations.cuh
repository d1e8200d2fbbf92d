// The row operations on a GPU: what is accumulated over a row, and what is written from the result.
//
// Each is a struct with
//   Part                       what a row is reduced to
//   operands                   how many arrays of whole rows are read: a, or a and b
//   reads_a_to_reduce          whether the reduction needs a, or only b
//   writes                     whether whole rows are written
//   fill()                     the element that changes no reduction
//   accumulate(part, a, b)     some packs into a part
//   finish(part, arguments, row) -> what the writing pass needs; writes the row's statistics
//   value(row values, a, b)    an element of the result
#pragma once

#include "fold.cuh"
#include "pack.cuh"

namespace jaxsoft::cuda {

template <class T>
struct Arguments {
  using A = Accumulator<T>;
  const T* a = nullptr;
  const T* b = nullptr;
  T* out = nullptr;
  A* m = nullptr;  // statistics, one a row: results of the forward operations, operands of the backward ones
  A* s = nullptr;
  const A* g = nullptr;
  int64_t rows = 0, n = 0;
  bool vector = true;
};

// The sum of the terms, as a tree.
template <int count, class A>
__device__ A tree_sum(A (&x)[count]) {
#pragma unroll
  for (int width = count / 2; width > 0; width /= 2)
#pragma unroll
    for (int k = 0; k < width; k++) x[k] += x[k + width];
  return x[0];
}

template <class T, bool apart>
struct Scores {  // the forward operations reduce scores to their state
  using A = Accumulator<T>;
  using Part = State<A, apart>;
  static constexpr int operands = 1;
  static constexpr bool reduces = true, reads_a_to_reduce = true;
  static __device__ T fill() { return narrow<T>(-infinity<A>()); }

  template <int count>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&)[count]) {
    constexpr int size = Pack<T>::size;
    A m = -infinity<A>();
#pragma unroll
    for (int k = 0; k < count; k++) m = max(m, a[k].maximum());
    bool fresh = m > part.m;
    if (fresh) part = {m, seen_from<T>(m, part)};
    A ref = reference(part.m), tops = 0;
    A sums[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
      A x[size];
#pragma unroll
      for (int i = 0; i < size; i++) {
        A score = a[k].get(i);
        x[i] = exponential<T>(score - ref);
        if constexpr (apart) {
          bool top = fresh && score == m;
          x[i] = top ? A(0) : x[i];
          tops += top;
        }
      }
      sums[k] = tree_sum(x);
    }
    part.sum.add(tree_sum(sums));
    if constexpr (apart) part.sum.add(max(tops - 1, A(0)));
  }
};

template <class T>
struct Softmax : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = true;
  struct Values { A ref, scale; };

  static __device__ Values finish(Part part, const Arguments<T>&, int64_t, bool) {
    // The softmax of a row that holds +inf is NaN everywhere, as inf / inf has no value.
    return {reference(part.m), part.m == infinity<A>() ? A(nan("")) : A(kUnit<T>) / part.s()};
  }
  static __device__ A value(Values v, A x, A) { return exponential_in_units<T>(x - v.ref) * v.scale; }
};

template <class T>
struct StateOf : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = false;
  struct Values {};

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    return {};
  }
  static __device__ A value(Values, A, A) { return 0; }
};

template <class T>
struct LogSoftmax : Scores<T, true> {
  using typename Scores<T, true>::A;
  using typename Scores<T, true>::Part;
  static constexpr bool writes = true;
  struct Values { A ref, log_s; };

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    A rest = (1.0 + part.sum.value()) - 1.0;  // what f64, in which the CPU kernels sum, has of it
    return {reference(part.m), isfinite(part.m) ? log1p(rest) : A(nan(""))};
  }
  static __device__ A value(Values v, A x, A) { return (x - v.ref) - v.log_s; }
};

template <class T>
struct SoftmaxVjp {  // a = y, b = g
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = true, writes = true;
  using Values = A;
  static __device__ T fill() { return narrow<T>(0); }

  template <int count>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count]) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      A terms[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) terms[i] = a[k].get(i) * b[k].get(i);
      part.add(tree_sum(terms));
    }
  }
  static __device__ A finish(Part part, const Arguments<T>&, int64_t, bool) { return part.value(); }
  static __device__ A value(A dot, A y, A g) { return y * (g - dot); }
};

// p = exp(x - m) / s: the probabilities in the other two pullbacks, 0 in a row without scores.
template <class T>
struct Probabilities {
  using A = Accumulator<T>;
  A ref, scale;
  __device__ Probabilities(A m, A s) : ref(reference(m)), scale(s == 0 ? A(0) : A(kUnit<T>) / s) {}
  __device__ A operator()(A x) const { return exponential_in_units<T>(x - ref) * scale; }
};

template <class T>
struct LogSoftmaxVjp {  // a = x, b = g
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = false, writes = true;
  struct Values { Probabilities<T> p; A sum; };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count>
  static __device__ void accumulate(Part& part, const Pack<T> (&)[count], const Pack<T> (&b)[count]) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      A terms[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) terms[i] = b[k].get(i);
      part.add(tree_sum(terms));
    }
  }
  static __device__ Values finish(Part part, const Arguments<T>& from, int64_t row, bool) {
    A m = from.m[row];
    Probabilities<T> p(m, from.s[row]);
    if (!isfinite(m)) p.scale = nan("");  // log_softmax has no value there
    return {p, part.value()};
  }
  static __device__ A value(const Values& v, A x, A g) { return g - v.p(x) * v.sum; }
};

template <class T>
struct LogsumexpVjp {  // a = x, g one a row; nothing is reduced
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr int operands = 1;
  static constexpr bool reduces = false, reads_a_to_reduce = false, writes = true;
  struct Values { Probabilities<T> p; A g; };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count>
  static __device__ void accumulate(Part&, const Pack<T> (&)[count], const Pack<T> (&)[count]) {}
  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    return {Probabilities<T>(from.m[row], from.s[row]), from.g[row]};
  }
  static __device__ A value(const Values& v, A x, A) { return v.p(x) * v.g; }
};

}  // namespace jaxsoft::cuda
