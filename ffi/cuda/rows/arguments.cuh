// The arguments of a call, as every row kernel takes them.
#pragma once

#include <cstdint>

#include "../../rows/extras.h"
#include "../../rows/limits.h"
#include "../divider.cuh"
#include "../window.cuh"

namespace jaxsoft::cuda {

// The element type of a result of whole rows: `same` is that of the operands.
enum class ResultType { same, f32, f16, bf16 };

// A template, as XLA's header, which has the enumeration, is not included here.
template <class DataType>
ResultType result_type(DataType operand, DataType result) {
  if (result == operand) return ResultType::same;
  return result == DataType::F32 ? ResultType::f32 : result == DataType::F16 ? ResultType::f16 : ResultType::bf16;
}

// The extras in the order of `Arguments::strides`.
enum { kScale, kLimit, kWhere, kBias, kExtras };

template <class T>
struct Arguments {
  using A = Accumulator<T>;
  // Operands and the result of whole rows. `out` has the element type that `result` names.
  const T* a = nullptr;
  const T* b = nullptr;
  void* out = nullptr;
  // Statistics, one for each row, by the names of rows/operations.h and rows/call.h. m and s are results of the forward
  // operations, and operands of the backward ones.
  A* m = nullptr;
  A* s = nullptr;
  const A* cotangent = nullptr;
  const int32_t* labels = nullptr;
  A *label_score = nullptr, *beside = nullptr, *count = nullptr;
  const A *label_cotangent = nullptr, *distance_cotangent = nullptr, *entropy_cotangent = nullptr;
  A cap = 0;  // the scores' soft cap; 0 for none
  // The arrays have the shape (rows, n, inner), and n is reduced.
  int64_t rows = 0, n = 0, inner = 1;
  bool vector = true;  // whether packs of all operands and results of whole rows are aligned together
  ResultType result = ResultType::same;
  bool masked = false;  // softmax_vjp: elements with y = 0 are masked
  Extras extras;
  // For index arithmetic in 32 bits: the sizes of the groups of rows, and the extras' strides. Those of `where` and the
  // bias are counted in rows of these arrays. Not set where there are 2^31 rows or more.
  Divider sizes[kGroups];
  uint32_t strides[kExtras][kGroups] = {};

  __host__ __device__ bool counted_in_ints() const { return rows <= INT32_MAX; }
  void set_extras(const Extras& of_call) {
    extras = of_call;
    if (!counted_in_ints()) return;
    for (int i = 0; i < extras.groups; i++) {
      sizes[i] = Divider(static_cast<uint32_t>(extras.size[i]));
      strides[kScale][i] = static_cast<uint32_t>(extras.scale.stride[i]);
      strides[kLimit][i] = static_cast<uint32_t>(extras.limit.stride[i]);
      strides[kWhere][i] = n > 0 ? static_cast<uint32_t>(extras.where.stride[i] / n) : 0;
      strides[kBias][i] = n > 0 ? static_cast<uint32_t>(extras.bias.stride[i] / n) : 0;
    }
  }

  // The row that is processed at a turn. With a bias, rows that share one row of it follow each other, so that this row
  // comes from the cache.
  template <bool with_bias>
  __device__ int64_t row(int64_t turn) const {
    const int last = extras.groups - 1;
    if (!with_bias || last < 1 || extras.bias.stride[last] != 0 || !counted_in_ints()) return turn;
    const uint32_t at = static_cast<uint32_t>(turn), row = sizes[last].quotient(at);
    return (at - row * sizes[last].divisor) * extras.divisor[last] + row;
  }

  Layout layout() const {
    auto all = [&](size_t to) {  // whether everything is aligned to 16 bytes, or to 8
      auto aligned = [&](const void* p, size_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; };
      return vector && n * sizeof(T) % to == 0 && aligned(a, to) && result == ResultType::same &&
             aligned(extras.bias.data, to) && aligned(extras.where.data, to / sizeof(T));
    };
    return all(16) ? Layout::whole : all(8) ? Layout::halves : Layout::any;
  }
};

}  // namespace jaxsoft::cuda
