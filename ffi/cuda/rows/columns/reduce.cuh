// The first phase of a tile: each group of threads reduces its part of the columns to maxima and sums in shared memory.
//
// A group has the threads of one warp that share a column. In a tile of 32 accesses or more, this is one thread.
#pragma once

#include "slots.cuh"

namespace jaxsoft::cuda {

template <class Kind>
struct Reducer {
  using T = typename Kind::T;
  using A = typename Kind::A;
  using Op = typename Kind::Op;
  static constexpr int width = Kind::width;
  const Tiling<Kind>& tiling;
  const Slots<Kind>& slots;
  const SharedTile<Kind>& shared;
  const TileLayout<Kind>& layout;
  const TileColumns<Kind>& columns;
  const int group;   // of the thread
  const bool leads;  // whether the thread stores what its group has found
  Place& here;       // the chunk that is in the slots, or on its way there
  unsigned summed = 0;      // a bit for each column whose sum is stored already
  bool all_summed = false;  // whether all columns of all of the warp's lanes have that bit

  // Reduces the block's part of the tile, from the chunk `here` on. Where the part does not stay in shared memory,
  // `here` becomes the chunk that is on its way in the end.
  __device__ void reduce() {
    if constexpr (Kind::may_be_quick) {
      if (tiling.stays && tiling.args.result == ResultType::same) {
        summed = sum_in_one_pass(here);
        all_summed = __all_sync(0xffffffffu, summed == (1u << width) - 1);
      }
    }
    if (!all_summed) reduce_chunks();
  }

 private:
  // Sums exp(x) itself, for 16 bits: a state whose m is 0. Returns a bit for each column where that is exact, as the
  // sum is not too large or small, and for each that the thread has nothing of.
  __device__ unsigned sum_in_one_pass(const Place& here) const {
    slots.arrive(here);
    A plain[width] = {};
    slots.template visit<false>(here, here, [&](int, const auto& a, const auto&) {
#pragma unroll
      for (const auto& pack : a)
#pragma unroll
        for (int e = 0; e < width; e++) plain[e] += exp2_approximately(pack.get(e) * A(kLog2E));
    });
    add_lanes(plain);
    unsigned summed = 0;
#pragma unroll
    for (int e = 0; e < width; e++) summed |= (plain[e] > A(0x1p-90) && plain[e] < A(0x1p90)) << e;
#pragma unroll
    for (int e = 0; e < width; e++)
      if (here.count == 0 || !columns.is_own(e)) summed |= 1u << e;
    if (leads) {
      Pack<T> m{};
      if (here.count == 0) m.fill(narrow<T>(-infinity<A>()));  // then no lane of the group has any
      store_sums(plain, 0);
      store_maxima(m);
    }
    return summed;
  }

  // Reduces chunk by chunk, as exactly as the dtype deserves: of scores, first their maximum, then the sum of
  // exponentials below it. Columns that have a bit in `summed` keep the sums that they have, and 0 as their maximum.
  __device__ void reduce_chunks() const {
    Pack<T> top;
    Sum<A> sum[width];
#pragma unroll
    for (int e = 0; e < width; e++) top.set(e, narrow<T>(-infinity<A>()));
    for (int64_t chunk = tiling.begin; chunk < tiling.end || chunk == tiling.begin; chunk += tiling.chunk_rows) {
      slots.arrive(here);
      // What writes nothing goes on to the next tile, which is not from the counter then.
      const unsigned index = columns.index, next = Kind::writes ? index : index + tiling.tiles_at_once;
      const Place following = tiling.stays ? here : tiling.place_after(chunk, index, next);
      A from[width] = {};  // what exp subtracts: the reference of the group's maximum up to here
      if constexpr (Kind::scores) raise_maximum(here, chunk > tiling.begin, top, sum, from);
      add_chunk(here, following, from, sum);
      if (!tiling.stays) {
        if (Kind::writes) slots.copy_all(following);
        here = following;
      }
    }
    store_group(here, summed, top, sum);
  }

  // Takes a chunk's maximum into the group's, and moves the sums of earlier chunks to it.
  __device__ void raise_maximum(const Place& here, bool has_earlier, Pack<T>& top, Sum<A> (&sum)[width],
                                A (&from)[width]) const {
    Pack<T> high = top;
#pragma unroll 4
    for (int k = 0; k < here.count; k++) high = larger<width>(high, load_elements<width>(slots.slot(0, k)));
    for (int mask = 16; mask >= tiling.across; mask /= 2) high = larger<width>(high, shuffle<width>(high, mask));
    if (has_earlier) {
#pragma unroll
      for (int e = 0; e < width; e++) {
        sum[e] = seen_from<T>(high.get(e), State<A, false>{top.get(e), sum[e]});
        if constexpr (!Kind::compensates) sum[e].c = 0;
      }
    }
#pragma unroll
    for (int e = 0; e < width; e++) from[e] = reference(high.get(e));
    top = high;
  }

  // A few terms of the thread's sums, not yet added to them. Scores that are the maximum are counted, not mixed into
  // the sum of the others: added to it only with compensation, they leave it its digits. (A column that holds +inf has
  // no such sum.)
  struct Terms {
    A sum[width] = {};
    A equal[width] = {};  // of scores that are the maximum, where that is kept apart
    __device__ void move_to(Sum<A> (&total)[width]) {
#pragma unroll
      for (int e = 0; e < width; e++) {
        if constexpr (Kind::compensates) total[e].add(sum[e]);
        else total[e].s += sum[e];
        sum[e] = 0;
        if constexpr (Op::separates_maximum) total[e].add(equal[e]), equal[e] = 0;
      }
    }
    template <bool quickly, bool masked>
    __device__ void add(const Pack<T>& a, const Pack<T>& b, const A (&from)[width]) {
#pragma unroll
      for (int e = 0; e < width; e++) {
        if constexpr (Kind::scores) {
          A x = a.get(e), term = exponential_term<quickly>(x, from[e]);
          bool is_top = Op::separates_maximum && x == from[e];
          sum[e] += is_top ? A(0) : term;
          if constexpr (Op::separates_maximum) equal[e] += is_top ? A(1) : A(0);
        } else if constexpr (Op::reads_a_to_reduce) {
          sum[e] += masked && a.get(e) == 0 ? A(0) : a.get(e) * b.get(e);
        } else {
          sum[e] += b.get(e);
        }
      }
    }
  };

  // Adds a chunk to the thread's sums. Where nothing is written, the chunk that follows takes its place.
  __device__ void add_chunk(const Place& here, const Place& following, const A (&from)[width],
                            Sum<A> (&sum)[width]) const {
    Terms terms;
    // Where 16 bits are written, what a shift that is not large is rounded by does not show.
    bool quickly = Kind::may_be_quick && tiling.args.result == ResultType::same;
#pragma unroll
    for (int e = 0; e < width; e++) quickly &= fabs(from[e]) < 64;
    if (Kind::may_be_quick && quickly) add_terms<Kind::may_be_quick, false>(here, following, from, terms, sum);
    else if (Kind::may_be_masked && tiling.args.masked)
      add_terms<false, Kind::may_be_masked>(here, following, from, terms, sum);
    else add_terms<false, false>(here, following, from, terms, sum);
    terms.move_to(sum);
  }
  template <bool quickly, bool masked>
  __device__ void add_terms(const Place& here, const Place& following, const A (&from)[width], Terms& terms,
                            Sum<A> (&sum)[width]) const {
    slots.template visit<!Kind::writes>(here, following, [&](int k, const auto& a, const auto& b) {
      constexpr int count = sizeof(a) / sizeof(Pack<T>);
#pragma unroll
      for (int i = 0; i < count; i++) terms.template add<quickly, masked>(a[i], b[i], from);
      if ((k + count) % ColumnsCode::terms<T> == 0) terms.move_to(sum);
    });
  }

  // Combines the group's lanes and stores what they have found.
  __device__ void store_group(const Place& here, unsigned summed, Pack<T>& top, Sum<A> (&sum)[width]) const {
    if constexpr (Op::separates_maximum) {
      for (int mask = 16; mask >= tiling.across; mask /= 2)
#pragma unroll
        for (int e = 0; e < width; e++) sum[e] = combine<T>(sum[e], shuffle(sum[e], mask));
      if (leads) store_sums(sum, summed);
    } else {
      A plain[width];
#pragma unroll
      for (int e = 0; e < width; e++) plain[e] = Kind::compensates ? sum[e].value() : sum[e].s;
      add_lanes(plain);
      if (leads) store_sums(plain, summed);
    }
    if constexpr (Kind::may_be_quick) {
#pragma unroll
      for (int e = 0; e < width; e++)
        if (here.count > 0 && summed >> e & 1) top.words[e / 2] &= 0xffff0000u >> e % 2 * 16;  // 0
    }
    if (Kind::scores && leads) store_maxima(top);
  }

  __device__ void add_lanes(A (&x)[width]) const {
    for (int mask = 16; mask >= tiling.across; mask /= 2)
#pragma unroll
      for (int e = 0; e < width; e++) x[e] += __shfl_xor_sync(0xffffffffu, x[e], mask);
  }
  // Stores the group's sums, but for the columns that have a bit in `but`.
  template <class S>
  __device__ void store_sums(const S (&x)[width], unsigned but) const {
    auto* of_group = shared.sums + group * layout.columns;
#pragma unroll
    for (int e = 0; e < width; e++)
      if (!(but >> e & 1) && columns.is_own(e)) of_group[columns.column_of(e)] = x[e];
  }
  __device__ void store_maxima(const Pack<T>& top) const {
    if constexpr (Kind::straddles) {
#pragma unroll
      for (int e = 0; e < width; e++) {
        const int column = columns.column_of(e), access = group * tiling.across + tiling.access_of(column);
        if (columns.is_own(e)) shared.maxima[access * width + tiling.element_of(column)] = top.raw(e);
      }
    } else {
      store_elements<width>(shared.maxima + (group * tiling.across + tiling.x) * width, top);
    }
  }
};

}  // namespace jaxsoft::cuda
