// Rows of elements as packs of 16 bytes.
//
// A row may begin at any element. A window on it begins at the 16-byte boundary at or before the row's first element.
// So all packs but the first and the last are whole and aligned, and of those two the window uses and writes only the
// elements that belong to the row.
#pragma once

#include "pack.cuh"

namespace jaxsoft::cuda {

// The packs in one cache line of 128 bytes.
constexpr int kLine = 8;

// How the rows of all operands lie in memory. `whole`: every row begins and ends at a multiple of 16 bytes. `halves`:
// at a multiple of 8 bytes. `any`: at any element.
enum class Layout { any, halves, whole };

// The number of elements of the first pack that lie before the row. `vector` says whether packs of all operands are
// aligned. If not, packs are gathered element by element, and the first one begins with the row.
template <class T>
__device__ int head_of(const T* row, bool vector) {
  return vector ? static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)) : 0;
}

// The window on n elements, which are a row or a part of one. Pack i holds elements [i * size - head, (i + 1) * size -
// head). Positions are ints, which take fewer registers. With Layout::halves there is no head, and a pack is read and
// written in two pieces of 8 bytes.
template <class T, Layout layout = Layout::any>
struct Window {
  static constexpr int size = Pack<T>::size;
  int n;
  int head = 0;   // elements of the first pack that lie before the row
  int packs;
  int whole_end;  // packs [whole_begin(), whole_end) belong to the row entirely
  bool vector;    // whether packs of all operands are aligned

  // `like` points to the row in any one of the operands.
  __device__ Window(const T* like, int n, bool vector) : n(n), vector(layout != Layout::any || vector) {
    if (layout == Layout::any) head = head_of(like, vector);
    whole_end = (head + n) / size;
    packs = layout == Layout::whole ? whole_end : (head + n + size - 1) / size;
  }
  __device__ int whole_begin() const { return head > 0; }
  __device__ bool inside(int i) const { return layout == Layout::whole || (i < whole_end && (i > 0 || head == 0)); }
  __device__ bool whole(int i) const { return vector && inside(i); }
  // Reads pack i as it lies in memory, with whatever lies beyond the row's ends. This is safe, because an aligned word
  // of 16 bytes is in device memory if one of its bytes is. Nothing here waits for the data, so a thread can have many
  // reads in flight.
  __device__ Pack<T> fetch(const T* row, int i) const {
    if constexpr (layout == Layout::halves) {
      auto* half = reinterpret_cast<const uint2*>(row + i * size);
      uint2 low = half[0], high = inside(i) ? half[1] : uint2{};
      return {{low.x, low.y, high.x, high.y}};
    }
    if (vector) return *reinterpret_cast<const Pack<T>*>(row + (i * size - head));
    return gather(row, i);
  }
  // Reads the same pack of a row that may be aligned differently from the window's row.
  __device__ Pack<T> fetch_anywhere(const T* row, bool aligned, int i) const {
    if (layout == Layout::whole || (aligned && inside(i)))
      return *reinterpret_cast<const Pack<T>*>(row + (i * size - head));
    return gather(row, i);
  }
  __device__ Pack<T> gather(const T* row, int i) const {
    int first = i * size - head;
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < size; k++) pack.set(k, first + k >= 0 && first + k < n ? row[first + k] : narrow<T>(0));
    return pack;
  }
  // Replaces elements beyond the row's ends by `fill`.
  __device__ void trim(Pack<T>& pack, int i, T fill) const {
    if (inside(i)) return;
    if constexpr (layout == Layout::halves) {
      Pack<T> all;
      all.fill(fill);
      pack.words[2] = all.words[2], pack.words[3] = all.words[3];
      return;
    }
    pack.keep(bytes_inside(i), fill);
  }
  // One byte for each element of pack i: 1 where it is in the row, else 0.
  __device__ uint64_t bytes_inside(int i) const {
    int first = i * size - head;
    return range_bytes(-first, min(n - first, size));
  }
  __device__ void store(T* row, int i, Pack<T> pack) const {
    int first = i * size - head;
    if constexpr (layout == Layout::halves) {
      auto* half = reinterpret_cast<uint2*>(row + first);
      half[0] = {pack.words[0], pack.words[1]};
      if (inside(i)) half[1] = {pack.words[2], pack.words[3]};
      return;
    }
    if (whole(i)) {
      *reinterpret_cast<Pack<T>*>(row + first) = pack;
      return;
    }
#pragma unroll
    for (int k = 0; k < size; k++)
      if (first + k >= 0 && first + k < n) row[first + k] = pack.raw(k);
  }
};

}  // namespace jaxsoft::cuda
