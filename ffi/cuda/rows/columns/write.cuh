// The third phase of a tile: each thread writes the results of what it holds, and copies its part of the next tile into
// the slots that it has read.
#pragma once

#include "slots.cuh"

namespace jaxsoft::cuda {

template <class Kind>
struct Writer {
  using T = typename Kind::T;
  using A = typename Kind::A;
  using Op = typename Kind::Op;
  using Values = typename Kind::Values;
  static constexpr int width = Kind::width;
  const Tiling<Kind>& tiling;
  const Slots<Kind>& slots;
  const TileColumns<Kind>& columns;
  const Values* values;  // of the tile's columns
  Place& here;           // the chunk that is in the slots, or on its way there

  // Writes the tile, from the chunk `here` on, which becomes the first one of the tile that follows.
  __device__ void write(unsigned next) const {
    const Arguments<T>& args = tiling.args;
    if constexpr (Kind::may_be_quick) {
      bool quick = args.result == ResultType::same;
#pragma unroll
      for (int e = 0; e < width; e++) quick &= !columns.is_own(e) || values[columns.column_of(e)].quick;
      if (quick) write_chunks<true>(next);
      else write_chunks<false>(next);
    } else if constexpr (Kind::may_be_masked) {
      if (args.result == ResultType::same && !args.masked) write_chunks<true>(next);
      else write_chunks<false>(next);
    } else {
      write_chunks<false>(next);
    }
  }

 private:
  // `quick`: the results have the operands' dtype, nothing is masked, and where the operation has a quick formula it
  // may be used.
  template <bool quick>
  __device__ void write_chunks(unsigned next) const {
    const bool has_all = columns.is_own(0) && columns.is_own(width - 1);
    Values own[width];
#pragma unroll
    for (int e = 0; e < width; e++) own[e] = values[columns.column_of(e)];
    for (int64_t chunk = tiling.begin; chunk < tiling.end || chunk == tiling.begin; chunk += tiling.chunk_rows) {
      if (!tiling.stays) slots.arrive(here);
      const Place following = tiling.place_after(chunk, columns.index, next);
      int64_t to = here.offset;
      slots.template visit<true>(here, following, [&](int, const auto& a, const auto& b) {
        constexpr int count = sizeof(a) / sizeof(Pack<T>);
#pragma unroll
        for (int i = 0; i < count; i++, to += tiling.step) {
          if constexpr (Kind::may_be_quick && quick) write_quickly(own, a[i], to, has_all);
          else write_access<quick>(own, a[i], b[i], to, has_all);
        }
      });
      here = following;
    }
  }

  __device__ void write_quickly(const Values (&own)[width], const Pack<T>& a, int64_t to, bool has_all) const {
    A x[Pack<T>::size] = {};
#pragma unroll
    for (int e = 0; e < width; e++) x[e] = Op::quick_value(own[e], a.get(e));
    Pack<T> pack;
    pack.set_all(x);
    if constexpr (kUnit<T> != 1) pack.multiply(kUnit<T>);
    T* out = static_cast<T*>(tiling.args.out) + to;
    if (has_all) store_elements<width>(out, pack);
    else if (columns.is_own(0)) out[0] = pack.raw(0);
    else if (columns.is_own(width - 1)) out[width - 1] = pack.raw(width - 1);
  }

  template <bool quick>
  __device__ void write_access(const Values (&own)[width], const Pack<T>& a, const Pack<T>& b, int64_t to,
                               bool has_all) const {
    const Arguments<T>& args = tiling.args;
    A x[width];
#pragma unroll
    for (int e = 0; e < width; e++) {
      x[e] = Op::value(own[e], a.get(e), Kind::operands > 1 ? b.get(e) : A(0));
      if (Kind::may_be_masked && !quick && args.masked && a.get(e) == 0) x[e] = 0;
    }
    if (quick || args.result == ResultType::same) {
      store(static_cast<T*>(args.out) + to, x, has_all);
    } else if constexpr (sizeof(T) == 2) {
      store(static_cast<float*>(args.out) + to, x, has_all);
    } else if constexpr (sizeof(T) == 4) {
      if (args.result == ResultType::f16) store(static_cast<__half*>(args.out) + to, x, has_all);
      else store(static_cast<__nv_bfloat16*>(args.out) + to, x, has_all);
    }
  }

  template <class R>
  __device__ void store(R* out, const A (&x)[width], bool has_all) const {
    if (has_all) {
      store_results(out, x);
    } else if constexpr (Kind::straddles) {
#pragma unroll
      for (int e = 0; e < width; e++)
        if (columns.is_own(e)) out[e] = narrow<R>(x[e]);
    }
  }
};

}  // namespace jaxsoft::cuda
