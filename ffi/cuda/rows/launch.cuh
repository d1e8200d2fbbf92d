// The launch of a row operation: the facts of a call, the plan for it, and the kernel that the plan names.
#pragma once

#include <cstdint>
#include <utility>

#include "../devices.cuh"
#include "clustered.cuh"
#include "columns/launch.cuh"
#include "grid_ring.cuh"
#include "flat.cuh"
#include "register_row.cuh"
#include "plan.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "split.cuh"
#include "grid_registers.cuh"
#include "tiled.cuh"

namespace jaxsoft::cuda {

// Launches the kernel of one row of the plan's table, which is known when this is compiled.
template <template <class> class Op, class T, class Form, int rule_index>
cudaError_t launch_rule(const Arguments<T>& args, const Plan& plan, Layout layout, void* workspace,
                        cudaStream_t stream) {
  constexpr const Rule& rule = kRules[rule_index];
  constexpr int packs = rule.packs_a_thread;
  if constexpr (!rule.compiles(kKernel<Op<T>, T, Form>)) return cudaErrorInvalidValue;  // no plan names this rule
  else if constexpr (rule.strategy == Strategy::register_row)
    return launch_register_row<Op, T, Form, packs>(args, layout, plan.packs, stream);
  else if constexpr (rule.strategy == Strategy::clustered)
    return launch_clustered<Op, T, Form, packs, rule.aligned_only() ? Layout::whole : Layout::any>(
        args, plan.packs, plan.blocks, stream);
  else if constexpr (rule.strategy == Strategy::grid_registers)
    return launch_grid_registers<Op, T, Form, packs>(args, plan.split, workspace, stream);
  else if constexpr (rule.strategy == Strategy::ring)
    return launch_ring<Op, T, Form>(args, plan.blocks, workspace, stream);
  else if constexpr (rule.strategy == Strategy::grid_ring)
    return launch_grid_ring<Op, T, Form>(args, plan.packs, plan.processors, workspace, stream);
  else if constexpr (rule.strategy == Strategy::flat)
    return launch_flat<Op, T>(args, stream);
  else if constexpr (rule.strategy == Strategy::split)
    return launch_split<Op, T, Form>(args, plan, workspace, stream);
  else
    return launch_tiled<Op, T, Form, packs>(args, plan.threads, stream);
}

template <template <class> class Op, class T, class Form, int... rules>
cudaError_t launch_plan(const Arguments<T>& args, const Plan& plan, Layout layout, void* workspace, cudaStream_t stream,
                        std::integer_sequence<int, rules...>) {
  cudaError_t error = cudaErrorInvalidValue;
  auto launch_if = [&](auto index) {
    constexpr int rule = decltype(index)::value;
    if (plan.rule == rule) error = launch_rule<Op, T, Form, rule>(args, plan, layout, workspace, stream);
  };
  (launch_if(std::integral_constant<int, rules>()), ...);
  return error;
}

template <template <class> class Op, class T, class Form>
cudaError_t launch_form(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  Device device;
  if (auto e = device.read()) return e;
  CallFacts call{};
  call.gpu = gpu_of(device.major), call.processors = device.processors;
  call.rows = args.rows, call.n = args.n, call.vector = args.vector;
  call.first_aligned = reinterpret_cast<uintptr_t>(args.a) % 16 == 0;
  call.workspace = bytes, call.state = sizeof(typename Op<T>::Part), call.packet = sizeof(Packet);
  const int64_t row_bytes = args.n * sizeof(T);
  call.packs = (row_bytes + 15) / 16;
  Layout layout = args.layout();
  if (layout == Layout::halves && !serves_halves(kKernel<Op<T>, T, Form>, call.packs)) layout = Layout::any;
  call.unaligned = layout == Layout::any;
  // A row that may begin anywhere in its first pack takes one pack more.
  if (call.unaligned && (row_bytes % 16 != 0 || !call.first_aligned)) call.packs++;
  // Where the device has no room for a cluster of that size, or for all blocks at once, the next row of the table
  // that fits is taken.
  for (int first = 0;;) {
    const Plan plan = make_plan(kKernel<Op<T>, T, Form>, call, first);
    const cudaError_t error = launch_plan<Op, T, Form>(args, plan, layout, workspace, stream,
                                                       std::make_integer_sequence<int, kRuleCount>());
    if (!is_refused(error)) return error;
    first = plan.rule + 1;
  }
}

// The calls with extras. A form is compiled only for operations that may have it.
template <template <class> class Op, class T>
cudaError_t run_with_extras(const Arguments<T>& args, void* workspace, int64_t bytes, cudaStream_t stream) {
  const Extras& extras = args.extras;
  if constexpr (Op<T>::a_is_scores && Op<T>::operands == 1 && !Op<T>::sums)
    if (extras.bias.data) return launch_form<Op, T, WithExtras<T, true, false>>(args, workspace, bytes, stream);
  if constexpr (Op<T>::labelled)
    if (args.cap > 0) return launch_form<Op, T, WithExtras<T, false, true>>(args, workspace, bytes, stream);
  return launch_form<Op, T, WithExtras<T, false, false>>(args, workspace, bytes, stream);
}

// See rows.cuh.
template <template <class> class Op, class T>
cudaError_t run(const Arguments<T>& args, const Call&, void* workspace, int64_t bytes, cudaStream_t stream) {
  if (bytes < int64_t(sizeof(unsigned long long))) workspace = nullptr;  // there is no room for a counter
  if constexpr (!Op<T>::sums)
    if (args.inner > 1) return launch_columns<Op>(args, workspace, stream);
  const Extras& extras = args.extras;
  if (extras.bias.data || args.cap > 0 || extras.scale.data || extras.limit.data || extras.where.data || args.masked ||
      args.result != ResultType::same)
    return run_with_extras<Op>(args, workspace, bytes, stream);
  return launch_form<Op, T, Plain>(args, workspace, bytes, stream);
}

}  // namespace jaxsoft::cuda
