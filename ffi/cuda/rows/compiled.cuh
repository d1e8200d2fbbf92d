// What the plan's table knows of a kernel, from the kernel's template arguments; and which kernels have code for the
// GPU that is being compiled for.
#pragma once

#include "table.cuh"

namespace jaxsoft::cuda {

template <class Op>
constexpr Kinds kind_of() {
  if (!Op::reduces) return kElementwise;
  if (!Op::writes) return Op::sums ? kSums : kState;
  return Op::reads_a_to_reduce && !Op::separates_maximum ? kSoftmax : kLogSoftmax;
}

template <class Op, class T, class Form>
constexpr KernelFacts kKernel = {sizeof(T), Op::operands == 1 && !Form::bias ? 1u : 2u, kind_of<Op>(),
                            Form::bias     ? kBiased
                            : Form::capped ? kCapped
                            : Form::extras ? kExtrasAlone
                                           : kPlain};

// The GPU that is being compiled for, and none while host code is compiled.
#ifdef __CUDA_ARCH__
constexpr unsigned kThisGpu = gpu_of(__CUDA_ARCH__ / 100);
#else
constexpr unsigned kThisGpu = 0;
#endif

// Whether the table chooses a kernel on this GPU. Kernels of strategies that only some GPUs have are empty on the
// others.
template <Strategy strategy, class Op, class T, class Form, int packs_a_thread = 0>
constexpr bool kChosenHere = chosen(strategy, packs_a_thread, kKernel<Op, T, Form>, kThisGpu);

}  // namespace jaxsoft::cuda
