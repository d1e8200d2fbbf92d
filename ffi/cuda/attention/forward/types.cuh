// The forward kernels of each element type, which are compiled in f16.cu and bf16.cu.
#pragma once

#include "../../warp_groups.cuh"
#include "../attention.cuh"

namespace jaxsoft::cuda {

cudaError_t run_attention_forward_f16(const AttentionCall& call, const AttentionBefore& before,
                                      const AttentionResults& results, cudaStream_t stream);
cudaError_t run_attention_forward_bf16(const AttentionCall& call, const AttentionBefore& before,
                                       const AttentionResults& results, cudaStream_t stream);

}  // namespace jaxsoft::cuda
