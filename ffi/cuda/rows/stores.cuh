// Stores of results whose element type differs from the operands'.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arguments.cuh"

namespace jaxsoft::cuda {

// Writes pack i of a row's result in the element type that `type` names. Elements beyond the row's ends are not
// written.
template <class T, Layout layout>
__device__ void store_as(ResultType type, void* row, const Window<T, layout>& window, int i,
                         const Accumulator<T> (&x)[Pack<T>::size]) {
  auto each = [&](auto* out) {
    using R = std::remove_pointer_t<decltype(out)>;
    constexpr int size = Pack<T>::size;
    const int first = i * size - window.head;
    if (first >= 0 && first + size <= window.n && reinterpret_cast<uintptr_t>(out + first) % sizeof(uint2) == 0) {
      alignas(sizeof(uint2)) R values[size];
#pragma unroll
      for (int k = 0; k < size; k++) values[k] = narrow<R>(x[k]);
      constexpr int words = size * sizeof(R) / 8;
#pragma unroll
      for (int k = 0; k < words; k++)
        reinterpret_cast<uint2*>(out + first)[k] = reinterpret_cast<const uint2*>(values)[k];
      return;
    }
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < window.n) out[first + k] = narrow<R>(x[k]);
  };
  if (type == ResultType::same) return each(static_cast<T*>(row));
  if constexpr (sizeof(T) == 2) each(static_cast<float*>(row));
  if constexpr (sizeof(T) == 4) {
    if (type == ResultType::f16) each(static_cast<__half*>(row));
    else each(static_cast<__nv_bfloat16*>(row));
  }
}

}  // namespace jaxsoft::cuda
