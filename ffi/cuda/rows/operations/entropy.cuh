// entropy: the state (m, s) of each row, and the sum u of exp(z - m) * (z - m) over its scores z. The entropy of the
// row's softmax is log(s) - u / s. A score of -inf adds nothing to u.
//
// entropy_vjp: dx = -scale * g * p * ((z - m) - u / s), with one g for each row and p = exp(z - m) / s.
#pragma once

#include "probabilities.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

// z - m, but no further below 0 than a product with it can take. So far below, its weight exp(z - m) is 0.
template <class A>
__device__ A below(A z, A m) {
  return max(z - m, A(-1e20));
}

// A state and its sum u.
template <class A>
struct StateAndProducts {
  State<A, false> state;
  Sum<A> products;
};

// The same as it grows in one thread. The products are of differences from the reference of the running sum.
template <class A>
struct RunningProducts {
  Running<A> running;
  Sum<A> products;

  __device__ void raise(A top) {
    const Running<A> before = running;
    running.raise(top);
    if (running.from == before.from) return;
    if (!isfinite(before.from)) {
      products = {};
      return;
    }
    const A factor = exponential_term(before.from, running.from) / exponential_term(before.from, before.from);
    products.add(below(before.from, running.from) * before.sum.value());
    products.s *= factor, products.c *= factor;
  }
  // The products relative to the maximum m, in the same units as `Running::seen_from` has the sum.
  __device__ Sum<A> seen_from(A m) const {
    if (!isfinite(m) || !isfinite(running.from)) return products;
    const A unit = exponential_term(m, running.from);
    Sum<A> moved = products;
    moved.add(below(running.from, m) * running.sum.value());
    return {moved.s / unit, moved.c == 0 ? A(0) : moved.c / unit};
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
template <class T, class A>
__device__ StateAndProducts<A> reduce_lanes(const StateAndProducts<A>& part, int width) {
  const State<A, false> state = reduce_lanes<T>(part.state, width);
  return {state, reduce_lanes<T>(products_from<T>(state.m, part), width)};
}
template <class T, class A>
__device__ StateAndProducts<A> reduce_lanes(const RunningProducts<A>& part, int width) {
  const State<A, false> state = reduce_lanes<T>(part.running, width);
  return {state, reduce_lanes<T>(part.seen_from(state.m), width)};
}

template <class T>
struct Entropy : Scores<T, false> {
  using Base = Scores<T, false>;
  using typename Base::A;
  using Part = StateAndProducts<A>;
  using Thread = RunningProducts<A>;
  static constexpr bool sums = true;
  struct Values {};

  // `shifted` terms save a subtraction: see exponential_term.
  template <int count, class Form>
  static __device__ void accumulate(Thread& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                    const Form& form) {
    part.raise(Base::maximum(a, b, form));
    const A from = reference(part.running.from);
    auto add = [&](auto shifted) {
#pragma unroll
      for (int k = 0; k < count; k++) {
        A terms[Pack<T>::size], products[Pack<T>::size];
#pragma unroll
        for (int i = 0; i < Pack<T>::size; i++) {
          const A z = Base::score(a[k], b[k], i, form);
          terms[i] = exponential_term<decltype(shifted)::value>(z, from);
          products[i] = terms[i] * below(z, from);
        }
        part.running.sum.add(tree_sum(terms));
        part.products.add(tree_sum(products));
      }
    };
    if (may_shift(from)) add(std::true_type());
    else add(std::false_type());
  }
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.state.m, to.s[row] = part.state.s(), to.beside[row] = part.products.value();
    return {};
  }
};

template <class T>
struct EntropyVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  static constexpr bool reads_a_to_reduce = false, writes = true, gradient = true, a_is_scores = true;
  struct Values {
    Probabilities<T> p;
    A cotangent, mean;  // mean: of z - m, with the probabilities as weights
  };
  static __device__ T fill() { return narrow<T>(0); }

  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const A s = from.s[row];
    return {Probabilities<T>(from.m[row], s), from.cotangent[row], s == 0 ? A(0) : from.beside[row] / s};
  }
  static __device__ A value(const Values& row, A x, A) {
    return -(row.p(x) * row.cotangent) * (below(x, row.p.ref) - row.mean);
  }
  static __device__ bool may_be_quick(const Values&) { return false; }
  static __device__ A quick_value(const Values& row, A x) { return value(row, x, 0); }
  static __device__ bool ordinary(const Values& row) {
    return isfinite(row.p.scale) && isfinite(row.cotangent) && isfinite(row.mean);
  }
};

}  // namespace jaxsoft::cuda
