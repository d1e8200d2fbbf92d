// The buffers of a call as arrays that are indexed by element or by row.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../rows/specification.h"
#include "../pages.h"
#include "kernels.h"

namespace jaxsoft::cpu {

// An array of the first operand's shape. The data of one that the call lacks is null.
struct Elements {
  char* data = nullptr;
  int64_t size = 0;  // bytes an element
  ffi::DataType dtype = ffi::DataType::INVALID;

  Elements() = default;
  Elements(const Buffer& buffer)
      : data(static_cast<char*>(buffer.data)), size(ffi::ByteWidth(buffer.dtype)), dtype(buffer.dtype) {}
  char* at(int64_t i) const { return data ? data + i * size : nullptr; }
};

// An array of one number a row, f32 or f64.
struct PerRow {
  void* data = nullptr;
  bool wide = false;

  PerRow() = default;
  PerRow(const Buffer& buffer) : data(buffer.data), wide(buffer.dtype == ffi::F64) {}
  void* at(int64_t row) const { return data ? static_cast<char*>(data) + row * (wide ? 8 : 4) : nullptr; }
  double get(int64_t row) const { return wide ? static_cast<double*>(data)[row] : static_cast<float*>(data)[row]; }
  void set(int64_t row, double value) const {
    if (wide) static_cast<double*>(data)[row] = value;
    else static_cast<float*>(data)[row] = static_cast<float>(value);
  }
};

struct Arrays {
  Elements a, b, out;  // the first operand; the cotangents or the other scores; the result
  Elements other_out;  // the result of the other scores
  PerRow m, s;         // the state
  PerRow beside;       // a sum beside the state
  PerRow cotangent;
  bool gives_state;  // whether m and s are results

  Arrays(const Operation& operation, const Buffers& buffers)
      : a(buffers.first), b(buffers.other.data ? buffers.other : buffers.cotangents), out(buffers.result),
        other_out(buffers.other_result), m(buffers.maximum), s(buffers.sum), beside(buffers.beside),
        cotangent(buffers.cotangent), gives_state(operation.gives(&Buffers::maximum)) {
    advise_large_pages(out.data, buffers.result.bytes());
    advise_large_pages(other_out.data, buffers.other_result.bytes());
  }

  // The numbers of a row that has been reduced. Writes those that are results. Inlined, it takes 10 ns longer: GCC then
  // packs the two numbers of the state by way of memory, which stalls the load that follows the two stores.
  [[gnu::noinline]] RowNumbers finish(int64_t row, State reduced) const {
    RowNumbers numbers{reduced};
    if (cotangent.data) numbers.cotangent = cotangent.get(row);
    if (!m.data) return numbers;
    if (gives_state) {
      m.set(row, reduced.m);
      s.set(row, reduced.s);
    } else {
      numbers.given = {m.get(row), s.get(row)};
      if (beside.data) numbers.beside = beside.get(row);
    }
    return numbers;
  }
};

// The arrays of an operation with labels beside those.
struct Labels {
  const int32_t* label;
  double cap;
  PerRow score, count;                                      // results
  PerRow cotangent, distance_cotangent, entropy_cotangent;  // operands

  explicit Labels(const Call& call)
      : label(static_cast<const int32_t*>(call.buffers.label.data)), cap(call.cap), score(call.buffers.label_score),
        count(call.buffers.count), cotangent(call.buffers.label_cotangent),
        distance_cotangent(call.buffers.distance_cotangent), entropy_cotangent(call.buffers.entropy_cotangent) {}
};

// Finds what a kernel reads of rows (rows, n). Lambdas hold it by value: it is looked at for every row, however short.
struct Rows {
  Elements a, b;
  int64_t n;
  bool masked, wide, has_extras;
  Extras extras;

  Rows(const Arrays& arrays, const Call& call)
      : a(arrays.a), b(arrays.b), n(call.shape.n), masked(call.masked), wide(a.dtype == ffi::F64), extras(call.extras) {
    has_extras = extras.scale.data || extras.limit.data || extras.where.data || extras.bias.data ||
                 extras.other_scale.data;
  }

  // The segment of a row from element i on.
  Segment segment(int64_t row, int64_t i) const {
    Segment at{a.at(row * n + i), b.at(row * n + i), nullptr, nullptr, number(extras.scale, row), masked};
    if (!has_extras) return at;
    at.other_scale = number(extras.other_scale, row);
    if (extras.where.data)
      at.where = static_cast<const bool*>(extras.where.data) + extras.offset(extras.where, row) + i;
    if (extras.bias.data)
      at.bias = static_cast<const char*>(extras.bias.data) + (extras.offset(extras.bias, row) + i) * a.size;
    return at;
  }

  // A row's scale, which is 1 where the call has none.
  double number(const Extra& extra, int64_t row) const {
    if (!has_extras || !extra.data) return 1;
    int64_t i = extras.offset(extra, row);
    return wide ? static_cast<const double*>(extra.data)[i] : static_cast<const float*>(extra.data)[i];
  }

  // How many of the `size` elements from i on lie before the row's limit.
  int64_t valid_count(int64_t row, int64_t i, int64_t size) const {
    if (!has_extras || !extras.limit.data) return size;
    int64_t limit = static_cast<const int32_t*>(extras.limit.data)[extras.offset(extras.limit, row)];
    return std::clamp<int64_t>(limit - i, 0, size);
  }
};

}  // namespace jaxsoft::cpu
