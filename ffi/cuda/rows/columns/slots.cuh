// The slots of a thread: shared memory that holds its accesses of a chunk.
//
// The thread that fills a slot is the only one that reads it, so no barrier is needed.
#pragma once

#include "../../copies.cuh"
#include "access.cuh"
#include "place.cuh"

namespace jaxsoft::cuda {

template <class Kind>
struct Slots {
  using T = typename Kind::T;
  static constexpr int width = Kind::width, operands = Kind::operands;
  const Tiling<Kind>& tiling;
  T* const slots;  // all threads'

  __device__ T* slot(int operand, int k) const {
    return slots + ((k * operands + operand) * tiling.tile.threads + tiling.thread) * width;
  }

  // Begins to copy a whole chunk. An element of 16 bits cannot be copied asynchronously: `arrive` loads it.
  __device__ void copy_all(Place of) const {
    const T* from[operands];
    start(from, of);
    for (int k = 0; k < of.count; k++) copy(k, from);
  }

  // Waits until the chunk is in its slots.
  __device__ void arrive(const Place& of) const {
    if constexpr (Kind::copies) return wait_for_copies();
    constexpr int in_flight = ColumnsCode::elements_in_flight;
#pragma unroll
    for (int operand = 0; operand < operands; operand++) {
      const T* source = array(operand) + of.offset;
      for (int k = 0; k < of.count; k += in_flight) {
        T x[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; i++, source += tiling.step)
          if (k + i < of.count) x[i] = *source;
#pragma unroll
        for (int i = 0; i < in_flight; i++)
          if (k + i < of.count) *slot(operand, k + i) = x[i];
      }
    }
  }

  // Calls use(k, a, b) for accesses k, k + 1, ... of a chunk, arrays of packs, until all have been used. With `refill`,
  // what has been read is replaced by the thread's part of the chunk that follows.
  template <bool refill, class Use>
  __device__ void visit(const Place& here, const Place& following, Use use) const {
    const T* from[operands];
    start(from, following);
    constexpr int in_flight = Kind::in_flight;
    const int both = refill ? min(here.count, following.count) : here.count;
    int k = 0;
    for (; k + in_flight <= both; k += in_flight) visit_some<in_flight, refill>(k, following, from, use);
    for (; k < here.count; k++) visit_some<1, refill>(k, following, from, use);
    if constexpr (refill)
      for (; k < following.count; k++) copy(k, from);
  }

 private:
  __device__ const T* array(int operand) const { return operand == 0 ? tiling.args.a : tiling.args.b; }

  // Where the thread's part of a chunk begins in the operands; `copy` goes on by a row.
  __device__ void start(const T* (&from)[operands], const Place& of) const {
#pragma unroll
    for (int operand = 0; operand < operands; operand++) from[operand] = array(operand) + of.offset;
  }
  __device__ void copy(int k, const T* (&from)[operands]) const {
#pragma unroll
    for (int operand = 0; operand < operands; operand++) {
      if constexpr (Kind::copies) copy_access<Kind::access_bytes>(slot(operand, k), from[operand]);
      from[operand] += tiling.step;
    }
  }

  template <int count, bool refill, class Use>
  __device__ void visit_some(int k, const Place& following, const T* (&from)[operands], Use& use) const {
    Pack<T> a[count], b[count];
#pragma unroll
    for (int i = 0; i < count; i++) {
      a[i] = load_elements<width>(slot(0, k + i));
      if constexpr (operands > 1) b[i] = load_elements<width>(slot(1, k + i));
    }
    if constexpr (refill) {
#pragma unroll
      for (int i = 0; i < count; i++)
        if (count > 1 || k < following.count) copy(k + i, from);
    }
    use(k, a, b);
  }
};

}  // namespace jaxsoft::cuda
