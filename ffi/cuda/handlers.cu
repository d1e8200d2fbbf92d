// The CUDA side of the custom calls: buffers checked, the dtype resolved, the kernels launched on XLA's stream.
#include "../rows.h"
#include "rows.cuh"

namespace jaxsoft::cuda {
namespace {

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

// Which buffers an operation has; those that it lacks stay empty.
struct Buffers {
  const In *a, *b = nullptr;
  const Out* out = nullptr;
  void *m = nullptr, *s = nullptr;
  const In* g = nullptr;
  const Out* workspace = nullptr;
};

template <template <class> class Op, class T>
cudaError_t run_typed(const Buffers& buffers, cudaStream_t stream) {
  using A = Accumulator<T>;
  Arguments<T> args;
  Shape shape = shape_of(*buffers.a);
  args.rows = shape.rows;
  args.n = shape.n;
  args.a = static_cast<const T*>(buffers.a->untyped_data());
  if (buffers.b) args.b = static_cast<const T*>(buffers.b->untyped_data());
  if (buffers.out) args.out = static_cast<T*>((*buffers.out)->untyped_data());
  args.m = static_cast<A*>(buffers.m);
  args.s = static_cast<A*>(buffers.s);
  if (buffers.g) args.g = static_cast<const A*>(buffers.g->untyped_data());
  auto offset = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  args.vector = (!args.b || offset(args.b) == offset(args.a)) && (!args.out || offset(args.out) == offset(args.a)) &&
                offset(args.a) % sizeof(T) == 0;
  void* workspace = buffers.workspace ? (*buffers.workspace)->untyped_data() : nullptr;
  int64_t room = buffers.workspace ? (*buffers.workspace)->size_bytes() / sizeof(typename Op<T>::Part) : INT64_MAX;
  return run<Op, T>(args, workspace, room, stream);
}

template <template <class> class Op>
ffi::Error run_any(const char* name, const Buffers& buffers, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (buffers.a->element_type()) {
    case ffi::F16: error = run_typed<Op, __half>(buffers, stream); break;
    case ffi::BF16: error = run_typed<Op, __nv_bfloat16>(buffers, stream); break;
    case ffi::F32: error = run_typed<Op, float>(buffers, stream); break;
    case ffi::F64: error = run_typed<Op, double>(buffers, stream); break;
    default: break;  // `check` has refused every other dtype
  }
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxsoft_") + name + ": " + cudaGetErrorString(error));
}

ffi::Error softmax(cudaStream_t stream, In x, Out y, Out workspace) {
  if (auto error = check(x, {*y}, {}); error.failure()) return error;
  Buffers buffers{&x};
  buffers.out = &y;
  buffers.workspace = &workspace;
  return run_any<Softmax>("softmax", buffers, stream);
}

ffi::Error log_softmax(cudaStream_t stream, In x, Out y, Out m, Out s, Out workspace) {
  if (auto error = check(x, {*y}, {*m, *s}); error.failure()) return error;
  Buffers buffers{&x};
  buffers.out = &y;
  buffers.m = m->untyped_data();
  buffers.s = s->untyped_data();
  buffers.workspace = &workspace;
  return run_any<LogSoftmax>("log_softmax", buffers, stream);
}

ffi::Error state(cudaStream_t stream, In x, Out m, Out s, Out workspace) {
  if (auto error = check(x, {}, {*m, *s}); error.failure()) return error;
  Buffers buffers{&x};
  buffers.m = m->untyped_data();
  buffers.s = s->untyped_data();
  buffers.workspace = &workspace;
  return run_any<StateOf>("state", buffers, stream);
}

ffi::Error softmax_vjp(cudaStream_t stream, In y, In g, Out dx, Out workspace) {
  if (auto error = check(y, {g, *dx}, {}); error.failure()) return error;
  Buffers buffers{&y, &g};
  buffers.out = &dx;
  buffers.workspace = &workspace;
  return run_any<SoftmaxVjp>("softmax_vjp", buffers, stream);
}

ffi::Error log_softmax_vjp(cudaStream_t stream, In x, In m, In s, In g, Out dx, Out workspace) {
  if (auto error = check(x, {g, *dx}, {m, s}); error.failure()) return error;
  Buffers buffers{&x, &g};
  buffers.out = &dx;
  buffers.m = m.untyped_data();
  buffers.s = s.untyped_data();
  buffers.workspace = &workspace;
  return run_any<LogSoftmaxVjp>("log_softmax_vjp", buffers, stream);
}

ffi::Error logsumexp_vjp(cudaStream_t stream, In x, In m, In s, In g, Out dx) {
  if (auto error = check(x, {*dx}, {m, s, g}); error.failure()) return error;
  Buffers buffers{&x};
  buffers.out = &dx;
  buffers.m = m.untyped_data();
  buffers.s = s.untyped_data();
  buffers.g = &g;
  return run_any<LogsumexpVjp>("logsumexp_vjp", buffers, stream);
}

}  // namespace
}  // namespace jaxsoft::cuda

JAXSOFT_EXPORT_API_VERSION
JAXSOFT_TARGETS(jaxsoft::cuda, .Ctx<xla::ffi::PlatformStream<cudaStream_t>>());
