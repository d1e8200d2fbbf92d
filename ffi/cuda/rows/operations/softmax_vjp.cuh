// softmax_vjp: dx = scale * y * (g - <y, g>), with a = y and b = g.
#pragma once

#include "operation.cuh"

namespace jaxsoft::cuda {

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
