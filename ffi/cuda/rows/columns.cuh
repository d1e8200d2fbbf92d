// Row operations over an axis that is not the last. How they work is explained in columns/kernel.cuh.
//
//   columns/tuning.cuh    the sizes that decide, as data
//   columns/plan.cuh      the choice of a tile, on the host; columns/launch.cuh, the launch
//   columns/tile.cuh      a tile, and its arrays in shared memory
//   columns/place.cuh     which of a tile's elements and columns a thread has
//   columns/slots.cuh     a thread's part of shared memory; columns/access.cuh, what it loads and stores at once
//   columns/reduce.cuh, exchange.cuh, write.cuh    the three phases of a tile
//   columns/kernel.cuh    all of it together
#pragma once

#include "columns/launch.cuh"

namespace jaxsoft::cuda {

// `workspace` has room for the counter, or is null. Everything is ordered by `stream`; nothing is allocated or waited
// for.
template <template <class> class Op, class T>
cudaError_t launch_columns(const Arguments<T>& args, void* workspace, cudaStream_t stream) {
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  constexpr int size = Pack<T>::size, least_straddled = 32;  // the fewest columns for which pairs are worth their cost
  if (aligned(args.a) && aligned(args.b) && aligned(args.out)) {
    if (args.inner % size == 0) return launch_tiles<Op, T, size>(args, workspace, stream);
    if constexpr (size > 2)
      if (args.inner % 2 == 0) return launch_tiles<Op, T, 2>(args, workspace, stream);
    if constexpr (sizeof(T) == 2)
      if (args.inner >= least_straddled) return launch_tiles<Op, T, 2, true>(args, workspace, stream);
  }
  return launch_tiles<Op, T, 1>(args, workspace, stream);
}

}  // namespace jaxsoft::cuda
