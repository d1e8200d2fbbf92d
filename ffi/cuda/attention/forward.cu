// Attention forward for many queries: which kernel serves a call. The kernels are compiled by element type and size of
// heads, in files of their own (forward/forward.cu.in).
#include "../elements.cuh"
#include "../warp_groups.cuh"
#include "attention.cuh"

namespace jaxsoft::cuda {

// Computes it for one element type, and heads of up to `size`.
template <class T, int size>
cudaError_t run_forward(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                        cudaStream_t stream);

namespace {

template <class T>
cudaError_t run_typed(const AttentionCall& call, const AttentionBefore& before, const AttentionResults& results,
                      cudaStream_t stream) {
  if (call.size <= 64) return run_forward<T, 64>(call, before, results, stream);
  if (call.size <= 128) return run_forward<T, 128>(call, before, results, stream);
  if (call.size <= 192) return run_forward<T, 192>(call, before, results, stream);
  return run_forward<T, 256>(call, before, results, stream);
}

}  // namespace

// The workspace has room for a counter: 8 bytes.
cudaError_t run_attention_forward(const AttentionCall& call, const AttentionBefore& before,
                                  const AttentionResults& results, cudaStream_t stream) {
  bool found = false;
  if (auto e = has_warp_groups(&found)) return e;
  if (!found) return cudaErrorNoKernelImageForDevice;
  const bool served = call.size == call.value_size && call.size % 8 == 0 && call.size <= 256 && call.scale > 0 &&
                      !call.bias.data && !call.mask.data;
  if (!served || call.workspace_bytes < static_cast<int64_t>(sizeof(unsigned long long))) return cudaErrorInvalidValue;
  return call.type == AttentionType::f16 ? run_typed<__half>(call, before, results, stream)
                                         : run_typed<__nv_bfloat16>(call, before, results, stream);
}

}  // namespace jaxsoft::cuda
