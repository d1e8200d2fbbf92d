// The interface between the FFI handlers and the row kernels: one function for each operation and element type. That of
// top_k, which has results of its own, is in top_k.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../rows/operations.h"
#include "arguments.cuh"

namespace jaxsoft {
struct Call;  // see rows/call.h, which the kernels' files do not include, as XLA's headers take long to compile
}

namespace jaxsoft::cuda {

#define JAXSOFT_DECLARE(name, Op, ...) \
  template <class T>                   \
  struct Op;
JAXSOFT_ROW_OPERATIONS(JAXSOFT_DECLARE)
#undef JAXSOFT_DECLARE

// Runs an operation on all rows. The workspace has `bytes` bytes. Everything is ordered by `stream`, and nothing is
// allocated or waited for. Defined in launch.cuh, which only the files that rows.cu.in makes include; an operation with
// kernels of its own specializes it. Those take what `args` lacks from the call.
template <template <class> class Op, class T>
cudaError_t run(const Arguments<T>& args, const Call& call, void* workspace, int64_t bytes, cudaStream_t stream);

}  // namespace jaxsoft::cuda
