// What is chosen for a call of a row operation, in words. It is computed from the same table as the launch, and needs
// no CUDA, so the plan is known without a GPU: it is the one of a GPU that has room for the clusters, as a part of one
// (MIG) may not have.
#pragma once

#include <string>
#include <string_view>

#include "../../rows/operations.h"
#include "facts.h"
#include "plan.cuh"

namespace jaxsoft::cuda {

// The struct of an operation's kernels; "" if there is no such operation.
inline std::string_view kernels_of(std::string_view operation) {
#define JAXSOFT_NAMES(name, Kernels, ...) \
  if (operation == #name) return #Kernels;
  JAXSOFT_ROW_OPERATIONS(JAXSOFT_NAMES)
#undef JAXSOFT_NAMES
  return "";
}

// A call whose arrays begin at multiples of 16 bytes. `extras` has the letters of the call's, c for a soft cap, and any
// other letter for a mask by probabilities. `inner` columns lie side by side: 1 where the last axis is the reduced one.
struct RowCall {
  std::string_view operation;
  int64_t rows, n, inner, element_bytes, result_bytes;
  std::string_view extras;
  int capability, processors;  // 90 is 9.0
  int64_t workspace;           // bytes
};

inline Plan plan_of(const RowCall& asked, const OperationFacts& facts) {
  const bool same = asked.result_bytes == asked.element_bytes;
  auto has = [&](char letter) { return asked.extras.find(letter) != std::string_view::npos; };
  const Forms form = has('b') ? kBiased : has('c') ? kCapped : asked.extras.empty() && same ? kPlain : kExtrasAlone;
  const KernelFacts kernel{static_cast<unsigned>(asked.element_bytes), has('b') ? 2 : facts.operands, facts.kind, form};
  const int64_t row_bytes = asked.n * asked.element_bytes;
  CallFacts call{};
  call.gpu = gpu_of(asked.capability / 10), call.processors = asked.processors;
  call.rows = asked.rows, call.n = asked.n;
  call.vector = call.first_aligned = true;
  call.workspace = asked.workspace, call.packet = 16;
  call.state = facts.part * (asked.element_bytes == 8 ? 8 : 4);
  call.packs = (row_bytes + 15) / 16;
  const bool halves = same && row_bytes % 8 == 0 && serves_halves(kernel, call.packs);
  call.unaligned = !(same && row_bytes % 16 == 0) && !halves;
  call.packs += call.unaligned && row_bytes % 16 != 0;
  return make_plan(kernel, call);
}

// The first word is in the name of the kernel, as a profiler shows it. "" if there is no kernel for the call.
inline std::string describe_plan(const RowCall& asked) {
  const std::string_view kernels = kernels_of(asked.operation);
  const OperationFacts* const facts = facts_of(kernels);
  if (asked.n < 1 || asked.rows < 1) return "";
  if (!facts && (kernels.empty() || kernels == "TopK")) return "";
  if (!facts)  // the kernels of one operation alone
    return std::string(asked.operation.substr(0, asked.operation.find("_vjp"))) + ": one read of all arrays";
  if (asked.inner > 1 && facts->kind != kSums) return "columns: tiles of columns in shared memory";
  const Plan plan = plan_of(asked, *facts);
  if (plan.rule < 0) return "";
  const Rule& rule = kRules[plan.rule];
  auto number = [](int64_t count, const char* what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
  };
  const std::string a_thread = number(rule.packs_a_thread, "pack") + " of 16 bytes a thread";
  switch (rule.strategy) {
    case Strategy::register_row: return "register_row: rows in registers, " + a_thread;
    case Strategy::clustered:
      return "clustered: rows in the registers of " + number(plan.blocks, "block") + " each, " + a_thread;
    case Strategy::grid_registers:
      return "grid_registers: " + number(plan.split.parts, "block") + " a row, in registers, " + a_thread;
    case Strategy::ring: return "ring: rows in the shared memory of " + number(plan.blocks, "block") + " each";
    case Strategy::grid_ring: return "grid_ring: rows in the shared memory of all blocks";
    case Strategy::flat: return "flat: the rows as one array";
    case Strategy::split:
      return std::string(facts->kind == kElementwise ? "split_write: " : "split_reduce: ") +
             number(plan.split.parts, "part") + " a row, of " + number(plan.threads, "thread");
    case Strategy::tiled: return "tiled: a block of " + number(plan.threads, "thread") + " a row";
  }
  return "";
}

}  // namespace jaxsoft::cuda
