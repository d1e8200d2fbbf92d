// The CUDA side of the custom calls: buffers checked, the dtype resolved, the kernels launched on XLA's stream.
#include "../../rows/call.h"
#include "rows.cuh"
#include "top_k.cuh"

namespace jaxsoft::cuda {
namespace {

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using Rest = ffi::RemainingArgs;

ffi::Error result(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxsoft_") + name + ": " + cudaGetErrorString(error));
}

// The buffers of a kernel; those that an operation lacks stay null.
struct Kernel {
  const char* name;
  Call call;
  bool masked;
  In x, out;  // the first operand; a whole-row result, or the first operand again where there is none
  const void* b = nullptr;
  void* y = nullptr;
  void *m = nullptr, *s = nullptr;
  const void* g = nullptr;
  Out* workspace = nullptr;
  // Of an operation with labels.
  const void* labels = nullptr;
  double cap = 0;
  void *t = nullptr, *u = nullptr, *k = nullptr;
  const void *h = nullptr, *v = nullptr;
};

template <template <class> class Op, class T>
cudaError_t run_typed(const Kernel& kernel, cudaStream_t stream) {
  using A = Accumulator<T>;
  Arguments<T> args;
  args.rows = kernel.call.shape.rows, args.n = kernel.call.shape.n, args.inner = kernel.call.shape.inner;
  args.a = static_cast<const T*>(kernel.x.untyped_data());
  args.b = static_cast<const T*>(kernel.b);
  args.out = kernel.y;
  args.m = static_cast<A*>(kernel.m);
  args.s = static_cast<A*>(kernel.s);
  args.g = static_cast<const A*>(kernel.g);
  args.labels = static_cast<const int32_t*>(kernel.labels);
  args.cap = static_cast<A>(kernel.cap);
  args.t = static_cast<A*>(kernel.t), args.u = static_cast<A*>(kernel.u), args.k = static_cast<A*>(kernel.k);
  args.h = static_cast<const A*>(kernel.h), args.v = static_cast<const A*>(kernel.v);
  args.set_extras(kernel.call.extras);
  args.masked = kernel.masked;
  auto type = kernel.out.element_type();
  if (type != kernel.x.element_type())
    args.result = type == ffi::F32 ? ResultType::f32 : type == ffi::F16 ? ResultType::f16 : ResultType::bf16;
  auto offset = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  args.vector = (!args.b || offset(args.b) == offset(args.a)) && offset(args.a) % sizeof(T) == 0 &&
                (!args.out || args.result != ResultType::same || offset(args.out) == offset(args.a));
  void* workspace = kernel.workspace ? (*kernel.workspace)->untyped_data() : nullptr;
  int64_t bytes = kernel.workspace ? (*kernel.workspace)->size_bytes() : 0;
  return run<Op, T>(args, workspace, bytes, stream);
}

template <template <class> class Op>
ffi::Error run_any(const Kernel& kernel, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (kernel.x.element_type()) {
    case ffi::F16: error = run_typed<Op, __half>(kernel, stream); break;
    case ffi::BF16: error = run_typed<Op, __nv_bfloat16>(kernel, stream); break;
    case ffi::F32: error = run_typed<Op, float>(kernel, stream); break;
    case ffi::F64: error = run_typed<Op, double>(kernel, stream); break;
    default: break;  // `read_call` has refused every other dtype
  }
  return result(kernel.name, error);
}

ffi::Error softmax(cudaStream_t stream, In x, Out y, Out workspace, Rest rest, Form form) {
  auto call = read_call({x, {}, {*y}, {}, "slwb", false}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"softmax", *call, form.masked, x, *y};
  kernel.y = y->untyped_data();
  kernel.workspace = &workspace;
  return run_any<Softmax>(kernel, stream);
}

ffi::Error softmax_vjp(cudaStream_t stream, In y, In g, Out dx, Out workspace, Rest rest, Form form) {
  auto call = read_call({y, {g}, {*dx}, {}, "sl", true}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"softmax_vjp", *call, form.masked, y, *dx, g.untyped_data(), dx->untyped_data()};
  kernel.workspace = &workspace;
  return run_any<SoftmaxVjp>(kernel, stream);
}

ffi::Error log_softmax(cudaStream_t stream, In x, Out y, Out m, Out s, Out workspace, Rest rest, Form form) {
  auto call = read_call({x, {}, {*y}, {*m, *s}, "slwb", false}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"log_softmax", *call, form.masked, x, *y};
  kernel.y = y->untyped_data();
  kernel.m = m->untyped_data(), kernel.s = s->untyped_data();
  kernel.workspace = &workspace;
  return run_any<LogSoftmax>(kernel, stream);
}

ffi::Error log_softmax_vjp(cudaStream_t stream, In x, In m, In s, In g, Out dx, Out workspace, Rest rest, Form form) {
  auto call = read_call({x, {g}, {*dx}, {m, s}, "slw", false}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"log_softmax_vjp", *call, form.masked, x, *dx, g.untyped_data(), dx->untyped_data()};
  kernel.m = m.untyped_data(), kernel.s = s.untyped_data();
  kernel.workspace = &workspace;
  return run_any<LogSoftmaxVjp>(kernel, stream);
}

ffi::Error state(cudaStream_t stream, In x, Out m, Out s, Out workspace, Rest rest, Form form) {
  auto call = read_call({x, {}, {}, {*m, *s}, "slwb", false}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"state", *call, form.masked, x, x};
  kernel.m = m->untyped_data(), kernel.s = s->untyped_data();
  kernel.workspace = &workspace;
  return run_any<StateOf>(kernel, stream);
}

template <class T>
cudaError_t run_top_k_typed(const Call& call, In x, In values, In indices, In m, In s, In workspace,
                            cudaStream_t stream) {
  Arguments<T> args;
  args.a = static_cast<const T*>(x.untyped_data());
  args.rows = call.shape.rows, args.n = call.shape.n;
  args.m = static_cast<Accumulator<T>*>(m.untyped_data()), args.s = static_cast<Accumulator<T>*>(s.untyped_data());
  args.vector = reinterpret_cast<uintptr_t>(args.a) % sizeof(T) == 0;
  const Largest<T> largest{static_cast<T*>(values.untyped_data()), static_cast<int32_t*>(indices.untyped_data()),
                           static_cast<int>(values.dimensions().back())};
  return run_top_k(args, largest, workspace.untyped_data(), workspace.size_bytes(), stream);
}

ffi::Error top_k(cudaStream_t stream, In x, Out values, Out indices, Out m, Out s, Out workspace, Rest rest,
                 Form form) {
  auto call = read_top_k_call(x, *values, *indices, *m, *s, rest, form);
  if (call.has_error()) return call.error();
  auto run = [&](auto typed) { return result("top_k", typed(*call, x, *values, *indices, *m, *s, *workspace, stream)); };
  switch (x.element_type()) {
    case ffi::F16: return run(run_top_k_typed<__half>);
    case ffi::BF16: return run(run_top_k_typed<__nv_bfloat16>);
    case ffi::F32: return run(run_top_k_typed<float>);
    default: return refuse("top_k has no kernel for F64: got " + describe(x));
  }
}

ffi::Error logsumexp_vjp(cudaStream_t stream, In x, In m, In s, In g, Out dx, Rest rest, Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g}, "slwb", false}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"logsumexp_vjp", *call, form.masked, x, *dx, nullptr, dx->untyped_data()};
  kernel.m = m.untyped_data(), kernel.s = s.untyped_data();
  kernel.g = g.untyped_data();
  return run_any<LogsumexpVjp>(kernel, stream);
}

ffi::Error label_state(cudaStream_t stream, In x, In i, Out m, Out s, Out t, Out workspace, Rest rest, Form form) {
  auto call = read_call({x, {}, {}, {*m, *s, *t}, "lw", false, {i}}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"label_state", *call, form.masked, x, x};
  kernel.m = m->untyped_data(), kernel.s = s->untyped_data(), kernel.t = t->untyped_data();
  kernel.labels = i.untyped_data(), kernel.cap = form.cap;
  kernel.workspace = &workspace;
  return run_any<StateOf>(kernel, stream);
}

ffi::Error label_sums(cudaStream_t stream, In x, In i, Out m, Out s, Out t, Out u, Out k, Out workspace, Rest rest,
                      Form form) {
  auto call = read_call({x, {}, {}, {*m, *s, *t, *u, *k}, "lw", false, {i}}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"label_sums", *call, form.masked, x, x};
  kernel.m = m->untyped_data(), kernel.s = s->untyped_data(), kernel.t = t->untyped_data();
  kernel.u = u->untyped_data(), kernel.k = k->untyped_data();
  kernel.labels = i.untyped_data(), kernel.cap = form.cap;
  kernel.workspace = &workspace;
  return run_any<LabelSums>(kernel, stream);
}

ffi::Error label_state_vjp(cudaStream_t stream, In x, In i, In m, In s, In g, In h, Out dx, Rest rest, Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g, h}, "lw", false, {i}}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"label_state_vjp", *call, form.masked, x, *dx, nullptr, dx->untyped_data()};
  kernel.m = m.untyped_data(), kernel.s = s.untyped_data(), kernel.g = g.untyped_data(), kernel.h = h.untyped_data();
  kernel.labels = i.untyped_data(), kernel.cap = form.cap;
  return run_any<LogsumexpVjp>(kernel, stream);
}

ffi::Error label_sums_vjp(cudaStream_t stream, In x, In i, In m, In s, In g, In h, In v, Out dx, Rest rest,
                          Form form) {
  auto call = read_call({x, {}, {*dx}, {m, s, g, h, v}, "lw", false, {i}}, rest, form);
  if (call.has_error()) return call.error();
  Kernel kernel{"label_sums_vjp", *call, form.masked, x, *dx, nullptr, dx->untyped_data()};
  kernel.m = m.untyped_data(), kernel.s = s.untyped_data(), kernel.g = g.untyped_data(), kernel.h = h.untyped_data();
  kernel.v = v.untyped_data();
  kernel.labels = i.untyped_data(), kernel.cap = form.cap;
  return run_any<LogsumexpVjp>(kernel, stream);
}

}  // namespace
}  // namespace jaxsoft::cuda

JAXSOFT_EXPORT_API_VERSION
JAXSOFT_TARGETS(jaxsoft::cuda, .Ctx<xla::ffi::PlatformStream<cudaStream_t>>());
