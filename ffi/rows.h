// What both platforms share: an FFI buffer seen as rows, and the checks that keep a bad buffer from a kernel.
//
// Every target takes operands of shape (..., n) and treats the product of the leading dimensions as rows, so that
// vmap needs no code here. The targets, with (m, s) the state of a row in f32 (f64 for f64):
//   jaxsoft_softmax          x -> y
//   jaxsoft_softmax_vjp      y, g -> dx             y * (g - <y, g>)
//   jaxsoft_log_softmax      x -> y, m, s
//   jaxsoft_log_softmax_vjp  x, m, s, g -> dx       g - p * sum(g),  p = exp(x - m) / s
//   jaxsoft_state            x -> m, s
//   jaxsoft_logsumexp_vjp    x, m, s, g -> dx       p * g,  g one a row
// Those that reduce have one result more, a workspace of bytes: scratch that XLA allocates with the other buffers, as
// what a handler asks for while a CUDA graph is recorded would be gone when the graph runs.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxsoft {

namespace ffi = xla::ffi;

struct Shape {
  int64_t rows, n;
};

inline Shape shape_of(ffi::AnyBuffer x) {
  auto dims = x.dimensions();
  int64_t n = dims.size() == 0 ? 1 : dims.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); i++) rows *= dims[i];
  return {rows, n};
}

inline ffi::DataType state_dtype(ffi::DataType dtype) {
  return dtype == ffi::F64 ? ffi::F64 : ffi::F32;
}

inline std::string describe(ffi::AnyBuffer b) {
  std::string text = "dtype " + std::to_string(static_cast<int>(b.element_type())) + " and shape (";
  for (auto d : b.dimensions()) text += std::to_string(d) + ",";
  return text + ")";
}

// `full` must have the dtype and shape of x; `stats` the shape of x without its last dimension, and its state's dtype.
inline ffi::Error check(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> full,
                        std::initializer_list<ffi::AnyBuffer> stats) {
  auto bad = [&](const char* what, ffi::AnyBuffer b) {
    return ffi::Error::InvalidArgument(std::string("jaxsoft: ") + what + ": got " + describe(b) +
                                       " beside a first operand of " + describe(x));
  };
  auto dtype = x.element_type();
  if (dtype != ffi::F16 && dtype != ffi::BF16 && dtype != ffi::F32 && dtype != ffi::F64)
    return bad("the dtype must be f16, bf16, f32 or f64", x);
  auto dims = x.dimensions();
  if (dims.size() == 0) return bad("the first operand must have at least one dimension", x);
  for (auto b : full) {
    auto d = b.dimensions();
    bool same = b.element_type() == dtype && d.size() == dims.size();
    for (size_t i = 0; same && i < dims.size(); i++) same = d[i] == dims[i];
    if (!same) return bad("an operand or result must have the first operand's shape and dtype", b);
  }
  for (auto b : stats) {
    auto d = b.dimensions();
    bool same = b.element_type() == state_dtype(dtype) && d.size() + 1 == dims.size();
    for (size_t i = 0; same && i < d.size(); i++) same = d[i] == dims[i];
    if (!same) return bad("a row statistic must have one f32 (f64 for f64) a row", b);
  }
  return ffi::Error::Success();
}

}  // namespace jaxsoft

// The version of the FFI interface that the library was compiled against; Python reads it before it registers
// anything, as XLA refuses a whole platform over a newer one.
#define JAXSOFT_EXPORT extern "C" __attribute__((visibility("default")))
#define JAXSOFT_EXPORT_API_VERSION                                    \
  JAXSOFT_EXPORT int jaxsoft_ffi_api_major() { return XLA_FFI_API_MAJOR; } \
  JAXSOFT_EXPORT int jaxsoft_ffi_api_minor() { return XLA_FFI_API_MINOR; }

// Defines the targets of one platform. `context` binds what its handlers take before their buffers.
#define JAXSOFT_X .Arg<xla::ffi::AnyBuffer>()
#define JAXSOFT_Y .Ret<xla::ffi::AnyBuffer>()
#define JAXSOFT_TARGET(space, context, name, buffers)                   \
  JAXSOFT_EXPORT XLA_FFI_Error* jaxsoft_##name(XLA_FFI_CallFrame*);     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsoft_##name, space::name, xla::ffi::Ffi::Bind() context buffers, \
                                {xla::ffi::Traits::kCmdBufferCompatible})
#define JAXSOFT_TARGETS(space, context)                                                                       \
  JAXSOFT_TARGET(space, context, softmax, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y);                                     \
  JAXSOFT_TARGET(space, context, softmax_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y);                       \
  JAXSOFT_TARGET(space, context, log_softmax, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);             \
  JAXSOFT_TARGET(space, context, log_softmax_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y); \
  JAXSOFT_TARGET(space, context, state, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);                             \
  JAXSOFT_TARGET(space, context, logsumexp_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y)
