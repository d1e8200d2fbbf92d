// The k largest elements of rows of which too many reach a threshold that is taken from the maxima of groups: many are
// equal, or the largest are in a few groups. The least of the k largest keys is searched for by bisection, first its
// order and then its index. Each step counts elements, of the groups that reach the threshold only, by reading them
// again.
#pragma once

#include "tiles.cuh"

namespace jaxsoft::cuda {

// A search in the tiles of a warp, or of the warps of a block together. `sum` adds a number of each lane's over all
// lanes that take part, which all call it. All functions are called by all of them.
template <class T, class Sum>
struct ExactSearch {
  const Tiles<T>& tiles;
  const float* maxima;  // of the warp's groups
  const int groups, together;
  const int k;
  const Sum sum;

  // Calls use(packs, first, true) for the lane's tiles of the groups for which wanted(maximum, the tile's first
  // element) is true. All lanes of the warp call it together, if one of them has such a group; the others with false.
  template <class Wanted, class Use>
  __device__ void visit(Wanted wanted, Use use) const {
    for (int g = 0; g < groups; g++)
      for (int t = 0; t < together; t++) {
        const int first = (g * together + t) * tiles.step() + tiles.first();
        const int begin = (first - tiles.lane()) * Pack<T>::size - tiles.from.window.head;
        const bool reads = tiles.has(first) && wanted(maxima[g * 32 + tiles.lane()], begin);
        if (!__any_sync(kAllLanes, reads)) continue;
        TilePacks<T> packs;
        tiles.fetch(packs, reads ? first : INT_MAX / 2);
        if (reads) tiles.trim(packs, first);
        use(packs, first, reads);
      }
  }
  // The number of elements from an order on, which is above that of -inf.
  __device__ int number_from(uint32_t order) const {
    const float threshold = of_order(order);
    int number = 0;
    visit([&](float top, int) { return top >= threshold; }, [&](const TilePacks<T>& packs, int, bool reads) {
      number += reads ? __popc(mask_from(threshold, packs)) : 0;
    });
    return sum(number);
  }
  // The number of elements of an order up to a place.
  __device__ int number_until(int last, uint32_t order) const {
    const float threshold = of_order(order), above = of_order(order + (1u << kFree<T>));
    int number = 0;
    visit([&](float top, int begin) { return top >= threshold && begin <= last; },
          [&](const TilePacks<T>& packs, int first, bool reads) {
            uint32_t left = reads ? mask_from(threshold, packs) & ~mask_from(above, packs) : 0;
            for (; left; left &= left - 1) {
              const int place = tiles.place(__ffs(left) - 1, first);
              number += place >= 0 && place <= last && place < tiles.from.window.n;
            }
          });
    return sum(number);
  }

  // The least key of the k largest. At least k elements reach `threshold`, or it is -inf; no element is above `top`.
  __device__ Key least(float threshold, float top) const {
    constexpr uint32_t one = 1u << kFree<T>;
    uint32_t low = order_of(threshold), high = order_of(top);
    if (low <= kLeastOrder) {  // if there are k elements above -inf, only those are read from here on
      if (high > kLeastOrder && number_from(kLeastOrder + one) >= k) low = kLeastOrder + one;
      else low = high = kLeastOrder;
    }
    while (low < high) {
      const uint32_t middle = low + ((high - low) / one + 1) / 2 * one;
      if (number_from(middle) >= k) low = middle;
      else high = middle - one;
    }
    const int n = tiles.from.window.n, needed = k - (low < order_of(top) ? number_from(low + one) : 0);
    // As of rows whose elements are all equal the first ones are wanted, the search begins with few.
    int begin = 0, end = min(Tiles<T>::length * Pack<T>::size, n) - 1;
    while (end < n - 1 && number_until(end, low) < needed) begin = end + 1, end = end < n / 2 ? 2 * end : n - 1;
    while (begin < end) {
      const int middle = begin + (end - begin) / 2;
      if (number_until(middle, low) >= needed) end = middle;
      else begin = middle + 1;
    }
    return key_of(low, tiles.from.begin + end);
  }

  // Calls use(key) for each key from the least one on, as `Tiles::collect`.
  template <class Use>
  __device__ void collect(Key least, Use use) const {
    const float threshold = of_order(order_in(least));
    const int last = static_cast<int>(index_in(least) - tiles.from.begin);
    visit([&](float top, int begin) { return top > threshold || (top == threshold && begin <= last); },
          [&](const TilePacks<T>& packs, int first, bool reads) {
            uint32_t mask = reads ? mask_from(threshold, packs) : 0;
            while (__any_sync(kAllLanes, mask != 0)) {
              const int place = mask ? tiles.place(__ffs(mask) - 1, first) : -1;
              const bool inside = place >= 0 && place < tiles.from.window.n;
              const Key key = inside ? tiles.key_at(place) : 0;
              use(key >= least ? key : 0);
              mask &= mask - 1;
            }
          });
  }
};

}  // namespace jaxsoft::cuda
