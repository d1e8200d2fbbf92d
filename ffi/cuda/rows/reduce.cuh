// The reduction of rows by any operation: packs that are visited one after the other, or a row that is held as a whole.
#pragma once

#include <cuda_runtime.h>

#include "operations/operation.cuh"

namespace jaxsoft::cuda {

// Reduces a row, or a part of one, by a group of threads. `visit(f)` calls f with all packs of the calling thread, some
// at a time. `reduce` combines what the threads have over the group.
template <class Op, class Form, class Visit, class Reduce>
__device__ typename Op::Part reduce_visited(const Form& form, Visit visit, Reduce reduce) {
  typename Op::Thread thread;
  visit([&](auto& a, auto& b) { Op::accumulate(thread, a, b, form); });
  if constexpr (Op::separates_maximum) return reduce(thread.apart());
  else return reduce(thread);
}

// Combines a number over the block's threads in x, and every thread gets the result. `shared` must not be used again
// before the next barrier.
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

// Reduces a row whose packs are all in the registers of the block's threads in x. The maximum of its scores is known
// before the first exponential is taken, and sums are taken as trees, which need no compensation. Of a thread's packs k
// = 0, 1, ..., those with k * step < left exist. `shared` has room for three values of each warp.
template <class Op, class T, int count, class Form>
__device__ typename Op::Part reduce_registers(const Pack<T> (&a)[count], const Pack<T> (&b)[count], const Form& form,
                                         int left, int step, Accumulator<T> (&shared)[3][32]) {
  using A = Accumulator<T>;
  [[maybe_unused]] A m = 0;
  if constexpr (Op::scores)
    m = reduce_values(Op::maximum(a, b, form, left, step), -infinity<A>(), shared[0],
                      [](A x, A y) { return max(x, y); });
  auto sum = [&](A x, int which) { return reduce_values(x, A(0), shared[which], [](A x, A y) { return x + y; }); };
  if constexpr (Op::scores && Op::separates_maximum) {
    auto rest = Op::template rest_of_terms<false>(reference(m), reference(m), a, b, form, left, step);
    Sum<A> part{sum(rest.sum, 1), 0};
    A tops = sum(rest.tops, 2);
    if (isfinite(m)) part.add(tops - 1);
    return {m, part};
  } else if constexpr (Op::scores && Op::sums) {
    const auto terms = Op::template sum_of_terms<false>(reference(m), a, b, form, left, step);
    const A products = terms.products * A(kLogBase<A>);
    return {{m, {sum(terms.sum, 1), 0}}, {sum(products, 2), 0}};
  } else if constexpr (Op::scores) {
    return {m, {sum(Op::template sum_of_terms<false>(reference(m), a, b, form, left, step), 1), 0}};
  } else {
    typename Op::Thread part;
    Op::accumulate(part, a, b, form);
    return {sum(part.value(), 1), 0};
  }
}

}  // namespace jaxsoft::cuda
