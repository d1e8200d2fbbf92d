// What the handlers of all families do alike: the answer to a call, and the element type of a dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>

#include "../rows/buffers.h"

namespace jaxsoft::cuda {

// What a handler returns, given what became of its kernels.
inline ffi::Error answer(const std::string& name, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // else the next call, which may be a good one, would be given this error
  return ffi::Error::Internal("jaxsoft_" + name + ": " + cudaGetErrorString(error));
}

// Calls use(T()) with the element type T of a dtype, which is one of F16, BF16 and F32.
template <class Use>
auto with_type(ffi::DataType dtype, Use use) {
  return dtype == ffi::F16 ? use(__half()) : dtype == ffi::BF16 ? use(__nv_bfloat16()) : use(float());
}

}  // namespace jaxsoft::cuda
