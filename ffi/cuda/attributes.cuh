// Attributes with which kernels are launched, and a launch with the most frequent of them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace jaxsoft::cuda {

// The blocks of the launch form clusters of this size.
inline cudaLaunchAttribute in_clusters_of(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}

// All blocks of the launch run at the same time, and may wait for each other.
inline cudaLaunchAttribute all_at_once() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

// The launch may start while the one before still runs (from Hopper on).
inline cudaLaunchAttribute overlapping() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel that may overlap the launch before, if it `overlaps`.
template <class... Taken, class... Given>
cudaError_t launch_kernel(void (*kernel)(Taken...), dim3 blocks, dim3 threads, size_t shared_bytes,
                          cudaStream_t stream, bool overlaps, const Given&... given) {
  cudaLaunchAttribute attribute = overlapping();
  const cudaLaunchConfig_t config{blocks, threads, shared_bytes, stream, &attribute, overlaps};
  return cudaLaunchKernelEx(&config, kernel, given...);
}

}  // namespace jaxsoft::cuda
