// The k largest elements of rows and their state (m, s), in one read.
//
// A block goes through a row tile by tile. Each thread folds its packs into its state; where their maximum reaches `bar`,
// it puts those of their elements that may still be among the k largest into a buffer in shared memory, as keys: words of
// 64 bits that are ordered as the elements are to be, by value and then by index. At the first tile, `bar` is about the
// k-th largest of the threads' maxima, so that hardly more than k elements reach it. Whenever many have been gathered, or
// there is no room for one, the buffer is cut to the k largest, and what is below them no longer reaches `bar`. Elements
// without room are offered again after that. So every row is served exactly, in whichever order its elements come; which
// place a key gets in the buffer is up to chance, but which keys are the k largest is not.
//
// Few rows are split over blocks, whose keys and states wait in the workspace for a second launch.
#include "top_k.cuh"

#include "strategies.cuh"

namespace jaxsoft::cuda {
namespace {

using Key = unsigned long long;  // the value's order, and the complement of the index; 0 is none

constexpr int kTopKThreads = 512;  // of a block, at most
constexpr int kTilePacks = 4;      // of a thread in a tile
constexpr int kBuffer = 2048;      // keys in the buffer: more than kMostK packs have elements
constexpr int kGathered = 448;     // so many are cut, or 2 k
constexpr int kRanked = 128;       // up to so many are put in order without being cut before
constexpr int kMerged = 4096;      // keys of all parts of a row

// A number in the order of floats, where -0.0 is 0.0; and back.
__device__ inline uint32_t order_of(float x) {
  const uint32_t word = bits<uint32_t>(x);
  return word >> 31 ? 0u - word : word ^ 0x80000000u;
}
__device__ inline float of_order(uint32_t order) {
  return bits<float>(order >> 31 ? order ^ 0x80000000u : 0u - order);
}
// Its low bits, which are 0 for every T.
template <class T> constexpr int kFree = 0;
template <> constexpr int kFree<__half> = 13;
template <> constexpr int kFree<__nv_bfloat16> = 16;

__device__ inline Key key_of(uint32_t order, uint32_t index) { return Key(order) << 32 | ~index; }
__device__ inline uint32_t order_in(Key key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline uint32_t index_in(Key key) { return ~static_cast<uint32_t>(key); }

// What the block shares.
struct Gathered {
  int count;            // of keys in the buffer, and of those for which there was no room
  uint32_t low, high;   // orders: of the first tile's maxima, the least; of all that have been looked at, the greatest
};

// A place at the end of the buffer for each of the warp's threads that are here.
__device__ inline int place_for_key(Gathered& gathered) {
  const unsigned here = __activemask(), lane = threadIdx.x % 32;
  const int leader = __ffs(here) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(&gathered.count, __popc(here));
  return __shfl_sync(here, first, leader) + __popc(here & ((1u << lane) - 1));
}

// How many keys are at least this one. A barrier for each of the block's threads that has one; all threads get it.
__device__ inline int number_from(Key least, const Key* keys, int count) {
  int number = 0;
  for (int first = 0; first < count; first += blockDim.x) {
    const int i = first + threadIdx.x;
    number += __syncthreads_count(i < count && keys[i] >= least);
  }
  return number;
}

// The greatest order, in units of T, from which on there are k or more; `number(order)` counts them for all threads.
// `found` of `low`, which has that many. The search ends early where there are no more than `enough`.
template <class T, class Number>
__device__ uint32_t greatest_order(uint32_t low, uint32_t high, int k, int enough, int& found, Number number) {
  low >>= kFree<T>, high >>= kFree<T>;
  while (low < high && found > enough) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int from = number(middle << kFree<T>);
    if (from >= k) low = middle, found = from;
    else high = middle - 1;
  }
  return low << kFree<T>;
}

// Leaves the k greatest of more keys than that in the buffer, in any order. Returns a key from which on there are these.
// No key's order is below `low`, no index is `n` or above. All threads call it, after a barrier.
template <class T>
__device__ Key cut(Gathered& gathered, Key* keys, int count, int k, uint32_t low, uint32_t n) {
  uint32_t high = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) high = max(high, order_in(keys[i]));
  high = __reduce_max_sync(0xffffffffu, high);
  if (threadIdx.x % 32 == 0) atomicMax(&gathered.high, high);
  __syncthreads();
  int found = count;
  const uint32_t order = greatest_order<T>(low, gathered.high, k, k, found, [&](uint32_t order) {
    return number_from(Key(order) << 32, keys, count);
  });
  Key least = Key(order) << 32;
  if (found > k) {  // of those that are equal to the last, the ones of the lowest indices
    uint32_t first = 0, last = n - 1;
    while (first < last && found != k) {
      const uint32_t middle = first + (last - first) / 2;
      found = number_from(key_of(order, middle), keys, count);
      if (found >= k) last = middle;
      else first = middle + 1;
    }
    least = key_of(order, last);
  }
  if (threadIdx.x == 0) gathered.count = 0;  // which all have read before the last barrier
  for (int start = 0; start < count; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const Key key = i < count ? keys[i] : 0;
    __syncthreads();  // all have read what may be written over
    if (key >= least && i < count) keys[place_for_key(gathered)] = key;
  }
  __syncthreads();
  return least;
}

// Which of a thread's elements reach `bar`: a bit each. Those past the row's ends may, too.
template <class T>
__device__ uint32_t reaching(const Pack<T> (&packs)[kTilePacks], float bar) {
  uint32_t marks = 0;
#pragma unroll
  for (int j = 0; j < kTilePacks * Pack<T>::size; j++)
    if (packs[j / Pack<T>::size].get(j % Pack<T>::size) >= bar) marks |= 1u << j;
  return marks;
}

// Folds a row, or a part of one that begins at this element of the row, and leaves k of its keys in the buffer, or those
// that are at most kRanked anyhow. Returns the state.
template <class T>
__device__ auto gather(const Row<StateOf, T, Plain>& row, uint32_t begin, uint32_t n, int k, int room, bool ranked,
                       Gathered& gathered, Key* keys) {
  constexpr int size = Pack<T>::size;
  const Window<T>& window = row.window;
  const int step = blockDim.x, tile = kTilePacks * step, limit = min(room, max(2 * k, kGathered));
  const T nothing = narrow<T>(-infinity<float>());
  if (threadIdx.x == 0) gathered = {0, ~0u, 0};
  __syncthreads();

  Running<float> part;
  Key least = 0;
  float bar = 0;
  Pack<T> packs[kTilePacks], next[kTilePacks];
  auto fetch = [&](int first) {
#pragma unroll
    for (int j = 0; j < kTilePacks; j++)
      if (first + j * step < window.packs) next[j] = window.fetch(row.a, first + j * step);
      else next[j].fill(nothing);
  };
  fetch(threadIdx.x);
  for (int start = 0; start < window.packs; start += tile) {
    const int first = start + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kTilePacks; j++) {
      packs[j] = next[j];
      if (first + j * step < window.packs) window.trim(packs[j], first + j * step, nothing);
    }
    const bool more = start + tile < window.packs;
    if (more) fetch(first + tile);
    const float top = StateOf<T>::accumulate(part, packs, packs, row.form);

    if (start == 0) {
      uint32_t order = order_of(-infinity<float>());
      if (window.packs >= k) {  // so many threads have elements, as a block has k threads
        const bool has = threadIdx.x < window.packs;
        const uint32_t own = order_of(top), low = __reduce_min_sync(0xffffffffu, has ? own : ~0u);
        const uint32_t high = __reduce_max_sync(0xffffffffu, own);
        if (threadIdx.x % 32 == 0) atomicMin(&gathered.low, low), atomicMax(&gathered.high, high);
        __syncthreads();
        int found = min(step, window.packs);
        order = greatest_order<T>(gathered.low, gathered.high, k, k + k / 4, found, [&](uint32_t order) {
          return __syncthreads_count(has && own >= order);
        });
      }
      least = Key(order) << 32, bar = of_order(order);
    }

    uint32_t left = ~0u;  // elements that have not been placed
    for (;;) {
      uint32_t wanted = top >= bar ? left & reaching(packs, bar) : 0;
      bool crowded = false;
      left = 0;
      while (wanted) {  // from the last on: if the row ascends, others are not wanted any more
        const int j = 31 - __clz(wanted), at = (first + j / size * step) * size - window.head + j % size;
        wanted ^= 1u << j;
        if (static_cast<uint32_t>(at) >= static_cast<uint32_t>(window.n)) continue;
        const Key key = key_of(order_of(widen(row.a[at])), begin + at);
        if (key < least) continue;
        const int place = place_for_key(gathered);
        if (place < room) keys[place] = key;
        else left |= 1u << j;
        crowded |= place >= limit;
      }
      if (!__syncthreads_or(left != 0 || (more && crowded))) break;
      least = cut<T>(gathered, keys, min(gathered.count, room), k, order_in(least), n);
      bar = of_order(order_in(least));
    }
    // Later elements lose to the k that there are if they are equal to the last of those.
    if (static_cast<uint32_t>(least)) bar = of_order(order_in(least) + (1u << kFree<T>));
  }
  const int count = gathered.count;
  if (count > (ranked ? max(k, kRanked) : k)) cut<T>(gathered, keys, count, k, order_in(least), n);
  return reduce_threads<T>(part);
}

// Writes a row's results from the keys in the buffer, of which all threads see all.
template <class T>
__device__ void write_largest(const Arguments<T>& args, const Largest<T>& to, int64_t index,
                              const typename StateOf<T>::Part& state, const Gathered& gathered, const Key* keys) {
  const T* row = args.a + index * args.n;
  T* values = to.values + index * to.k;
  int32_t* indices = to.indices + index * to.k;
  StateOf<T>::finish(state, args, index, threadIdx.x == 0);
  if (!isfinite(state.m) || isnan(state.s())) {  // the softmax has no value
    for (int i = threadIdx.x; i < to.k; i += blockDim.x) values[i] = row[i], indices[i] = i;
    return;
  }
  for (int i = threadIdx.x; i < gathered.count; i += blockDim.x) {
    const Key key = keys[i];
    int rank = 0;
    for (int j = 0; j < gathered.count; j++) rank += keys[j] > key;
    if (rank >= to.k) continue;
    const float value = of_order(order_in(key));
    values[rank] = value == 0 ? row[index_in(key)] : narrow<T>(value);  // which has the sign of a zero
    indices[rank] = static_cast<int32_t>(index_in(key));
  }
}

// Of rows that are not split the results, else the keys and the state of a part, to the workspace.
template <class T>
__global__ void __launch_bounds__(kTopKThreads, 2)
    top_k(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, int room,
          Key* keys_of_parts, typename StateOf<T>::Part* states, Split split) {
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  let_next_kernel_start();
  const int64_t index = blockIdx.x / split.parts;
  const auto row = part_of_row<StateOf, T, Plain>(args, blockIdx.x, split);
  const auto begin = static_cast<uint32_t>(row.a - (args.a + index * args.n));
  const bool whole = split.parts == 1;
  const auto state = gather<T>(row, begin, args.n, to.k, room, whole, gathered, keys);
  if (whole) return write_largest(args, to, index, state, gathered, keys);
  for (int i = threadIdx.x; i < to.k; i += blockDim.x)
    keys_of_parts[int64_t(blockIdx.x) * to.k + i] = i < gathered.count ? keys[i] : 0;
  if (threadIdx.x == 0) states[blockIdx.x] = state;
}

// Merges the parts of a row.
template <class T>
__global__ void __launch_bounds__(kTopKThreads)
    top_k_merge(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to,
                const Key* keys_of_parts, const typename StateOf<T>::Part* states, unsigned parts) {
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  const int64_t index = blockIdx.x;
  const int count = static_cast<int>(parts) * to.k;
  if (threadIdx.x == 0) gathered = {count, 0, 0};
  wait_for_last_kernel();
  for (int i = threadIdx.x; i < count; i += blockDim.x) keys[i] = keys_of_parts[index * count + i];
  __syncthreads();
  if (count > max(to.k, kRanked)) cut<T>(gathered, keys, count, to.k, 0, args.n);
  const auto state = merge<StateOf, T>(states + index * parts, parts);
  write_largest(args, to, index, state, gathered, keys);
}

}  // namespace

template <class T>
cudaError_t run_top_k(const Arguments<T>& args, const Largest<T>& to, void* workspace, int64_t bytes,
                      cudaStream_t stream) {
  using State = typename StateOf<T>::Part;
  if (args.rows == 0) return cudaSuccess;
  int device = 0, processors = 0, major = 0;
  if (auto e = cudaGetDevice(&device)) return e;
  if (auto e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (auto e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  const int64_t packs = (args.n * sizeof(T) + 15) / 16 + 1;  // a row may begin anywhere in its first
  const int64_t parts = std::min({2 * processors / args.rows, packs / kTopKThreads, int64_t(kMerged / to.k),
                                  bytes / (args.rows * int64_t(to.k * sizeof(Key) + sizeof(State)))});
  const Split split(packs, std::max<int64_t>(parts, 1));
  const int64_t blocks = args.rows * split.parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  // A thread for each four packs, but enough for their maxima to tell the k largest apart.
  const int64_t of_part = std::min(packs, split.packs);
  const int64_t threads = std::max((of_part + kTilePacks - 1) / kTilePacks, std::min<int64_t>(of_part, 2 * to.k));
  const int width = static_cast<int>(std::min<int64_t>((threads + 31) / 32 * 32, kTopKThreads));
  const int room = static_cast<int>(std::min<int64_t>(of_part * Pack<T>::size, kBuffer));
  auto* keys = static_cast<Key*>(workspace);
  auto* states = reinterpret_cast<State*>(keys + (split.parts > 1 ? blocks * to.k : 0));
  top_k<T><<<static_cast<unsigned>(blocks), width, room * sizeof(Key), stream>>>(args, to, room, keys, states, split);
  if (auto e = cudaGetLastError()) return e;
  if (split.parts == 1) return cudaSuccess;

  const int count = static_cast<int>(split.parts) * to.k;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows));
  config.blockDim = dim3(std::clamp((count + 31) / 32 * 32, 128, kTopKThreads));
  config.dynamicSmemBytes = count * sizeof(Key);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9;
  return cudaLaunchKernelEx(&config, top_k_merge<T>, args, to, static_cast<const Key*>(keys),
                            static_cast<const State*>(states), split.parts);
}

#define JAXSOFT_DEFINE_TOP_K(T) \
  template cudaError_t run_top_k<T>(const Arguments<T>&, const Largest<T>&, void*, int64_t, cudaStream_t);
JAXSOFT_DEFINE_TOP_K(__half)
JAXSOFT_DEFINE_TOP_K(__nv_bfloat16)
JAXSOFT_DEFINE_TOP_K(float)

}  // namespace jaxsoft::cuda
