// The row operations on a GPU: what is accumulated over a row, and what is written from the result.
//
// Each is a struct with
//   Part                       what a row is reduced to; Thread, what one thread accumulates on the way
//   operands                   how many arrays of whole rows are read: a, or a and b
//   reduces, keeps_apart       whether there is a reduction, and whether its maximum is kept apart
//   reads_a_to_reduce          whether the reduction needs a, or only b
//   writes                     whether whole rows are written
//   a_is_scores                whether a makes scores, together with the extras
//   labelled, sums             whether there may be a label a row; whether its Part is that of LabelSums
//   masked_value               what is written for a masked element
//   ordinary(values)           whether value is masked_value where the score is -inf and b is 0
//   fill()                     the element that changes no reduction
//   accumulate(part, a, b, form)  some packs into a part
//   finish(part, arguments, row) -> what the writing pass needs; writes the row's statistics
//   value(row values, a, b)    an element of the result, but for the factor `scale` of a gradient
#pragma once

#include "extras.cuh"
#include "../fold.cuh"

namespace jaxsoft::cuda {

// The sum of the terms, as a tree.
template <int count, class A>
__device__ A tree_sum(A (&x)[count]) {
#pragma unroll
  for (int left = count; left > 1; left = (left + 1) / 2)
#pragma unroll
    for (int k = 0; k < left / 2; k++) x[k] += x[k + (left + 1) / 2];
  return x[0];
}

template <class T, bool apart>
struct Scores {  // the forward operations reduce scores to their state
  using A = Accumulator<T>;
  using Part = State<A, apart>;
  using Thread = Running<A>;
  static constexpr int operands = 1;
  static constexpr bool reduces = true, reads_a_to_reduce = true, keeps_apart = apart, has_quick = false;
  static constexpr bool a_is_scores = true, gradient = false, scores = true, labelled = false, sums = false;
  static constexpr double masked_value = 0;
  static __device__ T fill() { return narrow<T>(-infinity<A>()); }

  template <class Form>
  static __device__ A score(const Pack<T>& a, const Pack<T>& b, int k, const Form& form) {
    if constexpr (Form::extras) return form.score(a, b, k);
    else return a.get(k);
  }
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
        if (form.cap > 0 && m > -infinity<A>()) m = capped<T>(m, form.cap);
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
  // Returns the maximum of the scores.
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
    // What may be the row's maximum is added by itself, as `Running::apart` wants it.
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

  // The sum of the terms of scores other than m, and the number of those that are m.
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

// Reduces a row, or the part of it that a group of threads has. `visit(f)` calls f with all packs of the calling thread,
// some at a time; `reduce` combines over the group.
template <class Op, class Form, class Visit, class Reduce>
__device__ typename Op::Part reduce_visited(const Form& form, Visit visit, Reduce reduce) {
  typename Op::Thread thread;
  visit([&](auto& a, auto& b) { Op::accumulate(thread, a, b, form); });
  if constexpr (Op::keeps_apart) return reduce(thread.apart());
  else return reduce(thread);
}

// The sum or the maximum over the block's threads in x; every thread gets it. `shared` is not to be used again before
// another barrier.
template <class A, class Combine>
__device__ A reduce_values(A x, A identity, A* shared, Combine combine) {
  const int width = min(blockDim.x, 32);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
    if (mask < width) x = combine(x, __shfl_xor_sync(0xffffffffu, x, mask));
  if (blockDim.x <= 32) return x;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < warps ? shared[lane] : identity;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// Reduces a row all of whose packs the block's threads in x hold: the maximum m of its scores is known before any
// exponential is taken, and sums that are trees need no compensation. Of a thread's packs 0, 1, ..., those with
// k * step < left are held. `shared` is for the block's warps, of three values.
template <class Op, class T, int count, class Form>
__device__ typename Op::Part reduce_held(const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form,
                                         int left, int step, Accumulator<T> (&shared)[3][32]) {
  using A = Accumulator<T>;
  [[maybe_unused]] A m = 0;
  if constexpr (Op::scores)
    m = reduce_values(Op::maximum(a, b, form, left, step), -infinity<A>(), shared[0],
                      [](A x, A y) { return max(x, y); });
  auto sum = [&](A x, int which) { return reduce_values(x, A(0), shared[which], [](A x, A y) { return x + y; }); };
  if constexpr (Op::scores && Op::keeps_apart) {
    auto rest = Op::template rest_of_terms<false>(reference(m), reference(m), a, b, form, left, step);
    Sum<A> part{sum(rest.sum, 1), 0};
    A tops = sum(rest.tops, 2);
    if (isfinite(m)) part.add(tops - 1);
    return {m, part};
  } else if constexpr (Op::scores) {
    return {m, {sum(Op::template sum_of_terms<false>(reference(m), a, b, form, left, step), 1), 0}};
  } else {
    typename Op::Thread part;
    Op::accumulate(part, a, b, form);
    return {sum(part.value(), 1), 0};
  }
}

template <class T>
struct Softmax : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = true, has_quick = sizeof(T) == 2;
  struct Values { A ref, scale, shift; bool quick; };

  static __device__ Values finish(Part part, const Arguments<T>&, int64_t, bool) {
    // The softmax of a row that holds +inf is NaN everywhere, as inf / inf has no value.
    A s = part.s();
    Values values{reference(part.m), part.m == infinity<A>() ? A(nan("")) : 1 / s, 0, false};
    if constexpr (sizeof(T) == 2) {
      // For 16 bits 2^(x log2(e) - shift), without a difference or a factor: to 2^-17, and not where the shift is large.
      values.shift = part.m * A(kLog2E) + __log2f(s) + A(kUnitExponent<T>);
      values.quick = fabs(part.m) < 64 && fabs(values.shift) < 128;
    }
    return values;
  }
  // As exact as f32 is, for 16 bits as well: their result may be wanted in f32.
  static __device__ A value(Values v, A x, A) { return exponential<A>(x - v.ref) * v.scale; }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.scale); }
  // Where a score is one product, log2(e) goes into its factor.
  template <class Form>
  static constexpr bool folds = has_quick && Form::extras && !Form::bias;
  template <class Form>
  static __device__ A quick_exponent(const Pack<T>& a, const Pack<T>& b, int k, const Form& form, A shift) {
    if constexpr (folds<Form>) return fmaf(a.get(k), form.factor * A(kLog2E), -shift);
    else return fmaf(Scores<T, false>::score(a, b, k, form), A(kLog2E), -shift);
  }
  template <class Form>
  static __device__ bool may_be_quick(A m, const Form& form) {
    if constexpr (folds<Form>)
      if (!(fabs(form.factor) > A(1e-30) && fabs(form.factor) < A(1e30))) return false;
    return fabs(m) < 64;
  }
  // Of a row that is held: each score's exponential, from `shift` on, and their sum.
  template <class Form>
  static __device__ A quick_terms(const Pack<T>& a, const Pack<T>& b, const Form& form, A shift,
                                  A (&x)[Pack<T>::size]) {
    A terms[Pack<T>::size];
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++)
      terms[i] = x[i] = exp2_approximately(quick_exponent(a, b, i, form, shift));
    return tree_sum(terms);
  }
  // The shift that makes one unit of element x. One that is not a number, or may stand for a mask, as large ones do,
  // makes none.
  template <class Form>
  static __device__ A quick_shift(A x, const Form& form) {
    if constexpr (Form::extras) x *= form.factor;
    return fmaf(fabs(x) < 4096 ? x : A(0), A(kLog2E), A(kUnitExponent<T>));
  }
  // Whether f32 has held the sum, and what it has flushed to 0 is 0 in the result.
  static __device__ bool holds(A sum) {
    constexpr A half_of_least = std::is_same<T, __nv_bfloat16>::value ? 0x1p-134 : 0x1p-25;
    return sum > A(0x1p-126) / half_of_least && sum < A(0x1p120);
  }
  static __device__ A quick_value(Values v, A x) { return exp2_approximately(fmaf(x, A(kLog2E), -v.shift)); }
};

// The score of a row's label: NaN where there is none, 0 in a row that is not read.
template <class T>
__device__ Accumulator<T> label_score(const Arguments<T>& args, int64_t row) {
  using A = Accumulator<T>;
  const int32_t label = args.labels[row];
  if (label < 0 || label >= args.n) return label == kNoRow ? A(0) : A(nan(""));
  const A x = widen(args.a[row * args.n + label]);
  return args.cap > 0 ? capped<T>(x, args.cap) : x;
}

template <class T>
struct StateOf : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = false, labelled = true;
  struct Values {};

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    if (first && to.t) to.t[row] = label_score(to, row);
    return {};
  }
  static __device__ A value(Values, A, A) { return 0; }
  static __device__ bool ordinary(const Values&) { return true; }
};

template <class T>
struct LogSoftmax : Scores<T, true> {
  using typename Scores<T, true>::A;
  using typename Scores<T, true>::Part;
  static constexpr bool writes = true;
  static constexpr double masked_value = -__builtin_huge_val();
  struct Values { A ref, log_s; };

  static __device__ Values finish(Part part, const Arguments<T>& to, int64_t row, bool first) {
    if (first) to.m[row] = part.m, to.s[row] = part.s();
    A rest = (1.0 + part.sum.value()) - 1.0;  // what f64, in which the CPU kernels sum, has of it
    return {reference(part.m), isfinite(part.m) ? log1p(rest) : A(nan(""))};
  }
  static __device__ A value(Values v, A x, A) { return (x - v.ref) - v.log_s; }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.log_s); }
};

// The state, and of the scores above -inf their number and the sum of their distances from its maximum.
template <class A>
struct StateAndSums {
  State<A, false> state;
  Sum<A> above;
  A count = 0;
};

// The same of one thread, as it grows: the distances are from the reference that the state's sum has.
template <class A>
struct RunningSums {
  Running<A> running;
  Sum<A> above;
  A count = 0;
};

// The sum of distances from another reference.
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
  static constexpr bool writes = false, labelled = true, sums = true;
  struct Values {};

  template <int count, class Form>
  static __device__ void accumulate(Thread& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                    const Form& form) {
    const A before = reference(part.running.from);
    Scores<T, false>::accumulate(part.running, a, b, form);
    const A from = reference(part.running.from);
    part.above = moved(part.above, part.count, before, from);
#pragma unroll
    for (int k = 0; k < count; k++) {
      A distances[Pack<T>::size], counts[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) {
        const A z = Scores<T, false>::score(a[k], b[k], i, form);
        counts[i] = z > -infinity<A>();
        distances[i] = z > -infinity<A>() ? z - from : A(0);
      }
      part.above.add(tree_sum(distances));
      part.count += tree_sum(counts);
    }
  }
  // The label, which is not among the scores, is at no distance from itself.
  static __device__ Values finish(const Part& part, const Arguments<T>& to, int64_t row, bool first) {
    if (!first) return {};
    const A t = label_score(to, row);
    to.m[row] = part.state.m, to.s[row] = part.state.s(), to.t[row] = t;
    to.u[row] = moved(part.above, part.count, reference(part.state.m), reference(t)).value() + (t == infinity<A>() ? t : 0);
    to.k[row] = part.count + (t > -infinity<A>() && to.labels[row] != kNoRow);
    return {};
  }
  static __device__ A value(Values, A, A) { return 0; }
  static __device__ bool ordinary(const Values&) { return true; }
};

template <class T>
struct SoftmaxVjp {  // a = y, b = g
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = true, keeps_apart = false, has_quick = false, writes = true;
  static constexpr bool a_is_scores = false, gradient = true, scores = false, labelled = false, sums = false;
  static constexpr double masked_value = 0;
  using Values = A;
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form) {
#pragma unroll
    for (int k = 0; k < count; k++) {
      A terms[Pack<T>::size];
#pragma unroll
      for (int i = 0; i < Pack<T>::size; i++) {
        terms[i] = a[k].get(i) * b[k].get(i);
        if constexpr (Form::extras)
          if (form.masked && a[k].get(i) == 0) terms[i] = 0;
      }
      part.add(tree_sum(terms));
    }
  }
  static __device__ A finish(Part part, const Arguments<T>&, int64_t, bool) { return part.value(); }
  static __device__ A value(A dot, A y, A g) { return y * (g - dot); }
  static __device__ bool ordinary(A) { return true; }
};

// p = exp(x - m) / s: the probabilities in the other two pullbacks, 0 in a row without scores.
template <class T>
struct Probabilities {
  using A = Accumulator<T>;
  A ref, scale;
  Probabilities() = default;
  __device__ Probabilities(A m, A s) : ref(reference(m)), scale(s == 0 ? A(0) : A(kUnit<T>) / s) {}
  __device__ A operator()(A x) const { return exponential_in_units<T>(x - ref) * scale; }
};

template <class T>
struct LogSoftmaxVjp {  // a = x, b = g
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, reads_a_to_reduce = false, keeps_apart = false, has_quick = false, writes = true;
  static constexpr bool a_is_scores = true, gradient = true, scores = false, labelled = false, sums = false;
  static constexpr double masked_value = 0;
  struct Values { Probabilities<T> p; A sum; };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form&) {
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
  static __device__ bool ordinary(const Values& v) { return isfinite(v.p.scale) && isfinite(v.sum); }
};

template <class T>
struct LogsumexpVjp {  // a = x, g one a row, and v, where there is one; nothing is reduced
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr int operands = 1;
  static constexpr bool reduces = false, reads_a_to_reduce = false, keeps_apart = false, has_quick = false, writes = true;
  static constexpr bool a_is_scores = true, gradient = true, scores = false, labelled = true, sums = false;
  static constexpr double masked_value = 0;
  struct Values { Probabilities<T> p; A g, v; };
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part&, const Pack<T> (&)[count], const Pack<T> (&)[count], const Form&) {}
  static __device__ Values finish(Part, const Arguments<T>& from, int64_t row, bool) {
    const bool read = !from.labels || from.labels[row] != kNoRow;
    return {Probabilities<T>(from.m[row], from.s[row]), read ? from.g[row] : A(0), read && from.v ? from.v[row] : A(0)};
  }
  static __device__ A value(const Values& v, A x, A) {
    const A y = v.p(x) * v.g;
    return v.v == 0 || x == -infinity<A>() ? y : y + v.v;
  }
  // For 16 bits with fewer instructions: the exponential of a difference that is not rounded, but for that of `ref`, to
  // 2^-17. Not where ref is large, or the product of the factors too small.
  static __device__ bool may_be_quick(const Values& v) {
    return fabs(v.p.ref) < 64 && v.v == 0 && (v.g == 0 || fabs(v.p.scale * v.g) > A(0x1p-100));
  }
  static __device__ A quick_value(const Values& v, A x) {
    return exp2_approximately(fmaf(x, A(kLog2E), -(v.p.ref * A(kLog2E) + A(kUnitExponent<T>)))) * (v.p.scale * v.g);
  }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.p.scale) && isfinite(v.g); }
};

// The results of a pack, but for what is masked in a row that is not ordinary.
template <class Op, bool quick, class T, class Form>
__device__ void results(const typename Op::Values& values, const Pack<T>& a, const Pack<T>& b, const Form& form,
                        Accumulator<T> (&x)[Pack<T>::size]) {
  using A = Accumulator<T>;
#pragma unroll
  for (int k = 0; k < Pack<T>::size; k++) {
    if constexpr (quick) {
      x[k] = exp2_approximately(Op::quick_exponent(a, b, k, form, values.shift));
      continue;
    }
    A first, second = Op::operands > 1 ? b.get(k) : A(0);
    if constexpr (Form::extras && Op::a_is_scores) first = form.score(a, b, k);
    else first = a.get(k);
    x[k] = Op::value(values, first, second);
    if constexpr (Form::extras) {
      if (Op::gradient) x[k] *= form.scale;
      if (Op::gradient && Op::labelled && form.cap > 0) x[k] *= cap_slope(a.get(k), form.cap);
      if (!Op::a_is_scores && form.masked && first == 0) x[k] = 0;
    }
  }
}

}  // namespace jaxsoft::cuda
