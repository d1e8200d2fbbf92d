// The interface between the FFI handlers and the row kernels: one function for each operation and element type. That of
// top_k, which has results of its own, is in top_k.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../rows/operations.h"
#include "arguments.cuh"

namespace jaxsoft::cuda {

#define JAXSOFT_DECLARE(name, Op, ...) \
  template <class T>                   \
  struct Op;
JAXSOFT_ROW_OPERATIONS(JAXSOFT_DECLARE)
#undef JAXSOFT_DECLARE

// Runs an operation on all rows. The workspace has `bytes` bytes. Everything is ordered by `stream`, and nothing is
// allocated or waited for. Defined in launch.cuh, which only the files that rows.cu.in makes include.
template <template <class> class Op, class T>
cudaError_t run(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream);

}  // namespace jaxsoft::cuda
