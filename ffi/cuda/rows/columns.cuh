// Row operations over an axis that is not the last: arrays (rows, n, inner), reduced over n, without a transpose.
//
// A column is one of the rows * inner sets of n scores. A block takes a tile of neighbouring columns, 128 bytes wide or
// wider, so that what a warp reads is contiguous, and a part of n; a cluster of blocks has all of n. Every thread
// copies its packs into shared memory and is the only one to read them again, to reduce and then to write: one read of
// device memory. Shared memory serves as registers of any number here: it is larger, and what it holds needs no
// unrolled code.
//
// Blocks are persistent, and take their next tile from a counter: multiprocessors are not equally fast. As a thread
// writes what it holds of a tile, it copies its packs of the next tile into their place, so that memory has something
// to read throughout; and several blocks share a multiprocessor, so one reduces while others read and write.
//
// Parts of n that do not fit go through shared memory in chunks, twice: reduced, then read again and written.
//
// Where 16 bits are read and written, sums are taken of exp(x) itself, so that no maximum has to be found first: scores
// are seldom so large or small that f32 does not hold it, and then they are summed again.
#pragma once

#include <algorithm>

#include "../copies.cuh"
#include "../counter.cuh"
#include "../devices.cuh"
#include "../hopper.cuh"
#include "operations.cuh"

namespace jaxsoft::cuda {

struct Columns {
  static constexpr int most_threads = 256;       // of a block
  // Blocks that a multiprocessor should hold, of 256 threads; more of fewer.
  template <class T> static constexpr int blocks_at_once = sizeof(T) == 8 ? 2 : 3;
  static constexpr int most_blocks = 16;         // of a cluster
  static constexpr int tile_bytes = 128;         // of a tile's breadth, where there are so many columns; twice that
                                                 // where rows are not a multiple of it, as tiles share what is read
  static constexpr int most_across = 64;         // accesses side by side in a tile that is wider, as n is small
  static constexpr int short_bytes = 32 * 1024;  // what a tile may hold to be made wider
  static constexpr int held_bytes = 64 * 1024;   // what a block should hold at most, if more blocks can share n
  static constexpr int at_once = 2;              // packs that a thread reads before it uses the first, or twice as many
                                                 // accesses of less than a pack
  static constexpr int few_tiles = 4;            // a cluster: up to here tiles are dealt out in advance
  static constexpr int log_helpers = 3;          // of the number of lanes that finish a column, at most
  // Terms of a sum between additions to one that is compensated, but for 16 bits.
  template <class T> static constexpr int terms = sizeof(T) == 2 ? 16 : 32 / sizeof(T);
};

// How a tile is dealt out. An access is what a thread loads at once: a pack, or two elements or one where packs do not
// lie on 16-byte boundaries.
struct Tile {
  int threads;      // of a block
  int across;       // accesses side by side; threads / across threads, and so many rows apart, have a column
  int slots;        // accesses that a thread holds of each operand
  unsigned blocks;  // that share n; like across, a power of two
  int share;        // so many blocks share a multiprocessor's memory
  Divider row;      // divides by the accesses that are side by side in a row; not set where there are 2^31 or more
};

// Two elements of 16 bits are at a multiple of 4 bytes in every second row if `inner` is odd; in the rows between, the
// two that are straddle those. As a thread's rows are an even number of rows apart, it always has the same two columns,
// those of its neighbour's rows being one column to the left; a tile has the columns that either way covers.
__host__ __device__ constexpr int straddled_columns(int across) { return 2 * across - 1; }  // of a tile
template <int width, bool straddles>
__host__ __device__ int64_t accesses_of_row(int64_t inner, int across) {
  if (!straddles) return inner / width;
  return (inner + straddled_columns(across) - 1) / straddled_columns(across) * across;
}

// What groups of threads, and blocks, hand to each other of a column. Only sums from which a maximum is to be taken out
// again are compensated there, as they are few.
template <class Op, class A>
using GroupSum = std::conditional_t<Op::keeps_apart, Sum<A>, A>;
template <class Op, class A, bool = Op::scores>
struct Message {
  A m;
  GroupSum<Op, A> sum;
};
template <class Op, class A>
struct Message<Op, A, false> {
  GroupSum<Op, A> sum;
};

template <class A>
__device__ Sum<A> as_sum(A s) {
  return {s, 0};
}
template <class A>
__device__ Sum<A> as_sum(Sum<A> sum) {
  return sum;
}

// Where what lies in shared memory. Of a tile, worked out on the host: a kernel's parameters cost no instructions.
template <template <class> class Op, class T, int width>
struct TileLayout {
  using A = Accumulator<T>;
  int columns, groups;  // a group: the threads of a column that lie in one warp, or the only one that does
  unsigned barrier, next, values, mail, sums, maxima, slots, end = 0;
  explicit TileLayout(Tile tile) {
    columns = tile.across * width;
    groups = tile.threads / (tile.across < 32 ? 32 : tile.across);
    barrier = add(sizeof(Barrier));
    next = add(sizeof(unsigned));
    values = add(columns * sizeof(typename Op<T>::Values));
    mail = add(tile.blocks > 1 ? columns * tile.blocks * sizeof(Message<Op<T>, A>) : 0);
    sums = add(Op<T>::reduces ? groups * columns * sizeof(GroupSum<Op<T>, A>) : 0);
    maxima = add(Op<T>::scores ? groups * columns * sizeof(T) : 0);
    slots = end;
  }
  unsigned add(size_t bytes) {
    unsigned begin = end;
    end += (bytes + 15) / 16 * 16;
    return begin;
  }
};

// Accesses of `width` elements, which stand at the beginning of a pack.
template <int bytes>
struct alignas(bytes) Words {
  uint32_t words[bytes / 4];
};
template <int width, class T>
__device__ Pack<T> load_elements(const T* from) {
  constexpr int bytes = width * sizeof(T);
  Pack<T> pack;
  if constexpr (bytes >= 4) reinterpret_cast<Words<bytes>&>(pack) = *reinterpret_cast<const Words<bytes>*>(from);
  else pack.set(0, *from);
  return pack;
}
template <int width, class T>
__device__ void store_elements(T* to, const Pack<T>& pack) {
  constexpr int bytes = width * sizeof(T);
  if constexpr (bytes >= 4) *reinterpret_cast<Words<bytes>*>(to) = reinterpret_cast<const Words<bytes>&>(pack);
  else *to = pack.raw(0);
}
template <int width, class R, class A>
__device__ void store_results(R* to, const A (&x)[width]) {
  constexpr int size = width < Pack<R>::size ? width : Pack<R>::size;
  alignas(width * sizeof(R) < 16 ? width * sizeof(R) : 16) R result[width];
#pragma unroll
  for (int e = 0; e < width; e++) result[e] = narrow<R>(x[e]);
  struct alignas(size * sizeof(R)) Store { R elements[size]; };
#pragma unroll
  for (int e = 0; e < width; e += size) *reinterpret_cast<Store*>(to + e) = *reinterpret_cast<const Store*>(result + e);
}

// The larger of each two elements; of a number and a NaN, the number.
template <int width, class T>
__device__ Pack<T> larger(Pack<T> a, const Pack<T>& b) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < (width + 1) / 2; k++)
      a.words[k] = bits<uint32_t>(__hmax2(bits<Pair<T>>(a.words[k]), bits<Pair<T>>(b.words[k])));
  } else {
#pragma unroll
    for (int e = 0; e < width; e++) a.set(e, max(a.get(e), b.get(e)));
  }
  return a;
}
template <int width, class T>
__device__ Pack<T> shuffle(const Pack<T>& pack, int lane_mask) {
  Pack<T> other;
#pragma unroll
  for (int k = 0; k < (width * int(sizeof(T)) + 3) / 4; k++)
    other.words[k] = __shfl_xor_sync(0xffffffffu, pack.words[k], lane_mask);
  return other;
}

template <template <class> class Op, class T, int width, bool straddles>
__global__ void __launch_bounds__(Columns::most_threads, Columns::blocks_at_once<T>)
columns(const __grid_constant__ Arguments<T> args, const __grid_constant__ Tile tile,
        const __grid_constant__ TileLayout<Op, T, width> layout, unsigned long long* counter) {
  using A = Accumulator<T>;
  using Part = typename Op<T>::Part;
  using Each = Message<Op<T>, A>;
  using Values = typename Op<T>::Values;
  constexpr int operands = Op<T>::operands,
                at_once = (width * sizeof(T) < 16 ? 2 : 1) * Columns::at_once / Op<T>::operands;
  constexpr bool scores = Op<T>::scores, reduces = Op<T>::reduces, writes = Op<T>::writes;
  constexpr bool may_be_quick = writes && Op<T>::has_quick && width > 1;
  constexpr bool may_be_masked = !scores && !Op<T>::a_is_scores;  // softmax_vjp
  constexpr bool compensates = sizeof(T) > 2 || Op<T>::keeps_apart;
  constexpr bool copies = width * sizeof(T) >= 4;  // asynchronously; a single element of 16 bits is loaded

  extern __shared__ __align__(16) unsigned char tile_memory[];
  auto& barrier = *reinterpret_cast<Barrier*>(tile_memory + layout.barrier);
  auto& next_tile = *reinterpret_cast<volatile unsigned*>(tile_memory + layout.next);
  auto* values = reinterpret_cast<Values*>(tile_memory + layout.values);
  auto* mail = reinterpret_cast<Each*>(tile_memory + layout.mail);
  auto* sums = reinterpret_cast<GroupSum<Op<T>, A>*>(tile_memory + layout.sums);
  T* maxima = reinterpret_cast<T*>(tile_memory + layout.maxima);
  T* slots = reinterpret_cast<T*>(tile_memory + layout.slots);

  const int across = tile.across, shift = __ffs(across) - 1, apart = tile.threads >> shift;
  const int thread = threadIdx.x, at = thread & (across - 1), first = thread >> shift;
  const unsigned rank = blockIdx.x & (tile.blocks - 1), tiles_at_once = gridDim.x / tile.blocks;
  const int64_t accesses_a_row = accesses_of_row<width, straddles>(args.inner, across);
  const int64_t accesses = args.rows * accesses_a_row;
  const int64_t begin = args.n * rank / tile.blocks, end = args.n * (rank + 1) / tile.blocks;
  const int chunk_rows = tile.slots * apart;
  const int64_t step = apart * args.inner;
  const bool stays = reduces && writes && end - begin <= chunk_rows;  // from being reduced to being written

  auto row_of = [&](int64_t access) {
    return accesses <= INT32_MAX ? int64_t(tile.row.quotient(static_cast<uint32_t>(access))) : access / accesses_a_row;
  };

  // Where columns straddle accesses, the row that a tile is of, and the first of its columns there.
  struct Begin {
    int64_t row, column;
  };
  auto begin_of = [&](unsigned index) {
    const int64_t access = int64_t(index) << shift, row = row_of(access);
    return Begin{row, (access - row * accesses_a_row >> shift) * straddled_columns(across)};
  };

  // The thread's part of a chunk of a tile: the first of its elements in an operand, and how many rows it has.
  struct Place {
    int64_t offset;
    int count;
  };
  auto place = [&](unsigned index, int64_t chunk) {
    const int64_t access = (int64_t(index) << shift) + at;  // of all rows' accesses of equal j
    const int rows = static_cast<int>(min(end - chunk, int64_t(chunk_rows))) - first;
    if (access >= accesses || rows <= 0) return Place{0, 0};
    const int count = (rows + apart - 1) >> (__ffs(apart) - 1);
    if constexpr (straddles) {
      const Begin of = begin_of(index);
      const int64_t to = (of.row * args.n + chunk + first) * args.inner + of.column, two = 2 * at - (to & 1);
      return of.column + two < args.inner ? Place{to + two, count} : Place{0, 0};
    }
    const int64_t row = row_of(access), column = access - row * accesses_a_row;
    return Place{(row * args.n + chunk + first) * args.inner + column * width, count};
  };
  auto slot = [&](int operand, int k) { return slots + ((k * operands + operand) * tile.threads + thread) * width; };
  // Where a thread's part begins in the operands; `copy` goes on by a step.
  auto start = [&](const T* (&from)[operands], const Place& of) {
#pragma unroll
    for (int operand = 0; operand < operands; operand++) from[operand] = (operand == 0 ? args.a : args.b) + of.offset;
  };
  auto copy = [&](int k, const T* (&from)[operands]) {
#pragma unroll
    for (int operand = 0; operand < operands; operand++) {
      if constexpr (copies) copy_access<width * sizeof(T)>(slot(operand, k), from[operand]);
      from[operand] += step;
    }
  };
  auto copy_all = [&](const Place& of) {
    const T* from[operands];
    start(from, of);
    for (int k = 0; k < of.count; k++) copy(k, from);
  };
  auto arrive = [&](const Place& of) {  // what has been copied, or is loaded now
    if constexpr (copies) return wait_for_copies();
    constexpr int in_flight = 8;
#pragma unroll
    for (int operand = 0; operand < operands; operand++) {
      const T* source = (operand == 0 ? args.a : args.b) + of.offset;
      for (int k = 0; k < of.count; k += in_flight) {
        T x[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; i++, source += step)
          if (k + i < of.count) x[i] = *source;
#pragma unroll
        for (int i = 0; i < in_flight; i++)
          if (k + i < of.count) *slot(operand, k + i) = x[i];
      }
    }
  };

  // Calls use(k, a, b) for all of a chunk, some accesses at a time. With `refill` what a thread has read is replaced by
  // its part of the chunk that follows.
  auto visit = [&](auto refill, const Place& here, const Place& following, auto use) {
    const T* from[operands];
    start(from, following);
    auto some = [&](int k, auto number) {
      constexpr int count = decltype(number)::value;
      Pack<T> a[count], b[count];
#pragma unroll
      for (int i = 0; i < count; i++) {
        a[i] = load_elements<width>(slot(0, k + i));
        if constexpr (operands > 1) b[i] = load_elements<width>(slot(1, k + i));
      }
      if constexpr (decltype(refill)::value) {
#pragma unroll
        for (int i = 0; i < count; i++)
          if (count > 1 || k < following.count) copy(k + i, from);
      }
      use(k, a, b);
    };
    const int both = decltype(refill)::value ? min(here.count, following.count) : here.count;
    int k = 0;
    for (; k + at_once <= both; k += at_once) some(k, std::integral_constant<int, at_once>{});
    for (; k < here.count; k++) some(k, std::integral_constant<int, 1>{});
    if constexpr (decltype(refill)::value)
      for (; k < following.count; k++) copy(k, from);
  };

  // A column, counted so that those at the same place in their accesses are neighbours, is finished by a lane, or some
  // neighbouring ones. All lanes of a warp call f, as it may shuffle; the last columns may not exist.
  const int log_helpers = min(max(__ffs(tile.threads) - __ffs(layout.columns), 0), Columns::log_helpers);
  const int helpers = 1 << log_helpers;
  auto for_columns = [&](auto f) {
    for (int c = thread >> log_helpers; c - (thread % 32 >> log_helpers) < layout.columns;
         c += tile.threads >> log_helpers)
      f(c, thread & (helpers - 1));
  };

  const bool clustered = kHopperCode && reduces && tile.blocks > 1;  // before Hopper every block is alone
  if constexpr (kHopperCode) {
    if (clustered) {
      if (thread == 0) {
        barrier.init(1);
        show_barriers();
      }
      __syncwarp();
      arrive_at_cluster();
    }
  }
  unsigned index = blockIdx.x / tile.blocks;  // 2^32 tiles are more than there is memory
  Place here = place(index, begin);
  copy_all(here);
  unsigned next;
  for (unsigned turn = 0; (int64_t(index) << shift) < accesses; index = next, turn ^= 1) {
    unsigned taken = 0;
    if (counter && rank == 0 && thread == 0) taken = take(counter);
    // What comes after a chunk: the next one, or after the last one the first of the tile that follows.
    auto after = [&](int64_t chunk, unsigned follows) {
      chunk += chunk_rows;
      return chunk < end ? place(index, chunk) : place(follows, begin);
    };
    // The first of the tile's columns, of all rows' columns; where they straddle accesses, how many they are, and whether
    // the thread's are one to the left.
    int64_t first_column = 0;
    int tile_columns = 0;
    bool left = false;
    if constexpr (straddles) {
      const Begin of = begin_of(index);
      first_column = of.row * args.inner + of.column;
      tile_columns = static_cast<int>(min(args.inner - of.column, int64_t(straddled_columns(across))));
      left = ((of.row * args.n + begin + first) * args.inner + of.column) & 1;
    }
    // Of the thread's element: its column's place among the tile's, those of equal e side by side.
    auto place_of = [&](int e) {
      if (straddles && left) return e == 0 ? max(across + at - 1, across) : at;
      return e * across + at;
    };
    auto is_own = [&](int e) { return !straddles || (at * width + e >= left && at * width + e - left < tile_columns); };

    if constexpr (reduces) {
      const int group = across < 32 ? thread / 32 : first;
      const bool leads = across >= 32 || thread % 32 < across;
      auto store_maxima = [&](const Pack<T>& top) {
        if constexpr (straddles) {
#pragma unroll
          for (int e = 0; e < width; e++) {
            const int place = place_of(e), access = group * across + (place & (across - 1));
            if (is_own(e)) maxima[access * width + (place >> shift)] = top.raw(e);
          }
        } else {
          store_elements<width>(maxima + (group * across + at) * width, top);
        }
      };
      auto add_lanes = [&](A (&x)[width]) {
        for (int mask = 16; mask >= across; mask /= 2)
#pragma unroll
          for (int e = 0; e < width; e++) x[e] += __shfl_xor_sync(0xffffffffu, x[e], mask);
      };
      auto store_sums = [&](const auto& x, unsigned but) {
        auto* of_group = sums + group * layout.columns;
#pragma unroll
        for (int e = 0; e < width; e++)
          if (!(but >> e & 1) && is_own(e)) of_group[place_of(e)] = x[e];
      };

      // For 16 bits, in one pass: sums of exp(x) itself, which are states whose m is 0, where they are not too large or
      // small to be exact.
      unsigned summed = 0;  // a bit for each column
      bool all_summed = false;
      if constexpr (may_be_quick) {
        if (stays && args.result == ResultType::same) {
          arrive(here);
          A plain[width] = {};
          visit(std::false_type{}, here, here, [&](int, const auto& a, const auto&) {
#pragma unroll
            for (const auto& pack : a)
#pragma unroll
              for (int e = 0; e < width; e++) plain[e] += exp2_approximately(pack.get(e) * A(kLog2E));
          });
          add_lanes(plain);
#pragma unroll
          for (int e = 0; e < width; e++) summed |= (plain[e] > A(0x1p-90) && plain[e] < A(0x1p90)) << e;
#pragma unroll
          for (int e = 0; e < width; e++)
            if (here.count == 0 || !is_own(e)) summed |= 1u << e;
          if (leads) {
            Pack<T> m{};
            if (here.count == 0) m.fill(narrow<T>(-infinity<A>()));  // then no lane of the group has any
            store_sums(plain, 0);
            store_maxima(m);
          }
          all_summed = __all_sync(0xffffffffu, summed == (1u << width) - 1);
        }
      }
      if (!all_summed) {
        Pack<T> top;
        Sum<A> sum[width];
#pragma unroll
        for (int e = 0; e < width; e++) top.set(e, narrow<T>(-infinity<A>()));
        for (int64_t chunk = begin; chunk < end || chunk == begin; chunk += chunk_rows) {
          arrive(here);
          const Place following = stays ? here : after(chunk, writes ? index : index + tiles_at_once);
          A from[width] = {};  // what exp subtracts: the reference of the group's maximum up to here
          if constexpr (scores) {
            Pack<T> high = top;
#pragma unroll 4
            for (int k = 0; k < here.count; k++) high = larger<width>(high, load_elements<width>(slot(0, k)));
            for (int mask = 16; mask >= across; mask /= 2) high = larger<width>(high, shuffle<width>(high, mask));
            if (chunk > begin) {
#pragma unroll
              for (int e = 0; e < width; e++) {
                sum[e] = seen_from<T>(high.get(e), State<A, false>{top.get(e), sum[e]});
                if constexpr (!compensates) sum[e].c = 0;
              }
            }
#pragma unroll
            for (int e = 0; e < width; e++) from[e] = reference(high.get(e));
            top = high;
          }
          A terms[width] = {};
          [[maybe_unused]] A equal[width] = {};
          auto add = [&] {
#pragma unroll
            for (int e = 0; e < width; e++) {
              if constexpr (compensates) sum[e].add(terms[e]);
              else sum[e].s += terms[e];
              terms[e] = 0;
              if constexpr (Op<T>::keeps_apart) sum[e].add(equal[e]), equal[e] = 0;
            }
          };
          auto sum_up = [&](auto quickly, auto masked) {
            visit(std::bool_constant<!writes>{}, here, following, [&](int k, const auto& a, const auto& b) {
              constexpr int count = sizeof(a) / sizeof(Pack<T>);
#pragma unroll
              for (int i = 0; i < count; i++) {
#pragma unroll
                for (int e = 0; e < width; e++) {
                  if constexpr (scores) {
                    A x = a[i].get(e), term = exponential_term<decltype(quickly)::value>(x, from[e]);
                    // Scores that are the maximum are counted, not mixed into the sum of the others: added to it only
                    // with compensation, they leave it its digits. (A column that holds +inf has no such sum.)
                    bool is_top = Op<T>::keeps_apart && x == from[e];
                    terms[e] += is_top ? A(0) : term;
                    if constexpr (Op<T>::keeps_apart) equal[e] += is_top ? A(1) : A(0);
                  } else if constexpr (Op<T>::reads_a_to_reduce) {
                    terms[e] += decltype(masked)::value && a[i].get(e) == 0 ? A(0) : a[i].get(e) * b[i].get(e);
                  } else {
                    terms[e] += b[i].get(e);
                  }
                }
              }
              if ((k + count) % Columns::terms<T> == 0) add();
            });
          };
          // Where 16 bits are written, what a shift that is not large is rounded by does not show.
          bool quickly = may_be_quick && args.result == ResultType::same;
#pragma unroll
          for (int e = 0; e < width; e++) quickly &= fabs(from[e]) < 64;
          if (may_be_quick && quickly) sum_up(std::bool_constant<may_be_quick>{}, std::false_type{});
          else if (may_be_masked && args.masked) sum_up(std::false_type{}, std::bool_constant<may_be_masked>{});
          else sum_up(std::false_type{}, std::false_type{});
          add();
          if (!stays) {
            if (writes) copy_all(following);
            here = following;
          }
        }
        if constexpr (Op<T>::keeps_apart) {
          for (int mask = 16; mask >= across; mask /= 2)
#pragma unroll
            for (int e = 0; e < width; e++) sum[e] = combine<T>(sum[e], shuffle(sum[e], mask));
          if (leads) store_sums(sum, summed);
        } else {
          A plain[width];
#pragma unroll
          for (int e = 0; e < width; e++) plain[e] = compensates ? sum[e].value() : sum[e].s;
          add_lanes(plain);
          if (leads) store_sums(plain, summed);
        }
        if constexpr (may_be_quick) {
#pragma unroll
          for (int e = 0; e < width; e++)
            if (here.count > 0 && summed >> e & 1) top.words[e / 2] &= 0xffff0000u >> e % 2 * 16;  // 0
        }
        if (scores && leads) store_maxima(top);
      }
    }
    __syncthreads();

    // What the helpers make of a column's parts, `count` of them.
    auto merge = [&](int count, int helper, auto part) {
      State<A, false> whole;
      if constexpr (scores) {
        for (int i = helper; i < count; i += helpers) whole.m = max(whole.m, part(i).m);
        whole.m = reduce_maximum(whole.m, helpers);
      }
      for (int i = helper; i < count; i += helpers) {
        const Sum<A> sum = scores ? seen_from<T>(whole.m, part(i)) : part(i).sum;
        if constexpr (compensates) whole.sum = combine<T>(whole.sum, sum);
        else whole.sum.s += sum.s;
      }
      if constexpr (compensates) whole.sum = reduce_lanes<T>(whole.sum, helpers);
      else for (int mask = helpers / 2; mask > 0; mask /= 2)
        whole.sum.s += __shfl_xor_sync(0xffffffffu, whole.sum.s, mask);
      return whole;
    };
    auto finish = [&](int column, int helper, State<A, false> whole) {
      const int64_t access = (int64_t(index) << shift) + (column & (across - 1));
      int64_t of_all = access * width + (column >> shift);
      bool exists = access < accesses;
      if constexpr (straddles) {
        const int of_tile = (column & (across - 1)) * width + (column >> shift);
        of_all = first_column + of_tile, exists = of_tile < tile_columns;
      }
      if (column >= layout.columns || !exists) return;
      if constexpr (Op<T>::keeps_apart)
        if (isfinite(whole.m)) whole.sum.add(-1);
      Part part;
      if constexpr (scores) part = {whole.m, whole.sum};
      else part = whole.sum;
      const bool first = helper == 0 && rank == 0;
      const Values found = Op<T>::finish(part, args, of_all, first);
      if (helper == 0) values[column] = found;
    };
    if constexpr (kHopperCode) {
      if (clustered) {
        wait_for_cluster();  // until the last mail has been read
        if (thread == 0) {
          barrier.arrive_expecting(layout.columns * tile.blocks * sizeof(Each) + (counter ? sizeof(unsigned) : 0));
          if (counter && rank == 0)
            for (unsigned block = 0; block < tile.blocks; block++)
              send(taken + tiles_at_once, const_cast<unsigned*>(&next_tile), barrier, block);
        }
      }
    }
    if (counter && !clustered && thread == 0) next_tile = taken + tiles_at_once;
    for_columns([&](int column, int helper) {
      const bool exists = column < layout.columns;
      State<A, false> whole;
      if constexpr (reduces)
        whole = merge(exists ? layout.groups : 0, helper, [&](int g) {
          State<A, false> part;
          const int access = g * across + (column & (across - 1));
          if constexpr (scores) part.m = widen(maxima[access * width + (column >> shift)]);
          part.sum = as_sum(sums[g * layout.columns + column]);
          return part;
        });
      if constexpr (kHopperCode && reduces) {
        if (clustered) {
          Each message;
          if constexpr (scores) message.m = whole.m;
          if constexpr (Op<T>::keeps_apart) message.sum = whole.sum;
          else message.sum = whole.sum.value();
          for (unsigned block = helper; block < tile.blocks && exists; block += helpers)
            send(message, mail + column * tile.blocks + rank, barrier, block);
          return;
        }
      }
      finish(column, helper, whole);
    });
    if constexpr (kHopperCode && reduces) {
      if (clustered) {
        barrier.wait(turn);
        if (counter) next = next_tile;
        for_columns([&](int column, int helper) {
          const Each* of_column = mail + column * tile.blocks;
          finish(column, helper, merge(column < layout.columns ? tile.blocks : 0, helper, [&](int block) {
            State<A, false> part;
            if constexpr (scores) part.m = of_column[block].m;
            part.sum = as_sum(of_column[block].sum);
            return part;
          }));
        });
      }
    }
    __syncthreads();
    if (!counter) next = index + tiles_at_once;
    else if (!clustered) next = next_tile;
    if constexpr (kHopperCode)
      if (clustered) arrive_at_cluster();

    if constexpr (writes) {
      auto write = [&](auto quickly) {
        constexpr bool quick = decltype(quickly)::value;
        const bool has_all = is_own(0) && is_own(width - 1);
        auto store = [&](auto* out, const A (&x)[width]) {
          if (has_all) {
            store_results(out, x);
          } else if constexpr (straddles) {
#pragma unroll
            for (int e = 0; e < width; e++)
              if (is_own(e)) out[e] = narrow<std::remove_reference_t<decltype(*out)>>(x[e]);
          }
        };
        Values own[width];
#pragma unroll
        for (int e = 0; e < width; e++) own[e] = values[place_of(e)];
        for (int64_t chunk = begin; chunk < end || chunk == begin; chunk += chunk_rows) {
          if (!stays) arrive(here);
          const Place following = after(chunk, next);
          int64_t to = here.offset;
          visit(std::true_type{}, here, following, [&](int, const auto& a, const auto& b) {
            constexpr int count = sizeof(a) / sizeof(Pack<T>);
#pragma unroll
            for (int i = 0; i < count; i++, to += step) {
              A x[width];
#pragma unroll
              for (int e = 0; e < width; e++) {
                if constexpr (may_be_quick)
                  if (quick) x[e] = Op<T>::quick_value(own[e], a[i].get(e));
                if (may_be_quick && quick) continue;
                x[e] = Op<T>::value(own[e], a[i].get(e), operands > 1 ? b[i].get(e) : A(0));
                if (may_be_masked && !quick && args.masked && a[i].get(e) == 0) x[e] = 0;
              }
              if (may_be_quick && quick) {
                if constexpr (may_be_quick) {
                  Pack<T> pack;
                  A all[Pack<T>::size] = {};
#pragma unroll
                  for (int e = 0; e < width; e++) all[e] = x[e];
                  pack.set_all(all);
                  if constexpr (kUnit<T> != 1) pack.multiply(kUnit<T>);
                  T* out = static_cast<T*>(args.out) + to;
                  if (has_all) store_elements<width>(out, pack);
                  else if (is_own(0)) out[0] = pack.raw(0);
                  else if (is_own(width - 1)) out[width - 1] = pack.raw(width - 1);
                }
              } else if (quick || args.result == ResultType::same) {
                store(static_cast<T*>(args.out) + to, x);
              } else if constexpr (sizeof(T) == 2) {
                store(static_cast<float*>(args.out) + to, x);
              } else if constexpr (sizeof(T) == 4) {
                if (args.result == ResultType::f16) store(static_cast<__half*>(args.out) + to, x);
                else store(static_cast<__nv_bfloat16*>(args.out) + to, x);
              }
            }
          });
          here = following;
        }
      };
      if constexpr (may_be_quick) {
        bool quick = args.result == ResultType::same;
#pragma unroll
        for (int e = 0; e < width; e++) quick &= !is_own(e) || values[place_of(e)].quick;
        if (quick) write(std::true_type{});
        else write(std::false_type{});
      } else if constexpr (may_be_masked) {
        if (args.result == ResultType::same && !args.masked) write(std::true_type{});
        else write(std::false_type{});
      } else {
        write(std::false_type{});
      }
    }
  }
  if constexpr (kHopperCode) {
    if (clustered) {
      __syncwarp();
      wait_for_cluster();
    }
  }
}

// What a device has, and what shared memory each of so many blocks can have of a multiprocessor's.
struct ColumnsDevice {
  int processors = 0, major = 0, memory = 0, of_block = 0, reserved = 0;
  cudaError_t read() {
    int device = 0;
    if (auto e = cudaGetDevice(&device)) return e;
    if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
    if (auto e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
    if (auto e = cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)) return e;
    if (auto e = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device)) return e;
    return cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  // It is given in multiples of 128 bytes.
  int shared(int share) const { return std::min(of_block, memory / share / 128 * 128 - reserved); }
};

// The choice of a tile, for a device whose clusters have up to `most_blocks` blocks.
template <template <class> class Op, class T, int width, bool straddles>
Tile choose_tile(const Arguments<T>& args, const ColumnsDevice& device, unsigned most_blocks) {
  constexpr int64_t bytes = width * sizeof(T) * Op<T>::operands;  // of an access, in all operands
  auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  auto accesses = [&](int across) { return args.rows * accesses_of_row<width, straddles>(args.inner, across); };
  const int lines = args.inner * sizeof(T) % Columns::tile_bytes == 0 ? 1 : 2;
  int across = std::min<int>(lines * Columns::tile_bytes / (width * sizeof(T)), Columns::most_across);
  if (straddles && accesses(32) < accesses(across)) across = 32;
  while (!straddles && across > 1 && across / 2 >= accesses(across)) across /= 2;
  while (!straddles && across < Columns::most_across && 2 * across * bytes * args.n <= Columns::short_bytes &&
         accesses(across) >= int64_t(2) * across * Columns::blocks_at_once<T> * device.processors)
    across *= 2;
  const int64_t of_row = accesses_of_row<width, straddles>(args.inner, across);
  const Divider row = accesses(across) <= INT32_MAX ? Divider(static_cast<uint32_t>(of_row)) : Divider();

  // Few rows are dealt to few threads, so that each has some.
  const bool few_rows = across * bytes * args.n <= Columns::short_bytes;
  const int threads = few_rows ? Columns::most_threads / 2 : Columns::most_threads, apart = threads / across;
  const int64_t tiles = divide(accesses(across), across);
  unsigned blocks = 1;
  auto too_much = [&] { return divide(args.n, blocks) * across * bytes > Columns::held_bytes; };
  auto too_few = [&] { return tiles * blocks <= device.processors && divide(args.n, blocks) >= 4 * apart; };
  while (blocks < most_blocks && (too_much() || too_few())) blocks *= 2;

  const int64_t rows = divide(args.n, blocks), slots = divide(rows, apart);
  const int64_t unused = (slots * apart - rows) * across * width * sizeof(T);  // of the last slot, at its end
  const int most_share = Columns::blocks_at_once<T> * Columns::most_threads / threads;
  auto held = [&](int share) {
    TileLayout<Op, T, width> empty({threads, across, 0, blocks, share, row});
    const int64_t room = device.shared(share) - int64_t(empty.end);
    return room >= slots * threads * bytes - unused ? slots : room / (threads * bytes);
  };
  int share = most_share;
  while (Op<T>::reduces && share > 1 && held(share) < slots) share--;
  if (held(share) < slots) share = most_share;  // in chunks
  return {threads, across, static_cast<int>(std::max<int64_t>(1, held(share))), blocks, share, row};
}

// How many clusters of a kernel run at once on a device: asked once for each size and share. None if it does not know
// clusters of this size.
template <template <class> class Op, class T, int width, bool straddles>
cudaError_t tiles_at_once(const ColumnsDevice& device, const cudaLaunchConfig_t& config, Tile tile, int* tiles) {
  auto kernel = columns<Op, T, width, straddles>;
  constexpr int shares = 16;
  static Devices<(Columns::most_blocks + 1) * shares> known;
  return known.once(tile.blocks * shares + tile.share, tiles, [&](int* found) {
    constexpr auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.of_block)) return e;
    if (auto e = cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared)) return e;
    if (config.numAttrs > 0) {
      if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
      if (cudaOccupancyMaxActiveClusters(found, kernel, &config)) {
        cudaGetLastError();
        *found = 0;
      }
    } else {
      const size_t bytes = config.dynamicSmemBytes;
      if (auto e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(found, kernel, tile.threads, bytes)) return e;
      *found = std::max<int>(1, *found * device.processors / tile.blocks);
    }
    return cudaSuccess;
  });
}

// `launched` is false where the device does not know clusters of the size.
template <template <class> class Op, class T, int width, bool straddles>
cudaError_t launch_tile(const Arguments<T>& args, const ColumnsDevice& device, Tile tile, void* workspace,
                        cudaStream_t stream, bool* launched) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {tile.blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(tile.blocks);
  config.blockDim = dim3(tile.threads);
  config.dynamicSmemBytes = device.shared(tile.share);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = Op<T>::reduces && tile.blocks > 1;  // blocks that only share n need not be a cluster
  int at_once = 0;
  if (auto e = tiles_at_once<Op, T, width, straddles>(device, config, tile, &at_once)) return e;
  *launched = at_once > 0;
  if (at_once == 0) return cudaSuccess;
  const int64_t accesses = args.rows * accesses_of_row<width, straddles>(args.inner, tile.across);
  const int64_t tiles = (accesses + tile.across - 1) / tile.across;
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(tiles, at_once) * tile.blocks));
  // What writes nothing copies its next tile before it is known.
  const bool many = Op<T>::reduces && Op<T>::writes && tiles > int64_t(Columns::few_tiles) * at_once;
  unsigned long long* counter = nullptr;
  if (auto e = clear_counter(many, workspace, stream, &counter)) return e;
  const TileLayout<Op, T, width> layout(tile);
  return cudaLaunchKernelEx(&config, columns<Op, T, width, straddles>, args, tile, layout, counter);
}

template <template <class> class Op, class T, int width, bool straddles = false>
cudaError_t launch_tiles(const Arguments<T>& args, void* workspace, cudaStream_t stream) {
  ColumnsDevice device;
  if (auto e = device.read()) return e;
  bool launched = false;
  for (unsigned most = device.major >= 9 || !Op<T>::reduces ? Columns::most_blocks : 1; !launched;) {
    Tile tile = choose_tile<Op, T, width, straddles>(args, device, most);
    if (auto e = launch_tile<Op, T, width, straddles>(args, device, tile, workspace, stream, &launched)) return e;
    most = tile.blocks / 2;
  }
  return cudaSuccess;
}

// `workspace` has room for the counter, or is null. Everything is ordered by `stream`; nothing is allocated or waited
// for.
template <template <class> class Op, class T>
cudaError_t launch_columns(const Arguments<T>& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0 || args.n == 0 || args.inner == 0) return cudaSuccess;
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  constexpr int size = Pack<T>::size;
  if (aligned(args.a) && aligned(args.b) && aligned(args.out)) {
    if (args.inner % size == 0) return launch_tiles<Op, T, size>(args, workspace, stream);
    if constexpr (size > 2)
      if (args.inner % 2 == 0) return launch_tiles<Op, T, 2>(args, workspace, stream);
    if constexpr (sizeof(T) == 2)
      if (args.inner >= 32) return launch_tiles<Op, T, 2, true>(args, workspace, stream);
  }
  return launch_tiles<Op, T, 1>(args, workspace, stream);
}

}  // namespace jaxsoft::cuda
