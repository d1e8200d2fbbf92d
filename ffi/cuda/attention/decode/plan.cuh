// How the keys of a sequence are cut into chunks, and where in the workspace the chunks' states are.
//
// An item is some rows (packed queries) of one key head of one sequence, and a unit of work is one chunk of an item's
// keys. Which chunks there are follows from the shapes of a call, and from which keys count for the sequence itself:
// neither the device nor the other sequences change a row's bits. So the number of multiprocessors here is a constant.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../attention.cuh"

namespace jaxsoft::cuda::decode {

constexpr int kProcessors = 132;    // of an H100 and an H200
constexpr int kRun = 16;            // keys that lie in one page, whatever its size
constexpr int kChunkAlign = 64;     // keys: whole tiles of all kernels
constexpr int kLeastChunk = 128;    // keys: less is not worth a merge
constexpr int kUnits = 2112;        // wanted where there is enough to do: 16 for each multiprocessor
constexpr int kShortChunk = 512;    // keys, for up to 16 rows: the states are then at most 3 % of keys and values
constexpr int kLongChunk = 1024;    // keys: more would leave multiprocessors idle at the end
constexpr int kMostChunks = 256;    // of an item, before the last are cut
constexpr int kCuts = 4;            // of these
constexpr int kMostUnits = 32768;   // beyond which chunks become longer, so that their states take less memory
constexpr int kGroup = 16;          // chunks whose states are merged at once

constexpr __host__ __device__ int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
constexpr __host__ __device__ int round_up_int(int a, int b) { return (a + b - 1) / b * b; }

// The chunks of an item: `longer` of `length` keys, and then all others of `rest` keys. The last ones are shorter where
// each multiprocessor has several, so that all end at about the same time.
struct Chunks {
  int length = 1, longer = 0, rest = 1;
  __host__ __device__ int begin(int chunk) const {
    return chunk < longer ? chunk * length : longer * length + (chunk - longer) * rest;
  }
  __host__ __device__ int count(int keys) const {
    const int left = keys - longer * length;
    return longer + (left > 0 ? (left + rest - 1) / rest : 0);
  }
};

struct Plan {
  int row_tile = 16;   // rows of an item, at most
  int row_groups = 1;  // items of a key head of a sequence
  int items = 1;
  int wave = 1;         // chunks of an item if each multiprocessor has one unit
  int least_chunk = 1;  // keys of a chunk, where there are more chunks than that
  int most_keys = 1;    // that may count for a sequence
  int most_chunks = 1;  // of an item
  int factor = 1;       // how much larger the states of chunks are than those of 16 rows

  // Keys of each chunk of an item for which `keys` count, or a few more.
  __host__ __device__ int chunk(int keys) const {
    const int longest = kLongChunk * factor;
    if (keys <= int64_t(wave) * longest) {
      const int length = (keys + wave - 1) / wave;
      return round_up_int(length < kLeastChunk ? kLeastChunk : length, kChunkAlign);
    }
    const int64_t wanted = (int64_t(keys) * items + kUnits - 1) / kUnits;
    int length = wanted > longest ? longest : round_up_int(static_cast<int>(wanted), kLeastChunk);
    if (length < least_chunk) length = least_chunk;
    const int for_most = round_up_int((keys + kMostChunks - 1) / kMostChunks, kLeastChunk);
    return length < for_most ? for_most : length;
  }
  __host__ __device__ Chunks chunks(int keys) const {
    const int length = chunk(keys), count = (keys + length - 1) / length;
    return {length, count > wave ? count - wave : count, count > wave ? round_up_int(length / kCuts, kChunkAlign) : length};
  }
};

inline Plan make_plan(const AttentionCall& call, int row_tile, int factor) {
  Plan plan;
  const int rows = call.queries * (call.heads / call.key_heads);
  plan.row_tile = row_tile;
  plan.factor = factor;
  plan.row_groups = static_cast<int>(divide_up(rows, row_tile));
  plan.items = call.batch * call.key_heads * plan.row_groups;
  plan.wave = plan.items < kProcessors ? kProcessors / plan.items : 1;
  int64_t keys = call.keys;
  if (call.left >= 0 && call.right >= 0) {
    const int64_t window = int64_t(call.left) + call.right + call.queries + kChunkAlign;
    if (window < keys) keys = window;
  }
  plan.most_keys = static_cast<int>(keys);
  const int64_t spread = round_up(divide_up(keys * plan.items, kMostUnits), kLeastChunk);
  plan.least_chunk = static_cast<int>(spread > kShortChunk * plan.factor ? spread : kShortChunk * plan.factor);
  const int64_t in_wave = divide_up(keys, kLeastChunk), beyond = divide_up(keys, plan.least_chunk);
  plan.most_chunks = static_cast<int>(in_wave < plan.wave ? in_wave : plan.wave);
  const int64_t more = beyond < kMostChunks ? beyond : kMostChunks;
  if (more > plan.wave) plan.most_chunks = static_cast<int>(more + (kCuts - 1) * plan.wave);
  return plan;
}

// The workspace: counters, which must be 0 at first, then the maxima and sums of the chunks' states, then their outputs.
struct Workspace {
  int64_t counters, sums, outputs, bytes;  // in bytes: how long the counters are, and where the others begin
  Workspace(const Plan& plan, int rows, int size) {
    const int64_t states = plan.most_chunks > 1 || plan.factor > 1 ? int64_t(plan.items) * plan.most_chunks : 0;
    const int64_t groups = divide_up(plan.most_chunks, kGroup) + 1;
    counters = round_up((states ? plan.items * groups : 0) * 4 + 16, 256);
    sums = counters;
    outputs = sums + round_up(states * rows * 8, 256);
    bytes = outputs + states * rows * size * 4;
  }
};

}  // namespace jaxsoft::cuda::decode
