// What the launches need to know of a device, numbers that are kept for each device, and settings that are made once.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace jaxsoft::cuda {

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

// Whether a launch was refused as the device has no room for its cluster, or for all its blocks at once. Then another
// launch may be tried, and the error is cleared: else that one would be given it.
inline bool is_refused(cudaError_t error) {
  if (error != cudaErrorInvalidClusterSize && error != cudaErrorCooperativeLaunchTooLarge) return false;
  cudaGetLastError();
  return true;
}

// Lets a kernel have so many bytes of shared memory, which may be more than kernels have by default.
template <auto kernel, int bytes>
cudaError_t allow_shared_memory() {
  static_assert(bytes <= 227 * 1024);
  static Devices<> allowed;
  return allowed.once([] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); });
}

// A kernel of which only the attributes are asked for. They say what the library's kernels were compiled for.
template <int = 0>
__global__ void any_kernel() {}

// The current device, as far as the choice of a kernel depends on it.
struct Device {
  int ordinal = 0;
  int processors = 0;  // multiprocessors
  // The major number of the compute capability that the kernels were compiled for which run here. It is the device's,
  // or an older one's where the library has nothing newer for it than that one's PTX. Kernels lack what came later.
  int major = 0;

  cudaError_t read() {
    static Devices<2> known;
    if (auto e = cudaGetDevice(&ordinal)) return e;
    if (auto e = known.once(0, &processors, [&](int* found) {
          return cudaDeviceGetAttribute(found, cudaDevAttrMultiProcessorCount, ordinal);
        }))
      return e;
    return known.once(1, &major, [](int* found) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, any_kernel<>);
      *found = attributes.ptxVersion / 10;
      return error;
    });
  }
};

// Finds how many clusters of a launch can run at the same time. There are none where the device has no room for one, as
// a part of a GPU (MIG) may not have.
template <class Kernel>
cudaError_t find_clusters(Kernel kernel, const cudaLaunchConfig_t& config, int* found) {
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
  if (cudaOccupancyMaxActiveClusters(found, kernel, &config)) {
    cudaGetLastError();  // else the next launch would be given this error
    *found = 0;
  }
  return cudaSuccess;
}

}  // namespace jaxsoft::cuda
