// The k largest elements of rows and their state (m, s), in one read.
//
// A block goes through a row tile by tile. Each thread folds its packs into its state; where their maximum reaches
// `bar`, it puts those of their elements that may still be among the k largest into a buffer in shared memory, as keys
// that are ordered by value and then by index. At the first tile, `bar` is about the k-th largest of the threads'
// maxima, so that hardly more than k elements reach it. Whenever many have been gathered, or there is no room for one,
// the buffer is cut to about the k largest, and what is below them no longer reaches `bar`. Elements without room are
// offered again after that. So every row is served exactly, in whichever order its elements come. Which place a key
// gets in the buffer is up to chance, but which keys are the k largest is not. In the end each key's place in the
// result is the number of larger ones in the buffer.
//
// Few rows are split over blocks, whose k largest keys, in order, and states wait in the workspace for a second launch.
//
//   top_k/tuning.cuh   the sizes that decide, as data
//   top_k/keys.cuh     keys; top_k/buffer.cuh, the buffer that they are put into
//   top_k/gather.cuh   a block's way through its elements
//   top_k/kernels.cuh  the kernels
#include "top_k.cuh"

#include <algorithm>

#include "../attributes.cuh"
#include "../devices.cuh"
#include "top_k/kernels.cuh"

namespace jaxsoft::cuda {
namespace {

// How many packs a row has: it may begin anywhere in its first.
template <class T>
int64_t packs_of_row(const Arguments<T>& args) {
  return (args.n * sizeof(T) + 15) / 16 + 1;
}

// Splits rows into parts where there are fewer rows than blocks that run at once. `bytes` of workspace have room for
// all parts' keys and states.
template <class T>
Split choose_split(const Arguments<T>& args, int k, const Device& device, const TopKTuning& tuning, int64_t bytes) {
  const int64_t packs = packs_of_row(args);
  const int64_t tiles = packs / (TopKCode::tile_packs * TopKCode::threads);
  const int64_t of_part = k * sizeof(Key) + sizeof(typename StateOf<T>::Part);
  const int64_t parts = std::min({int64_t(tuning.blocks_at_once) * device.processors / args.rows,
                                  packs / TopKCode::threads,
                                  std::max<int64_t>(tuning.few_parts, tiles / tuning.least_tiles),
                                  int64_t(tuning.merged / k), bytes / (args.rows * of_part)});
  return Split(packs, std::max<int64_t>(parts, 1));
}

// A thread for each of a tile's packs that it takes, but enough threads for their maxima to tell the k largest apart.
int choose_threads(int64_t packs, int k) {
  const int64_t tile_packs = TopKCode::tile_packs;
  const int64_t threads = std::max((packs + tile_packs - 1) / tile_packs, std::min<int64_t>(packs, 2 * k));
  return static_cast<int>(std::min<int64_t>((threads + 31) / 32 * 32, TopKCode::threads));
}

template <class T>
cudaError_t launch_merge(const Arguments<T>& args, const Largest<T>& to, const Key* keys,
                         const typename StateOf<T>::Part* states, unsigned parts, bool overlaps, cudaStream_t stream) {
  const int count = static_cast<int>(parts) * to.k, threads = (count + 31) / 32 * 32;
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows));
  config.blockDim = dim3(std::clamp(threads, TopKCode::least_merge_threads, TopKCode::merge_threads));
  config.dynamicSmemBytes = count * sizeof(Key);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps;
  return cudaLaunchKernelEx(&config, top_k_merge<T>, args, to, keys, states, parts);
}

}  // namespace

template <class T>
cudaError_t run_top_k(const Arguments<T>& args, const Largest<T>& to, void* workspace, int64_t bytes,
                      cudaStream_t stream) {
  using State = typename StateOf<T>::Part;
  Device device;
  if (auto e = device.read()) return e;
  const TopKTuning& tuning = top_k_tuning(device.major);
  const Split split = choose_split(args, to.k, device, tuning, bytes);
  const int64_t blocks = args.rows * split.parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t packs = std::min(packs_of_row(args), split.packs);  // of a part
  const int room = static_cast<int>(std::min<int64_t>(packs * Pack<T>::size, tuning.buffer));
  auto* keys = static_cast<Key*>(workspace);
  auto* states = reinterpret_cast<State*>(keys + (split.parts > 1 ? blocks * to.k : 0));
  top_k<T><<<static_cast<unsigned>(blocks), choose_threads(packs, to.k), room * sizeof(Key), stream>>>(
      args, to, room, keys, states, split);
  if (auto e = cudaGetLastError()) return e;
  if (split.parts == 1) return cudaSuccess;
  return launch_merge<T>(args, to, keys, states, split.parts, tuning.overlaps, stream);
}

#define JAXSOFT_DEFINE_TOP_K(T) \
  template cudaError_t run_top_k<T>(const Arguments<T>&, const Largest<T>&, void*, int64_t, cudaStream_t);
JAXSOFT_DEFINE_TOP_K(__half)
JAXSOFT_DEFINE_TOP_K(__nv_bfloat16)
JAXSOFT_DEFINE_TOP_K(float)

}  // namespace jaxsoft::cuda
