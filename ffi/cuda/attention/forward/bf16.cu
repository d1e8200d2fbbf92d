// The forward kernels of bf16.
#include "launch.cuh"
#include "types.cuh"

namespace jaxsoft::cuda {

cudaError_t run_attention_forward_bf16(const AttentionCall& call, const AttentionBefore& before,
                                       const AttentionResults& results, cudaStream_t stream) {
  return launch_forward_of_type<__nv_bfloat16>(call, before, results, stream);
}

}  // namespace jaxsoft::cuda
