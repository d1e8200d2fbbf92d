// Attention forward for many queries: which kernel serves a call. The kernels are compiled by element type and sizes
// of heads, in files of their own (forward/forward.cu.in).
#include "../elements.cuh"
#include "../warp_groups.cuh"
#include "attention.cuh"
#include "forward/tiles.h"

namespace jaxsoft::cuda {

// Computes it for one element type, and heads of up to `Sizes`.
template <class T, class Sizes>
cudaError_t run_forward(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                        cudaStream_t stream);

// Puts -inf where the largest scores are noted, before there are any.
template <int = 0>
__global__ void clear_maxima(float* maxima, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) maxima[i] = -__builtin_huge_valf();
}

// What it needs of the workspace is said in forward/tiles.h.
cudaError_t run_attention_forward(const AttentionCall& call, const AttentionBefore& before,
                                  const AttentionResults& results, cudaStream_t stream) {
  if (auto e = need_warp_groups()) return e;
  if (call.workspace_bytes < ForwardSpace::counter) return cudaErrorInvalidValue;
  if (results.max_logits) {
    constexpr int threads = 256;
    const int count = call.batch * call.heads;
    clear_maxima<><<<(count + threads - 1) / threads, threads, 0, stream>>>(results.max_logits, count);
    if (auto e = cudaGetLastError()) return e;
  }
  return with_forward_sizes(call.size, call.value_size, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return call.type == AttentionType::f16 ? run_forward<__half, Sizes>(call, before, results, stream)
                                           : run_forward<__nv_bfloat16, Sizes>(call, before, results, stream);
  });
}

}  // namespace jaxsoft::cuda
