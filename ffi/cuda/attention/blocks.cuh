// Divides sequences with segments into blocks, so that few blocks have elements of two segments: of packed documents
// each then has blocks of its own, as if it were a sequence by itself.
#pragma once

#include <cuda_runtime.h>

#include "../hopper.cuh"
#include "blocks.h"
#include "limits.cuh"

namespace jaxsoft::cuda {

// Numbers of segments by the element of the batch and position: row b begins at data + b * step.
struct Segments {
  const int32_t* data = nullptr;  // null if there are none
  int64_t step = 0;
  int count = 0;
  __device__ int number(int batch, int position) const { return data[batch * step + min(position, count - 1)]; }
};

// Where the blocks of each sequence begin, ascending: (B, begin_numbers(most)). Where there are fewer than `most`, the
// last ones are empty, and begin at the end, as one after the last does. Then comes how many are not empty, and whether
// each has elements of one segment only.
struct BlockBegins {
  int* data = nullptr;
  int size = 0;  // elements of a block, at most
  int most = 0;
  __device__ int* of(int batch) const { return data + batch * begin_numbers(most); }
  __device__ int& count(int batch) const { return of(batch)[most + 1]; }
  __device__ int& of_one_segment(int batch) const { return of(batch)[most + 2]; }
  __device__ ElementRange block(int batch, int number) const { return {of(batch)[number], of(batch)[number + 1]}; }
};

// Combines the numbers of all threads of a block before each; for the last thread also with its own, in *all, if that
// is given. `carry` has room for a number of each warp. All threads of the block call it.
template <class Combine>
__device__ int combine_before(int own, int identity, Combine combine, int* carry, int* all = nullptr) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  auto up_to = [&](int number) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, number, step);
      if (lane >= step) number = combine(before, number);
    }
    return number;
  };
  const int of_warp = up_to(own), before = __shfl_up_sync(0xffffffffu, of_warp, 1);
  __syncthreads();  // the last call's numbers have been read
  if (lane == 31) carry[warp] = of_warp;
  __syncthreads();
  const int of_warps = up_to(lane < warps ? carry[lane] : identity);
  if (all) *all = __shfl_sync(0xffffffffu, of_warps, warps - 1);
  const int warps_before = __shfl_sync(0xffffffffu, of_warps, max(warp - 1, 0));
  return combine(warp > 0 ? warps_before : identity, lane > 0 ? before : identity);
}

// Blocks that begin at multiples of their size. All threads of a block call it.
__device__ inline void begin_at_multiples(const BlockBegins& begins, int batch, int count) {
  for (int i = threadIdx.x; i <= begins.most; i += blockDim.x) begins.of(batch)[i] = min(i * begins.size, count);
}

// If they are no more than `most`, and there are few enough pieces to be held here, each piece of a segment has blocks
// of its own, which begin where it does. Else blocks begin at multiples of their size. A block of threads for each
// sequence, and a row of them for each of two divisions. It also clears a counter, if there is one.
template <int threads>
__global__ void __launch_bounds__(threads, 1)
    find_blocks(const Segments first, const BlockBegins of_first, const Segments second, const BlockBegins of_second,
                unsigned long long* counter) {
  let_next_kernel_start();
  const Segments segments = blockIdx.y == 0 ? first : second;
  const BlockBegins begins = blockIdx.y == 0 ? of_first : of_second;
  constexpr int most_pieces = 4096;
  __shared__ int carry[32], pieces[most_pieces + 1], blocks_before[most_pieces];
  auto add = [](int a, int b) { return a + b; };
  auto blocks_of = [&](int piece) { return (pieces[piece + 1] - pieces[piece] + begins.size - 1) / begins.size; };
  const int32_t* const numbers = segments.data + blockIdx.x * segments.step;
  const int count = segments.count, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Each warp goes over a part of the sequence, a lane over four elements at a time.
  constexpr int of_lane = 4, of_step = 32 * of_lane;
  const int share = (count + threads * of_lane - 1) / (threads * of_lane) * of_step;
  const int begin = warp * share, end = min(begin + share, count);
  // Calls visit(i, borders): bit k of `borders` says whether element i + k begins a piece.
  auto for_elements = [&](auto visit) {
#pragma unroll 4
    for (int step = begin; step < end; step += of_step) {
      const int i = step + lane * of_lane;
      int own[of_lane + 1];  // that before, and four
#pragma unroll
      for (int k = 0; k <= of_lane; k++) own[k] = numbers[min(max(i + k - 1, 0), count - 1)];
      unsigned borders = i == 0;
#pragma unroll
      for (int k = 0; k < of_lane; k++) borders |= unsigned(own[k + 1] != own[k] && i + k < end) << k;
      visit(i, borders);
    }
  };
  int own = 0, of_pieces, of_blocks = 0;
  for_elements([&](int, unsigned borders) { own += __popc(borders); });
  // As lanes have elements of all steps, what a lane has before it is known for whole warps only.
  own = __reduce_add_sync(0xffffffffu, own);
  int next = combine_before(lane == 0 ? own : 0, 0, add, carry, &of_pieces);
  next = __shfl_sync(0xffffffffu, next, 0);
  bool by_pieces = of_pieces <= min(most_pieces, begins.most);
  if (by_pieces) {
    for_elements([&](int i, unsigned borders) {
      const unsigned lanes = __ballot_sync(0xffffffffu, borders != 0);
      // Few have any. They are taken in one after the other.
      for (unsigned left = lanes; left; left &= left - 1) {
        const int at = __ffs(left) - 1;
        const unsigned of_one = __shfl_sync(0xffffffffu, borders, at);
        if (lane == at)
          for (unsigned bits = of_one, n = next; bits; bits &= bits - 1) pieces[n++] = i + __ffs(bits) - 1;
        next += __popc(of_one);
      }
    });
    if (threadIdx.x == 0) pieces[of_pieces] = count;
    __syncthreads();
    const int of_thread = (of_pieces + threads - 1) / threads;
    const int from = min(static_cast<int>(threadIdx.x) * of_thread, of_pieces), to = min(from + of_thread, of_pieces);
    int blocks = 0;
    for (int piece = from; piece < to; piece++) blocks += blocks_of(piece);
    int before = combine_before(blocks, 0, add, carry, &of_blocks);
    for (int piece = from; piece < to; piece++) blocks_before[piece] = before, before += blocks_of(piece);
    __syncthreads();
    by_pieces = of_blocks <= begins.most;
  }
  if (by_pieces) {
    int* const to = begins.of(blockIdx.x);
    for (int piece = warp; piece < of_pieces; piece += threads / 32)
      for (int k = lane; k < blocks_of(piece); k += 32) to[blocks_before[piece] + k] = pieces[piece] + k * begins.size;
    for (int i = of_blocks + threadIdx.x; i <= begins.most; i += threads) to[i] = count;
  } else {
    of_blocks = static_cast<int>(full_blocks(count, begins.size));
    begin_at_multiples(begins, blockIdx.x, count);
  }
  if (threadIdx.x != 0) return;
  begins.count(blockIdx.x) = of_blocks, begins.of_one_segment(blockIdx.x) = by_pieces;
  if (counter && blockIdx.x + blockIdx.y == 0) *counter = 0;
}

inline cudaError_t launch_find_blocks(int batch, const Segments& first, const BlockBegins& of_first,
                                      const Segments& second, const BlockBegins& of_second,
                                      unsigned long long* counter, cudaStream_t stream) {
  constexpr int threads = 1024;
  find_blocks<threads><<<dim3(batch, 2), threads, 0, stream>>>(first, of_first, second, of_second, counter);
  return cudaGetLastError();
}

}  // namespace jaxsoft::cuda
