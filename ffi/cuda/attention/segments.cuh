// Segments: a query and a key count for each other only where their numbers of a segment are equal. Here is which keys
// may count for a block of queries, or the other way round, so that kernels skip the others, and need not look at the
// numbers where all are equal. Nothing is assumed about the order of segments; where a segment is one piece, as of
// documents that are packed one after the other, nothing else is visited.
#pragma once

#include "../attributes.cuh"
#include "blocks.cuh"

namespace jaxsoft::cuda {

// What counts for a block of elements.
struct SegmentRange {
  ElementRange own;  // the block's elements
  ElementRange all;  // holds all whose segments the block has, and perhaps others
  // If the block has no more than two segments, one after the other, and what is in either segment is one piece: these
  // pieces, of the block's elements before `split` and of those from there on. Else `known` is false.
  bool known;
  int split;
  ElementRange first, second;
  // Whether the block has one segment, in one piece.
  __device__ bool of_one() const { return known && split >= own.end; }
  // Those that count for each element of the block, as far as that is known.
  __device__ ElementRange inner() const {
    if (!known) return {0, 0};
    return {max(first.begin, second.begin), min(first.end, second.end)};
  }
  __device__ ElementRange of(int element) const { return element < split ? first : second; }
};

static_assert(sizeof(SegmentRange) == 40);  // as the workspaces are divided

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

// Where the elements are that a thread has found, in ascending order.
struct FoundByThread {
  int first = INT32_MAX, last = -1, count = 0;
  __device__ void add(const ElementRange& range) {
    first = min(first, range.begin), last = range.end - 1, count += range.end - range.begin;
  }
};
// The same for a block of threads.
class Found {
 public:
  __device__ void clear() { first_ = INT32_MAX, last_ = -1, count_ = 0; }
  // What a thread has found, which all threads call.
  __device__ void add(const FoundByThread& found) {
    const int first = __reduce_min_sync(0xffffffffu, found.first), last = __reduce_max_sync(0xffffffffu, found.last);
    const int count = __reduce_add_sync(0xffffffffu, found.count);
    if (threadIdx.x % 32 != 0 || count == 0) return;
    atomicMin(&first_, first), atomicMax(&last_, last), atomicAdd(&count_, count);
  }
  __device__ ElementRange range() const { return count_ > 0 ? ElementRange{first_, last_ + 1} : ElementRange{0, 0}; }
  __device__ bool in_one_piece() const { return count_ == 0 || count_ == last_ + 1 - first_; }

 private:
  int first_, last_, count_;
};

// A block of threads for each block of elements. It goes over all others: over their blocks, where each of these has
// elements of one segment only.
template <int threads>
__global__ void __launch_bounds__(threads)
    find_segment_ranges(const Segments own, const BlockBegins blocks, const Segments others,
                        const BlockBegins other_blocks, SegmentRange* ranges, int* most_found) {
  let_next_kernel_start();
  wait_for_last_kernel();  // which finds the blocks
  if (most_found && blockIdx.x == 0 && threadIdx.x < 32) {
    int most = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x / blocks.most; i += 32) most = max(most, blocks.count(i));
    *most_found = __reduce_max_sync(0xffffffffu, most);
  }
  const int64_t batch = blockIdx.x / blocks.most;
  const auto [begin, end] = blocks.block(batch, blockIdx.x % blocks.most);
  if (begin == end) {
    if (threadIdx.x == 0) ranges[blockIdx.x] = {{begin, end}, {0, 0}, true, end, {0, 0}, {0, 0}};
    return;
  }
  const int32_t* const numbers = own.data + batch * own.step;
  const int32_t* const other_numbers = others.data + batch * others.step;
  const int first_number = numbers[begin], last_number = numbers[end - 1];
  __shared__ SomeNumbers some;
  __shared__ Found all, of_first, of_last;
  __shared__ int split, more;
  some.clear();
  if (threadIdx.x == 0) all.clear(), of_first.clear(), of_last.clear(), split = end, more = 0;
  __syncthreads();
  for (int i = begin + threadIdx.x; i < end; i += threads) {
    some.add(numbers[i]);
    if (numbers[i] != first_number) atomicMin(&split, i);
  }
  __syncthreads();
  for (int i = max(begin, split) + threadIdx.x; i < end; i += threads)
    if (numbers[i] != last_number) more = 1;
  FoundByThread any, first, last;
  auto see = [&](int number, const ElementRange& where) {
    if (!some.may_have(number)) return;
    any.add(where);
    if (number == first_number) first.add(where);
    if (number == last_number) last.add(where);
  };
  if (other_blocks.of_one_segment(batch)) {
    for (int i = threadIdx.x; i < other_blocks.count(batch); i += threads) {
      const ElementRange other = other_blocks.block(batch, i);
      see(other_numbers[other.begin], other);
    }
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < others.count; i += threads) see(other_numbers[i], {i, i + 1});
  }
  all.add(any), of_first.add(first), of_last.add(last);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool known = !more && of_first.in_one_piece() && of_last.in_one_piece();
  const ElementRange first_range = of_first.range(), last_range = of_last.range();
  // Where few are known to count, none of those that seemed to do does.
  const bool of_one = known && split == end;
  ranges[blockIdx.x] = {{begin, end}, of_one ? first_range : all.range(), known, split, first_range, last_range};
}

// Finds the ranges of `others` for blocks of `own`: (B, most blocks); and if it is wanted, how many blocks that are not
// empty a sequence has at most. The launch before is that of find_blocks, for both.
inline cudaError_t launch_segment_ranges(int batch, const Segments& own, const BlockBegins& blocks,
                                         const Segments& others, const BlockBegins& other_blocks, SegmentRange* ranges,
                                         int* most_found, cudaStream_t stream) {
  constexpr int threads = 256;
  return launch_kernel(find_segment_ranges<threads>, blocks.most * batch, threads, 0, stream, true, own, blocks, others,
                       other_blocks, ranges, most_found);
}

}  // namespace jaxsoft::cuda
