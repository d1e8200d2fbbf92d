// The CUDA side of the FFI calls: a checked call becomes the arguments of a kernel, which is launched on XLA's stream.
#include <type_traits>

#include "exchange.cuh"
#include "sample.cuh"
#ifdef JAXSOFT_HOPPER  // the library is built for a GPU that has kernels of attention, and the in-place weight gradient
#include "../attention/targets.h"
#include "../head/plan.h"
#define JAXSOFT_HOPPER_TEXT jaxsoft::cuda::kWeightGradientText + jaxsoft::attention::targets_as_text()
#else
#define JAXSOFT_HOPPER_TEXT ""
#endif
// Their handlers are in exchange.cu, in sample.cu, in ../head/weight_gradient.cu and in ../attention/handlers.cu.
#define JAXSOFT_OTHER_OPERATIONS jaxsoft::cuda::kExchangeText + jaxsoft::cuda::kSampleText + JAXSOFT_HOPPER_TEXT

#include "../../rows/checks.h"
#include "../../rows/targets.h"
#include "../handlers.cuh"
#include "rows.cuh"
#include "top_k.cuh"

namespace jaxsoft::cuda {
namespace {

// Whether packs of all whole-row buffers are aligned together: kernels then read and write packs of 16 bytes of each.
template <class T>
bool aligned_together(const Arguments<T>& args) {
  auto offset = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  return (!args.b || offset(args.b) == offset(args.a)) && offset(args.a) % sizeof(T) == 0 &&
         (!args.out || args.result != ResultType::same || offset(args.out) == offset(args.a));
}

// The buffers that an operation lacks stay null.
template <class T>
Arguments<T> arguments(const Call& call) {
  using A = Accumulator<T>;
  const Buffers& buffers = call.buffers;
  auto number = [](const Buffer& buffer) { return static_cast<A*>(buffer.data); };
  Arguments<T> args;
  args.rows = call.shape.rows, args.n = call.shape.n, args.inner = call.shape.inner;
  args.a = static_cast<const T*>(buffers.first.data);
  args.b = static_cast<const T*>(buffers.cotangents.data);
  args.out = buffers.result.data;
  args.m = number(buffers.maximum), args.s = number(buffers.sum);
  args.cotangent = number(buffers.cotangent);
  args.labels = static_cast<const int32_t*>(buffers.label.data);
  args.label_score = number(buffers.label_score), args.count = number(buffers.count);
  args.beside = number(buffers.beside);
  args.label_cotangent = number(buffers.label_cotangent), args.distance_cotangent = number(buffers.distance_cotangent);
  args.entropy_cotangent = number(buffers.entropy_cotangent);
  args.cap = static_cast<A>(call.cap);
  args.set_extras(call.extras);
  args.masked = call.masked;
  if (buffers.result.data) args.result = result_type(buffers.first.dtype, buffers.result.dtype);
  args.vector = aligned_together(args);
  return args;
}

template <template <class> class Op, class T>
cudaError_t run_operation(const Arguments<T>& args, const Call& call, cudaStream_t stream) {
  const Buffers& buffers = call.buffers;
  void* const workspace = buffers.workspace.data;
  const int64_t bytes = buffers.workspace.bytes();
  if constexpr (!std::is_same_v<Op<T>, TopK<T>>) {
    return run<Op>(args, call, workspace, bytes, stream);
  } else if constexpr (std::is_same_v<T, double>) {
    return cudaErrorInvalidValue;  // `handle` has refused it
  } else {
    const Largest<T> largest{static_cast<T*>(buffers.values.data), static_cast<int32_t*>(buffers.indices.data),
                             static_cast<int>(buffers.values.dims.back())};
    return run_top_k(args, largest, workspace, bytes, stream);
  }
}

template <class T>
cudaError_t run_typed(Name name, const Call& call, cudaStream_t stream) {
  const Arguments<T> args = arguments<T>(call);
  switch (name) {
#define JAXSOFT_CASE(name, Op, ...) \
  case Name::name: return run_operation<Op>(args, call, stream);
    JAXSOFT_ROW_OPERATIONS(JAXSOFT_CASE)
#undef JAXSOFT_CASE
  }
  return cudaErrorInvalidValue;
}

cudaError_t run_any(Name name, const Call& call, cudaStream_t stream) {
  const ffi::DataType dtype = call.buffers.first.dtype;
  if (dtype == ffi::F64) return run_typed<double>(name, call, stream);
  return with_type(dtype, [&](auto zero) { return run_typed<decltype(zero)>(name, call, stream); });
}

template <Name name>
ffi::Error handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Form form) {
  const auto call = read_call(operation(name), args, rets, form);
  if (call.has_error()) return call.error();
  if (name == Name::top_k && call->buffers.first.dtype == ffi::F64)
    return refuse("top_k has no kernel for F64: got " + describe(call->buffers.first));
  const Shape& shape = call->shape;
  if (shape.rows == 0 || shape.inner == 0) return ffi::Error::Success();  // there is no row
  if (shape.n == 0)
    return refuse(std::string(operation(name).text) + " has no kernel for rows without elements: got " +
                  describe(call->buffers.first));
  return answer(operation(name).text, run_any(name, *call, stream));
}

}  // namespace
}  // namespace jaxsoft::cuda

#define JAXSOFT_CUDA_TARGET(name, ...) \
  JAXSOFT_EXPORT_TARGET(name, jaxsoft::cuda::handle, xla::ffi::PlatformStream<cudaStream_t>)
JAXSOFT_ROW_OPERATIONS(JAXSOFT_CUDA_TARGET)
