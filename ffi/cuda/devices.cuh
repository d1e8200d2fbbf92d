// What the launches need to know of a device, numbers that are kept for each device, and settings that are made once.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace jaxsoft::cuda {

// The current device: its multiprocessors, and the major number of its compute capability.
struct Device {
  int processors = 0, major = 0;

  cudaError_t read() {
    int device = 0;
    if (auto e = cudaGetDevice(&device)) return e;
    if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
};

// Remembers `count` numbers for each device. None of them is negative.
template <int count = 1>
class Devices {
  static constexpr int devices = 32;  // the others are asked every time
  std::atomic<int> known_[devices][count] = {};  // the number plus 1; 0 where it is not known yet

 public:
  // Puts number `kind` of the current device into *found. `ask(found)` finds it, or returns an error.
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
  // Calls `set()`, which returns no number, once for each device.
  template <class Set>
  cudaError_t once(Set set) {
    int nothing = 0;
    return once(0, &nothing, [&](int* found) { return *found = 0, set(); });
  }
};

}  // namespace jaxsoft::cuda
