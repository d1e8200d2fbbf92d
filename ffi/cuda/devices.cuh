// What is asked of each device, or set on it, only once: how many clusters of a kernel run at once, its attributes.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace jaxsoft::cuda {

// Numbers, none of them negative, of `count` kinds for each device.
template <int count = 1>
class Devices {
  static constexpr int devices = 32;  // the others are asked each time
  std::atomic<int> known_[devices][count] = {};  // 1 more

 public:
  // `ask(found)` finds one, or fails.
  template <class Ask>
  cudaError_t once(int kind, int* found, Ask ask) {
    int device = 0;
    if (auto e = cudaGetDevice(&device)) return e;
    std::atomic<int>* known = device < devices ? &known_[device][kind] : nullptr;
    *found = known ? known->load(std::memory_order_relaxed) - 1 : -1;
    if (*found >= 0) return cudaSuccess;
    if (auto e = ask(found)) return e;
    if (known) known->store(*found + 1, std::memory_order_relaxed);
    return cudaSuccess;
  }
  // For what finds nothing.
  template <class Set>
  cudaError_t once(Set set) {
    int nothing = 0;
    return once(0, &nothing, [&](int* found) { return *found = 0, set(); });
  }
};

}  // namespace jaxsoft::cuda
