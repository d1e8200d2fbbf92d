// How the keys of a sequence are cut into chunks, and where in the workspace the chunks' states are.
//
// An item is some rows (packed queries) of one key head of one sequence, and a unit of work is one chunk of an item's
// keys. Which chunks there are follows from the shapes of a call, and from which keys count for the sequence itself:
// neither the device nor the other sequences change a row's bits. So the number of multiprocessors here is a constant.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../attention.cuh"

namespace jaxsoft::cuda::decode {

constexpr int kProcessors = 132;   // of an H100 and an H200
constexpr int kRun = 16;           // keys that lie in one page, whatever its size
constexpr int kChunkAlign = 64;    // keys: whole tiles of all kernels
constexpr int kLeastChunk = 128;   // keys: less is not worth a merge
constexpr int kUnits = 528;        // wanted where there is enough to do: 4 for each multiprocessor
constexpr int kMostChunks = 256;   // of an item
constexpr int kShortKeys = 2048;   // of a block's units: up to here it does not pay to deal them as blocks finish
constexpr int kMostUnits = 32768;  // of 16 rows: beyond, chunks become longer, so that states take less memory

constexpr __host__ __device__ int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
constexpr __host__ __device__ int round_up_int(int a, int b) { return (a + b - 1) / b * b; }

// a / b, where the quotient is less than 2^20: a division of integers takes longer, and blocks begin with several.
__host__ __device__ inline int short_quotient(int a, int b) {
#ifdef __CUDA_ARCH__
  int quotient = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - quotient * b;
  if (rest < 0) quotient--;
  else if (rest >= b) quotient++;
  return quotient;
#else
  return a / b;
#endif
}

struct Plan {
  int row_tile = 16;    // rows of an item, at most
  int heads_each = 1;   // query heads of a key head
  int row_groups = 1;   // items of a key head of a sequence
  int items = 1;
  int wave = 1;         // chunks of an item with which the multiprocessors have about the same number of units
  int longest = 1;      // keys of a chunk
  int shortest = 1;     // the same, where there are more chunks than `wave`
  int most_chunks = 1;  // of an item

  // Keys of each chunk of an item for which `keys` count, or a few more.
  __host__ __device__ int chunk(int keys) const {
    if (keys <= int64_t(wave) * longest) {
      const int length = short_quotient(keys + wave - 1, wave);
      return round_up_int(length < kLeastChunk ? kLeastChunk : length, kChunkAlign);
    }
    const int64_t wanted = (int64_t(keys) * items + kUnits - 1) / kUnits;
    int length = wanted > longest ? longest : round_up_int(static_cast<int>(wanted), kLeastChunk);
    if (length < shortest) length = shortest;
    const int for_most = round_up_int((keys + kMostChunks - 1) / kMostChunks, kLeastChunk);
    return length < for_most ? for_most : length;
  }
};

// How keys are cut for items of up to `row_tile` rows. The states of more rows are larger, and so chunks are longer.
// Where sequences have lengths, chunks are shorter, as one long sequence must not keep the others waiting.
inline Plan make_plan(const AttentionCall& call, int row_tile) {
  Plan plan;
  plan.heads_each = call.heads / call.key_heads;
  const int rows = call.queries * plan.heads_each;
  const bool many = row_tile > 16, ragged = call.key_lengths.data && call.batch > 1;
  plan.row_tile = row_tile;
  plan.row_groups = static_cast<int>(divide_up(rows, row_tile));
  plan.items = call.batch * call.key_heads * plan.row_groups;
  // With so many units, this percentage of the multiprocessors has one until the end.
  const int busy = plan.items < kProcessors ? 94 : 85;
  auto idles = [&](int64_t units) { return units * 100 < busy * kProcessors * divide_up(units, kProcessors); };
  while (idles(int64_t(plan.wave) * plan.items)) plan.wave++;
  const bool crowded = plan.items >= 2 * kProcessors;  // then one long sequence is but a small part of the work
  plan.longest = many ? (ragged ? 16384 : 32768) : !ragged ? 8192 : crowded ? 4096 : 1024;
  int64_t keys = call.keys;
  if (call.left >= 0 && call.right >= 0) {
    const int64_t window = int64_t(call.left) + call.right + call.queries + kChunkAlign;
    if (window < keys) keys = window;
  }
  const int64_t spread = round_up(divide_up(keys * plan.items * (row_tile / 16), kMostUnits), kLeastChunk);
  plan.shortest = static_cast<int>(std::max<int64_t>(spread, many ? 4096 : 512));
  const int64_t in_wave = std::min<int64_t>(divide_up(keys, kLeastChunk), plan.wave);
  const bool exceeds = keys > int64_t(plan.wave) * plan.longest;
  int64_t beyond = 1;
  if (exceeds) {
    beyond = std::max(divide_up(kUnits, plan.items), divide_up(keys, plan.longest));
    beyond = std::min(std::min<int64_t>(beyond, kMostChunks), divide_up(keys, plan.shortest));
  }
  plan.most_chunks = static_cast<int>(std::max(in_wave, beyond));
  return plan;
}

// The workspace: the counter of units, then maxima and sums of the chunks' states, then their outputs.
struct Workspace {
  static constexpr int64_t sums = 256;
  int64_t outputs, bytes;  // where the outputs begin, and how long all is
  Workspace(const Plan& plan, int rows, int size) {
    const int64_t states = plan.most_chunks > 1 ? int64_t(plan.items) * plan.most_chunks : 0;
    outputs = sums + round_up(states * rows * 8, 256);
    bytes = outputs + states * rows * size * 4;
  }
};

}  // namespace jaxsoft::cuda::decode
