// A block's buffer of keys in shared memory: how keys are put there, cut to about the k largest, and ranked.
#pragma once

#include "keys.cuh"
#include "tuning.h"

namespace jaxsoft::cuda {

// What the block's threads share beside the keys.
struct Gathered {
  int count;  // of keys in the buffer, and of those for which there was no room
  Key least;  // the last cut has left the keys from this one on; 0 before the first
};

// The most candidates with which a search for the k largest may end.
__device__ inline int enough_for(int k) { return k + max(k / TopKCode::spare_part, TopKCode::least_spare); }

// A place at the end of the buffer for each of the warp's threads that are here.
__device__ inline int place_for_key(Gathered& gathered) {
  const unsigned here = __activemask(), lane = threadIdx.x % 32;
  const int leader = __ffs(here) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(&gathered.count, __popc(here));
  return __shfl_sync(here, first, leader) + __popc(here & ((1u << lane) - 1));
}

// Counts the keys that are at least this one, by a warp.
__device__ inline int number_from(Key least, const Key* keys, int count) {
  int number = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) number += keys[i] >= least;
  return __reduce_add_sync(0xffffffffu, number);
}

// Moves the keys that are at least this one to the front, in the same order, by a warp. Returns their number.
__device__ inline int keep_from(Key least, Key* keys, int count) {
  const int lane = threadIdx.x % 32;
  int kept = 0;
  for (int start = 0; start < count; start += 32) {
    const Key key = start + lane < count ? keys[start + lane] : 0;
    const bool keeps = key >= least && key > 0;
    const unsigned all = __ballot_sync(0xffffffffu, keeps);
    __syncwarp();
    if (keeps) keys[kept + __popc(all & ((1u << lane) - 1))] = key;
    kept += __popc(all);
  }
  __syncwarp();
  return kept;
}

// Calls use(rank, key) once for each key in the buffer. All threads call it, and see the buffer.
template <class Use>
__device__ void for_ranked(const Key* keys, int count, Use use) {
  int shift = 5;  // 2^shift lanes share a key
  while (shift > 0 && count << shift > static_cast<int>(blockDim.x)) shift--;
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  for (int first = threadIdx.x / 32 * 32 >> shift; first < count; first += blockDim.x >> shift) {
    const int i = first + (threadIdx.x % 32 >> shift);
    const Key key = i < count ? keys[i] : 0;
    int rank = 0;
    for (int j = lane; j < count; j += lanes) rank += keys[j] > key;
    for (int mask = lanes / 2; mask > 0; mask /= 2) rank += __shfl_xor_sync(0xffffffffu, rank, mask);
    if (i < count && lane == 0) use(rank, key);
  }
}

// Finds, by bisection between `low` and `high`, the greatest order from which on there are at least k elements; or ends
// sooner, with one from which on there are at most `enough`. `number(order)` counts the elements from an order on, for
// all threads that call this. `found` is their number from `low` on, and becomes that from the result on.
template <class T, class Number>
__device__ uint32_t greatest_order(uint32_t low, uint32_t high, int k, int enough, int& found, Number number) {
  low >>= kFree<T>, high >>= kFree<T>;
  while (low < high && found > enough) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int from = number(middle << kFree<T>);
    if (from >= k) low = middle, found = from;
    else high = middle - 1;
  }
  return low << kFree<T>;
}

// Finds a key of the buffer from which on there are at least k keys and not many more, by one warp. There are k keys
// at least, of orders from `low` on, and of indices below n.
template <class T>
__device__ Key least_of_largest(const Key* keys, int count, int k, uint32_t low, uint32_t n) {
  uint32_t high = 0;  // the greatest order
  for (int i = threadIdx.x % 32; i < count; i += 32) high = max(high, order_in(keys[i]));
  high = __reduce_max_sync(0xffffffffu, high);
  int found = count;
  auto number = [&](Key least) { return number_from(least, keys, count); };
  const uint32_t order =
      greatest_order<T>(low, high, k, enough_for(k), found, [&](uint32_t order) { return number(Key(order) << 32); });
  if (found <= enough_for(k)) return Key(order) << 32;
  uint32_t first = 0, last = n - 1;  // of the elements that are equal to the k-th, those of the lowest indices
  while (first < last && found > enough_for(k)) {
    const uint32_t middle = first + (last - first) / 2;
    const int from = number(key_of(order, middle));
    if (from >= k) last = middle, found = from;
    else first = middle + 1;
  }
  return key_of(order, last);
}

// Cuts the buffer to the k greatest keys and not many more, in any order: those from gathered.least on. All threads
// call it, after a barrier. One warp searches, as each of its lanes has few keys.
template <class T>
__device__ void cut(Gathered& gathered, Key* keys, int count, int k, uint32_t low, uint32_t n) {
  if (threadIdx.x < 32) {
    const Key least = least_of_largest<T>(keys, count, k, low, n);
    if (threadIdx.x == 0) gathered.least = least;
  }
  __syncthreads();
  const Key least = gathered.least;
  if (threadIdx.x == 0) gathered.count = 0;
  for (int start = 0; start < count; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const Key key = i < count ? keys[i] : 0;
    __syncthreads();  // all have read what may be written over
    if (key >= least && i < count) keys[place_for_key(gathered)] = key;
  }
  __syncthreads();
}

}  // namespace jaxsoft::cuda
