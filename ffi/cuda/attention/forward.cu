// Attention forward for many queries: which kernel serves a call. The kernels are compiled by element type and size of
// heads, in files of their own (forward/forward.cu.in).
#include "../elements.cuh"
#include "../warp_groups.cuh"
#include "attention.cuh"
#include "forward/tiles.h"

namespace jaxsoft::cuda {

// Computes it for one element type, and heads of up to `size`.
template <class T, int size>
cudaError_t run_forward(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                        cudaStream_t stream);

// What it needs of the workspace is said in forward/tiles.h.
cudaError_t run_attention_forward(const AttentionCall& call, const AttentionBefore& before,
                                  const AttentionResults& results, cudaStream_t stream) {
  if (auto e = need_warp_groups()) return e;
  if (call.workspace_bytes < ForwardSpace(0, 0).bytes()) return cudaErrorInvalidValue;
  return with_forward_size(call.size, [&](auto size) {
    return call.type == AttentionType::f16 ? run_forward<__half, size>(call, before, results, stream)
                                           : run_forward<__nv_bfloat16, size>(call, before, results, stream);
  });
}

}  // namespace jaxsoft::cuda
