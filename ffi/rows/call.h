// What both platforms share: an FFI call seen as rows, and the checks that keep a bad call from a kernel.
//
// The targets, with (m, s) the state of a row in f32 (f64 for f64), z = x * scale + bias and p = exp(z - m) / s:
//   jaxsoft_softmax          x           [slwb] -> y
//   jaxsoft_softmax_vjp      y, g        [sl]   -> dx        scale * y * (g - <y, g>)
//   jaxsoft_log_softmax      x           [slwb] -> y, m, s
//   jaxsoft_log_softmax_vjp  x, m, s, g  [slw]  -> dx        scale * (g - p * sum(g))
//   jaxsoft_state            x           [slwb] -> m, s
//   jaxsoft_logsumexp_vjp    x, m, s, g  [slwb] -> dx        scale * p * g,  g one a row
//   jaxsoft_label_state      x, i        [lw]   -> m, s, t   the state without the score of the label i, and that score
//   jaxsoft_label_state_vjp  x, i, m, s, g, h  [lw] -> dx    p * g, and h at the label
//   jaxsoft_label_sums       x, i        [lw]   -> m, s, t, u, k  and of the scores above -inf the sum of their distance
//                                                            from the label's, and their number
//   jaxsoft_label_sums_vjp   x, i, m, s, g, h, v  [lw] -> dx  p * g, and h at the label; plus v where z > -inf
//   jaxsoft_top_k            x           []     -> v, i, m, s  the k largest elements of a row, the largest first, and their
//                                                            int32 indices, (..., k) both; of equal ones, which -0.0 and
//                                                            0.0 are, the lowest index first. Of a row whose softmax has
//                                                            no value, as m is infinite or s NaN, the first k elements.
// In brackets, the extra operands that may follow the others: those that the attribute `extras` names, in this order,
//   s  scale  the state's dtype, one a row         l  limit  int32, one a row: elements j < limit of it count
//   b  bias   x's dtype, a row                     w  where  bool, a row: what counts of it
// each with length 1 in any leading dimension that it is broadcast over. What does not count is 0 in y and dx, -inf in
// log_softmax's y. `masked` (softmax_vjp) says that elements with y = 0 do not count, whatever g is there. A label counts
// in any case. It is an int32 a row: kNoRow for a row that is not read, of which nothing counts; any other that is out of
// range makes t NaN. `cap` (those with labels; 0: none) makes z = cap * tanh(x / cap).
//
// x has the shape (..., n, ...) with `trailing` dimensions after n, and none beside extras. All leading dimensions are
// rows, so that vmap needs no code here. y and dx may have another dtype than the operands: one of f16, bf16 for f32,
// and f32 for those.
//
// Those that reduce have one result more, a workspace of bytes: scratch that XLA allocates with the other buffers, as
// what a handler asks for while a CUDA graph is recorded would be gone when the graph runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>

#include "xla/ffi/api/ffi.h"

namespace jaxsoft {

namespace ffi = xla::ffi;

// x as an array of rows * n * inner elements. A row statistic is one of rows * inner.
struct Shape {
  int64_t rows, n, inner;
};

// The leading dimensions, as few groups of neighbours as tell apart what the extras are broadcast over. A call that
// needs more groups is refused. A mask over (batch, 1, query) beside a scale of (1, head, 1) makes 3.
inline constexpr int kGroups = 4;

inline constexpr int32_t kNoRow = INT32_MIN;

inline constexpr int64_t kMostK = 256;  // of top_k

// An operand beside x. `data` is null where the call has none; a stride is in elements, and 0 where it is broadcast.
struct Extra {
  const void* data = nullptr;
  int64_t stride[kGroups] = {};
};

struct Extras {
  int groups = 0;                // from the innermost on
  int64_t size[kGroups] = {};
  int64_t divisor[kGroups] = {};  // rows from one step in a group to the next: the product of the sizes inside it
  Extra scale, limit, where, bias;

  // Where a row's part of an extra begins.
  int64_t offset(const Extra& extra, int64_t row) const {
    int64_t sum = 0;
    for (int i = 0; i < groups; i++) sum += row / divisor[i] % size[i] * extra.stride[i];
    return sum;
  }
};

// The attributes of a call.
struct Form {
  std::string_view extras;
  int64_t trailing;
  bool masked;
  double cap;
};

// The buffers of a call, by what they must be like.
struct Buffers {
  ffi::AnyBuffer x;                                 // the first operand
  std::initializer_list<ffi::AnyBuffer> operands;   // of its shape and dtype
  std::initializer_list<ffi::AnyBuffer> results;    // of its shape, in a dtype that goes with it
  std::initializer_list<ffi::AnyBuffer> statistics;  // one a row
  std::string_view extras;                          // what the operation may have
  bool may_be_masked;
  std::initializer_list<ffi::AnyBuffer> labels = {};  // one a row; what has them may have a cap, and no trailing
};

// What a kernel needs to know beside the base operands.
struct Call {
  Shape shape;
  Extras extras;
};

inline ffi::DataType state_dtype(ffi::DataType dtype) {
  return dtype == ffi::F64 ? ffi::F64 : ffi::F32;
}

inline bool is_16_bit(ffi::DataType dtype) { return dtype == ffi::F16 || dtype == ffi::BF16; }

inline bool go_together(ffi::DataType x, ffi::DataType y) {
  return x == y || (x == ffi::F32 && is_16_bit(y)) || (is_16_bit(x) && y == ffi::F32);
}

inline std::string describe(ffi::AnyBuffer b) {
  std::ostringstream text;
  text << b.element_type() << "(";
  for (size_t i = 0; i < b.dimensions().size(); i++) text << (i ? "," : "") << b.dimensions()[i];
  text << ")";
  return text.str();
}

inline ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("jaxsoft: " + what); }

// Reads the extras `names` of x from `buffers`. Without trailing dimensions, n is x's last.
inline ffi::ErrorOr<Extras> read_extras(ffi::AnyBuffer x, std::string_view names, ffi::RemainingArgs buffers) {
  auto dims = x.dimensions();
  const size_t leading = dims.size() - 1;
  Extras extras;
  Extra* read[4];
  ffi::Span<const int64_t> shapes[4];
  for (size_t k = 0; k < names.size(); k++) {
    auto buffer = buffers.get<ffi::AnyBuffer>(k);
    if (buffer.has_error()) return buffer.error();
    const bool row = names[k] == 'w' || names[k] == 'b';  // else one number a row
    auto [name, dtype, extra] = names[k] == 's'   ? std::tuple("scale", state_dtype(x.element_type()), &extras.scale)
                                : names[k] == 'l' ? std::tuple("limit", ffi::S32, &extras.limit)
                                : names[k] == 'w' ? std::tuple("where", ffi::PRED, &extras.where)
                                                  : std::tuple("bias", x.element_type(), &extras.bias);
    auto d = buffer->dimensions();
    bool fits = buffer->element_type() == dtype && d.size() == leading + row && (!row || d[leading] == dims[leading]);
    for (size_t i = 0; fits && i < leading; i++) fits = d[i] == dims[i] || d[i] == 1;
    if (!fits) {
      std::ostringstream text;
      text << name << " must be " << dtype << " of x's shape " << (row ? "" : "without its last dimension, ")
           << "or 1 in leading dimensions: got " << describe(*buffer) << " beside x " << describe(x);
      return refuse(text.str());
    }
    extra->data = buffer->untyped_data();
    read[k] = extra;
    shapes[k] = d;
  }

  int64_t step[4], divisor = 1;  // step: elements of an extra in one of its next dimension
  for (size_t k = 0; k < names.size(); k++) step[k] = shapes[k].size() > leading ? dims[leading] : 1;
  for (size_t i = leading; i-- > 0;) {
    if (dims[i] == 1) continue;
    int last = extras.groups - 1;
    bool same = extras.groups > 0;  // as the group inside it: this dimension joins it
    for (size_t k = 0; same && k < names.size(); k++) same = (shapes[k][i] == 1) == (read[k]->stride[last] == 0);
    if (same) {
      extras.size[last] *= dims[i];
    } else {
      if (extras.groups == kGroups)
        return refuse("the extras are broadcast in more ways than kernels know: at most " + std::to_string(kGroups) +
                      " groups of leading dimensions, beside x " + describe(x));
      last = extras.groups++;
      extras.size[last] = dims[i];
      extras.divisor[last] = divisor;
      for (size_t k = 0; k < names.size(); k++) read[k]->stride[last] = shapes[k][i] == 1 ? 0 : step[k];
    }
    divisor *= dims[i];
    for (size_t k = 0; k < names.size(); k++) step[k] *= shapes[k][i];
  }
  return extras;
}

// Checks a call. `rest` holds the extras.
inline ffi::ErrorOr<Call> read_call(const Buffers& buffers, ffi::RemainingArgs rest, const Form& form) {
  auto x = buffers.x;
  auto dtype = x.element_type();
  auto dims = x.dimensions();
  auto beside = [&](const char* what, ffi::AnyBuffer b) {
    return refuse(std::string(what) + ": got " + describe(b) + " beside a first operand " + describe(x));
  };
  if (!is_16_bit(dtype) && dtype != ffi::F32 && dtype != ffi::F64)
    return refuse("the dtype must be F16, BF16, F32 or F64: got " + describe(x));
  if (form.trailing < 0 || form.trailing >= static_cast<int64_t>(dims.size()))
    return refuse("trailing=" + std::to_string(form.trailing) + " leaves no dimension to reduce of " + describe(x));
  const size_t axis = dims.size() - 1 - form.trailing;
  for (auto b : buffers.operands)
    if (b.element_type() != dtype || !(b.dimensions() == dims))
      return beside("an operand must have the first operand's shape and dtype", b);
  for (auto b : buffers.results)
    if (!go_together(dtype, b.element_type()) || !(b.dimensions() == dims))
      return beside("a result must have the first operand's shape and dtype, or F32 for 16 bits, 16 bits for F32", b);
  for (auto b : buffers.statistics) {
    auto d = b.dimensions();
    bool fits = b.element_type() == state_dtype(dtype) && d.size() + 1 == dims.size();
    for (size_t i = 0; fits && i < d.size(); i++) fits = d[i] == dims[i < axis ? i : i + 1];
    if (!fits) return beside("a row statistic must be F32 (F64 for F64), one a row", b);
  }

  for (auto b : buffers.labels) {
    auto d = b.dimensions();
    bool fits = b.element_type() == ffi::S32 && d.size() == axis;
    for (size_t i = 0; fits && i < axis; i++) fits = d[i] == dims[i];
    if (!fits) return beside("labels must be S32, one a row", b);
  }
  const bool labelled = buffers.labels.size() > 0;
  if (labelled && form.trailing) return refuse("trailing must be 0 beside labels: got " + std::to_string(form.trailing));
  if (!(form.cap >= 0) || form.cap > 1e300) return refuse("cap must be a number, at least 0");
  if (form.cap > 0 && !labelled) return refuse("cap is an attribute of operations with labels alone");

  size_t found = 0;
  for (char name : buffers.extras) found += found < form.extras.size() && form.extras[found] == name;
  std::string quoted = "extras='" + std::string(form.extras) + "'";
  if (found != form.extras.size())
    return refuse(quoted + " must be some of '" + std::string(buffers.extras) + "', in this order");
  if (rest.size() != form.extras.size())
    return refuse(quoted + " with " + std::to_string(rest.size()) + " extra operands");
  if (form.trailing && !form.extras.empty())
    return refuse(quoted + " must be empty beside trailing=" + std::to_string(form.trailing));
  if (form.masked && !buffers.may_be_masked) return refuse("masked is an attribute of softmax_vjp alone");

  Call call{{1, dims[axis], 1}, {}};
  for (size_t i = 0; i < dims.size(); i++)
    if (i != axis) (i < axis ? call.shape.rows : call.shape.inner) *= dims[i];
  auto extras = read_extras(x, form.extras, rest);
  if (extras.has_error()) return extras.error();
  call.extras = *extras;
  return call;
}

// Checks a call of top_k, whose k is the last dimension of its results.
inline ffi::ErrorOr<Call> read_top_k_call(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer indices,
                                          ffi::AnyBuffer m, ffi::AnyBuffer s, ffi::RemainingArgs rest, const Form& form) {
  if (form.trailing) return refuse("trailing must be 0 for top_k: got " + std::to_string(form.trailing));
  auto call = read_call({x, {}, {}, {m, s}, "", false}, rest, form);
  if (call.has_error()) return call;
  const int64_t n = call->shape.n;
  auto dims = x.dimensions(), d = values.dimensions();
  bool fits = values.element_type() == x.element_type() && d.size() == dims.size();
  for (size_t i = 0; fits && i + 1 < d.size(); i++) fits = d[i] == dims[i];
  if (!fits || d.back() < 1 || d.back() > std::min(n, kMostK) || n > INT32_MAX)
    return refuse("values must have x's dtype and shape, with 1 to " + std::to_string(kMostK) + " of at most " +
                  std::to_string(INT32_MAX) + " elements a row: got " + describe(values) + " beside x " + describe(x));
  if (indices.element_type() != ffi::S32 || !(indices.dimensions() == d))
    return refuse("indices must be S32 of the values' shape: got " + describe(indices) + " beside " + describe(values));
  return call;
}

}  // namespace jaxsoft

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoft::Form, xla::ffi::StructMember<std::string_view>("extras"),
                                      xla::ffi::StructMember<int64_t>("trailing"),
                                      xla::ffi::StructMember<bool>("masked"), xla::ffi::StructMember<double>("cap"));

// The version of the FFI interface that the library was compiled against; Python reads it before it registers
// anything, as XLA refuses a whole platform over a newer one.
#define JAXSOFT_EXPORT extern "C" __attribute__((visibility("default")))
#define JAXSOFT_EXPORT_API_VERSION                                    \
  JAXSOFT_EXPORT int jaxsoft_ffi_api_major() { return XLA_FFI_API_MAJOR; } \
  JAXSOFT_EXPORT int jaxsoft_ffi_api_minor() { return XLA_FFI_API_MINOR; }

// Defines the targets of one platform. `context` binds what its handlers take before their buffers; after those, each
// takes the ffi::RemainingArgs that the extras are, and the Form.
#define JAXSOFT_X .Arg<xla::ffi::AnyBuffer>()
#define JAXSOFT_Y .Ret<xla::ffi::AnyBuffer>()
#define JAXSOFT_TARGET(space, context, name, buffers)                                                      \
  JAXSOFT_EXPORT XLA_FFI_Error* jaxsoft_##name(XLA_FFI_CallFrame*);                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsoft_##name, space::name,                                               \
                                xla::ffi::Ffi::Bind() context buffers.RemainingArgs().Attrs<jaxsoft::Form>(), \
                                {xla::ffi::Traits::kCmdBufferCompatible})
#define JAXSOFT_TARGETS(space, context)                                                                       \
  JAXSOFT_TARGET(space, context, softmax, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y);                                     \
  JAXSOFT_TARGET(space, context, softmax_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y);                       \
  JAXSOFT_TARGET(space, context, log_softmax, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);             \
  JAXSOFT_TARGET(space, context, log_softmax_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y); \
  JAXSOFT_TARGET(space, context, state, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);                             \
  JAXSOFT_TARGET(space, context, logsumexp_vjp, JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y);           \
  JAXSOFT_TARGET(space, context, top_k, JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);         \
  JAXSOFT_TARGET(space, context, label_state, JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);   \
  JAXSOFT_TARGET(space, context, label_state_vjp,                                                             \
                 JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y);                      \
  JAXSOFT_TARGET(space, context, label_sums,                                                                  \
                 JAXSOFT_X JAXSOFT_X JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y JAXSOFT_Y);            \
  JAXSOFT_TARGET(space, context, label_sums_vjp,                                                              \
                 JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_X JAXSOFT_Y)
