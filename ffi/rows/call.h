// A call of a row operation as the kernels of both platforms get it: checked, with a name for each buffer.
#pragma once

#include <cstdint>
#include <string_view>

#include "buffers.h"
#include "limits.h"
#include "operations.h"
#include "read_extras.h"

namespace jaxsoft {

// The attributes of a call.
struct Form {
  std::string_view extras;  // a letter for each extra that follows the operands: see read_extras.h
  int64_t trailing;         // how many dimensions follow the reduced one
  bool masked;              // softmax_vjp: elements whose probability is 0 are masked, whatever their cotangent is
  double cap;               // scores become cap * tanh(x / cap); 0 leaves them as they are
};

// The first operand as an array of rows * n * inner elements, of which n are reduced. All leading dimensions are rows,
// so that vmap needs no code here. What has one number a row has rows * inner of them.
struct Shape {
  int64_t rows = 1, n = 1, inner = 1;
};

// The buffers of a call, by their places in operations.h. An operation's record there says which of them it has.
struct Buffers {
#define JAXSOFT_BUFFER(place) Buffer place;
  JAXSOFT_ROW_PLACES(JAXSOFT_BUFFER)
#undef JAXSOFT_BUFFER
  Buffer workspace;  // bytes for the kernel's own use, allocated by XLA with the other buffers: what a handler asks for
                     // while a CUDA graph is recorded would be gone when the graph runs
};

struct Call {
  Shape shape;
  Extras extras;
  Buffers buffers;
  bool masked = false;
  double cap = 0;
};

}  // namespace jaxsoft

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoft::Form, xla::ffi::StructMember<std::string_view>("extras"),
                                      xla::ffi::StructMember<int64_t>("trailing"),
                                      xla::ffi::StructMember<bool>("masked"), xla::ffi::StructMember<double>("cap"));
