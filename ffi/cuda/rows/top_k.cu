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
#include "top_k/by_blocks.cuh"
#include "top_k/by_warps.cuh"
#include "top_k/short.cuh"

namespace jaxsoft::cuda {
namespace {

// Splits rows into parts where there are fewer rows than blocks that run at once. `bytes` of workspace have room for
// all parts' keys and states.
template <class T>
Split choose_split(const Arguments<T>& args, int64_t packs, int k, const Device& device, const TopKTuning& tuning,
                   int64_t bytes) {
  const int64_t tiles = packs / (TopKCode::tile_packs * TopKCode::threads);
  const int64_t of_part = k * sizeof(Key) + sizeof(typename StateOf<T>::Part);
  const int64_t parts = std::min({int64_t(tuning.blocks_at_once) * device.processors / args.rows,
                                  packs / TopKCode::threads,
                                  std::max<int64_t>(tuning.few_parts, tiles / tuning.least_tiles),
                                  int64_t(tuning.merged / k), bytes / (args.rows * of_part)});
  return Split(packs, std::max<int64_t>(parts, 1));
}

// The packs of a row, which may begin anywhere in its first unless all rows begin with one.
template <class T>
int64_t packs_of_row(const Arguments<T>& args) {
  return (args.n * sizeof(T) + 15) / 16 + !rows_are_whole(args);
}

// Whether a warp has a row. There must be rows enough for all of the multiprocessors' warps, several times, and groups
// enough to tell the k largest apart.
template <class T>
bool is_for_warps(const Arguments<T>& args, int64_t packs, int k, const Device& device, const TopKTuning& tuning) {
  const int64_t warps = int64_t(TopKCode::rows) * TopKCode::row_blocks * device.processors;
  return packs <= tuning.row_packs && args.rows >= tuning.waves * warps && k <= tuning.row_k &&
         2 * k <= packs / TopKCode::tile_packs;
}

template <class T>
cudaError_t launch_by_warps(const Arguments<T>& args, const Largest<T>& to, int64_t packs, cudaStream_t stream) {
  const int64_t blocks = (args.rows + TopKCode::rows - 1) / TopKCode::rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int room = TopKCode::room_of_row(to.k);
  const int tiles = static_cast<int>((packs + TopKCode::warp_packs - 1) / TopKCode::warp_packs);
  const size_t bytes = TopKCode::rows * ((room + to.k) * sizeof(Key) + tiles * 32 * sizeof(float));
  top_k_by_warps<T><<<static_cast<unsigned>(blocks), 32 * TopKCode::rows, bytes, stream>>>(args, to, tiles, room);
  return cudaGetLastError();
}

inline TopKSizes choose_sizes(int64_t packs, int warps, int k) {
  const int64_t of_step = warps * TopKCode::warp_packs, tiles = (packs + of_step - 1) / of_step;  // of a warp
  const int64_t together = (tiles + TopKCode::most_groups - 1) / TopKCode::most_groups;
  return {static_cast<int>((tiles + together - 1) / together), static_cast<int>(together),
          TopKCode::room_of_share(k), TopKCode::room_of_all(k)};
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
  const int64_t of_row = packs_of_row(args);
  if (is_short<T>(of_row, to.k)) return launch_short(args, to, of_row, stream);
  if (is_for_warps(args, of_row, to.k, device, tuning)) return launch_by_warps(args, to, of_row, stream);
  const Split split = choose_split(args, of_row, to.k, device, tuning, bytes);
  const int64_t blocks = args.rows * split.parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t packs = std::min(of_row, split.packs);  // of a part
  const int warps = static_cast<int>(std::clamp<int64_t>(packs / TopKCode::warp_packs, 1, TopKCode::warps));
  const TopKSizes sizes = choose_sizes(packs, warps, to.k);
  const size_t memory = sizes.room_of_all * sizeof(Key) + warps * std::max(sizes.room * sizeof(Key),
                                                                           sizes.groups * 32 * sizeof(float));
  auto* keys = static_cast<Key*>(workspace);
  auto* states = reinterpret_cast<State*>(keys + (split.parts > 1 ? blocks * to.k : 0));
  top_k_by_blocks<T>
      <<<static_cast<unsigned>(blocks), 32 * warps, memory, stream>>>(args, to, sizes, keys, states, split);
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
