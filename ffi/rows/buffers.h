// What all handlers use: how they are exported, and the buffers of a call: their dtypes, and how an error message
// describes them.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

#define JAXSOFT_EXPORT extern "C" __attribute__((visibility("default")))

// Exports a handler by the name of its symbol: its function, and how that gets the arguments of a call.
#define JAXSOFT_EXPORT_HANDLER(symbol, function, binding)   \
  JAXSOFT_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, binding, {xla::ffi::Traits::kCmdBufferCompatible});

namespace jaxsoft {

namespace ffi = xla::ffi;

using Dimensions = ffi::Span<const int64_t>;

// A buffer that a call may lack, in which case its data is null.
struct Buffer {
  void* data = nullptr;
  ffi::DataType dtype = ffi::DataType::INVALID;
  Dimensions dims;

  Buffer() = default;
  explicit Buffer(ffi::AnyBuffer buffer)
      : data(buffer.untyped_data()), dtype(buffer.element_type()), dims(buffer.dimensions()) {}

  int64_t bytes() const {
    int64_t count = 1;
    for (int64_t size : dims) count *= size;
    return count * static_cast<int64_t>(ffi::ByteWidth(dtype));
  }
};

// The dtype of numbers that stand for a whole row, such as its state.
inline ffi::DataType state_dtype(ffi::DataType dtype) { return dtype == ffi::F64 ? ffi::F64 : ffi::F32; }

inline bool is_16_bit(ffi::DataType dtype) { return dtype == ffi::F16 || dtype == ffi::BF16; }

// How many rows of the last dimension there are.
inline int64_t rows_of(Dimensions dims) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); i++) rows *= dims[i];
  return rows;
}

// Whether the kernels write a result of one dtype from operands of the other.
inline bool go_together(ffi::DataType operand, ffi::DataType result) {
  return operand == result || (operand == ffi::F32 && is_16_bit(result)) || (is_16_bit(operand) && result == ffi::F32);
}

template <class Value>
std::string as_text(const Value& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

// For example "F32(4,8)".
inline std::string describe(const Buffer& buffer) {
  std::ostringstream text;
  text << buffer.dtype << "(";
  for (size_t i = 0; i < buffer.dims.size(); i++) text << (i ? "," : "") << buffer.dims[i];
  text << ")";
  return text.str();
}

inline ffi::Error refuse(const std::string& reason) { return ffi::Error::InvalidArgument("jaxsoft: " + reason); }

}  // namespace jaxsoft
