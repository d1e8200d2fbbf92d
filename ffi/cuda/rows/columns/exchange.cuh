// The second phase of a tile: what groups of threads, and the blocks of a cluster, have reduced of a column is merged
// and finished, so that all blocks know what the column's elements are written from.
#pragma once

#include "../../counter.cuh"
#include "place.cuh"

namespace jaxsoft::cuda {

template <class Kind>
struct Exchange {
  using T = typename Kind::T;
  using A = typename Kind::A;
  using Op = typename Kind::Op;
  using Whole = State<A, false>;
  const Tiling<Kind>& tiling;
  const SharedTile<Kind>& shared;
  const TileLayout<Kind>& layout;
  unsigned long long* const counter;  // of tiles; null where they are distributed in advance
  // log2 of the lanes that finish a column together, and their number
  const int log_helpers = min(max(__ffs(tiling.tile.threads) - __ffs(layout.columns), 0), ColumnsCode::log_helpers);
  const int helpers = 1 << log_helpers;
  const bool clustered = kHopperCode && Kind::reduces && tiling.tile.blocks > 1;  // before Hopper blocks are alone

  // Makes the barrier, before the first tile.
  __device__ void open() const {
    if constexpr (kHopperCode) {
      if (!clustered) return;
      if (tiling.thread == 0) {
        shared.barrier.init(1);
        show_barriers();
      }
      __syncwarp();
      arrive_at_cluster();
    }
  }
  // Waits, after the last tile, until no block of the cluster reads this block's memory or sends to it.
  __device__ void close() const {
    if constexpr (kHopperCode) {
      if (!clustered) return;
      __syncwarp();
      wait_for_cluster();
    }
  }

  // Takes a tile from the counter, by one thread of all that share the tile. Asynchronous until it is used.
  __device__ unsigned take_tile() const {
    unsigned taken = 0;
    if (counter && tiling.rank == 0 && tiling.thread == 0) taken = take(counter);
    return taken;
  }

  // Before the columns of a tile are merged: sends the cluster's blocks which tile follows, and the barrier which bytes
  // to wait for.
  __device__ void begin(unsigned taken) const {
    if constexpr (kHopperCode) {
      if (!clustered) return;
      wait_for_cluster();  // until the last message has been read
      if (tiling.thread != 0) return;
      shared.barrier.arrive_expecting(layout.columns * tiling.tile.blocks * sizeof(Message<Kind>) +
                                      (counter ? sizeof(unsigned) : 0));
      if (counter && tiling.rank == 0)
        for (unsigned block = 0; block < tiling.tile.blocks; block++)
          send(taken + tiling.tiles_at_once, const_cast<unsigned*>(&shared.next_tile), shared.barrier, block);
    }
  }
  // Merges what the block's groups have of each column. A block that is alone finishes the columns; others send what
  // they have to all blocks of the cluster.
  __device__ void merge_groups(const TileColumns<Kind>& columns) const {
    for_columns([&](int column, int helper) {
      const Whole whole = merge_groups(column, helper);
      if constexpr (kHopperCode && Kind::reduces)
        if (clustered) return send_to_blocks(column, helper, whole);
      finish(columns, column, helper, whole);
    });
  }
  // Merges what the cluster's blocks have sent, and finishes the columns.
  __device__ void merge_blocks(const TileColumns<Kind>& columns) const {
    for_columns([&](int column, int helper) { finish(columns, column, helper, merge_blocks(column, helper)); });
  }

 private:
  // Calls f(column, helper) for all columns, each finished by one lane or some neighbouring ones, the helpers. All
  // lanes of a warp call f, as it may shuffle; so the last columns may not exist.
  template <class F>
  __device__ void for_columns(F f) const {
    const int thread = tiling.thread;
    for (int column = thread >> log_helpers; column - (thread % 32 >> log_helpers) < layout.columns;
         column += tiling.tile.threads >> log_helpers)
      f(column, thread & (helpers - 1));
  }

  // Merges the parts 0, 1, ... of a column, `count` of them.
  template <class PartOf>
  __device__ Whole merge(int count, int helper, PartOf part) const {
    Whole whole;
    if constexpr (Kind::scores) {
      for (int i = helper; i < count; i += helpers) whole.m = max(whole.m, part(i).m);
      whole.m = reduce_maximum(whole.m, helpers);
    }
    for (int i = helper; i < count; i += helpers) {
      const Sum<A> sum = Kind::scores ? seen_from<T>(whole.m, part(i)) : part(i).sum;
      if constexpr (Kind::compensates) whole.sum = combine<T>(whole.sum, sum);
      else whole.sum.s += sum.s;
    }
    if constexpr (Kind::compensates) whole.sum = reduce_lanes<T>(whole.sum, helpers);
    else for (int mask = helpers / 2; mask > 0; mask /= 2)
      whole.sum.s += __shfl_xor_sync(0xffffffffu, whole.sum.s, mask);
    return whole;
  }
  __device__ Whole merge_groups(int column, int helper) const {
    Whole whole;
    if constexpr (Kind::reduces)
      whole = merge(column < layout.columns ? layout.groups : 0, helper, [&](int group) {
        Whole part;
        const int access = group * tiling.across + tiling.access_of(column);
        if constexpr (Kind::scores)
          part.m = widen(shared.maxima[access * Kind::width + tiling.element_of(column)]);
        part.sum = {shared.sums[group * layout.columns + column]};
        return part;
      });
    return whole;
  }
  __device__ Whole merge_blocks(int column, int helper) const {
    const Message<Kind>* of_column = shared.received + column * tiling.tile.blocks;
    return merge(column < layout.columns ? tiling.tile.blocks : 0, helper, [&](int block) {
      Whole part;
      if constexpr (Kind::scores) part.m = of_column[block].m;
      part.sum = {of_column[block].sum};
      return part;
    });
  }
  __device__ void send_to_blocks(int column, int helper, const Whole& whole) const {
    const bool exists = column < layout.columns;
    Message<Kind> message;
    if constexpr (Kind::scores) message.m = whole.m;
    if constexpr (Op::separates_maximum) message.sum = whole.sum;
    else message.sum = whole.sum.value();
    for (unsigned block = helper; block < tiling.tile.blocks && exists; block += helpers)
      send(message, shared.received + column * tiling.tile.blocks + tiling.rank, shared.barrier, block);
  }

  // Works out what a column's elements are written from, and writes its statistics.
  __device__ void finish(const TileColumns<Kind>& columns, int column, int helper, Whole whole) const {
    const int64_t access = tiling.first_access(columns.index) + tiling.access_of(column);
    int64_t of_all = access * Kind::width + tiling.element_of(column);  // the column's place among all rows' columns
    bool exists = access < tiling.accesses;
    if constexpr (Kind::straddles) {
      const int of_tile = tiling.access_of(column) * Kind::width + tiling.element_of(column);
      of_all = columns.first + of_tile, exists = of_tile < columns.count;
    }
    if (column >= layout.columns || !exists) return;
    if constexpr (Op::separates_maximum)
      if (isfinite(whole.m)) whole.sum.add(-1);
    typename Op::Part part;
    if constexpr (Kind::scores) part = {whole.m, whole.sum};
    else part = whole.sum;
    const bool first = helper == 0 && tiling.rank == 0;
    const typename Kind::Values found = Op::finish(part, tiling.args, of_all, first);
    if (helper == 0) shared.values[column] = found;
  }
};

}  // namespace jaxsoft::cuda
