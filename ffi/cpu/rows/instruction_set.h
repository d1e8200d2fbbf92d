// The choice of the kernels that were compiled for the machine's instruction set.
#pragma once

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace jaxsoft::cpu {

// The kernels of the widest instruction set that the machine has. JAXSOFT_CPU_ISA names a narrower one, for tests.
inline const KernelTable& choose_kernels() {
#if defined(JAXSOFT_X86)
  const char* named = std::getenv("JAXSOFT_CPU_ISA");
  auto may_be = [&](const char* isa) { return named == nullptr || std::strcmp(named, isa) == 0; };
  if (may_be("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return kernels_avx512;
  if (may_be("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return kernels_avx2;
#endif
  return kernels_baseline;
}

inline const KernelTable& kernel_table() {
  static const KernelTable& chosen = choose_kernels();
  return chosen;
}

}  // namespace jaxsoft::cpu
