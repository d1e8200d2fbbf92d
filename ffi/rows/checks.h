// Checks an FFI call by the record of its operation, so that a bad call is an error and never reaches a kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "specification.h"

namespace jaxsoft {

// The checks of one call. Each function returns what is wrong, or "".
class Checks {
 public:
  Checks(const Operation& operation, const Form& form, const Buffers& buffers)
      : operation_(operation), form_(form), buffers_(buffers), first_(buffers.first) {}

  // The reduced dimension.
  size_t axis() const { return first_.dims.size() - 1 - form_.trailing; }

  std::string first() const {
    if (!is_16_bit(first_.dtype) && first_.dtype != ffi::F32 && first_.dtype != ffi::F64)
      return first_name() + " must be F16, BF16, F32 or F64: got " + describe(first_);
    if (form_.trailing < 0 || form_.trailing >= static_cast<int64_t>(first_.dims.size()))
      return "trailing=" + std::to_string(form_.trailing) + " leaves no dimension to reduce of " + describe(first_);
    return "";
  }

  std::string attributes() const {
    if (form_.trailing && !may_have(Feature::trailing))
      return "trailing must be 0, except for " + those_with(Feature::trailing) + ": got " +
             std::to_string(form_.trailing);
    if (form_.trailing && !form_.extras.empty())
      return "extras='" + std::string(form_.extras) + "' must be empty beside trailing=" +
             std::to_string(form_.trailing);
    if (form_.masked && !may_have(Feature::masked))
      return "masked must be false, except for " + those_with(Feature::masked);
    if (!(form_.cap >= 0) || form_.cap > 1e300) return "cap must be a number, at least 0: got " + as_text(form_.cap);
    if (form_.cap > 0 && !may_have(Feature::cap))
      return "cap must be 0, except for " + those_with(Feature::cap) + ": got " + as_text(form_.cap);
    return "";
  }

  // Checks an operand other than the first, or a result.
  std::string buffer(const Operand& operand, bool is_result) const {
    const Buffer& buffer = buffers_.*operand.place;
    const auto state = state_dtype(first_.dtype);
    switch (operand.kind) {
      case Kind::row: {
        const bool fits = is_result ? go_together(first_.dtype, buffer.dtype) : buffer.dtype == first_.dtype;
        if (fits && buffer.dims == first_.dims) return "";
        const auto dtypes = is_result ? result_dtypes() : as_text(first_.dtype);
        return must(operand, dtypes) + "of the same shape as " + got(buffer);
      }
      case Kind::number:
        if (buffer.dtype == state && is_one_a_row(buffer)) return "";
        return must(operand, as_text(state)) + "one a row of " + got(buffer);
      case Kind::label:
        if (buffer.dtype == ffi::S32 && is_one_a_row(buffer)) return "";
        return must(operand, "S32") + "one a row of " + got(buffer);
      case Kind::chosen: return chosen(operand, buffer.dtype == first_.dtype, as_text(first_.dtype));
      case Kind::index: return chosen(operand, buffer.dtype == ffi::S32, as_text(ffi::S32));
      case Kind::chosen_result: return chosen(operand, go_together(first_.dtype, buffer.dtype), result_dtypes());
    }
    return "";
  }

 private:
  bool may_have(Feature feature) const { return operation_.features.has(feature); }

  static std::string those_with(Feature feature) {
    std::string names;
    for (const Operation& each : operations::kAll)
      if (each.features.has(feature)) names += (names.empty() ? "" : ", ") + std::string(each.text);
    return names;
  }

  std::string first_name() const { return operation_.operands[0].name; }
  std::string must(const Operand& operand, const std::string& dtypes) const {
    return std::string(operand.name) + " must be " + dtypes + ", ";
  }
  std::string got(const Buffer& buffer) const {
    return first_name() + ": got " + describe(buffer) + " beside " + describe(first_);
  }

  std::string result_dtypes() const {
    if (first_.dtype == ffi::F32) return "F32, F16 or BF16";
    return as_text(first_.dtype) + (is_16_bit(first_.dtype) ? " or F32" : "");
  }

  // Whether a buffer has the first operand's shape without the reduced dimension.
  bool is_one_a_row(const Buffer& buffer) const {
    bool fits = buffer.dims.size() + 1 == first_.dims.size();
    for (size_t i = 0; fits && i < buffer.dims.size(); i++)
      fits = buffer.dims[i] == first_.dims[i < axis() ? i : i + 1];
    return fits;
  }

  // k is the last dimension of `values`, and every other buffer of k elements a row has the shape of `values`.
  std::string chosen(const Operand& operand, bool fits, const std::string& dtypes) const {
    const Buffer& buffer = buffers_.*operand.place;
    const auto dims = buffer.dims;
    const int64_t n = first_.dims[axis()];
    fits = fits && dims.size() == first_.dims.size() && dims == buffers_.values.dims;
    for (size_t i = 0; fits && i < axis(); i++) fits = dims[i] == first_.dims[i];
    if (fits && dims.back() >= 1 && dims.back() <= std::min(n, kMostK) && n <= INT32_MAX) return "";
    return must(operand, dtypes) + "1 to " + as_text(kMostK) + " of at most " + as_text(INT32_MAX) +
           " elements of a row, the same number in each result, of " + got(buffer);
  }

  const Operation& operation_;
  const Form& form_;
  const Buffers& buffers_;
  const Buffer& first_;
};

// Gives each buffer of a call its name, and the extras to a list. Returns what is wrong with their number, or "".
inline std::string take_buffers(const Operation& operation, const ffi::RemainingArgs& args,
                                const ffi::RemainingRets& rets, Buffers* buffers, std::vector<Buffer>* extras) {
  auto all = [](const List<Operand>& operands) {
    std::string text;
    for (const Operand& operand : operands) text += (text.empty() ? "" : ", ") + std::string(operand.name);
    return "(" + text + ")";
  };
  if (args.size() < operation.operands.size())
    return "wrong number of operands: got " + std::to_string(args.size()) + " instead of " + all(operation.operands);
  const size_t results = operation.results.size(), workspace = operation.features.has(Feature::workspace);
  if (rets.size() != results + workspace)
    return "wrong number of results: got " + std::to_string(rets.size()) + " instead of " + all(operation.results) +
           (workspace ? " and a workspace" : "");
  for (size_t i = 0; i < args.size(); i++) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error().message();
    if (i < operation.operands.size()) buffers->*operation.operands[i].place = Buffer(*buffer);
    else extras->push_back(Buffer(*buffer));
  }
  for (size_t i = 0; i < rets.size(); i++) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error().message();
    (i < results ? buffers->*operation.results[i].place : buffers->workspace) = Buffer(**buffer);
  }
  return "";
}

// Checks and reads everything of a call into `call`. Returns what is wrong, or "".
inline std::string fill_call(const Operation& operation, const ffi::RemainingArgs& args,
                             const ffi::RemainingRets& rets, const Form& form, Call* call) {
  std::vector<Buffer> extras;
  std::string reason = take_buffers(operation, args, rets, &call->buffers, &extras);
  if (!reason.empty()) return reason;

  const Checks checks(operation, form, call->buffers);
  if (reason = checks.first(); !reason.empty()) return reason;
  if (reason = checks.attributes(); !reason.empty()) return reason;
  for (size_t i = 1; i < operation.operands.size(); i++)
    if (reason = checks.buffer(operation.operands[i], false); !reason.empty()) return reason;
  for (const Operand& result : operation.results)
    if (reason = checks.buffer(result, true); !reason.empty()) return reason;

  const Buffer &result = call->buffers.result, &other_result = call->buffers.other_result;
  if (result.data && other_result.data && result.dtype != other_result.dtype)
    return "result and other_result must have the same dtype: got " + describe(result) + " and " +
           describe(other_result);

  std::vector<const ExtraRecord*> present;
  if (reason = decode_extras(form.extras, operation.extras, &present); !reason.empty()) return reason;
  if (extras.size() != present.size())
    return "extras='" + std::string(form.extras) + "' with " + std::to_string(extras.size()) + " extra operands";
  if (reason = read_extras(present, extras, call->buffers.first, &call->extras); !reason.empty()) return reason;

  const Dimensions dims = call->buffers.first.dims;
  const size_t axis = checks.axis();
  call->shape.n = dims[axis];
  for (size_t i = 0; i < dims.size(); i++)
    if (i != axis) (i < axis ? call->shape.rows : call->shape.inner) *= dims[i];
  call->masked = form.masked, call->cap = form.cap;
  return "";
}

inline ffi::ErrorOr<Call> read_call(const Operation& operation, const ffi::RemainingArgs& args,
                                    const ffi::RemainingRets& rets, const Form& form) {
  Call call;
  const std::string reason = fill_call(operation, args, rets, form, &call);
  if (!reason.empty()) return ffi::Unexpected(refuse(std::string(operation.text) + ": " + reason));
  return call;
}

}  // namespace jaxsoft
