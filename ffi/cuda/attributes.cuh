// Attributes with which kernels are launched.
#pragma once

#include <cuda_runtime.h>

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

}  // namespace jaxsoft::cuda
