// One read of a row, or of a part of one: its state, and in the buffer the keys of its k largest elements.
#pragma once

#include "../../hopper.cuh"
#include "../operations/logsumexp.cuh"
#include "../parts.cuh"
#include "buffer.cuh"

namespace jaxsoft::cuda {

template <class T>
using TilePacks = Pack<T>[TopKCode::tile_packs];

// A block's way through its elements, tile by tile.
template <class T>
struct Gatherer {
  static constexpr int size = Pack<T>::size, tile_packs = TopKCode::tile_packs;
  const Row<StateOf, T, Plain>& row;
  const Window<T>& window;
  const uint32_t begin, n;  // the row's element that is the first here, and the length of the row
  const int k, room;        // `room`: keys that the buffer can hold
  Gathered& gathered;
  Key* const keys;

  // Loads the thread's packs of a tile; `first` is the thread's first pack.
  __device__ void fetch(TilePacks<T>& to, int first) const {
    const int step = blockDim.x;
    const T nothing = narrow<T>(-infinity<float>());
#pragma unroll
    for (int j = 0; j < tile_packs; j++)
      if (first + j * step < window.packs) to[j] = window.fetch(row.a, first + j * step);
      else to[j].fill(nothing);
  }
  // Turns what lies past the ends of the row into -inf.
  __device__ void trim(TilePacks<T>& packs, int first) const {
    const int step = blockDim.x;
    const T nothing = narrow<T>(-infinity<float>());
#pragma unroll
    for (int j = 0; j < tile_packs; j++)
      if (first + j * step < window.packs) window.trim(packs[j], first + j * step, nothing);
  }

  // About the order of the k-th largest of the threads' maxima in the first tile, so that hardly more than k elements
  // reach it. `top` is the thread's maximum. At least k threads have elements.
  __device__ uint32_t order_of_first_tile(float top) const {
    const int step = blockDim.x;
    const bool has = threadIdx.x < window.packs;
    int found = min(step, window.packs);
    const uint32_t own = order_of(top), high = __reduce_max_sync(0xffffffffu, own);
    // If k warps have elements, the least of the warps' maxima is nearer.
    const uint32_t least = found >= 32 * k ? high : __reduce_min_sync(0xffffffffu, has ? own : ~0u);
    if (threadIdx.x % 32 == 0) atomicMin(&gathered.low, least), atomicMax(&gathered.high, high);
    __syncthreads();
    return greatest_order<T>(gathered.low, gathered.high, k, found, [&](uint32_t order) {
      return __syncthreads_count(has && own >= order);
    });
  }

  // Marks the thread's elements that reach `bar`, with a bit each. Those past the row's ends may reach it, too.
  __device__ static uint32_t reaching(const TilePacks<T>& packs, float bar) {
    uint32_t marks = 0;
#pragma unroll
    for (int j = 0; j < tile_packs * size; j++)
      if (packs[j / size].get(j % size) >= bar) marks |= 1u << j;
    return marks;
  }

  // Puts the keys of the thread's elements that are marked in `wanted` into the buffer. Returns those for which there
  // was no room; `crowded` becomes true where there are so many keys, `limit`, that they should be cut.
  __device__ uint32_t put(uint32_t wanted, int first, int limit, bool& crowded) const {
    const int step = blockDim.x;
    uint32_t left = 0;
    while (wanted) {  // from the last on: if the row ascends, others are not wanted any more
      const int j = 31 - __clz(wanted), at = (first + j / size * step) * size - window.head + j % size;
      wanted ^= 1u << j;
      if (static_cast<uint32_t>(at) >= static_cast<uint32_t>(window.n)) continue;
      const Key key = key_of(order_of(widen(row.a[at])), begin + at);
      if (key < gathered.least) continue;
      const int place = place_for_key(gathered);
      if (place < room) keys[place] = key;
      else left |= 1u << j;
      crowded |= place >= limit;
    }
    return left;
  }

  // Puts what a tile has of the k largest elements into the buffer, and cuts that when it must. `low` is the least
  // order of all keys there; `more`: whether other tiles follow.
  __device__ void put_tile(const TilePacks<T>& packs, float top, int first, bool more, uint32_t& low) const {
    const int limit = min(room, max(2 * k, TopKCode::gathered));
    // What comes after a cut loses to the k keys that there are if it is equal to the last of those.
    float bar = of_order(low + (static_cast<uint32_t>(gathered.least) ? 1u << kFree<T> : 0));
    uint32_t left = ~0u;  // elements that have not been placed
    for (;;) {
      const uint32_t wanted = top >= bar ? left & reaching(packs, bar) : 0;
      bool crowded = false;
      left = put(wanted, first, limit, crowded);
      if (!__syncthreads_or(left != 0 || (more && crowded))) break;
      cut<T>(gathered, keys, min(gathered.count, room), k, low, n);
      low = order_in(gathered.least), bar = of_order(low);
    }
  }

  // Folds all elements, and leaves their k greatest keys in the buffer, with some others. Up to `ranked` keys are not
  // cut again, as they are few enough to be put in order. Returns the thread's state.
  __device__ Running<float> gather(int ranked) const {
    const int tile = tile_packs * blockDim.x;
    Pack<T> packs[tile_packs], next[tile_packs];
    fetch(packs, threadIdx.x);
    fetch(next, threadIdx.x + tile);
    if (threadIdx.x == 0) gathered = {0, ~0u, 0, 0};
    __syncthreads();

    Running<float> part;
    uint32_t low = order_of(-infinity<float>());
    for (int start = 0; start < window.packs; start += tile) {
      const int first = start + threadIdx.x;
      trim(packs, first);
      const float top = StateOf<T>::accumulate(part, packs, packs, row.form);
      if (start == 0 && window.packs >= k) low = order_of_first_tile(top);  // a block with k packs has k threads
      put_tile(packs, top, first, start + tile < window.packs, low);
#pragma unroll
      for (int j = 0; j < tile_packs; j++) packs[j] = next[j];
      fetch(next, first + 2 * tile);
    }
    const int count = gathered.count;
    if (count > max(enough_for(k), ranked)) cut<T>(gathered, keys, count, k, low, n);
    return part;
  }
};

}  // namespace jaxsoft::cuda
