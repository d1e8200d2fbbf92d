// The two kernels of top-k: one that reads rows or parts of rows, and one that merges the parts of a row.
#pragma once

#include "../top_k.cuh"
#include "gather.cuh"

namespace jaxsoft::cuda {

// The last warp of a block merges the states while the others put keys in order.
__device__ inline bool in_last_warp() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }

// Writes a row's results from the keys in the buffer, of which all threads see all, and the states that the lanes of
// the last warp have.
template <class T>
__device__ void write_largest(const Arguments<T>& args, const Largest<T>& to, int64_t index,
                              typename StateOf<T>::Part state, int count, const Key* keys) {
  const T* row = args.a + index * args.n;
  T* values = to.values + index * to.k;
  int32_t* indices = to.indices + index * to.k;
  if (in_last_warp()) {
    state = reduce_lanes<T>(state, 32);
    StateOf<T>::finish(state, args, index, threadIdx.x % 32 == 0);
  }
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank >= to.k) return;
    const float value = of_order(order_in(key));
    values[rank] = value == 0 ? row[index_in(key)] : narrow<T>(value);  // a zero's sign is not in its key
    indices[rank] = static_cast<int32_t>(index_in(key));
  });
  __syncthreads();  // what has been written may be written over
  if (in_last_warp() && (!isfinite(state.m) || isnan(state.s())))  // the softmax has no value
    for (int i = threadIdx.x % 32; i < to.k; i += 32) values[i] = row[i], indices[i] = i;
}

// Writes the keys and the state of a part of a row to the workspace. The lanes of the last warp have the states.
template <class T>
__device__ void write_part(typename StateOf<T>::Part state, int count, const Key* keys, int k, Key* keys_of_parts,
                           typename StateOf<T>::Part* states) {
  if (in_last_warp()) {
    state = reduce_lanes<T>(state, 32);
    if (threadIdx.x % 32 == 0) states[blockIdx.x] = state;
  }
  keys_of_parts += int64_t(blockIdx.x) * k;
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank < k) keys_of_parts[rank] = key;
  });
  for (int i = count + threadIdx.x; i < k; i += blockDim.x) keys_of_parts[i] = 0;
}

// Writes the results of rows that are not split, and to the workspace the keys and states of parts of others.
template <class T>
__global__ void __launch_bounds__(TopKCode::threads, TopKCode::blocks)
    top_k(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, int room,
          Key* keys_of_parts, typename StateOf<T>::Part* states, Split split) {
  using State = typename StateOf<T>::Part;
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  __shared__ State warps[TopKCode::threads / 32];
  let_next_kernel_start();
  const int64_t index = blockIdx.x / split.parts;
  const auto row = part_of_row<StateOf, T, Plain>(args, blockIdx.x, split);
  const auto begin = static_cast<uint32_t>(row.a - (args.a + index * args.n));
  const int lane = threadIdx.x % 32;
  const int ranked = split.parts == 1 ? TopKCode::ranked_of_row : TopKCode::ranked_of_part;
  const Gatherer<T> gatherer{row, row.window, begin, static_cast<uint32_t>(args.n), to.k, room, gathered, keys};
  const auto of_warp = reduce_lanes<T>(gatherer.gather(ranked), 32);
  if (lane == 0) warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  State state;
  if (in_last_warp() && lane < blockDim.x / 32) state = warps[lane];
  if (split.parts == 1) return write_largest(args, to, index, state, gathered.count, keys);
  write_part<T>(state, gathered.count, keys, to.k, keys_of_parts, states);
}

// Finds, by a warp, an order from which on there are at least k keys of all parts. The keys of a part are in descending
// order. The first k / parts keys of every part, rounded up, are at least k together, so the least order among them is
// one answer. That of the k-th key of any part is another. The greatest of these orders is returned.
__device__ inline uint32_t order_of_parts(const Key* keys_of_parts, unsigned parts, int k) {
  const int of_each = (k + parts - 1) / parts;
  uint32_t low = 1, least = ~0u;
  for (unsigned part = threadIdx.x % 32; part < parts; part += 32) {
    least = min(least, order_in(keys_of_parts[part * k + of_each - 1]));
    low = max(low, order_in(keys_of_parts[part * k + k - 1]));
  }
  return max(__reduce_max_sync(0xffffffffu, low), __reduce_min_sync(0xffffffffu, least));
}

// Merges the parts of a row, by a block.
template <class T>
__global__ void __launch_bounds__(TopKCode::merge_threads)
    top_k_merge(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to,
                const Key* keys_of_parts, const typename StateOf<T>::Part* states, unsigned parts) {
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  const int64_t index = blockIdx.x;
  const int k = to.k, count = static_cast<int>(parts) * k, lane = threadIdx.x % 32;
  keys_of_parts += index * count, states += index * parts;
  if (threadIdx.x == 0) gathered.count = 0;
  __syncthreads();
  wait_for_last_kernel();
  int i = threadIdx.x;
  Key key = i < count ? keys_of_parts[i] : 0;
  typename StateOf<T>::Part state;
  if (in_last_warp())
    for (unsigned part = lane; part < parts; part += 32) state = combine<T>(state, states[part]);

  uint32_t low = 1;  // every key's order is at least 1
  if (count > TopKCode::ranked_of_part) low = order_of_parts(keys_of_parts, parts, k);
  while (i < count) {
    if (order_in(key) >= low) keys[place_for_key(gathered)] = key;
    i += blockDim.x;
    if (i < count) key = keys_of_parts[i];
  }
  __syncthreads();
  const int left = gathered.count;
  if (left > max(enough_for(k), TopKCode::ranked_of_part)) cut<T>(gathered, keys, left, k, low, args.n);
  write_largest(args, to, index, state, gathered.count, keys);
}

}  // namespace jaxsoft::cuda
