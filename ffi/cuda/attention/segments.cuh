// Segments: a query and a key count for each other only where their numbers of a segment are equal. Here is which keys
// may count for a block of queries, or the other way round, so that kernels skip the others, and need not look at the
// numbers where all are equal. Nothing is assumed about the order of segments; where a segment is one piece, as of
// documents that are packed one after the other, nothing else is visited.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxsoft::cuda {

// Elements [begin, end) hold all whose segments a block has, and perhaps others. Of [inner_begin, inner_end) all have
// the one segment of all of the block, and no others have it; it is empty where that cannot be said.
struct SegmentRange {
  int begin, end, inner_begin, inner_end;
  __device__ bool has_inner() const { return inner_begin < inner_end; }
};

// Numbers of segments by the element of the batch and position: row b begins at data + b * step.
struct Segments {
  const int32_t* data = nullptr;  // null if there are none
  int64_t step = 0;
  int count = 0;
  __device__ int number(int batch, int position) const { return data[batch * step + min(position, count - 1)]; }
};

// Some numbers, as bits of their remainders: others may seem to be among them.
class SomeNumbers {
 public:
  static constexpr unsigned bits = 2048;
  __device__ void add(unsigned number) { atomicOr(words_ + number % bits / 32, 1u << number % 32); }
  __device__ bool may_have(unsigned number) const { return words_[number % bits / 32] >> number % 32 & 1; }
  __device__ void clear() {
    for (unsigned i = threadIdx.x; i < bits / 32; i += blockDim.x) words_[i] = 0;
  }

 private:
  uint32_t words_[bits / 32];
};

// Finds the ranges of `others` for `blocks` of `size` elements of `own`: (B, blocks). A block of threads each.
template <int threads = 256>
__global__ void __launch_bounds__(threads)
    find_segment_ranges(const Segments own, const Segments others, int blocks, int size, SegmentRange* ranges) {
  const int64_t batch = blockIdx.x / blocks;
  const int32_t* const numbers = own.data + batch * own.step;
  const int32_t* const other_numbers = others.data + batch * others.step;
  const int begin = blockIdx.x % blocks * size, end = min(begin + size, own.count);
  __shared__ SomeNumbers some;
  __shared__ int least, most, first, last, counted;
  some.clear();
  if (threadIdx.x == 0) least = INT32_MAX, most = INT32_MIN, first = INT32_MAX, last = -1, counted = 0;
  __syncthreads();
  for (int i = begin + threadIdx.x; i < end; i += threads) {
    some.add(numbers[i]);
    atomicMin(&least, numbers[i]), atomicMax(&most, numbers[i]);
  }
  __syncthreads();
  const int low = least, high = most;
  int own_first = INT32_MAX, own_last = -1, own_count = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < others.count; i += threads) {
    const int number = other_numbers[i];
    if (number < low || number > high || !some.may_have(number)) continue;
    own_first = min(own_first, i), own_last = i, own_count++;
  }
  own_first = __reduce_min_sync(0xffffffffu, own_first), own_last = __reduce_max_sync(0xffffffffu, own_last);
  own_count = __reduce_add_sync(0xffffffffu, own_count);
  if (threadIdx.x % 32 == 0) atomicMin(&first, own_first), atomicMax(&last, own_last), atomicAdd(&counted, own_count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  SegmentRange range{0, 0, 0, 0};
  if (counted > 0) range.begin = first, range.end = last + 1;
  if (low == high && counted == last + 1 - first) range.inner_begin = first, range.inner_end = last + 1;
  ranges[blockIdx.x] = range;
}

}  // namespace jaxsoft::cuda
