// The search for the k largest elements of a row. Elements above the least of k that have been seen are candidates, of
// which now and then only the k largest are kept.
//
// Elements are compared by keys, integers in the same order. The key of a float is its bits, read as a sign and a
// magnitude: -0.0 and 0.0 are equal, but subnormal numbers, which XLA's threads treat as 0, are not.
#pragma once

#include "../../formats.h"
#include "../kernels.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Candidates;
using jaxsoft::cpu::kPlan;

template <class T> struct KeyOf { typedef int32_t Key; typedef uint32_t Unsigned; typedef I32 Keys; };
template <> struct KeyOf<double> { typedef int64_t Key; typedef uint64_t Unsigned; typedef I64 Keys; };

inline I32 keys(F32 x) {
  I32 i = bits<I32>(x);
  return i < 0 ? bits<I32>(0x80000000u - bits<U32>(i)) : i;
}
inline I64 keys(F64 x) {
  I64 i = bits<I64>(x);
  return i < 0 ? bits<I64>(0x8000000000000000u - bits<U64>(i)) : i;
}

// A number below the key of any element.
template <class Key>
constexpr Key lowest = sizeof(Key) == 4 ? (Key)INT32_MIN : (Key)INT64_MIN;

template <class T>
int64_t find(const jaxsoft::cpu::Segment& at, int64_t n, int64_t index, Candidates* found) {
  typedef Lanes<T> L;
  typedef typename KeyOf<T>::Key Key;
  typedef typename KeyOf<T>::Keys Keys;
  constexpr int vectors = 8, block = vectors * L::lanes;
  static_assert(block <= kPlan.candidate_block, "callers leave room for so many");
  const T* a = (const T*)at.a;
  Key* const all = (Key*)found->keys;
  const Key least = found->least < lowest<Key> ? lowest<Key> : (Key)found->least;
  const auto fill = (typename L::Scalar)-jaxsoft::cpu::infinity;
  for (int64_t start = 0; start < n; start += block) {
    Keys kept[vectors], most = Keys{} + lowest<Key>;
    const int64_t size = n - start < block ? n - start : block;
    for (int k = 0; k < vectors && k * L::lanes < size; k++) {
      kept[k] = keys(load<T>(a + start + k * L::lanes, size - k * L::lanes, fill));
      most = kept[k] > most ? kept[k] : most;
    }
    if (!lane_bits(most > least)) continue;
    if (found->count > found->limit - block) return start;
    for (int k = 0; k < vectors && k * L::lanes < size; k++) {
      const int64_t first = start + k * L::lanes;
      uint32_t wanted = lane_bits(kept[k] > least);
      if (n - first < L::lanes) wanted &= (1u << (n - first)) - 1;
      for (; wanted; wanted &= wanted - 1) {
        const int lane = __builtin_ctz(wanted);
        all[found->count] = kept[k][lane];
        found->indices[found->count++] = (int32_t)(index + first + lane);
      }
    }
  }
  return n;
}

// The candidates' keys as vectors, the last of which is filled up.
template <class T>
struct Found {
  typedef typename KeyOf<T>::Key Key;
  typedef typename KeyOf<T>::Keys Keys;
  static constexpr int lanes = sizeof(Keys) / sizeof(Key);
  Key* const keys;
  const int vectors;

  explicit Found(Candidates* candidates)
      : keys((Key*)candidates->keys), vectors((candidates->count + lanes - 1) / lanes) {
    for (int i = candidates->count; i < vectors * lanes; i++) keys[i] = lowest<Key>;
  }
  Keys operator[](int k) const {
    Keys v;
    memcpy(&v, keys + k * lanes, sizeof v);
    return v;
  }
  static Key sum(Keys minus) {
    return -reduce<Key>(minus, [](auto a, auto b) { return a + b; });
  }
  int number_from(Key least) const {
    Keys number{};
    for (int k = 0; k < vectors; k++) number += (*this)[k] >= least;
    return (int)sum(number);
  }
};

// Of candidates that are equal to the k-th largest, those of the lowest indices are kept.
template <class T>
void cut(Candidates* candidates, int k) {
  typedef typename KeyOf<T>::Key Key;
  typedef typename KeyOf<T>::Unsigned Unsigned;
  if (candidates->count <= (k > kPlan.few_candidates ? k : kPlan.few_candidates)) return;
  const Found<T> found(candidates);
  auto most = found[0];
  for (int i = 1; i < found.vectors; i++) most = found[i] > most ? found[i] : most;
  // Bisects for the greatest key that k or more candidates reach. k or more reach `low`.
  Key low = candidates->least < lowest<Key> ? lowest<Key> : (Key)candidates->least, high = reduce_max<Key>(most);
  int number = candidates->count;
  while (low < high && number > k) {
    const Unsigned distance = (Unsigned)high - (Unsigned)low;
    const Key middle = (Key)((Unsigned)low + distance / 2 + distance % 2);
    const int from = found.number_from(middle);
    if (from >= k) low = middle, number = from;
    else high = middle - 1;
  }
  // Only candidates equal to that key are too many; the last ones of them are dropped.
  int equal = number > k ? k - found.number_from(low + 1) : number, count = 0;
  for (int i = 0; i < found.vectors; i++) {
    const auto vector = found[i];
    for (uint32_t wanted = lane_bits(vector >= low); wanted; wanted &= wanted - 1) {
      const int lane = __builtin_ctz(wanted);
      const Key key = vector[lane];
      if (key == low && equal-- <= 0) continue;
      found.keys[count] = key;
      candidates->indices[count++] = candidates->indices[i * found.lanes + lane];
    }
  }
  candidates->count = count;
  candidates->least = number > k ? low : (int64_t)low - 1;
}

// A few largest of many candidates are taken out one after the other. Else a candidate's place is the number of those
// before it.
template <class T>
void order(Candidates* candidates, int k, int32_t* indices) {
  const Found<T> found(candidates);
  constexpr int lanes = found.lanes;
  if (4 * k <= candidates->count) {
    for (int place = 0; place < k; place++) {
      auto most = found[0];
      for (int v = 1; v < found.vectors; v++) most = found[v] > most ? found[v] : most;
      const auto key = reduce_max<typename Found<T>::Key>(most);
      uint32_t equal;
      int v = 0;
      while (!(equal = lane_bits(found[v] == key))) v++;
      const int i = v * lanes + __builtin_ctz(equal);
      indices[place] = candidates->indices[i];
      found.keys[i] = lowest<typename Found<T>::Key>;
    }
    return;
  }
  for (int i = 0; i < candidates->count; i++) {
    typename Found<T>::Keys before{};
    const auto key = found.keys[i];
    const int own = i / lanes;
    for (int v = 0; v < own; v++) before += found[v] >= key;
    for (int v = own + 1; v < found.vectors; v++) before += found[v] > key;
    const uint32_t equal = lane_bits(found[own] == key) & ((1u << i % lanes) - 1);
    const int place = (int)found.sum(before) + __builtin_popcount(lane_bits(found[own] > key) | equal);
    if (place < k) indices[place] = candidates->indices[i];
  }
}

}  // namespace JAXSOFT_ISA
