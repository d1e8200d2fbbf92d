// The forward kernels of f16.
#include "launch.cuh"
#include "types.cuh"

namespace jaxsoft::cuda {

cudaError_t run_attention_forward_f16(const AttentionCall& call, const AttentionBefore& before,
                                      const AttentionResults& results, cudaStream_t stream) {
  return launch_forward_of_type<__half>(call, before, results, stream);
}

}  // namespace jaxsoft::cuda
