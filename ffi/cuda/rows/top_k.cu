// The k largest elements of rows and their state (m, s), in one read.
//
// A block goes through a row tile by tile. Each thread folds its packs into its state; where their maximum reaches
// `bar`, it puts those of their elements that may still be among the k largest into a buffer in shared memory, as keys:
// words of 64 bits that are ordered as the elements are to be, by value and then by index. At the first tile, `bar` is
// about the k-th largest of the threads' maxima, so that hardly more than k elements reach it. Whenever many have been
// gathered, or there is no room for one, the buffer is cut to about the k largest, and what is below them no longer
// reaches `bar`. Elements without room are offered again after that. So every row is served exactly, in whichever order
// its elements come; which place a key gets in the buffer is up to chance, but which keys are the k largest is not. In
// the end each key's place in the result is the number of larger ones in the buffer.
//
// Few rows are split over blocks, whose k largest keys, in order, and states wait in the workspace for a second launch.
#include "top_k.cuh"

#include "strategies.cuh"

namespace jaxsoft::cuda {
namespace {

using Key = unsigned long long;  // the value's order, and the complement of the index; 0 is none

constexpr int kTopKThreads = 512;  // of a block, at most
constexpr int kTilePacks = 4;      // of a thread in a tile
constexpr int kBuffer = 2048;      // keys in the buffer: more than kMostK packs have elements
constexpr int kGathered = 448;     // so many are cut, or 2 k
constexpr int kRanked = 192;       // up to so many are put in order without being cut before
constexpr int kRankedOfRow = 128;  // the same of a row that is not split: other blocks have work for the time of a cut
constexpr int kMerged = 4096;      // keys of all parts of a row
constexpr int kFewParts = 16;      // more of a row only where each has two tiles even so
constexpr int kMergeThreads = 1024;

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
  uint32_t low, high;   // orders: the first tile's k-th largest maximum is between them
  Key least;            // from which on the last cut has left the keys; 0 before
};

// The last warp of the block merges the states while the others put keys in order.
__device__ inline bool in_last_warp() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }

// Where the k largest are looked for, it is not worth while to tell them from so few.
__device__ inline int enough_for(int k) { return k + max(k / 4, 4); }

// A place at the end of the buffer for each of the warp's threads that are here.
__device__ inline int place_for_key(Gathered& gathered) {
  const unsigned here = __activemask(), lane = threadIdx.x % 32;
  const int leader = __ffs(here) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(&gathered.count, __popc(here));
  return __shfl_sync(here, first, leader) + __popc(here & ((1u << lane) - 1));
}

// How many keys are at least this one, by a warp.
__device__ inline int number_from(Key least, const Key* keys, int count) {
  int number = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) number += keys[i] >= least;
  return __reduce_add_sync(0xffffffffu, number);
}

// Calls use(rank, key) once for each key in the buffer. All threads call it, and see the buffer.
template <class Use>
__device__ void for_ranked(const Key* keys, int count, Use use) {
  int lanes = 32;  // that share a key
  while (lanes > 1 && lanes * count > static_cast<int>(blockDim.x) - 32) lanes /= 2;
  for (int first = threadIdx.x / 32 * 32 / lanes; first < count; first += blockDim.x / lanes) {
    const int i = first + threadIdx.x % 32 / lanes, lane = threadIdx.x % lanes;
    const Key key = i < count ? keys[i] : 0;
    int rank = 0;
    for (int j = lane; j < count; j += lanes) rank += keys[j] > key;
    for (int mask = lanes / 2; mask > 0; mask /= 2) rank += __shfl_xor_sync(0xffffffffu, rank, mask);
    if (i < count && lane == 0) use(rank, key);
  }
}

// The greatest order, in units of T, from which on there are k or more, or one from which on there are few more.
// `number(order)` counts them, for all threads that call this. From `low` on there are k, and no more than `found`.
template <class T, class Number>
__device__ uint32_t greatest_order(uint32_t low, uint32_t high, int k, int& found, Number number) {
  low >>= kFree<T>, high >>= kFree<T>;
  while (low < high && found > enough_for(k)) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int from = number(middle << kFree<T>);
    if (from >= k) low = middle, found = from;
    else high = middle - 1;
  }
  return low << kFree<T>;
}

// Leaves the k greatest keys in the buffer and not many more, in any order: those from gathered.least on. No key's
// order is below `low`, no index is `n` or above. All threads call it, after a barrier. One warp searches, as each of
// its lanes has few keys.
template <class T>
__device__ void cut(Gathered& gathered, Key* keys, int count, int k, uint32_t low, uint32_t n) {
  if (threadIdx.x < 32) {
    uint32_t high = 0;
    for (int i = threadIdx.x; i < count; i += 32) high = max(high, order_in(keys[i]));
    int found = count;
    const uint32_t order = greatest_order<T>(low, __reduce_max_sync(0xffffffffu, high), k, found, [&](uint32_t order) {
      return number_from(Key(order) << 32, keys, count);
    });
    Key least = Key(order) << 32;
    if (found > enough_for(k)) {  // of those that are equal to the last, the ones of the lowest indices
      uint32_t first = 0, last = n - 1;
      while (first < last && found > enough_for(k)) {
        const uint32_t middle = first + (last - first) / 2;
        const int from = number_from(key_of(order, middle), keys, count);
        if (from >= k) last = middle, found = from;
        else first = middle + 1;
      }
      least = key_of(order, last);
    }
    if (threadIdx.x == 0) gathered.least = least;
  }
  __syncthreads();
  const Key least = gathered.least;
  if (threadIdx.x == 0) gathered.count = 0;
  for (int start = 0; start < count; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const Key key = i < count ? keys[i] : 0;
    __syncthreads();  // all have read what may be written over
    if (key >= least && i < count) keys[place_for_key(gathered)] = key;
  }
  __syncthreads();
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

// Folds a row, or a part of one that begins at this element of the row, and leaves its k greatest keys in the buffer,
// with others, of which `ranked` in all are few enough to be put in order. Returns the thread's state.
template <class T>
__device__ Running<float> gather(const Row<StateOf, T, Plain>& row, uint32_t begin, uint32_t n, int k, int ranked,
                                 int room, Gathered& gathered, Key* keys) {
  constexpr int size = Pack<T>::size;
  const Window<T>& window = row.window;
  const int step = blockDim.x, tile = kTilePacks * step, limit = min(room, max(2 * k, kGathered));
  const T nothing = narrow<T>(-infinity<float>());
  Pack<T> packs[kTilePacks], next[kTilePacks];
  auto fetch = [&](Pack<T>(&to)[kTilePacks], int first) {
#pragma unroll
    for (int j = 0; j < kTilePacks; j++)
      if (first + j * step < window.packs) to[j] = window.fetch(row.a, first + j * step);
      else to[j].fill(nothing);
  };
  fetch(packs, threadIdx.x);
  fetch(next, threadIdx.x + tile);
  if (threadIdx.x == 0) gathered = {0, ~0u, 0, 0};
  __syncthreads();

  Running<float> part;
  uint32_t low = order_of(-infinity<float>());  // of all keys in the buffer
  for (int start = 0; start < window.packs; start += tile) {
    const int first = start + threadIdx.x;
    const bool more = start + tile < window.packs;
#pragma unroll
    for (int j = 0; j < kTilePacks; j++)
      if (first + j * step < window.packs) window.trim(packs[j], first + j * step, nothing);
    const float top = StateOf<T>::accumulate(part, packs, packs, row.form);

    if (start == 0 && window.packs >= k) {  // so many threads have elements, as a block has k threads
      const bool has = threadIdx.x < window.packs;
      int found = min(step, window.packs);
      const uint32_t own = order_of(top), high = __reduce_max_sync(0xffffffffu, own);
      // If k warps have elements, the least of the warps' maxima is nearer.
      const uint32_t least = found >= 32 * k ? high : __reduce_min_sync(0xffffffffu, has ? own : ~0u);
      if (threadIdx.x % 32 == 0) atomicMin(&gathered.low, least), atomicMax(&gathered.high, high);
      __syncthreads();
      low = greatest_order<T>(gathered.low, gathered.high, k, found, [&](uint32_t order) {
        return __syncthreads_count(has && own >= order);
      });
    }

    // What comes after a cut loses to the k keys that there are if it is equal to the last of those.
    float bar = of_order(low + (static_cast<uint32_t>(gathered.least) ? 1u << kFree<T> : 0));
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
        if (key < gathered.least) continue;
        const int place = place_for_key(gathered);
        if (place < room) keys[place] = key;
        else left |= 1u << j;
        crowded |= place >= limit;
      }
      if (!__syncthreads_or(left != 0 || (more && crowded))) break;
      cut<T>(gathered, keys, min(gathered.count, room), k, low, n);
      low = order_in(gathered.least), bar = of_order(low);
    }
#pragma unroll
    for (int j = 0; j < kTilePacks; j++) packs[j] = next[j];
    fetch(next, first + 2 * tile);
  }
  const int count = gathered.count;
  if (count > max(enough_for(k), ranked)) cut<T>(gathered, keys, count, k, low, n);
  return part;
}

// Writes a row's results from the keys in the buffer, of which all threads see all, and the states that the lanes of
// the last warp have.
template <class T>
__device__ void write_largest(const Arguments<T>& args, const Largest<T>& to, int64_t index,
                              typename StateOf<T>::Part state, int count, const Key* keys) {
  const T* row = args.a + index * args.n;
  T* values = to.values + index * to.k;
  int32_t* indices = to.indices + index * to.k;
  if (in_last_warp()) {
    state = reduce_lanes<T>(state, 32);
    StateOf<T>::finish(state, args, index, threadIdx.x % 32 == 0);
  }
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank >= to.k) return;
    const float value = of_order(order_in(key));
    values[rank] = value == 0 ? row[index_in(key)] : narrow<T>(value);  // which has the sign of a zero
    indices[rank] = static_cast<int32_t>(index_in(key));
  });
  __syncthreads();  // what has been written may be written over
  if (in_last_warp() && (!isfinite(state.m) || isnan(state.s())))  // the softmax has no value
    for (int i = threadIdx.x % 32; i < to.k; i += 32) values[i] = row[i], indices[i] = i;
}

// Of rows that are not split the results, else the keys and the state of a part, to the workspace.
template <class T>
__global__ void __launch_bounds__(kTopKThreads, 2)
    top_k(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to, int room,
          Key* keys_of_parts, typename StateOf<T>::Part* states, Split split) {
  using State = typename StateOf<T>::Part;
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  __shared__ State warps[kTopKThreads / 32];
  let_next_kernel_start();
  const int64_t index = blockIdx.x / split.parts;
  const auto row = part_of_row<StateOf, T, Plain>(args, blockIdx.x, split);
  const auto begin = static_cast<uint32_t>(row.a - (args.a + index * args.n));
  const int lane = threadIdx.x % 32;
  const int ranked = split.parts == 1 ? kRankedOfRow : kRanked;
  const auto of_warp = reduce_lanes<T>(gather<T>(row, begin, args.n, to.k, ranked, room, gathered, keys), 32);
  if (lane == 0) warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  State state;
  if (in_last_warp() && lane < blockDim.x / 32) state = warps[lane];
  const int count = gathered.count;
  if (split.parts == 1) return write_largest(args, to, index, state, count, keys);

  if (in_last_warp()) {
    state = reduce_lanes<T>(state, 32);
    if (lane == 0) states[blockIdx.x] = state;
  }
  keys_of_parts += int64_t(blockIdx.x) * to.k;
  for_ranked(keys, count, [&](int rank, Key key) {
    if (rank < to.k) keys_of_parts[rank] = key;
  });
  for (int i = count + threadIdx.x; i < to.k; i += blockDim.x) keys_of_parts[i] = 0;
}

// Merges the parts of a row.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    top_k_merge(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to,
                const Key* keys_of_parts, const typename StateOf<T>::Part* states, unsigned parts) {
  extern __shared__ Key keys[];
  __shared__ Gathered gathered;
  const int64_t index = blockIdx.x;
  const int k = to.k, count = static_cast<int>(parts) * k, lane = threadIdx.x % 32;
  keys_of_parts += index * count, states += index * parts;
  if (threadIdx.x == 0) gathered.count = 0;
  __syncthreads();
  wait_for_last_kernel();
  int i = threadIdx.x;
  Key key = i < count ? keys_of_parts[i] : 0;
  typename StateOf<T>::Part state;
  if (in_last_warp())
    for (unsigned part = lane; part < parts; part += 32) state = combine<T>(state, states[part]);

  // An order from which on there are k keys: each part's first ones, as many as make k together, or one part's k.
  uint32_t low = 1;  // which a key that is none has not
  if (count > kRanked) {
    const int of_each = (k + parts - 1) / parts;
    uint32_t least = ~0u;
    for (unsigned part = lane; part < parts; part += 32) {
      least = min(least, order_in(keys_of_parts[part * k + of_each - 1]));
      low = max(low, order_in(keys_of_parts[part * k + k - 1]));
    }
    low = max(__reduce_max_sync(0xffffffffu, low), __reduce_min_sync(0xffffffffu, least));
  }
  while (i < count) {
    if (order_in(key) >= low) keys[place_for_key(gathered)] = key;
    i += blockDim.x;
    if (i < count) key = keys_of_parts[i];
  }
  __syncthreads();
  const int left = gathered.count;
  if (left > max(enough_for(k), kRanked)) cut<T>(gathered, keys, left, k, low, args.n);
  write_largest(args, to, index, state, gathered.count, keys);
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
  const int64_t many = std::max<int64_t>(kFewParts, packs / (2 * kTilePacks * kTopKThreads));
  const int64_t parts = std::min({2 * processors / args.rows, packs / kTopKThreads, many, int64_t(kMerged / to.k),
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
  config.blockDim = dim3(std::clamp((count + 31) / 32 * 32, 128, kMergeThreads));
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
