// label_sums: the state of each row without the label's score, the label's score t, and of the scores above -inf the
// sum u of their distances from t and their number k. Label smoothing needs these sums.
#pragma once

#include "labels.cuh"
#include "scores.cuh"

namespace jaxsoft::cuda {

// A state, with the number of scores above -inf and the sum of these scores' distances from the state's maximum.
template <class A>
struct StateAndSums {
  State<A, false> state;
  Sum<A> above;
  A count = 0;
};

// The same as it grows in one thread. The distances are from the reference of the running sum.
template <class A>
struct RunningSums {
  Running<A> running;
  Sum<A> above;
  A count = 0;
};

// The sum of distances, moved from one reference to another.
template <class A>
__device__ Sum<A> moved(Sum<A> above, A count, A from, A to) {
  if (from != to) above.add(count * (from - to));
  return above;
}

template <class T, class A>
__device__ StateAndSums<A> combine(StateAndSums<A> a, const StateAndSums<A>& b) {
  const A from = reference(a.state.m);
  a.state = combine<T>(a.state, b.state);
  const A to = reference(a.state.m);
  a.above = combine<T>(moved(a.above, a.count, from, to), moved(b.above, b.count, reference(b.state.m), to));
  a.count += b.count;
  return a;
}
template <class T, class A, class State>
__device__ StateAndSums<A> reduce_sums(const State& state, Sum<A> above, A count, A from, int width) {
  StateAndSums<A> result{reduce_lanes<T>(state, width)};
  result.above = reduce_lanes<T>(moved(above, count, from, reference(result.state.m)), width);
  result.count = reduce_lanes<T>(Sum<A>{count, 0}, width).value();
  return result;
}
template <class T, class A>
__device__ StateAndSums<A> reduce_lanes(const StateAndSums<A>& part, int width) {
  return reduce_sums<T>(part.state, part.above, part.count, reference(part.state.m), width);
}
template <class T, class A>
__device__ StateAndSums<A> reduce_lanes(const RunningSums<A>& part, int width) {
  return reduce_sums<T>(part.running, part.above, part.count, reference(part.running.from), width);
}

template <class T>
struct LabelSums : Scores<T, false> {
  using typename Scores<T, false>::A;
  using Part = StateAndSums<A>;
  using Thread = RunningSums<A>;
  static constexpr bool writes = false, labelled = true, sums = true, compensates = true;
  struct Values {};

  template <int count, class Form>
  static __device__ void accumulate(Thread& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                    const Form& form) {
    const A before = reference(part.running.from);
    Scores<T, false>::accumulate(part.running, a, b, form);
    const A from = reference(part.running.from);
    part.above = moved(part.above, part.count, before, from);
    A sums[count], counts[count];
#pragma unroll
    for (int k = 0; k < count; k++) {
      A distances[Pack<T>::size];
      counts[k] = 0;
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) {
        const A z = Scores<T, false>::score(a[k], b[k], i, form);
        const bool summed = z > -infinity<A>();
        distances[i] = summed ? z - from : A(0);
        counts[k] += summed;
      }
      sums[k] = tree_sum(distances);
    }
    part.above.add(tree_sum(sums));
    part.count += tree_sum(counts);
  }
  // The label's own score is not among the reduced ones. Its distance from itself is 0, but it is counted.
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first) {
    return finish(part, to, row, first, [&] { return label_element(to, row); });
  }
  template <class Element>
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first, Element at_label) {
    if (!first) return {};
    const A t = label_score(to, at_label());
    to.m[row] = part.state.m, to.s[row] = part.state.s(), to.label_score[row] = t;
    const Sum<A> above = moved(part.above, part.count, reference(part.state.m), reference(t));
    to.beside[row] = above.value() + (t == infinity<A>() ? t : 0);
    to.count[row] = part.count + (t > -infinity<A>() && to.labels[row] != kNoRow);
    return {};
  }
};

}  // namespace jaxsoft::cuda
