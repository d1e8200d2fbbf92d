// softmax: y = exp(z - m) / s.
//
// softmax_vjp: dx = scale * y * (g - <y, g>), with a = y and b = g.
#pragma once

#include "scores.cuh"

namespace jaxsoft::cuda {

template <class T>
struct Softmax : Scores<T, false> {
  using typename Scores<T, false>::A;
  using typename Scores<T, false>::Part;
  static constexpr bool writes = true, has_quick = sizeof(T) == 2;
  struct Values {
    A ref, scale;
    A shift;     // for the quick formula
    bool quick;  // whether it may be used
  };

  static __device__ Values finish(Part part, const Arguments<T>&, int64_t, bool) {
    // The softmax of a row that holds +inf is NaN everywhere, as inf / inf has no value.
    A s = part.s();
    Values values{reference(part.m), part.m == infinity<A>() ? A(nan("")) : 1 / s, 0, false};
    if constexpr (sizeof(T) == 2) {
      // The quick formula is 2^(x log2(e) - shift), without a difference and a factor. It errs by 2^-17 at most, as
      // long as the shift is not large.
      values.shift = part.m * A(kLog2E) + __log2f(s) + A(kUnitExponent<T>);
      values.quick = fabs(part.m) < 64 && fabs(values.shift) < 128;
    }
    return values;
  }
  // This is as exact as f32 even for 16-bit scores, because their result may be wanted in f32.
  static __device__ A value(Values v, A x, A) { return exponential<A>(x - v.ref) * v.scale; }
  static __device__ bool ordinary(const Values& v) { return isfinite(v.scale); }
  // Where a score is a product and nothing is added, its factor takes in log2(e).
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
  // For a row that is held in registers: the exponentials of a pack's scores, relative to `shift`, and their sum.
  template <class Form>
  static __device__ A quick_terms(const Pack<T>& a, const Pack<T>& b, const Form& form, A shift,
                                  A (&x)[Pack<T>::size]) {
    A terms[Pack<T>::size];
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++)
      terms[i] = x[i] = exp2_approximately(quick_exponent(a, b, i, form, shift));
    return tree_sum(terms);
  }
  // The shift with which the exponential of element x is one unit. If x is NaN, or so large that it may stand for a
  // masked score, 0 takes its place.
  template <class Form>
  static __device__ A quick_shift(A x, const Form& form) {
    if constexpr (Form::extras) x *= form.factor;
    return fmaf(fabs(x) < 4096 ? x : A(0), A(kLog2E), A(kUnitExponent<T>));
  }
  // Whether f32 could represent the sum of these exponentials, and every term that it has flushed to 0 rounds to 0 in
  // the result.
  static __device__ bool holds(A sum) {
    constexpr A half_of_least = std::is_same<T, __nv_bfloat16>::value ? 0x1p-134 : 0x1p-25;
    return sum > A(0x1p-126) / half_of_least && sum < A(0x1p120);
  }
  static __device__ A quick_value(Values v, A x) { return exp2_approximately(fmaf(x, A(kLog2E), -v.shift)); }
};

template <class T>
struct SoftmaxVjp : Operation {
  using A = Accumulator<T>;
  using Part = Sum<A>;
  using Thread = Part;
  static constexpr int operands = 2;
  static constexpr bool reduces = true, writes = true, gradient = true;
  using Values = A;
  static __device__ T fill() { return narrow<T>(0); }

  template <int count, class Form>
  static __device__ void accumulate(Part& part, const Pack<T> (&a)[count], const Pack<T> (&b)[count],
                                    const Form& form) {
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

}  // namespace jaxsoft::cuda
