// The k largest elements by way of queues, for rows of which too many elements reach a bar that is taken from the maxima
// of groups: many are equal, or the largest are in a few groups.
//
// The warps of a block take its tiles in turn. Each has a queue of its own in shared memory, and a slot with an order
// that its share of the k largest, k divided by the number of warps, reach. At least k elements of all warps reach the
// least of these orders, the bar, and what does not is not wanted. The first slots are from the maxima of the groups of
// elements in the first tiles, the later ones from the queues. After the first tile no warp waits for another.
//
// A queue that is full is cut to the warp's own k largest, so that every row is served exactly, in whichever order its
// elements come.
#pragma once

#include "tiles.cuh"

namespace jaxsoft::cuda {

// A warp's way through its tiles. All lanes have the same values of what is not const.
template <class T>
struct Gatherer {
  const Tiles<T>& tiles;
  const int k;
  Key* const keys;        // the queue
  const int room;         // of the queue
  uint32_t* const slots;  // one for each warp; not used by a warp that shares nothing
  const int warp = tiles.warp, warps = tiles.warps;
  // The warps that have a slot are those whose first tile is whole. Each has a share of the k largest.
  const int full = min(warps, tiles.from.window.packs / Tiles<T>::length);
  const int share = full > 0 ? (k + full - 1) / full : k;

  int count = 0;                   // of keys in the queue
  uint32_t low = kLeastOrder;      // the bar: no element of a lower order is wanted
  uint32_t own_low = kLeastOrder;  // the same for later tiles of this warp only
  Key least = 0;                   // the last cut has left the keys from this one on

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int number(Key from) const { return number_from(from, keys, count); }

  // Takes the bar from the slots.
  __device__ void see_slots() {
    if (warps == 1) return;
    // A read that is atomic, as other warps write meanwhile.
    const uint32_t slot = lane() < full ? atomicMax(&slots[lane()], 0u) : ~0u;
    if (full > 0) low = max(low, __reduce_min_sync(kAllLanes, slot));
  }
  // Raises the warp's slot to what its queue says.
  __device__ void raise_slot() {
    int found = number(Key(low) << 32);
    if (warp >= full || found < share) return;
    const uint32_t order = greatest_order<T>(low, greatest_order_in(keys, count), share, enough_for(share), found,
                                             [&](uint32_t order) { return number(Key(order) << 32); });
    if (lane() == 0) atomicMax(&slots[warp], order);
    __syncwarp();
    see_slots();
  }
  // Cuts the queue to its k greatest keys, and not many more, or to those that reach the bar, if these are fewer.
  __device__ void cut_queue() {
    const uint32_t from = max(low, order_in(least));
    const int found = number(Key(from) << 32);
    least = max(least, Key(from) << 32);
    if (found >= k) {
      least = max(least, least_key<T>(from, greatest_order_in(keys, count), k, found, tiles.from.n,
                                      [&](Key from) { return number(from); }));
      // Later elements that are equal to the last of k keys have higher indices.
      own_low = order_in(least) + (1u << kFree<T>);
    }
    count = keep_from(least, keys, count, keys);
  }

  // Puts the keys of the elements that are marked in `wanted` into the queue. Returns those for which there was no room.
  // `first` is the lane's first pack.
  __device__ uint32_t put(uint32_t wanted, int first) {
    uint32_t left = 0;
    while (count < room && __any_sync(kAllLanes, wanted != 0)) {
      // From the last on: if the row ascends, others are not wanted any more.
      const int bit = 31 - __clz(wanted | 1);
      const int at = tiles.place(bit, first);
      Key key = 0;
      if (wanted && static_cast<unsigned>(at) < static_cast<unsigned>(tiles.from.window.n)) key = tiles.key_at(at);
      const bool puts = key >= least && key > 0;
      const unsigned all = __ballot_sync(kAllLanes, puts);
      const int place = count + __popc(all & ((1u << lane()) - 1));
      if (puts && place < room) keys[place] = key;
      else if (puts) left |= 1u << bit;
      if (wanted) wanted ^= 1u << bit;
      count = min(count + __popc(all), room);
    }
    __syncwarp();
    return left | wanted;
  }
  // Puts what a tile has of the k largest elements into the queue, and cuts that when it must. `top` is the lane's
  // maximum.
  __device__ void put_tile(const TilePacks<T>& packs, float top, int first) {
    see_slots();
    uint32_t bar = max(low, own_low), left = ~0u;
    for (;;) {
      const uint32_t wanted = top >= of_order(bar) ? left & marks_from(of_order(bar), packs) : 0;
      left = put(wanted, first);
      if (!__any_sync(kAllLanes, left != 0)) break;
      cut_queue();
      bar = max(low, order_in(least));
    }
  }

  // Leaves in the queue those of the warp's elements that may be among the k largest of all warps'. If warps share the
  // elements, all of the block's threads call it.
  __device__ void gather() {
    const int step = tiles.step();
    int first = tiles.first();
    TilePacks<T> packs, next;
    tiles.fetch(packs, first);
    tiles.fetch(next, first + step);
    tiles.trim(packs, first);
    uint32_t slot = kLeastOrder;
    if (warp < full && share <= 32 * kGroupsOfThread) {
      float maxima[kGroupsOfThread];
      maxima_of_groups(packs, maxima);
      slot = order_of(bar_by_bisection<T, 32>(maxima, share));
    }
    if (warps == 1) {
      low = slot;
    } else {
      if (lane() == 0) slots[warp] = slot;
      __syncthreads();
      see_slots();
    }

    int limit = -1;  // the queue's length from which on a higher bar is looked for
    for (; tiles.has(first); first += step) {
      float top = -infinity<float>();
#pragma unroll
      for (int j = 0; j < TopKCode::tile_packs; j++) top = max(top, packs[j].maximum());
      if (__any_sync(kAllLanes, top >= of_order(max(low, own_low)))) {
        put_tile(packs, top, first);
        const int more = max(share, TopKCode::least_new);
        if (limit >= 0 && count >= limit && tiles.has(first + step)) {
          if (warps == 1) cut_queue();
          else raise_slot();
          limit = count + more;
        }
        if (limit < 0) limit = count + more;
      }
#pragma unroll
      for (int j = 0; j < TopKCode::tile_packs; j++) packs[j] = next[j];
      tiles.trim(packs, first + step);
      tiles.fetch(next, first + 2 * step);
    }
  }
};

}  // namespace jaxsoft::cuda
