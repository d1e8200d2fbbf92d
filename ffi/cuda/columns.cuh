// Row operations over an axis that is not the last: arrays (rows, n, inner), reduced over n, without a transpose.
//
// A column is one of the rows * inner sets of n scores. A block takes a tile of neighbouring columns, 128 bytes wide or
// wider, so that what a warp reads is contiguous, and a part of n; a cluster of blocks has all of n. Every thread copies
// its packs into shared memory and is the only one to read them again, to reduce and then to write: one read of device
// memory. Shared memory serves as registers of any number here: it is larger, and what it holds needs no unrolled code.
// Several blocks share a multiprocessor, so one computes while another's copies are on their way.
//
// Parts of n that do not fit go through shared memory in chunks, twice: reduced, then read again and written.
#pragma once

#include <algorithm>

#include "operations.cuh"

namespace jaxsoft::cuda {

struct Columns {
  static constexpr int threads = 256;            // of a block
  static constexpr int blocks_at_once = 3;       // that a multiprocessor should hold; 2 of f64
  static constexpr int most_blocks = 16;         // of a cluster
  static constexpr int tile_bytes = 128;         // of a tile's breadth, where there are so many columns
  static constexpr int most_across = 64;         // accesses side by side in a tile that is wider, as n is small
  static constexpr int short_bytes = 32 * 1024;  // what a tile may hold to be made wider; also a chunk
  static constexpr int held_bytes = 64 * 1024;   // what a block should hold at most, if more blocks can share n
  static constexpr int at_once = 4;              // accesses that a thread reads before it uses the first; so many terms
                                                 // of a sum stand between compensated additions
};

// How a tile is dealt out. An access is what a thread loads at once: a pack, or one element where packs do not lie on
// 16-byte boundaries.
struct Tile {
  int across;       // accesses side by side; Columns::threads / across threads, and so many rows apart, have a column
  int slots;        // accesses that a thread holds of each operand
  unsigned blocks;  // that share n; like across, a power of two
};

// Where what lies in shared memory.
template <template <class> class Op, class T, int width>
struct TileLayout {
  using A = Accumulator<T>;
  int columns, groups;  // a group: the threads of a column that lie in one warp, or the only one that does
  size_t maxima, sums, parts, end;
  __host__ __device__ explicit TileLayout(Tile tile) {
    columns = tile.across * width;
    groups = Columns::threads / (tile.across < 32 ? 32 : tile.across);
    maxima = size_t(Columns::threads) * tile.slots * Op<T>::operands * width * sizeof(T);
    sums = maxima + size_t(groups) * columns * sizeof(T);
    // When the sums have been read, the columns' values take their place.
    size_t of_sums = groups * columns * sizeof(Sum<A>), of_values = columns * sizeof(typename Op<T>::Values);
    parts = sums + (of_sums > of_values ? of_sums : of_values);
    parts = (parts + 15) / 16 * 16;
    end = parts + columns * sizeof(typename Op<T>::Part);
  }
};

// Clusters, which came with Hopper; before it every block is alone.
struct Cluster {
  static __device__ void arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
  }
  static __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
  }
  // The same place in another block's shared memory.
  template <class V>
  static __device__ const V* in_block(const V* here, unsigned block) {
#if __CUDA_ARCH__ >= 900
    const V* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
    return there;
#else
    return here;
#endif
  }
};

__device__ inline void copy_pack(void* to, const void* from) {
  auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Accesses of `width` elements, which stand at the beginning of a pack.
template <int width, class T>
__device__ Pack<T> load_elements(const T* from) {
  if constexpr (width == Pack<T>::size) {
    return *reinterpret_cast<const Pack<T>*>(from);
  } else {
    Pack<T> pack;
    pack.set(0, *from);
    return pack;
  }
}
template <int width, class T>
__device__ void store_elements(T* to, const Pack<T>& pack) {
  if constexpr (width == Pack<T>::size) *reinterpret_cast<Pack<T>*>(to) = pack;
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

template <template <class> class Op, class T, int width>
__global__ void __launch_bounds__(Columns::threads, sizeof(T) == 8 ? 2 : Columns::blocks_at_once)
columns(Arguments<T> args, Tile tile) {
  using A = Accumulator<T>;
  using Part = typename Op<T>::Part;
  using Values = typename Op<T>::Values;
  constexpr int operands = Op<T>::operands;
  constexpr bool scores = !std::is_same<Part, Sum<A>>::value;  // reduced to a state, not to a sum

  extern __shared__ __align__(16) unsigned char tile_memory[];
  const TileLayout<Op, T, width> layout(tile);
  T* slots = reinterpret_cast<T*>(tile_memory);
  T* maxima = reinterpret_cast<T*>(tile_memory + layout.maxima);
  auto* sums = reinterpret_cast<Sum<A>*>(tile_memory + layout.sums);
  auto* values = reinterpret_cast<Values*>(tile_memory + layout.sums);
  auto* parts = reinterpret_cast<Part*>(tile_memory + layout.parts);

  const int across = tile.across, shift = __ffs(across) - 1, apart = Columns::threads >> shift;
  const int thread = threadIdx.x, at = thread & (across - 1), first = thread >> shift;
  const unsigned rank = blockIdx.x & (tile.blocks - 1);
  const int64_t first_access = int64_t(blockIdx.x / tile.blocks) << shift;  // of all rows' accesses of equal j
  const int64_t accesses_a_row = args.inner / width, accesses = args.rows * accesses_a_row;
  const int64_t row = (first_access + at) / accesses_a_row;
  const int64_t origin = row * args.n * args.inner + (first_access + at - row * accesses_a_row) * width;
  const int64_t begin = args.n * rank / tile.blocks, end = args.n * (rank + 1) / tile.blocks;
  const int64_t chunk_rows = int64_t(tile.slots) * apart;

  // Of a chunk, the thread has the rows chunk + first, + apart, ...: so many.
  auto count_from = [&](int64_t chunk) {
    int rows = static_cast<int>(min(end - chunk, chunk_rows)) - first;
    return first_access + at < accesses && rows > 0 ? (rows + apart - 1) >> (__ffs(apart) - 1) : 0;
  };
  auto slot = [&](int operand, int k) {
    return slots + ((k * operands + operand) * Columns::threads + thread) * width;
  };
  auto load = [&](int64_t chunk, int count) {
    const int64_t step = apart * args.inner, from = origin + (chunk + first) * args.inner;
#pragma unroll
    for (int operand = 0; operand < operands; operand++) {
      const T* source = (operand == 0 ? args.a : args.b) + from;
      if constexpr (width > 1) {
        for (int k = 0; k < count; k++, source += step) copy_pack(slot(operand, k), source);
      } else {
        constexpr int in_flight = 8;
        for (int k = 0; k < count; k += in_flight) {
          T x[in_flight];
#pragma unroll
          for (int i = 0; i < in_flight; i++, source += step)
            if (k + i < count) x[i] = *source;
#pragma unroll
          for (int i = 0; i < in_flight; i++)
            if (k + i < count) *slot(operand, k + i) = x[i];
        }
      }
    }
    if constexpr (width > 1) wait_for_copies();
  };

  // A column, counted so that those at the same place in their accesses are neighbours, is finished by some neighbouring
  // lanes. All threads call f, as it may shuffle; the last columns may not exist.
  const int helpers = max(1, min(8, Columns::threads / layout.columns)), helper = thread & (helpers - 1);
  auto for_columns = [&](auto f) {
    for (int c = 0; c < layout.columns; c += Columns::threads / helpers) f(c + thread / helpers);
  };

  if constexpr (Op<T>::reduces) {
    for_columns([&](int column) {
      if (column < layout.columns && helper == 0) parts[column] = Part{};
    });
    const int group = across < 32 ? thread / 32 : first;
    const bool leads = across >= 32 || thread % 32 < across;
    for (int64_t chunk = begin; chunk < end; chunk += chunk_rows) {
      const int count = count_from(chunk);
      load(chunk, count);

      A from[width];  // what exp subtracts: the reference of the chunk's maximum
      if constexpr (scores) {
        Pack<T> top;
#pragma unroll
        for (int e = 0; e < width; e++) top.set(e, narrow<T>(-infinity<A>()));
        for (int k = 0; k < count; k += Columns::at_once) {
#pragma unroll
          for (int i = 0; i < Columns::at_once; i++)
            if (k + i < count) top = larger<width>(top, load_elements<width>(slot(0, k + i)));
        }
        for (int mask = 16; mask >= across; mask /= 2) top = larger<width>(top, shuffle<width>(top, mask));
        if (leads) store_elements<width>(maxima + (group * across + at) * width, top);
        __syncthreads();
        for (int g = 0; g < layout.groups; g++)
          top = larger<width>(top, load_elements<width>(maxima + (g * across + at) * width));
#pragma unroll
        for (int e = 0; e < width; e++) from[e] = reference(top.get(e));
      }

      Sum<A> sum[width];
      for (int k = 0; k < count; k += Columns::at_once) {
        A terms[width] = {}, tops[width] = {};
#pragma unroll
        for (int i = 0; i < Columns::at_once; i++) {
          if (k + i >= count) continue;
          Pack<T> a = load_elements<width>(slot(0, k + i)), b;
          if constexpr (operands > 1) b = load_elements<width>(slot(1, k + i));
#pragma unroll
          for (int e = 0; e < width; e++) {
            if constexpr (scores) {
              A x = a.get(e), term = exponential_term<false>(x, from[e]);
              // Scores that are the maximum are counted, not mixed into the sum of the others: added to it only with
              // compensation, they leave it its digits. (A column that holds +inf has no such sum.)
              bool top = Op<T>::keeps_apart && x == from[e];
              terms[e] += top ? A(0) : term;
              if constexpr (Op<T>::keeps_apart) tops[e] += top ? A(1) : A(0);
            } else if constexpr (Op<T>::reads_a_to_reduce) {
              terms[e] += args.masked && a.get(e) == 0 ? A(0) : a.get(e) * b.get(e);
            } else {
              terms[e] += b.get(e);
            }
          }
        }
#pragma unroll
        for (int e = 0; e < width; e++) {
          sum[e].add(terms[e]);
          if constexpr (Op<T>::keeps_apart) sum[e].add(tops[e]);
        }
      }
#pragma unroll
      for (int e = 0; e < width; e++) {
        for (int mask = 16; mask >= across; mask /= 2) sum[e] = combine<T>(sum[e], shuffle(sum[e], mask));
        if (leads) sums[group * layout.columns + e * across + at] = sum[e];
      }
      __syncthreads();

      for_columns([&](int column) {
        Sum<A> whole;
        A m = -infinity<A>();
        for (int g = helper; g < layout.groups && column < layout.columns; g += helpers) {
          whole = combine<T>(whole, sums[g * layout.columns + column]);
          int place = (column & (across - 1)) * width + (column >> shift);
          if constexpr (scores) m = max(m, widen(maxima[g * layout.columns + place]));
        }
        whole = reduce_lanes<T>(whole, helpers);
        if constexpr (scores) m = reduce_maximum(m, helpers);
        if (column >= layout.columns || helper != 0) return;
        if constexpr (scores) {
          if (Op<T>::keeps_apart && isfinite(m)) whole.add(-1);
          parts[column] = combine<T>(parts[column], Part{m, whole});
        } else {
          parts[column] = combine<T>(parts[column], whole);
        }
      });
      __syncthreads();  // before the next chunk's maxima, or the values, take the place of what has been read
    }
    if (tile.blocks > 1) Cluster::arrive(), Cluster::wait();
  }

  // Every block finishes all columns of the tile, from the parts of all blocks.
  for_columns([&](int column) {
    Part part;
    if constexpr (Op<T>::reduces) {
      for (unsigned block = helper; block < tile.blocks && column < layout.columns; block += helpers)
        part = combine<T>(part, *Cluster::in_block(parts + column, block));
      part = reduce_lanes<T>(part, helpers);
    }
    int64_t access = first_access + (column & (across - 1));
    if (helper == 0 && column < layout.columns && access < accesses)
      values[column] = Op<T>::finish(part, args, access * width + (column >> shift), rank == 0);
  });
  if (Op<T>::reduces && tile.blocks > 1) Cluster::arrive();  // the others' parts have been read

  if constexpr (Op<T>::writes) {
    __syncthreads();
    Values own[width];
#pragma unroll
    for (int e = 0; e < width; e++) own[e] = values[e * across + at];
    const bool held = Op<T>::reduces && end - begin <= chunk_rows;
    for (int64_t chunk = begin; chunk < end; chunk += chunk_rows) {
      const int count = count_from(chunk);
      if (!held) load(chunk, count);
      const int64_t step = apart * args.inner;
      int64_t to = origin + (chunk + first) * args.inner;
      for (int k = 0; k < count; k += Columns::at_once) {
#pragma unroll
        for (int i = 0; i < Columns::at_once; i++, to += step) {
          if (k + i >= count) continue;
          Pack<T> a = load_elements<width>(slot(0, k + i)), b;
          if constexpr (operands > 1) b = load_elements<width>(slot(1, k + i));
          A x[width];
#pragma unroll
          for (int e = 0; e < width; e++) {
            x[e] = Op<T>::value(own[e], a.get(e), operands > 1 ? b.get(e) : A(0));
            if (!Op<T>::a_is_scores && args.masked && a.get(e) == 0) x[e] = 0;
          }
          if (args.result == ResultType::same) {
            store_results(static_cast<T*>(args.out) + to, x);
          } else if constexpr (sizeof(T) == 2) {
            store_results(static_cast<float*>(args.out) + to, x);
          } else if constexpr (sizeof(T) == 4) {
            if (args.result == ResultType::f16) store_results(static_cast<__half*>(args.out) + to, x);
            else store_results(static_cast<__nv_bfloat16*>(args.out) + to, x);
          }
        }
      }
    }
  }
  if (Op<T>::reduces && tile.blocks > 1) Cluster::wait();  // no block may leave while another reads its parts
}

// The choice of a tile, for a device whose clusters have up to `most_blocks` blocks.
template <template <class> class Op, class T, int width>
Tile choose_tile(const Arguments<T>& args, int processors, int64_t memory, unsigned most_blocks) {
  const int64_t accesses = args.rows * args.inner / width;
  constexpr int64_t bytes = width * sizeof(T) * Op<T>::operands;  // of an access, in all operands
  auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int across = Columns::tile_bytes / (width * sizeof(T));
  while (across > 1 && across / 2 >= accesses) across /= 2;
  while (across < Columns::most_across && 2 * across * bytes * args.n <= Columns::short_bytes &&
         accesses >= int64_t(2) * across * Columns::blocks_at_once * processors)
    across *= 2;

  const int apart = Columns::threads / across;
  const int64_t tiles = divide(accesses, across);
  unsigned blocks = 1;
  auto too_much = [&] { return divide(args.n, blocks) * across * bytes > Columns::held_bytes; };
  auto too_few = [&] { return tiles * blocks * 2 <= 2 * processors && divide(args.n, blocks) >= 4 * apart; };
  while (blocks < most_blocks && (too_much() || too_few())) blocks *= 2;

  int64_t slots = divide(divide(args.n, blocks), apart);
  TileLayout<Op, T, width> empty({across, 0, blocks});
  int64_t most_slots = (memory - int64_t(empty.end)) / (Columns::threads * bytes);
  if (!Op<T>::reduces || slots > most_slots)
    slots = std::min(slots, std::max<int64_t>(1, Columns::short_bytes / (Columns::threads * bytes)));
  return {across, static_cast<int>(slots), blocks};
}

// What a launch needs; `attribute` must outlive it.
template <template <class> class Op, class T, int width>
cudaLaunchConfig_t configure_tile(const Arguments<T>& args, Tile tile, cudaStream_t stream,
                                  cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config{};
  int64_t tiles = (args.rows * args.inner / width + tile.across - 1) / tile.across;
  config.gridDim = dim3(static_cast<unsigned>(tiles * tile.blocks));
  config.blockDim = dim3(Columns::threads);
  config.dynamicSmemBytes = TileLayout<Op, T, width>(tile).end;
  config.stream = stream;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {tile.blocks, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = Op<T>::reduces && tile.blocks > 1;  // blocks that only share n need not be a cluster
  return config;
}

template <template <class> class Op, class T, int width>
cudaError_t launch_tiles(const Arguments<T>& args, cudaStream_t stream) {
  int device = 0, processors = 0, major = 0, memory = 0;
  if (auto e = cudaGetDevice(&device)) return e;
  if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (auto e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  if (auto e = cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
  auto kernel = columns<Op, T, width>;
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory)) return e;
  constexpr auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
  if (auto e = cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared)) return e;
  if (major >= 9)
    if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
  for (unsigned most = major >= 9 || !Op<T>::reduces ? Columns::most_blocks : 1;; most /= 2) {
    Tile tile = choose_tile<Op, T, width>(args, processors, memory, most);
    cudaLaunchAttribute attribute;
    auto config = configure_tile<Op, T, width>(args, tile, stream, attribute);
    int clusters = 1;
    if (config.numAttrs > 0 && cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)) {
      cudaGetLastError();  // a cluster of a size that this device does not know
      clusters = 0;
    }
    if (clusters > 0) return cudaLaunchKernelEx(&config, kernel, args, tile);
    most = tile.blocks;
  }
}

// Everything is ordered by `stream`; nothing is allocated or waited for.
template <template <class> class Op, class T>
cudaError_t launch_columns(const Arguments<T>& args, cudaStream_t stream) {
  if (args.rows == 0 || args.n == 0 || args.inner == 0) return cudaSuccess;
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  constexpr int size = Pack<T>::size;
  if (args.inner % size == 0 && aligned(args.a) && aligned(args.b) && aligned(args.out))
    return launch_tiles<Op, T, size>(args, stream);
  return launch_tiles<Op, T, 1>(args, stream);
}

}  // namespace jaxsoft::cuda
