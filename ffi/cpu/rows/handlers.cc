// The CPU side of the FFI calls: chooses the kernels for a checked call, and how they run over its rows.
//
// Every operation reduces a row to something small, and then writes the row from it.
#include "../../rows/checks.h"
#include "../../rows/targets.h"
#include "columns.h"
#include "instruction_set.h"
#include "labels.h"
#include "rows.h"
#include "short_rows.h"
#include "top_k.h"
#include "two_arrays.h"

namespace jaxsoft::cpu {
namespace {

DTypes dtypes(ffi::DataType x, ffi::DataType result) {
  if (x == ffi::F64) return F64;
  if (x == ffi::F16) return result == ffi::F32 ? F16ToF32 : F16;
  if (x == ffi::BF16) return result == ffi::F32 ? BF16ToF32 : BF16;
  return result == ffi::F16 ? F32ToF16 : result == ffi::BF16 ? F32ToBF16 : F32;
}

void run(ffi::ThreadPool& pool, const Operation& operation, const Call& call) {
  const Arrays arrays(operation, call.buffers);
  const Extras& extras = call.extras;
  // A limit makes rows shorter, which takes no other kernels.
  const bool with_extras = call.masked || call.cap > 0 || extras.scale.data || extras.where.data || extras.bias.data ||
                           extras.other_scale.data;
  const bool plain = !with_extras && !extras.limit.data;
  const auto& out = arrays.out.data ? arrays.out : arrays.other_out;
  const auto result = out.data ? out.dtype : arrays.a.dtype;
  const int name = static_cast<int>(operation.name);
  const Kernels& kernels = kernel_table().of[with_extras][dtypes(arrays.a.dtype, result)][name];
  const bool has_columns = operation.features.has(Feature::trailing);  // short rows become columns
  const auto [rows, n, inner] = call.shape;
  if (inner == 0) return;  // there are no rows
  if (kernels.find) run_top_k(pool, kernels, call, arrays);
  else if (operation.features.has(Feature::cap)) run_labels(pool, kernels, call, arrays, plain);
  else if (call.buffers.other.data) run_rows_of_two(pool, operation, kernels, call, arrays);
  else if (kernels.reduce_with_sum) run_rows_with_sum(pool, kernels, call, arrays);
  else if (inner > 1) run_columns(pool, kernels, call.shape, call.masked, arrays);
  else if (has_columns && plain && n > 0 && n <= kPlan.short_row) run_short_rows(pool, kernels, call.shape, arrays);
  else run_rows(pool, kernels, call, arrays);
}

template <Name name>
ffi::Error handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Form form) {
  const auto call = read_call(operation(name), args, rets, form);
  if (call.has_error()) return call.error();
  run(pool, operation(name), *call);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsoft::cpu

#define JAXSOFT_CPU_TARGET(name, ...) JAXSOFT_EXPORT_TARGET(name, jaxsoft::cpu::handle, xla::ffi::ThreadPool)
JAXSOFT_ROW_OPERATIONS(JAXSOFT_CPU_TARGET)
