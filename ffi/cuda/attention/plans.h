// How a call of attention is computed, known without a GPU: the bytes of its workspace, and its plan in words.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

#include "backward/tiles.h"
#include "decode/plan.h"
#include "forward/tiles.h"
#include "targets.h"

namespace jaxsoft::attention {

// A call, as far as that depends on it.
struct Sizes {
  std::string_view target;  // of the FFI
  std::string_view extras;  // names, with commas between them
  int64_t batch, queries, keys, heads, key_heads, size, value_size;
  int64_t left, right;  // -1 for no limit
  bool capped;
  int64_t key_bytes;  // of an element

  bool is(std::string_view prefix) const { return target.substr(0, prefix.size()) == prefix; }
  bool has(std::string_view extra) const { return extras.find(extra) != std::string_view::npos; }
  bool has_limits() const {
    bool found = left >= 0 || right >= 0;
    for (const Record& each : kRecords) found |= kLimits.has(each.name) && has(each.text);
    return found;
  }
  cuda::decode::Problem decode() const {
    auto number = [](int64_t size) { return static_cast<int>(size); };
    return {number(batch), number(queries), number(keys), number(heads), number(key_heads),
            number(left),  number(right),   has("key_lengths"), key_bytes == 1};
  }
};

// Calls use(plan) with the ForwardPlan of a call.
template <cuda::ScoreKind kind, class Use>
auto with_forward_plan(const Sizes& call, Use use) {
  return cuda::with_forward_sizes(call.size, call.value_size, [&](auto sizes) {
    using HeadSizes = decltype(sizes);
    return use(cuda::ForwardPlan<HeadSizes::size, HeadSizes::value_size, kind>());
  });
}

inline int64_t workspace_bytes(const Sizes& call, int multiprocessors) {
  if (call.is("attention_forward"))
    return with_forward_plan<cuda::ScoreKind::segmented>(call, [&](auto plan) {
      constexpr int64_t queries = decltype(plan)::queries;
      return cuda::ForwardSpace(call.batch, call.queries, call.keys, queries, call.has("segments")).bytes();
    });
  if (call.is("attention_backward"))
    return cuda::with_backward_size(call.size, call.value_size, [&](auto size) {
      return cuda::BackwardSpace<size>(call.batch, call.queries, call.keys, call.heads, call.key_heads,
                                       call.has("segments"))
          .bytes();
    });
  const auto problem = call.decode();
  return cuda::decode::Workspace(cuda::decode::make_plan(problem, multiprocessors), problem.item_rows(),
                                 cuda::decode::padded_size(static_cast<int>(call.size)))
      .bytes;
}

template <class Plan>
std::string text_of_forward_plan() {
  std::ostringstream text;
  text << "attention_forward: " << Plan::groups << " groups of " << Plan::group_queries << " queries a block, tiles of "
       << Plan::key_tile << " keys";
  return text.str();
}
template <cuda::ScoreKind kind>
std::string forward_plan(const Sizes& call) {
  return with_forward_plan<kind>(call, [](auto plan) { return text_of_forward_plan<decltype(plan)>(); });
}
inline std::string forward_plan_without_limits(const Sizes& call) {
  return cuda::with_forward_sizes(call.size, call.value_size, [&](auto sizes) {
    using Few = cuda::FewKeysPlan<decltype(sizes)::size, decltype(sizes)::value_size>;
    if constexpr (Few::exists)
      if (Few::serves(call.keys, call.has("state_lse"))) return text_of_forward_plan<Few>();
    return forward_plan<cuda::ScoreKind::plain>(call);
  });
}

// For example "decode_few_rows: 16 rows a block, up to 12 chunks of keys; clear may precede it, and merge follows". The
// first word is in the name of the kernel, as a profiler shows it, and so are those of the kernels around it.
inline std::string plan_as_text(const Sizes& call, int multiprocessors) {
  using cuda::ScoreKind;
  if (call.is("attention_forward")) {
    if (call.capped) return forward_plan<ScoreKind::capped>(call);
    if (call.has("segments")) return forward_plan<ScoreKind::segmented>(call);
    if (call.has_limits()) return forward_plan<ScoreKind::limited>(call);
    return forward_plan_without_limits(call);
  }
  std::ostringstream text;
  if (call.is("attention_backward")) {
    cuda::with_backward_size(call.size, call.value_size, [&](auto size) {
      using Plan = cuda::BackwardPlan<size>;
      text << (Plan::blocks == 2 ? "attention_backward_in_pairs" : "attention_backward") << ": tiles of "
           << Plan::queries << " queries and " << Plan::keys
           << " keys; prepare_numbers precedes it, and round_sums or store_sums follows";
    });
    return text.str();
  }
  const auto problem = call.decode();
  const auto plan = cuda::decode::make_plan(problem, multiprocessors);
  text << (problem.many() ? "decode_many_rows" : "decode_few_rows") << ": " << plan.row_tile << " rows a block, up to "
       << plan.most_chunks << " chunks of keys; clear may precede it";
  if (plan.most_chunks > 1) text << ", and merge follows";
  return text.str();
}

}  // namespace jaxsoft::attention
