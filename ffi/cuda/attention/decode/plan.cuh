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
constexpr int kSmallestTile = 16;   // keys: what chunks begin and end with is a multiple of twice as many
constexpr int kChunkAlign = 32;     // keys
constexpr int kLeastChunk = 128;    // keys: less is not worth a merge
constexpr int kUnits = 2112;        // wanted where there is enough to do: 16 for each multiprocessor
constexpr int kShortChunk = 512;    // keys, for up to 16 rows: the states are then at most 3 % of keys and values
constexpr int kLongChunk = 1024;    // keys: more would leave multiprocessors idle at the end
constexpr int kMostChunks = 256;    // of an item
constexpr int kMostUnits = 32768;   // beyond which chunks become longer, so that their states take less memory
constexpr int kGroup = 16;          // chunks whose states are merged at once

constexpr __host__ __device__ int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

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
    const int64_t longest = int64_t(kLongChunk) * factor;
    int64_t length;
    if (keys <= wave * longest) {
      length = round_up(divide_up(keys, wave), kChunkAlign);
      if (length < kLeastChunk) length = kLeastChunk;
    } else {
      length = round_up(divide_up(int64_t(keys) * items, kUnits), kLeastChunk);
      if (length > longest) length = longest;
      if (length < least_chunk) length = least_chunk;
      if (length * kMostChunks < keys) length = round_up(divide_up(keys, kMostChunks), kLeastChunk);
    }
    return static_cast<int>(length);
  }
  __host__ __device__ int chunks(int keys) const {
    return keys > 0 ? static_cast<int>(divide_up(keys, chunk(keys))) : 1;
  }
};

inline Plan make_plan(const AttentionCall& call, int row_tile) {
  Plan plan;
  const int rows = call.queries * (call.heads / call.key_heads);
  plan.row_tile = row_tile;
  plan.factor = row_tile / 16;
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
  if (more > plan.most_chunks) plan.most_chunks = static_cast<int>(more);
  return plan;
}

// The workspace: counters, which must be 0 at first, then the maxima and sums of the chunks' states, then their outputs.
struct Workspace {
  int64_t counters, sums, outputs, bytes;  // in bytes: how long the counters are, and where the others begin
  Workspace(const Plan& plan, int rows, int size) {
    const int64_t states = plan.most_chunks > 1 ? int64_t(plan.items) * plan.most_chunks : 0;
    const int64_t groups = divide_up(plan.most_chunks, kGroup) + 1;
    counters = round_up((states ? plan.items * groups : 0) * 4 + 16, 256);
    sums = counters;
    outputs = sums + round_up(states * rows * 8, 256);
    bytes = outputs + states * rows * size * 4;
  }
};

}  // namespace jaxsoft::cuda::decode
