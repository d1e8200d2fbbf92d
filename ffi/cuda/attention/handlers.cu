// The FFI calls of attention: a checked call becomes the arguments of a kernel, which is launched on XLA's stream.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "../handlers.cuh"
#include "attention.cuh"
#include "checks.h"

namespace jaxsoft::cuda {
namespace {

using attention::Call;
using attention::Name;

AttentionType type_of(ffi::DataType dtype) {
  return dtype == ffi::F16 ? AttentionType::f16 : dtype == ffi::BF16 ? AttentionType::bf16 : AttentionType::f32;
}

OfBatch of_batch(const Buffer& buffer) {
  return buffer.data ? OfBatch{static_cast<const int32_t*>(buffer.data), buffer.dims[0] > 1} : OfBatch{};
}

// Sets the steps from one index of each dimension to the next: 0 for dimensions of length 1.
void set_steps(const Buffer& buffer, int64_t* steps) {
  int64_t step = 1;
  for (size_t i = buffer.dims.size(); i-- > 0; step *= buffer.dims[i]) steps[i] = buffer.dims[i] > 1 ? step : 0;
}

OfScores of_scores(const Buffer& buffer) {
  OfScores found;
  if (!buffer.data) return found;
  found.data = buffer.data;
  found.type = type_of(buffer.dtype);
  set_steps(buffer, found.steps);
  return found;
}

const int32_t* segments(const Buffer& buffer, int64_t* step) {
  if (buffer.data) *step = buffer.dims[0] > 1 ? buffer.dims[1] : 0;
  return static_cast<const int32_t*>(buffer.data);
}

// The part of an array that has the values of a block, or gradients by them.
void* second_half(const Buffer& block) { return static_cast<char*>(block.data) + block.bytes() / 2; }

AttentionCall attention_call(const Call& given, const attention::Form& form) {
  AttentionCall call;
  const bool paged = given.operand(Name::page_table).data;
  call.type = type_of(given.operand(Name::query).dtype);
  call.batch = given.size('B'), call.queries = given.size('T'), call.keys = given.size('S');
  call.heads = given.size('N'), call.key_heads = given.size('K');
  call.size = given.size('H'), call.value_size = given.size('D');
  call.query = given.operand(Name::query).data;
  call.key = given.operand(paged ? Name::key_pages : Name::key).data;
  call.value = given.operand(paged ? Name::value_pages : Name::value).data;
  if (const Buffer& block = given.operand(Name::block); block.data)
    call.key = block.data, call.value = second_half(block);
  call.scale = static_cast<float>(form.scale), call.cap = static_cast<float>(form.cap);
  call.limits.left = static_cast<int>(form.left), call.limits.right = static_cast<int>(form.right);
  for (const auto& [name, place] : kLimitOperands) call.limits.*place = of_batch(given.operand(name));
  call.query_segments = segments(given.operand(Name::query_segments), &call.segment_steps[0]);
  call.key_segments = segments(given.operand(Name::key_segments), &call.segment_steps[1]);
  call.bias = of_scores(given.operand(Name::bias));
  call.mask = of_scores(given.operand(Name::mask));
  if (const Buffer& sinks = given.operand(Name::sinks); sinks.data) {
    call.sinks = static_cast<const float*>(sinks.data);
    set_steps(sinks, call.sink_steps);
  }
  call.workspace = given.result(Name::workspace).data;
  call.workspace_bytes = given.result(Name::workspace).bytes();
  return call;
}

AttentionResults attention_results(const Call& given) {
  AttentionResults results;
  const Buffer& output = given.result(Name::output);
  results.output = output.data;
  results.wide = output.dtype == ffi::F32;
  results.output_residual = given.result(Name::output_residual).data;
  results.lse = static_cast<float*>(given.result(Name::lse).data);
  results.lse_residual = static_cast<float*>(given.result(Name::lse_residual).data);
  results.max_logits = static_cast<float*>(given.result(Name::max_logits).data);
  return results;
}

cudaError_t forward(const Call& given, const attention::Form& form, cudaStream_t stream) {
  AttentionBefore before;
  before.output = static_cast<const float*>(given.operand(Name::state_output).data);
  before.lse = static_cast<const float*>(given.operand(Name::state_lse).data);
  return run_attention_forward(attention_call(given, form), before, attention_results(given), stream);
}

cudaError_t decode(const Call& given, const attention::Form& form, cudaStream_t stream) {
  return run_attention_decode(attention_call(given, form), nullptr, attention_results(given), stream);
}

cudaError_t paged(const Call& given, const attention::Form& form, cudaStream_t stream) {
  Pages pages;
  const auto dtype = given.operand(Name::key_pages).dtype;
  if (dtype == ffi::F8E4M3FN) pages.type = PageType::e4m3;
  if (dtype == ffi::F8E5M2) pages.type = PageType::e5m2;
  pages.pages = given.size('P'), pages.page_size = given.size('G'), pages.pages_of_sequence = given.size('C');
  pages.table = static_cast<const int32_t*>(given.operand(Name::page_table).data);
  pages.key_scale = static_cast<const float*>(given.operand(Name::key_scale).data);
  pages.value_scale = static_cast<const float*>(given.operand(Name::value_scale).data);
  return run_attention_decode(attention_call(given, form), &pages, attention_results(given), stream);
}

cudaError_t backward(const Call& given, const attention::Form& form, cudaStream_t stream) {
  AttentionGradients gradients;
  gradients.lse = static_cast<const float*>(given.operand(Name::lse).data);
  gradients.delta = static_cast<const float*>(given.operand(Name::delta).data);
  gradients.cotangent = given.operand(Name::cotangent).data;
  gradients.deterministic = form.deterministic;
  gradients.query = given.result(Name::query).data;
  gradients.key = given.result(Name::key).data;
  gradients.value = given.result(Name::value).data;
  if (const Buffer& block = given.result(Name::block); block.data)
    gradients.key = block.data, gradients.value = second_half(block);
  gradients.wide = given.result(Name::query).dtype == ffi::F32;
  gradients.query_sum = static_cast<const float*>(given.operand(Name::query_sum).data);
  gradients.key_sum = static_cast<const float*>(given.operand(Name::key_sum).data);
  gradients.value_sum = static_cast<const float*>(given.operand(Name::value_sum).data);
  return run_attention_backward(attention_call(given, form), gradients, stream);
}

template <const attention::Target& target, cudaError_t (*run)(const Call&, const attention::Form&, cudaStream_t)>
ffi::Error handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, attention::Form form) {
  Call call;
  const std::string reason = call.read(target, args, rets, form);
  if (!reason.empty()) return refuse(std::string(target.text) + ": " + reason);
  return answer(target.text, run(call, form, stream));
}

}  // namespace
}  // namespace jaxsoft::cuda

#define JAXSOFT_EXPORT_ATTENTION(name, target, run)                                                        \
  JAXSOFT_EXPORT_HANDLER(jaxsoft_##name,                                                                   \
                         (jaxsoft::cuda::handle<jaxsoft::attention::targets::target, jaxsoft::cuda::run>), \
                         xla::ffi::Ffi::Bind()                                                             \
                             .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()                                \
                             .RemainingArgs()                                                              \
                             .RemainingRets()                                                              \
                             .Attrs<jaxsoft::attention::Form>())

JAXSOFT_EXPORT_ATTENTION(attention_forward, kForward, forward)
JAXSOFT_EXPORT_ATTENTION(attention_forward_of_block, kForwardOfBlock, forward)
JAXSOFT_EXPORT_ATTENTION(attention_decode, kDecode, decode)
JAXSOFT_EXPORT_ATTENTION(paged_attention, kPaged, paged)
JAXSOFT_EXPORT_ATTENTION(attention_backward, kBackward, backward)
JAXSOFT_EXPORT_ATTENTION(attention_backward_of_block, kBackwardOfBlock, backward)
