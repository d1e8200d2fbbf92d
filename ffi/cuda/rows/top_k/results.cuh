// What is written of a row: its k largest elements, their probabilities and their indices.
#pragma once

#include "../top_k.cuh"
#include "../../fold.cuh"
#include "keys.cuh"

namespace jaxsoft::cuda {

// The softmax of a row by its state. It is NaN in a row that has none.
struct SoftmaxOfRow {
  float m, scale;
  bool exists;
  __device__ SoftmaxOfRow(float m, float s) : m(m), exists(isfinite(m) && !isnan(s)) {
    scale = exists ? __fdividef(1, s) : __int_as_float(0x7fffffff);
  }
  __device__ float operator()(float x) const { return expf(x - m) * scale; }
};

// The element of a key. A zero's sign is not in its key.
template <class T>
__device__ T element_of(Key key, const T* row) {
  const float value = of_order(order_in(key));
  return value == 0 ? row[index_in(key)] : narrow<T>(value);
}

// Writes one element: `at` counts elements of the results. Without args.out there is no place for its probability.
// Where it is known that there is (`has_out`), kernels for short rows and for many rows do without an instruction that
// others do not notice.
template <bool has_out = false, class T>
__device__ void write_element(const Arguments<T>& args, const Largest<T>& to, int64_t at, T value, uint32_t index,
                              const SoftmaxOfRow& softmax) {
  to.values[at] = value;
  to.indices[at] = static_cast<int32_t>(index);
  if (!has_out && !args.out) return;
  const float p = softmax(widen(value));
  // No switch, which would be a jump by a table: that takes longer than the comparisons.
  if (args.result == ResultType::same) static_cast<T*>(args.out)[at] = narrow<T>(p);
  else if (args.result == ResultType::f32) static_cast<float*>(args.out)[at] = p;
  else if (args.result == ResultType::f16) static_cast<__half*>(args.out)[at] = narrow<__half>(p);
  else static_cast<__nv_bfloat16*>(args.out)[at] = narrow<__nv_bfloat16>(p);
}

// Writes the results of a row without a softmax, its first k elements, by `threads` threads.
template <bool has_out = false, class T>
__device__ void write_first(const Arguments<T>& args, const Largest<T>& to, int64_t index, const SoftmaxOfRow& softmax,
                            int threads) {
  for (int j = threadIdx.x % threads; j < to.k; j += threads)
    write_element<has_out>(args, to, index * to.k + j, args.a[index * args.n + j], j, softmax);
}

// Copies the row's first k elements, if they are wanted.
template <class T>
__device__ void copy_first(const Arguments<T>& args, const Largest<T>& to, int64_t index, int threads) {
  if (!to.first) return;
  for (int j = threadIdx.x % threads; j < to.k; j += threads) to.first[index * to.k + j] = args.a[index * args.n + j];
}

}  // namespace jaxsoft::cuda
