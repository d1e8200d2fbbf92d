// The reduction of the forward operations: from scores to their state (m, s).
#pragma once

#include <type_traits>

#include "../score.cuh"
#include "operation.cuh"

namespace jaxsoft::cuda {

template <class T, bool apart>
struct Scores : Operation {
  using A = Accumulator<T>;
  using Part = State<A, apart>;
  using Thread = Running<A>;
  static constexpr bool reduces = true, scores = true, separates_maximum = apart, a_is_scores = true;

  static __device__ T fill() { return narrow<T>(-infinity<A>()); }

  template <class Form>
  static __device__ A score(const Pack<T>& a, const Pack<T>& b, int k, const Form& form) {
    if constexpr (Form::extras) return form.score(a, b, k);
    else return a.get(k);
  }
  // The maximum of the scores. Of a thread's packs k = 0, 1, ..., those with k * step < left exist; so in all functions
  // here.
  template <int count, class Form>
  static __device__ A maximum(const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form,
                              int left = count, int step = 1) {
    A m = -infinity<A>(), factor = 1;
    if constexpr (Form::extras) factor = form.factor;
    if (!Form::bias && factor > 0) {
#pragma unroll
      for (int k = 0; k < count; k++)
        if (k * step < left) m = max(m, a[k].maximum());
      if constexpr (Form::extras) {
        m = rounded_product(m, factor);
        if (Form::capped && m > -infinity<A>()) m = soft_cap<T>(m, form.cap);
      }
      return m;
    }
#pragma unroll
    for (int k = 0; k < count; k++)
      if (k * step < left)
#pragma unroll
        for (int i = 0; i < Pack<T>::size; i++) m = max(m, score(a[k], b[k], i, form));
    return m;
  }
  // Adds the scores of some packs to a thread's state, and returns their maximum.
  template <int count, class Form>
  static __device__ A accumulate(Thread& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                 const Form& form) {
    constexpr bool takes = apart && !Form::extras;
    [[maybe_unused]] Pack<T> others[count];
    A top;
    if constexpr (takes) {
#pragma unroll
      for (int k = 0; k < count; k++) others[k] = a[k];
      top = take_maximum(others);
    } else {
      top = maximum(a, b, form);
    }
    part.raise(top);
    const A from = reference(part.from);
    // With `apart`, the score that may be the row's maximum is added in a step of its own: `Running::apart` may have to
    // take it out again.
    auto add = [&](auto shifted) {
      if constexpr (takes) {
        part.sum.add(sum_of_terms<shifted>(from, others, b, form));
        part.sum.add(exponential_term<shifted>(top, from));
      } else if constexpr (apart) {
        const auto rest = rest_of_terms<shifted>(part.m, from, a, b, form);
        part.sum.add(rest.sum);
        if (rest.tops > 0) part.sum.add(rest.tops * exponential_term<shifted>(part.m, from));
      } else {
        part.sum.add(sum_of_terms<shifted>(from, a, b, form));
      }
    };
    if (may_shift(from)) add(std::true_type());
    else add(std::false_type());
    return top;
  }
  template <bool shifted, int count, class Form>
  static __device__ A sum_of_terms(A from, const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form,
                                   int left = count, int step = 1) {
    A sums[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
      sums[k] = 0;
      if (k * step >= left) continue;
      A x[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) x[i] = exponential_term<shifted>(score(a[k], b[k], i, form), from);
      sums[k] = tree_sum(x);
    }
    return tree_sum(sums);
  }

  // The sum of the terms of all scores that are not m, and the number of scores that are m.
  struct Rest {
    A sum, tops;
  };
  template <bool shifted, int count, class Form>
  static __device__ Rest rest_of_terms(A m, A from, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                       const Form& form, int left = count, int step = 1) {
    A sums[count], tops = 0;
#pragma unroll
    for (int k = 0; k < count; k++) {
      sums[k] = 0;
      if (k * step >= left) continue;
      A x[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) {
        A z = score(a[k], b[k], i, form);
        x[i] = z == m ? A(0) : exponential_term<shifted>(z, from);
        tops += z == m;
      }
      sums[k] = tree_sum(x);
    }
    return {tree_sum(sums), tops};
  }
};

}  // namespace jaxsoft::cuda
