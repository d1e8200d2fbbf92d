// The k largest elements of rows that lie over several devices of a mesh.
//
// Each device finds those of its part by the kernels of top_k, which write all that the others need into one buffer,
// its candidates. When every device has got those of all, in the order of the parts, a kernel merges them: an element's
// place among the k largest of the row is the number of elements that come before it, its place in its own part and,
// as each part is in order, what a binary search finds in every other one. A part without a softmax because it holds
// NaN or +inf is in no order, but then the row has no softmax either, and gives its first k elements.
#include "exchange.cuh"

#include <algorithm>
#include <string>

#include "../../rows/buffers.h"
#include "../../rows/limits.h"
#include "../attributes.cuh"
#include "../devices.cuh"
#include "../divider.cuh"
#include "../handlers.cuh"
#include "../hopper.cuh"
#include "operations/logsumexp.cuh"
#include "top_k/results.cuh"
#include "top_k/tuning.h"

namespace jaxsoft::cuda {
namespace {

// Elements that a thread has; threads of a row, at most; and of a block that has several rows. Chosen on two H200s in
// November 2026: 2048 rows of 2 x 64 bf16 took 5.1 us with one element in a thread, 4.6 with two and 4.1 with four.
constexpr int kEach = 4, kThreads = kMostReceived / kEach, kThreadsOfRows = 128;

// The candidates of all parts of the rows, one after the other.
template <class T>
struct AllCandidates {
  Candidates<T> first;
  int64_t bytes;  // of each
  Divider parts;
  int k;      // candidates of a row and a part
  int32_t n;  // elements of a row that a part has, at least k

  // An array of a part's candidates, given the first one's.
  template <class Number>
  __device__ const Number* of_part(const Number* array, int part) const {
    return reinterpret_cast<const Number*>(reinterpret_cast<const char*>(array) + part * bytes);
  }
};

// A row by the threads of the same y. `width` lanes of a warp combine the states of the parts, and `step` is the
// largest power of two that is at most k.
template <class T>
__global__ void __launch_bounds__(kThreads)
    top_k_merge_candidates(const __grid_constant__ Arguments<T> args, const __grid_constant__ Largest<T> to,
                           const __grid_constant__ AllCandidates<T> from, int width, int step) {
  extern __shared__ float shared[];
  const int parts = from.parts.divisor, k = from.k;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const Candidates<T>& first = from.first;
  float* const values = shared + threadIdx.y * parts * k;
  // The thread's elements: those of a warp are at about the same places of all parts, so that it soon knows of the last
  // places that they are not among the k largest. There is none at place k.
  T own[kEach];
  int32_t indices[kEach];
  int places[kEach], of_parts[kEach], ranks[kEach];
  typename StateOf<T>::Part state;
  wait_for_last_kernel();
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const int i = (threadIdx.x / 32 * kEach + e) * 32 + threadIdx.x % 32;
    places[e] = from.parts.quotient(i), of_parts[e] = i - places[e] * parts;
    if (places[e] >= k || row >= args.rows) places[e] = k;
    if (places[e] == k) continue;
    own[e] = from.of_part(first.values, of_parts[e])[row * k + places[e]];
    indices[e] = from.of_part(first.indices, of_parts[e])[row * k + places[e]];
  }
  if (row < args.rows) {
    for (int part = threadIdx.x & (width - 1); part < parts; part += width)
      state = combine<T>(state, {from.of_part(first.m, part)[row], {from.of_part(first.s, part)[row], 0}});
    state = reduce_lanes<T>(state, width);
  }
#pragma unroll
  for (int e = 0; e < kEach; e++)
    if (places[e] < k) values[of_parts[e] * k + places[e]] = widen(own[e]);
  __syncthreads();
  if (row >= args.rows) return;

  StateOf<T>::finish(state, args, row, threadIdx.x == 0);
  const SoftmaxOfRow softmax(state.m, state.s());
  if (!softmax.exists) {
    for (int j = threadIdx.x; j < to.k; j += blockDim.x) {
      const int part = j / from.n;
      const T value = from.of_part(first.first, part)[row * k + (j - part * from.n)];
      write_element(args, to, row * to.k + j, value, j, softmax);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; e++) ranks[e] = places[e] < k ? places[e] : to.k;
  for (int turn = 1; turn < parts; turn++) {  // all lanes search another part than their own
    bool may_be_largest = false;
#pragma unroll
    for (int e = 0; e < kEach; e++) may_be_largest |= ranks[e] < to.k;
    if (!may_be_largest) break;
    const float* others[kEach];
    int before[kEach];  // how many of the others come before the thread's element
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int other = of_parts[e] + turn;
      others[e] = values + (other < parts ? other : other - parts) * k, before[e] = 0;
    }
    for (int s = step; s > 0; s /= 2)  // no branch, so that the searches go on side by side
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const int more = before[e] + s;
        const float other = others[e][min(more, k) - 1], value = widen(own[e]);
        const bool earlier = of_parts[e] + turn >= parts;
        if (more <= k && (other > value || (earlier && other == value))) before[e] = more;
      }
#pragma unroll
    for (int e = 0; e < kEach; e++) ranks[e] += before[e];
  }
#pragma unroll
  for (int e = 0; e < kEach; e++)
    if (ranks[e] < to.k)
      write_element(args, to, row * to.k + ranks[e], own[e], indices[e] + of_parts[e] * from.n, softmax);
}

template <class T>
cudaError_t run_merge(const Arguments<T>& args, const Largest<T>& to, const AllCandidates<T>& from,
                      cudaStream_t stream) {
  const int parts = static_cast<int>(from.parts.divisor), count = parts * from.k;
  int threads = 32, width = 1, step = 1;
  while (threads * kEach < count) threads *= 2;
  while (width < parts && width < 32) width *= 2;
  while (2 * step <= from.k) step *= 2;
  const int rows = std::max(kThreadsOfRows / threads, 1);  // of a block
  const int64_t blocks = (args.rows + rows - 1) / rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  Device device;
  if (auto e = device.read()) return e;
  cudaLaunchAttribute attribute = overlapping();
  const cudaLaunchConfig_t config{dim3(static_cast<unsigned>(blocks)), dim3(threads, rows),
                                  rows * count * sizeof(float), stream, &attribute,
                                  top_k_tuning(device.major).overlaps};
  return cudaLaunchKernelEx(&config, top_k_merge_candidates<T>, args, to, from, width, step);
}

int64_t words_of(ffi::DataType dtype, int64_t rows, int64_t k) {
  return with_type(dtype, [&](auto zero) { return Candidates<decltype(zero)>::words(rows, k); });
}

bool has_kernel(ffi::DataType dtype) { return is_16_bit(dtype) || dtype == ffi::F32; }

// What is wrong with a call that makes candidates, or "".
std::string check_make(const Buffer& scores, int64_t k, const Buffer& candidates) {
  if (!has_kernel(scores.dtype) || scores.dims.size() == 0)
    return "scores must be F16, BF16 or F32, of a dimension or more: got " + describe(scores);
  if (scores.dims.back() <= kShortPart || scores.dims.back() > INT32_MAX)
    return "scores must have rows of " + std::to_string(kShortPart + 1) + " to " + std::to_string(INT32_MAX) +
           " elements: got " + describe(scores);
  if (k < 1 || k > kMostK) return "k must be from 1 to " + std::to_string(kMostK) + ": got " + std::to_string(k);
  const int64_t words = words_of(scores.dtype, rows_of(scores.dims), k);
  if (candidates.dtype != ffi::U32 || candidates.dims.size() != 1 || candidates.dims[0] != words)
    return "candidates must be U32(" + std::to_string(words) + "): got " + describe(candidates);
  return "";
}

ffi::Error make(cudaStream_t stream, ffi::AnyBuffer scores, ffi::Result<ffi::AnyBuffer> candidates,
                ffi::Result<ffi::AnyBuffer> workspace, int64_t k) {
  const Buffer x(scores), to(*candidates), space(*workspace);
  const std::string reason = check_make(x, k, to);
  if (!reason.empty()) return refuse("top_k_candidates: " + reason);
  if (to.dims[0] == 0) return ffi::Error::Success();  // there is no row
  return answer("top_k_candidates", with_type(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    Arguments<T> args;
    args.rows = rows_of(x.dims), args.n = x.dims.back(), args.a = static_cast<const T*>(x.data);
    const Candidates<T> parts(static_cast<uint32_t*>(to.data), args.rows, k);
    args.m = parts.m, args.s = parts.s;
    const Largest<T> largest{parts.values, parts.indices, static_cast<int>(k), parts.first};
    return run_top_k(args, largest, space.data, space.bytes(), stream);
  }));
}

// What is wrong with a call that merges candidates, or "".
std::string check_merge(const Buffer& candidates, const Buffer& values, const Buffer& probabilities,
                        const Buffer& indices, const Buffer& maximum, const Buffer& sum, int64_t part) {
  if (!has_kernel(values.dtype) || values.dims.size() == 0 || values.dims.back() < 1 || values.dims.back() > kMostK)
    return "values must be F16, BF16 or F32, 1 to " + std::to_string(kMostK) + " of a row: got " + describe(values);
  auto beside = [&](const Buffer& buffer) { return ": got " + describe(buffer) + " beside " + describe(values); };
  if (!go_together(values.dtype, probabilities.dtype) || !(probabilities.dims == values.dims))
    return "chosen_probabilities must be as many as values, in a dtype that goes with theirs" + beside(probabilities);
  if (indices.dtype != ffi::S32 || !(indices.dims == values.dims))
    return "indices must be S32, as many as values" + beside(indices);
  const Dimensions rows = values.dims.first(values.dims.size() - 1);
  for (const Buffer* number : {&maximum, &sum})
    if (number->dtype != ffi::F32 || !(number->dims == rows))
      return "maximum and sum must be F32, one a row of values" + beside(*number);
  if (candidates.dtype != ffi::U32 || candidates.dims.size() != 2)
    return "candidates must be U32, of two dimensions: got " + describe(candidates);
  const int64_t parts = candidates.dims[0], k = values.dims.back();
  if (part < 1 || parts < 1 || part > INT32_MAX / parts || part * parts < k)
    return "a row must have " + std::to_string(k) + " to " + std::to_string(INT32_MAX) +
           " elements: got part=" + std::to_string(part) + " in each of " + std::to_string(parts) + " parts";
  const int64_t each = std::min(k, part), words = words_of(values.dtype, rows_of(values.dims), each);
  if (candidates.dims[1] != words)
    return "candidates must have " + std::to_string(words) + " words each" + beside(candidates);
  if (parts * each > kMostReceived)
    return "there may be " + std::to_string(kMostReceived) + " candidates of a row: got " +
           std::to_string(parts * each);
  return "";
}

ffi::Error merge(cudaStream_t stream, ffi::AnyBuffer candidates, ffi::Result<ffi::AnyBuffer> values,
                 ffi::Result<ffi::AnyBuffer> probabilities, ffi::Result<ffi::AnyBuffer> indices,
                 ffi::Result<ffi::AnyBuffer> maximum, ffi::Result<ffi::AnyBuffer> sum, int64_t part) {
  const Buffer got(candidates), v(*values), p(*probabilities), i(*indices), m(*maximum), s(*sum);
  const std::string reason = check_merge(got, v, p, i, m, s, part);
  if (!reason.empty()) return refuse("top_k_of_candidates: " + reason);
  if (got.dims[1] == 0) return ffi::Error::Success();  // there is no row
  return answer("top_k_of_candidates", with_type(v.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t k = v.dims.back();
    Arguments<T> args;
    args.rows = rows_of(v.dims), args.n = part * got.dims[0];
    args.out = p.data, args.result = result_type(v.dtype, p.dtype);
    args.m = static_cast<float*>(m.data), args.s = static_cast<float*>(s.data);
    const Largest<T> largest{static_cast<T*>(v.data), static_cast<int32_t*>(i.data), static_cast<int>(k)};
    const int64_t each = std::min(k, part);
    const AllCandidates<T> all{Candidates<T>(static_cast<uint32_t*>(got.data), args.rows, each),
                               got.bytes() / got.dims[0], Divider(static_cast<uint32_t>(got.dims[0])),
                               static_cast<int>(each), static_cast<int32_t>(part)};
    return run_merge(args, largest, all, stream);
  }));
}

}  // namespace
}  // namespace jaxsoft::cuda

JAXSOFT_EXPORT_HANDLER(jaxsoft_top_k_candidates, jaxsoft::cuda::make,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Attr<int64_t>("k"))
JAXSOFT_EXPORT_HANDLER(jaxsoft_top_k_of_candidates, jaxsoft::cuda::merge,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Arg<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Ret<xla::ffi::AnyBuffer>()
                           .Attr<int64_t>("part"))
