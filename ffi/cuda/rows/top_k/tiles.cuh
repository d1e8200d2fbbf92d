// A row, or a part of one, as tiles that warps take in turn. One read of them gives the state and the maxima of groups
// of elements, and with those a threshold that at least k elements reach, and hardly more. Only the groups that reach
// it are read again.
#pragma once

#include <climits>

#include "../../hopper.cuh"
#include "../operations/logsumexp.cuh"
#include "../parts.cuh"
#include "buffer.cuh"
#include "masks.cuh"

namespace jaxsoft::cuda {

template <class T>
using TilePacks = Pack<T>[TopKCode::tile_packs];

// The elements that the warps of a block, or one alone, go through. All rows begin at an element, so packs are aligned.
template <class T>
struct Elements {
  const T* a;
  Window<T> window;
  Plain form;
  uint32_t begin, n;  // the row's element that is the first here, and the length of the row
  int64_t index;      // of the row

  __device__ Elements(const Arguments<T>& args, int64_t row, int64_t from, int64_t to)
      : a(args.a + row * args.n + from), window(a, static_cast<int>(to - from), true), form(args, row, from, window),
        begin(static_cast<uint32_t>(from)), n(static_cast<uint32_t>(args.n)), index(row) {}
  __device__ Elements(const Arguments<T>& args, int64_t row) : Elements(args, row, 0, args.n) {}
};

// A warp's way through its tiles. Lanes take every 32nd pack of a tile.
template <class T>
struct Tiles {
  static constexpr int size = Pack<T>::size, count = TopKCode::tile_packs, length = TopKCode::warp_packs;
  const Elements<T>& from;
  const int warp, warps;  // this one, and how many take tiles in turn

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int step() const { return warps * length; }  // packs from a tile of the warp's to its next
  __device__ int first() const { return warp * length + lane(); }  // the lane's first pack
  // Whether the warp has a tile with the lane's pack `first`.
  __device__ bool has(int first) const { return first - lane() < from.window.packs; }

  // Loads the lane's packs of a tile.
  __device__ void fetch(TilePacks<T>& to, int first) const {
    const T nothing = narrow<T>(-infinity<float>());
#pragma unroll
    for (int j = 0; j < count; j++)
      if (first + j * 32 < from.window.packs) to[j] = from.window.fetch(from.a, first + j * 32);
      else to[j].fill(nothing);
  }
  // Turns what lies past the ends of the row into -inf.
  __device__ void trim(TilePacks<T>& packs, int first) const {
    if (first - lane() > 0 && first - lane() + length <= from.window.whole_end) return;
    const T nothing = narrow<T>(-infinity<float>());
#pragma unroll
    for (int j = 0; j < count; j++)
      if (first + j * 32 < from.window.packs) from.window.trim(packs[j], first + j * 32, nothing);
  }
  // Which element here a bit stands for, in the tile with the lane's pack `first`.
  __device__ int place(unsigned bit, int first) const {
    return (first + pack_of_bit<T>(bit) * 32) * size + place_of_bit<T>(bit) - from.window.head;
  }
  __device__ Key key_at(int place) const { return key_of(order_of(widen(from.a[place])), from.begin + place); }

  // Reads all tiles of the warp. What a lane has of `together` tiles is a group, whose maximum goes into `maxima`, 32
  // for each step. Returns the lane's state, with its maximum.
  __device__ Running<float> fold(float* maxima, int together) const {
    Running<float> part;
    TilePacks<T> packs, next;
    int at = first(), left = together;
    fetch(packs, at);
    fetch(next, at + step());
    maxima += lane();
    float top = -infinity<float>();
    for (; has(at); at += step()) {
      trim(packs, at);
      top = max(top, StateOf<T>::accumulate(part, packs, packs, from.form));
      *maxima = top;
      if (--left == 0) maxima += 32, left = together, top = -infinity<float>();
#pragma unroll
      for (int j = 0; j < count; j++) packs[j] = next[j];
      fetch(next, at + 2 * step());
    }
    return part;
  }
  static constexpr int group_elements = count * size;  // of a group that is one tile's
  // The number of steps in `maxima`.
  __device__ int groups(int together) const {
    const int tiles = max(from.window.packs - warp * length + step() - 1, 0) / step();
    return (tiles + together - 1) / together;
  }

  // Reads the groups again that reach the threshold, and calls use(key) for each element that does, by all lanes of the
  // warp together, of which those without an element have the key 0. Ends when `use` returns false. `found` has room
  // for `most` groups. Returns false, and calls nothing, if there are more.
  template <class Use>
  __device__ bool collect(float threshold, const float* maxima, int groups, int together, uint16_t* found, int most,
                          Use use) const {
    int reach = 0;
    for (int g = 0; g < groups; g++) {
      const bool reaches = maxima[g * 32 + lane()] >= threshold;
      const unsigned all = __ballot_sync(kAllLanes, reaches);
      const int place = reach + __popc(all & ((1u << lane()) - 1));
      if (reaches && place < most) found[place] = static_cast<uint16_t>(g * 32 + lane());
      reach += __popc(all);
    }
    if (reach > most) return false;
    __syncwarp();
    for (int start = 0; start < reach * together; start += 32) {
      const int i = start + lane(), group = i < reach * together ? found[i / together] : 0;
      const int tile = group / 32 * together + i % together;
      const int first = i < reach * together ? tile * step() + warp * length + group % 32 : INT_MAX / 2;
      TilePacks<T> packs;
      fetch(packs, first);
      const T nothing = narrow<T>(-infinity<float>());
#pragma unroll
      for (int j = 0; j < count; j++)
        if (first + j * 32 < from.window.packs) from.window.trim(packs[j], first + j * 32, nothing);
      uint32_t mask = mask_from(threshold, packs);
      if (threshold == -infinity<float>()) mask = mask_within<T>(mask, from.window, first, 32);
      while (__any_sync(kAllLanes, mask != 0)) {
        if (!use(mask ? key_at(place(__ffs(mask) - 1, first)) : 0)) return true;
        mask &= mask - 1;
      }
    }
    return true;
  }
};

// A threshold that at least k elements of a warp's reach, from the maxima of its groups. Those of several steps may be
// taken together, as a few of each lane are enough. `found` becomes the number of maxima that reach it, of those taken
// so.
template <class T>
__device__ float threshold_of_warp(const float* maxima, int groups, int k, int& found) {
  constexpr int most = TopKCode::most_compared;
  float taken[most];
#pragma unroll
  for (int g = 0; g < most; g++) taken[g] = -infinity<float>();
  for (int start = 0; start < groups; start += most)
#pragma unroll
    for (int g = 0; g < most; g++)
      if (start + g < groups) taken[g] = max(taken[g], maxima[(start + g) * 32 + threadIdx.x % 32]);
  found = 0;
  return k <= 32 * most ? threshold_by_bisection<T, 32>(taken, k, found) : -infinity<float>();
}

}  // namespace jaxsoft::cuda
