// Attention by CUDA: what a call is, and the functions that launch its kernels.
//
// Arrays are dense, in the order of their dimensions. The letters of the shapes: B batch, T queries, S keys, N heads of
// queries, K heads of keys, H the head size of queries and keys, and D that of values. Query head n attends with key
// head n / (N / K). What scores are, and which of them count, is said in jaxsoft/_attention/form.py, and what a call
// may be in checks.h: H and D are the same of few queries, and of a block of keys and values.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "limits.cuh"

namespace jaxsoft::cuda {

// The dtype of queries, keys and values, all of one and in 16 bits; or of an array of scores, such as a bias.
enum class AttentionType { f16, bf16, f32 };
// The dtype of the pages of a cache of keys and values: that of queries, or 8-bit floats.
enum class PageType { as_query, e4m3, e5m2 };

// An array that is broadcast to (B, N, T, S): the steps of dimensions of length 1 are 0.
struct OfScores {
  const void* data = nullptr;  // null if there is none
  AttentionType type = AttentionType::f32;
  int64_t steps[4] = {};
};

// What all calls of attention have.
// --8<-- [start:call]
struct AttentionCall {
  AttentionType type = AttentionType::bf16;
  int batch = 0, queries = 0, keys = 0, heads = 0, key_heads = 0, size = 0, value_size = 0;
  const void* query = nullptr;  // (B, T, N, H)
  const void* key = nullptr;    // (B, S, K, H)
  const void* value = nullptr;  // (B, S, K, D)

  float scale = 1;
  float cap = 0;                           // 0 for none
  LimitOperands limits;
  const int32_t* query_segments = nullptr; // (B, T) or (1, T): segment_steps[0] from one row to the next
  const int32_t* key_segments = nullptr;   // (B, S) or (1, S)
  int64_t segment_steps[2] = {};
  OfScores bias;                   // is added to scores
  OfScores mask;                   // bytes: scores where it is not 0 count; `type` says nothing
  const float* sinks = nullptr;    // element (b, n) is sinks[b * sink_steps[0] + n * sink_steps[1]]
  int64_t sink_steps[2] = {};

  void* workspace = nullptr;  // its bytes hold anything at first
  int64_t workspace_bytes = 0;
};
// --8<-- [end:call]

// Divides a workspace: gives away one array after the other.
struct WorkspaceDivision {
  unsigned char* next;
  explicit WorkspaceDivision(void* workspace) : next(static_cast<unsigned char*>(workspace)) {}
  template <class T>
  T* take(int64_t bytes) {
    next += bytes;
    return reinterpret_cast<T*>(next - bytes);
  }
};

// The results of a call.
struct AttentionResults {
  void* output = nullptr;           // (B, T, N, D): in f32 if `wide`, else in the dtype of queries
  bool wide = false;
  void* output_residual = nullptr;  // (B, T, N, D) in the dtype of queries: what rounding took from output; or null
  float* lse = nullptr;           // (B, N, T): the natural log-sum-exp of scores; -inf where none is valid
  float* lse_residual = nullptr;  // (B, N, T): what lse lost when it was rounded; null where there is no bias
  float* max_logits = nullptr;    // (B, N): the largest score of each head; or null. Of few queries there is none
};

// What attention over other keys gave, with which the results are combined; or null. It may be where the results are to
// be: output where the results' is in f32, and lse.
struct AttentionBefore {
  const float* output = nullptr;  // (B, T, N, D)
  const float* lse = nullptr;     // (B, N, T): where it is -inf, output is not read
};

// Forward, for many queries. On Hopper only, without a bias and without a mask.
cudaError_t run_attention_forward(const AttentionCall& call, const AttentionBefore& before,
                                  const AttentionResults& results, cudaStream_t stream);

// The gradients by query, key and value, in their shapes.
struct AttentionGradients {
  const float* lse = nullptr;       // (B, N, T)
  const float* delta = nullptr;     // (B, N, T): <output, cotangent>, less the cotangent of lse
  const void* cotangent = nullptr;  // (B, T, N, D), in the dtype of queries
  bool deterministic = true;        // whether the same operands must give the same bits
  bool wide = false;                // whether they are in f32, and not in the dtype of queries
  void* query = nullptr;
  void* key = nullptr;
  void* value = nullptr;
  // What those in f32 are added to, where it is not null. It may be where they are to be.
  const float* query_sum = nullptr;
  const float* key_sum = nullptr;
  const float* value_sum = nullptr;
};
// On Hopper only, without a bias and a mask. What it needs of the workspace is said in backward/tiles.h.
cudaError_t run_attention_backward(const AttentionCall& call, const AttentionGradients& gradients,
                                   cudaStream_t stream);

// The cache of which a paged call has its keys and values; `keys` of the call is pages_of_sequence * page_size.
struct Pages {
  PageType type = PageType::as_query;
  int pages = 0, page_size = 0, pages_of_sequence = 0;
  // key and value of the call are (pages, page size, K, H) and (pages, page size, K, D).
  const int32_t* table = nullptr;      // (B, pages of a sequence): keys of entries out of range are masked
  const float* key_scale = nullptr;    // (K): keys are multiplied by it; null for 1
  const float* value_scale = nullptr;  // (K): values are multiplied by it; null for 1
};

// Forward, for few queries of each sequence over many keys. `pages` is null where keys and values lie in one piece.
cudaError_t run_attention_decode(const AttentionCall& call, const Pages* pages, const AttentionResults& results,
                                 cudaStream_t stream);

}  // namespace jaxsoft::cuda
