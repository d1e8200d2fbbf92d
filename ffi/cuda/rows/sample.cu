// Draws a token from each row of logits, after top-k, top-p and min-p, in one launch.
//
// A row lies over the blocks of a cluster, or in one block. The first read finds its largest element m, which gives all
// weights exp((x - m) * scale), and a threshold for the short way: if few elements may be left by the filters, the
// second read gathers these, and the token is drawn from them. Else the blocks need to know:
//
// 1. How many elements there are in each of 2048 bins of weights. This says in which bin the k-th largest is, and
//    bounds the mass of all that is above each bin. So only elements of a few bins, the candidates, may be on either
//    side of the ends of top-k and top-p. Where top-p is of the mass of all elements, one read gathers, counts and adds
//    up that mass.
// 2. The mass of what is certainly above these ends, for each warp's range of elements; and the candidates, which go to
//    the first block.
// 3. There the ends are found among the candidates, exactly, and then the token: the warp's range in which it is by the
//    table of masses, and its place in that range by reading it once more.
//
// Masses are whole numbers, in units of 2^-40 of the largest element's weight. So sums are the same in whatever order
// they are taken, and a row gives the same token however many blocks it lies over, and whichever way it goes.
//
// Of bf16, many long rows of which top-k leaves all and top-p does not are read once, and their values are counted.
//
// If there are more candidates than the first block has room for, as of a row of equal elements, the ends are found by
// going over the row once for every 9 bits of the elements' order and index.
//
//   sample/tuning.h     the sizes in the code; sample/plan.h, over how many blocks a row lies
//   sample/block.cuh    what threads do together; sample/shared.cuh, what they share
//   sample/row.cuh      a block's part of a row, weights, and keys that put elements in order
//   sample/options.cuh  the options of a row
//   sample/few.cuh      the first read's end, and the short way
//   sample/bracket.cuh  step 1; sample/select.cuh, the search of step 3; sample/draw.cuh, its end
//   sample/values.cuh   the draw from one read of a row of bf16
//   sample/kernel.cuh   the kernel
#include "sample.cuh"

#include <algorithm>
#include <string>

#include "../../rows/buffers.h"
#include "../attributes.cuh"
#include "../devices.cuh"
#include "../handlers.cuh"
#include "sample/kernel.cuh"
#include "sample/plan.h"

namespace jaxsoft::cuda {
namespace {

// Launches the kernel with clusters of `blocks` blocks. It is refused with cudaErrorInvalidClusterSize where the device
// has no room for a cluster for each row at once, with a multiprocessor for each block: two blocks on one take half as
// long again, and the whole call as long as its slowest row. (On an H200 there is room for 30 clusters of 4 blocks: 30
// rows of 128256 flat bf16 logits take 21 us in them, with top-p of 0.9, and 32 rows 30 us; in clusters of 3, 24 us.)
template <class T>
cudaError_t launch(const Sampling<T>& call, const Device& device, int blocks, cudaStream_t stream) {
  auto bytes_with = [](int slots) {
    return static_cast<int>(sizeof(SampleShared) + slots * SampleCode::threads * sizeof(Pack<T>));
  };
  static Devices<> prepared;
  int most_slots = 0;  // for which the device has room
  if (auto e = prepared.once(0, &most_slots, [&](int* found) {
        int bytes = 0;
        if (auto e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.ordinal)) return e;
        *found = SampleCode::most_slots;
        while (*found > 0 && bytes_with(*found) > bytes) --*found;
        const int most_bytes = bytes_with(*found);
        if (auto e = cudaFuncSetAttribute(sample_rows<T, kCountsValues<T>>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes))
          return e;
        return cudaFuncSetAttribute(sample_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
      }))
    return e;
  cudaLaunchAttribute attribute = in_clusters_of(blocks);
  cudaLaunchConfig_t config{dim3(blocks), dim3(SampleCode::threads), static_cast<size_t>(bytes_with(most_slots)),
                            stream,       &attribute,                blocks > 1};
  if (blocks > 1) {
    static Devices<SampleCode::most_blocks + 1> clusters_at_once;
    int clusters = 0;
    if (auto e = clusters_at_once.once(blocks, &clusters, [&](int* found) {
          return find_clusters(sample_rows<T>, config, found);
        }))
      return e;
    if (clusters < call.rows) return cudaErrorInvalidClusterSize;
  }
  const int64_t bytes = int64_t(call.n) * sizeof(T);
  const auto packs = static_cast<int>(bytes / 16);
  const bool aligned = (reinterpret_cast<uintptr_t>(call.logits) | bytes) % 16 == 0;
  const int steps = RowPart<T>::steps_of(aligned ? packs : packs + 2, blocks);  // at most, beyond a row's ends too
  // A block that has three quarters of what others have is as good as they.
  const int of_block = steps * SampleCode::threads;
  const int full = std::max((packs + of_block / 4) / of_block, 1);
  const int most = blocks > 1 ? most_slots : std::min(most_slots, SampleCode::shared_slots);
  // Before Hopper it was not tried.
  const bool counts_values = kCountsValues<T> && device.major >= 9 && blocks == 1 && steps > most &&
                             steps <= SampleCode::value_packs && call.k == call.n &&
                             most_slots >= SampleCode::shared_slots;
  const int slots = steps <= most    ? std::max(steps, SampleCode::ring)
                    : counts_values ? SampleCode::shared_slots
                                    : SampleCode::ring;
  config.gridDim = dim3(static_cast<unsigned>(call.rows * blocks));
  config.dynamicSmemBytes = bytes_with(slots);
  ThresholdRanks ranks;
  if (call.k < call.n) ranks.of_k = {call.k, call.n, blocks, full};
  ranks.of_one = {1, call.n, blocks, full}, ranks.of_mass = {SampleCode::sought_by_mass, call.n, blocks, full};
  const auto kernel = counts_values ? sample_rows<T, kCountsValues<T>> : sample_rows<T>;
  return cudaLaunchKernelEx(&config, kernel, call, ranks, slots);
}

template <class T>
cudaError_t run_sample(const Sampling<T>& call, cudaStream_t stream) {
  Device device;
  if (auto e = device.read()) return e;
  const int64_t packs = (int64_t(call.n) * sizeof(T) + 15) / 16;
  for (const int blocks : kSampleBlocks) {
    if (!may_have_blocks(blocks, call.rows, packs, device.major, device.processors)) continue;
    const cudaError_t error = launch(call, device, blocks, stream);
    if (!is_refused(error)) return error;
  }
  return launch(call, device, 1, stream);
}

// What is wrong with the buffers of a call, or "".
std::string check(const Buffer& logits, const Buffer& uniform, const Buffer* const (&options)[3], const Buffer& token,
                  const Buffer& probability, int64_t k) {
  if (!is_16_bit(logits.dtype) && logits.dtype != ffi::F32)
    return "logits must be F16, BF16 or F32: got " + describe(logits);
  const size_t rank = logits.dims.size();
  if (rank == 0 || logits.dims[rank - 1] < 1 || logits.dims[rank - 1] > kLongestSampled)
    return "logits must have rows of 1 to " + std::to_string(kLongestSampled) + " elements: got " + describe(logits);
  auto fits = [&](const Buffer& buffer, ffi::DataType dtype, bool pair) {
    bool same = buffer.dtype == dtype && buffer.dims.size() == rank - 1 + pair && (!pair || buffer.dims[rank - 1] == 2);
    for (size_t i = 0; same && i + 1 < rank; i++) same = buffer.dims[i] == logits.dims[i];
    return same;
  };
  if (!fits(uniform, ffi::F32, true))
    return "uniform must be F32, two numbers a row of logits: got " + describe(uniform) + " beside " + describe(logits);
  for (const Buffer* option : options)
    if (!fits(*option, ffi::F32, false) && !(option->dtype == ffi::F32 && option->dims.size() == 0))
      return "options must be F32, one number a row of logits or one for all: got " + describe(*option) + " beside " +
             describe(logits);
  if (!fits(token, ffi::S32, false) || !fits(probability, ffi::F32, false))
    return "the results must be S32 and F32, one number a row of logits: got " + describe(token) + " and " +
           describe(probability) + " beside " + describe(logits);
  if (k < 1) return "k must be at least 1: got " + std::to_string(k);
  return "";
}

template <class T>
cudaError_t run_typed(const Buffer& logits, const Buffer& uniform, const Buffer* const (&options)[3],
                      const Buffer& token, const Buffer& probability, int64_t k, cudaStream_t stream) {
  Sampling<T> call{};
  call.logits = static_cast<const T*>(logits.data), call.uniform = static_cast<const float*>(uniform.data);
  auto option = [](const Buffer& b) { return SampleOption{static_cast<const float*>(b.data), b.dims.size() > 0}; };
  call.temperature = option(*options[0]), call.top_p = option(*options[1]), call.min_p = option(*options[2]);
  call.token = static_cast<int32_t*>(token.data), call.probability = static_cast<float*>(probability.data);
  call.n = static_cast<uint32_t>(logits.dims.back());
  call.k = static_cast<uint32_t>(std::min<int64_t>(k, call.n));
  call.rows = rows_of(logits.dims);
  if (call.rows == 0) return cudaSuccess;
  if (call.rows > INT32_MAX) return cudaErrorInvalidValue;
  return run_sample(call, stream);
}

ffi::Error handle(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer uniform, ffi::AnyBuffer temperature,
                  ffi::AnyBuffer top_p, ffi::AnyBuffer min_p, ffi::Result<ffi::AnyBuffer> token,
                  ffi::Result<ffi::AnyBuffer> probability, int64_t k) {
  const Buffer x(logits), u(uniform), t(temperature), p(top_p), m(min_p), to(*token), share(*probability);
  const Buffer* const options[3] = {&t, &p, &m};
  const std::string reason = check(x, u, options, to, share, k);
  if (!reason.empty()) return refuse("sample: " + reason);
  return answer("sample", with_type(x.dtype, [&](auto zero) {
    return run_typed<decltype(zero)>(x, u, options, to, share, k, stream);
  }));
}

}  // namespace
}  // namespace jaxsoft::cuda

JAXSOFT_EXPORT_HANDLER(jaxsoft_sample, jaxsoft::cuda::handle,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Attr<int64_t>("k"))
