// entropy: the state (m, s) of each row, and the sum u of exp(z - m) * (z - m) over its scores z. The entropy of the
// row's softmax is log(s) - u / s. A score of -inf adds nothing to u. With labels, the label's score is left out of all
// three, and is a result of its own.
//
// entropy_vjp: dx = -scale * h * p * ((z - m) - u / s), with one h for each row and p = exp(z - m) / s. With labels, dx
// is p * (g - h * ((z - m) - u / s)), with g the cotangent of the logsumexp, and the label's cotangent at the label.
#pragma once

#include "labels.cuh"
#include "probabilities.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

// A distance below 0, but no further than a product with it can take. So far below, the weight exp(z - m) is 0. NaN
// stays NaN.
__device__ inline float bounded(float distance) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(distance), "f"(-1e20f));
  return y;
}
__device__ inline double bounded(double distance) { return distance < -1e20 ? -1e20 : distance; }

// z - m, bounded.
template <class A>
__device__ A below(A z, A m) {
  return bounded(z - m);
}

// The exponent by the reference that is fit for it.
template <class A>
__device__ A exponent(A x, A from) {
  return may_shift(from) ? exponent<true>(x, from) : exponent<false>(x, from);
}

// A state and its sum u.
template <class A>
struct StateAndProducts {
  State<A, false> state;
  Sum<A> products;
};

// The same as it grows in one thread. The products are of the terms of the running sum and their exponents, which are
// at hand when the terms are computed.
template <class A>
struct RunningProducts {
  Running<A> running;
  Sum<A> products;

  __device__ void raise(A top) {
    if (!running.falls_behind(top)) return;
    const Running<A> before = running;
    running.move(top);
    if (!isfinite(before.from)) {
      products = {};
      return;
    }
    const A to = exponent(before.from, running.from), from = exponent(before.from, before.from);
    const A factor = power(to) / power(from);
    products.add(bounded(to - from) * before.sum.value());
    products.s *= factor, products.c *= factor;
  }
  // The products relative to the maximum m, in the same units as `Running::seen_from` has the sum.
  __device__ Sum<A> seen_from(A m) const {
    if (!isfinite(m) || !isfinite(running.from)) return products;
    const A top = exponent(m, running.from), factor = A(kLogBase<A>) / power(top);
    Sum<A> moved = products;
    moved.add(bounded(-top) * running.sum.value());
    return {moved.s * factor, moved.c * factor};
  }
};

// The products of a state seen from a maximum that is at least its own.
template <class T, class A>
__device__ Sum<A> products_from(A m, const StateAndProducts<A>& part) {
  if (!isfinite(m) || !isfinite(part.state.m)) return isfinite(m) ? Sum<A>{} : part.products;
  const A factor = exponential<T>(part.state.m - m);
  Sum<A> moved = part.products;
  moved.add(below(part.state.m, m) * part.state.sum.value());
  return {moved.s * factor, moved.c * factor};
}

template <class T, class A>
__device__ StateAndProducts<A> combine(const StateAndProducts<A>& a, const StateAndProducts<A>& b) {
  const State<A, false> state = combine<T>(a.state, b.state);
  return {state, combine<T>(products_from<T>(state.m, a), products_from<T>(state.m, b))};
}
// Adds both sums in the same steps, so that one need not wait for the other.
template <class T, class A>
__device__ StateAndProducts<A> add_lanes(A m, Sum<A> sum, Sum<A> products, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) {
    const Sum<A> others = shuffle(sum, mask), other_products = shuffle(products, mask);
    sum = combine<T>(sum, others), products = combine<T>(products, other_products);
  }
  return {{m, sum}, products};
}
template <class T, class A>
__device__ StateAndProducts<A> reduce_lanes(const StateAndProducts<A>& part, int width) {
  const A m = reduce_maximum(part.state.m, width);
  return add_lanes<T>(m, seen_from<T>(m, part.state), products_from<T>(m, part), width);
}
template <class T, class A>
__device__ StateAndProducts<A> reduce_lanes(const RunningProducts<A>& part, int width) {
  const A m = reduce_maximum(part.running.m, width);
  return add_lanes<T>(m, part.running.seen_from(m), part.seen_from(m), width);
}

template <class T>
struct Entropy : Scores<T, false> {
  using Base = Scores<T, false>;
  using typename Base::A;
  using Part = StateAndProducts<A>;
  using Thread = RunningProducts<A>;
  static constexpr bool labelled = true, sums = true;
  struct Values {};

  // `shifted` terms save a subtraction: see exponential_term.
  template <int count, class Form>
  static __device__ void accumulate(Thread& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                    const Form& form) {
    if constexpr (Form::extras) part.raise(Base::maximum(a, b, form));
    else part.raise(maximum_of(a));  // the same in fewer steps
    const A from = reference(part.running.from);
    auto add = [&](auto shifted) {
      const Terms found = sum_of_terms<decltype(shifted)::value>(from, a, b, form, count, 1);
      part.running.sum.add(found.sum);
      part.products.add(found.products);
    };
    if (may_shift(from)) add(std::true_type());
    else add(std::false_type());
  }
  // The sums of the terms relative to `from`, and of their products with their exponents. Of a thread's packs k = 0, 1,
  // ..., those with k * step < left exist.
  struct Terms {
    A sum, products;
  };
  template <bool shifted, int count, class Form>
  static __device__ Terms sum_of_terms(A from, const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form,
                                       int left, int step) {
    // A shifted exponent of an element that is as far below 0 as -1e38 can be multiplied by 0. (In f16 there is no such
    // number beside those that are valid.)
    constexpr bool raises = shifted && std::is_same<T, __nv_bfloat16>::value && !Form::extras;
    A sums[count], products[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
      sums[k] = products[k] = 0;
      if (k * step >= left) continue;
      Pack<T> pack = a[k];
      if constexpr (raises) pack.raise(narrow<T>(A(-1e38)));
      A terms[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) {
        A at = exponent<shifted>(Base::score(pack, b[k], i, form), from);
        if (!raises) at = bounded(at);
        terms[i] = power(at);
        products[k] += terms[i] * at;
      }
      sums[k] = tree_sum(terms);
    }
    return {tree_sum(sums), tree_sum(products)};
  }
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first) {
    return finish(part, to, row, first, [&] { return label_element(to, row); });
  }
  template <class Element>
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first, Element at_label) {
    if (first) to.m[row] = part.state.m, to.s[row] = part.state.s(), to.beside[row] = part.products.value();
    if (first && to.label_score) to.label_score[row] = label_score(to, at_label());
    return {};
  }
};

template <class T>
struct EntropyVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr bool reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true, labelled = true;
  struct Values {
    Probabilities<T> p;
    A lse_cotangent, cotangent, mean;  // mean: of z - m, with the probabilities as weights
  };
  static __device__ T fill() { return narrow<T>(0); }

  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const A s = from.s[row];
    Values values{Probabilities<T>(from.m[row], s), 0, 0, s == 0 ? A(0) : from.beside[row] / s};
    if (!from.labels) values.cotangent = from.cotangent[row];
    else if (from.labels[row] != kNoRow)
      values.lse_cotangent = from.cotangent[row], values.cotangent = from.entropy_cotangent[row];
    return values;
  }
  static __device__ A value(const Values& row, A x, A) {
    const A p = row.p(x);
    // Where p is 0, a product of the cotangent and the distance could be infinite.
    return p * row.lse_cotangent - p * row.cotangent * (below(x, row.p.ref) - row.mean);
  }
  static __device__ bool may_be_quick(const Values&) { return false; }
  static __device__ A quick_value(const Values& row, A x) { return value(row, x, 0); }
  static __device__ bool ordinary(const Values& row) {
    return isfinite(row.p.scale) && isfinite(row.lse_cotangent) && isfinite(row.cotangent) && isfinite(row.mean);
  }
};

}  // namespace jaxsoft::cuda
