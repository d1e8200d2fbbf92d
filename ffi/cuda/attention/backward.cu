// The gradients of attention by query, key and value, in one kernel on Hopper.
//
// With the weights P = exp(scores - lse), which are computed again, and the slopes of the loss by scores dS = P (dO V^T
// - delta), the gradients are dV = P^T dO, dK = scale dS^T Q and dQ = scale dS K: five products of tiles. A piece of
// work is a block of keys, and goes over the tiles of queries of a head that attend to them. So the gradients by keys
// and values stay in registers. Where heads share keys, a piece has some of them, one after the other, and pieces with
// the same keys add to what the one before has left (group.cuh). The gradient by queries is a sum over blocks of keys,
// in f32 in the workspace, which bulk copies from shared memory add to. A last kernel rounds it, and begins when most
// heads are done. Gradients in f32 may be added to others, which are where the results are to be. The kernels for these
// are of their own, as their code is.
//
// If the same operands must give the same bits, blocks of keys add to each tile in a fixed order, from the last to the
// first. They take their work from a counter in this order, so a block waits only for work that has been taken before
// it: there is no deadlock, however many blocks run at once. Under a causal rule each block begins with another tile,
// and none waits long. But of the last heads it is from the first to the last, so that the shortest work is done last.
// Without limits blocks of a head run one behind the other, so the blocks that begin at the same time belong to
// different heads, as far as the cache allows.
//
// Where there are segments, small kernels find out before which queries may count for a block of keys (segments.cuh),
// and over which tiles it goes (tile_ranges.cuh).
//
// A block has two warp groups that multiply (multiply.cuh), and one whose threads bring tiles and add sums (copy.cuh).
// Of heads of more than 128, two blocks of a cluster share a piece of work (pair.cuh says why), and have three warp
// groups that multiply (multiply_in_pairs.cuh) and one that copies (copy_in_pairs.cuh).
#include "attention.cuh"
#include "../exponential.cuh"
#include "../warp_groups.cuh"
#include "backward/work.cuh"

namespace jaxsoft::cuda {

// Computes them for one element type, and heads of up to `size`.
template <class T, int size>
cudaError_t run_backward(BackwardCall& call, const AttentionCall& given, const AttentionGradients& gradients,
                         cudaStream_t stream);

namespace {

// Puts what a gradient is added to, if anything, where the gradient is to be.
cudaError_t put(void* gradient, const float* sum, int64_t count, cudaStream_t stream, bool* adds) {
  *adds = sum;
  if (!sum || sum == gradient) return cudaSuccess;
  return cudaMemcpyAsync(gradient, sum, count * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

}  // namespace

cudaError_t run_attention_backward(const AttentionCall& given, const AttentionGradients& gradients,
                                   cudaStream_t stream) {
  if (auto e = need_warp_groups()) return e;
  BackwardCall call{};
  call.batch = given.batch, call.queries = given.queries, call.keys = given.keys;
  call.heads = given.heads, call.key_heads = given.key_heads, call.group = given.heads / given.key_heads;
  call.size = given.size, call.value_size = given.value_size;
  call.deterministic = gradients.deterministic;
  call.scale = given.scale, call.scale2 = given.scale * float(kLog2E);
  if (given.cap > 0) call.soft_cap = SoftCap(given.cap, given.scale, 1);
  call.limits = given.limits;
  call.query_gradient = gradients.query, call.key_gradient = gradients.key, call.value_gradient = gradients.value;
  const int64_t of_query = int64_t(given.batch) * given.queries * given.heads * given.size;
  const int64_t all_keys = int64_t(given.batch) * given.keys * given.key_heads;
  if (auto e = put(gradients.query, gradients.query_sum, of_query, stream, &call.adds_query)) return e;
  if (auto e = put(gradients.key, gradients.key_sum, all_keys * given.size, stream, &call.adds_key)) return e;
  const int64_t of_value = all_keys * given.value_size;
  if (auto e = put(gradients.value, gradients.value_sum, of_value, stream, &call.adds_value)) return e;
  return with_backward_size(given.size, given.value_size, [&](auto size) {
    return given.type == AttentionType::f16 ? run_backward<__half, size>(call, given, gradients, stream)
                                            : run_backward<__nv_bfloat16, size>(call, given, gradients, stream);
  });
}

}  // namespace jaxsoft::cuda
