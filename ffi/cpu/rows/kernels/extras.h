// How a kernel reads a segment: its elements, the scores that the extras make of them, and which of them count.
#pragma once

#include "../../formats.h"
#include "../../soft_cap.h"
#include "../kernels.h"

namespace JAXSOFT_ISA {

using jaxsoft::cpu::infinity;
using jaxsoft::cpu::Segment;

// Reads the vector that begins at element i, where `left` elements are left of the segment. Without `extras`, scores
// are the elements themselves, and all of them count.
template <class T, bool extras>
struct Reader {
  typedef Lanes<T> L;
  typedef typename L::V V;
  typedef typename L::Scalar S;
  const T *first, *second;  // not read through `at` in a loop, where a store of a result might have changed them
  const Segment& at;

  explicit Reader(const Segment& at) : first((const T*)at.a), second((const T*)at.b), at(at) {}
  V a(int64_t i, int64_t left, S fill) const { return load<T>(first + i, left, fill); }
  V b(int64_t i, int64_t left) const { return load<T>(second + i, left, 0); }

  V score(int64_t i, int64_t left) const {
    if constexpr (!extras) return a(i, left, (S)-infinity);
    V scaled = a(i, left, 0) * (S)at.scale;
    if (at.cap > 0) return soft_cap(scaled, (S)at.cap);
    scaled = rounded(scaled);
    return at.bias ? scaled + load<T>((const T*)at.bias + i, left, 0) : scaled;
  }

  // The score, or -inf where the element is masked.
  V counted_score(int64_t i, int64_t left) const {
    V z = score(i, left);
    if constexpr (!extras) return z;
    if (!at.where && left >= L::lanes) return z;
    return load_mask(at.where ? at.where + i : nullptr, left, V{}) ? z : V{} - (S)infinity;
  }

  // The other array's score.
  V other_score(int64_t i, int64_t left) const {
    const V w = load<T>(second + i, left, (S)-infinity);
    if constexpr (extras) return rounded(w * (S)at.other_scale);
    else return w;
  }
  V counted_other_score(int64_t i, int64_t left) const {
    const V w = other_score(i, left);
    if constexpr (!extras) return w;
    else return load_mask(at.where ? at.where + i : nullptr, left, V{}) ? w : V{} - (S)infinity;
  }

  // v, or `otherwise` where the element is masked.
  V valid_or(V v, int64_t i, int64_t left, S otherwise) const {
    if constexpr (!extras) return v;
    if (at.where) return load_mask(at.where + i, left, V{}) ? v : V{} + otherwise;
    if (at.masked) return a(i, left, 0) == 0 ? V{} + otherwise : v;
    return v;
  }
};

}  // namespace JAXSOFT_ISA
