// The interface between the FFI handlers and the kernels: one function an operation and dtype.
#pragma once

#include "launch.cuh"

namespace jaxsoft::cuda {

#define JAXSOFT_OPERATIONS(X, T) \
  X(Softmax, T) X(StateOf, T) X(LabelSums, T) X(LogSoftmax, T) X(SoftmaxVjp, T) X(LogSoftmaxVjp, T) X(LogsumexpVjp, T)

template <template <class> class Op, class T>
cudaError_t run(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream);

#define JAXSOFT_DECLARE_ROW(Op, T) \
  template <> cudaError_t run<Op, T>(const Arguments<T>&, void*, int64_t, cudaStream_t);
JAXSOFT_OPERATIONS(JAXSOFT_DECLARE_ROW, __half)
JAXSOFT_OPERATIONS(JAXSOFT_DECLARE_ROW, __nv_bfloat16)
JAXSOFT_OPERATIONS(JAXSOFT_DECLARE_ROW, float)
JAXSOFT_OPERATIONS(JAXSOFT_DECLARE_ROW, double)

#define JAXSOFT_DEFINE_ROW(Op, T)                                                                              \
  template <> cudaError_t run<Op, T>(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) { \
    return launch<Op, T>(args, workspace, bytes, stream);                                                       \
  }
#define JAXSOFT_DEFINE_ROWS(T) JAXSOFT_OPERATIONS(JAXSOFT_DEFINE_ROW, T)

}  // namespace jaxsoft::cuda
