// Which elements of a row may be among its k largest: those above the least of k that have been seen.
//
// Elements are compared by keys, integers in their order. That of a float is its bits, as a sign and a magnitude, read as
// one number: so -0.0 and 0.0 are equal, while subnormal numbers, which XLA's threads treat as 0, still differ.
#pragma once

#include "rows.h"
#include "simd.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::Candidate;
using jaxsoft::cpu::Candidates;

inline I32 keys(F32 x) {
  I32 i = bits<I32>(x);
  return i < 0 ? bits<I32>(0x80000000u - bits<U32>(i)) : i;
}
inline I64 keys(F64 x) {
  I64 i = bits<I64>(x);
  return i < 0 ? bits<I64>(0x8000000000000000u - bits<U64>(i)) : i;
}
inline int32_t lowest_key(F32) { return INT32_MIN; }  // below that of any element
inline int64_t lowest_key(F64) { return INT64_MIN; }

template <class T>
int64_t find(const jaxsoft::cpu::Segment& at, int64_t n, int64_t index, Candidates* found) {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef decltype(keys(V{})) Keys;
  typedef decltype(lowest_key(V{})) Key;
  constexpr int vectors = 8, block = vectors * L::lanes;
  static_assert(block <= Candidates::block);
  const T* a = (const T*)at.a;
  const Key lowest = lowest_key(V{}), least = found->least < lowest ? lowest : (Key)found->least;
  for (int64_t start = 0; start < n; start += block) {
    Keys kept[vectors], most = Keys{} + lowest;
    const int64_t size = n - start < block ? n - start : block;
    for (int k = 0; k < vectors && k * L::lanes < size; k++) {
      kept[k] = keys(load<T>(a + start + k * L::lanes, size - k * L::lanes, (typename L::Scalar)-jaxsoft::cpu::infinity));
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
        found->all[found->count++] = {kept[k][lane], index + first + lane};
      }
    }
  }
  return n;
}

}  // namespace JAXSOFT_ISA
