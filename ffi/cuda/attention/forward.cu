// Attention forward for many queries: which kernel serves a call. The kernels are compiled by element type, in files of
// their own.
#include "forward/types.cuh"

namespace jaxsoft::cuda {

// The workspace has room for a counter: 8 bytes.
cudaError_t run_attention_forward(const AttentionCall& call, const AttentionBefore& before,
                                  const AttentionResults& results, cudaStream_t stream) {
  bool found = false;
  if (auto e = has_warp_groups(&found)) return e;
  if (!found) return cudaErrorNoKernelImageForDevice;
  const bool served = call.size == call.value_size && call.size % 8 == 0 && call.size <= 256 && call.scale > 0 &&
                      !call.bias.data && !call.mask.data;
  if (!served || call.workspace_bytes < static_cast<int64_t>(sizeof(unsigned long long))) return cudaErrorInvalidValue;
  return call.type == AttentionType::f16 ? run_attention_forward_f16(call, before, results, stream)
                                         : run_attention_forward_bf16(call, before, results, stream);
}

}  // namespace jaxsoft::cuda
