// The row operations on a GPU: what is accumulated over a row, and what is written from the result.
//
// Each is a struct with
//   Part                       what a row is reduced to
//   operands                   how many arrays of whole rows are read: a, or a and b
//   reads_a_to_reduce          whether the reduction needs a, or only b
//   writes                     whether whole rows are written
//   fill()                     the element that changes no reduction
//   accumulate(part, a, b)     a pack into a part
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

// The sum of a pack's terms, as a tree.
template <int size, class A>
__device__ A tree_sum(A (&x)[size]) {
#pragma unroll
  for (int width = size / 2; width > 0; width /= 2)
#pragma unroll
    for (int k = 0; k < width; k++) x[k] += x[k + width];
  return x[0];
}

template <class T>
struct Scores {  // the forward operations reduce scores to their state
  using A = Accumulator<T>;
  using Part = State<A>;
  static constexpr int operands = 1;
  static constexpr bool reduces = true, reads_a_to_reduce = true;
  static __device__ T fill() { return narrow<T>(-infinity<A>()); }

  static __device__ void accumulate(Part& part, const Pack<T>& a, const Pack<T>&) {
    A x[Pack<T>::size], m = -infinity<A>();
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) m = max(m, x[k] = a.get(k));
    if (m > part.m) {  // rare after the first packs: a new maximum, which leaves the sum
      Sum<A> rest;
      add_below<T>(rest, part, m);
      part = {m, rest};
      bool taken = false;
#pragma unroll
      for (int k = 0; k < Pack<T>::size; k++) {
        bool take = !taken && x[k] == m;
        taken |= take;
        if (take) x[k] = -infinity<A>();
      }
    }
    A ref = reference(part.m);
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) x[k] = exponential<T>(x[k] - ref);
    part.rest.add(tree_sum(x));
  }
};

template <class T>
struct Softmax : Scores<T> {
  using typename Scores<T>::A;
  using typename Scores<T>::Part;
  static constexpr bool writes = true;
  struct Values { A ref, scale; };

  static __device__ Values finish(Part part, const Arguments<T>&, int64_t, bool) {
    // The softmax of a row that holds +inf is NaN everywhere, as inf / inf has no value.
    return {reference(part.m), part.m == infinity<A>() ? A(nan("")) : 1 / part.s()};
  }
  static __device__ A value(Values v, A x, A) { return exponential<T>(x - v.ref) * v.scale; }
};

template <class T>
struct StateOf : Scores<T> {
  using typename Scores<T>::A;
  using typename Scores<T>::Part;
  static constexpr bool writes = false;
  struct Values {};

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    return {};
  }
  static __device__ A value(Values, A, A) { return 0; }
};

template <class T>
struct LogSoftmax : Scores<T> {
  using typename Scores<T>::A;
  using typename Scores<T>::Part;
  static constexpr bool writes = true;
  struct Values { A ref, log_s; };

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    return {reference(part.m), isfinite(part.m) ? log1p(part.rest.value()) : A(nan(""))};
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

  static __device__ void accumulate(Part& part, const Pack<T>& a, const Pack<T>& b) {
    A terms[Pack<T>::size];
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) terms[k] = a.get(k) * b.get(k);
    part.add(tree_sum(terms));
  }
  static __device__ A finish(Part part, const Arguments<T>&, int64_t, bool) { return part.value(); }
  static __device__ A value(A dot, A y, A g) { return y * (g - dot); }
};

// p = exp(x - m) / s: the probabilities in the other two pullbacks, 0 in a row without scores.
template <class T>
struct Probabilities {
  using A = Accumulator<T>;
  A ref, scale;
  __device__ Probabilities(A m, A s) : ref(reference(m)), scale(s == 0 ? A(0) : 1 / s) {}
  __device__ A operator()(A x) const { return exponential<T>(x - ref) * scale; }
};

template <class T>
struct LogSoftmaxVjp {  // a = x, b = g
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = false, writes = true;
  struct Values { Probabilities<T> p; A sum; };
  static __device__ T fill() { return narrow<T>(0); }

  static __device__ void accumulate(Part& part, const Pack<T>&, const Pack<T>& b) {
    A terms[Pack<T>::size];
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) terms[k] = b.get(k);
    part.add(tree_sum(terms));
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

  static __device__ void accumulate(Part&, const Pack<T>&, const Pack<T>&) {}
  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    return {Probabilities<T>(from.m[row], from.s[row]), from.g[row]};
  }
  static __device__ A value(const Values& v, A x, A) { return v.p(x) * v.g; }
};

}  // namespace jaxsoft::cuda
