// Parts of rows, as blocks have them: which part a block has, and how the parts' states are merged.
#pragma once

#include <algorithm>

#include "plan.cuh"
#include "reduce.cuh"
#include "row.cuh"

namespace jaxsoft::cuda {

// The part of a row that a block has, if blocks take the parts of all rows in turn. `vector` as in a window.
template <class Part, class T>
__device__ Part part_of_row(const Arguments<T>& args, unsigned block, const Split& split, bool vector) {
  const int64_t row = block / split.parts;
  const int head = head_of(args.a + row * args.n, vector);
  auto element = [&](unsigned part) { return max(int64_t(0), min(part * split.packs * Pack<T>::size - head, args.n)); };
  const unsigned part = block % split.parts;
  return {args, row, element(part), element(part + 1)};
}

// Merges the states of all parts of a row. All threads of the block get the result.
template <template <class> class Op, class T>
__device__ typename Op<T>::Part merge(const typename Op<T>::Part* states, unsigned parts) {
  typename Op<T>::Part part;
  for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) part = combine<T>(part, states[i]);
  return reduce_threads<T>(part);
}

}  // namespace jaxsoft::cuda
