// How the keys of a sequence are cut into chunks, and where in the workspace the chunks' states are.
//
// An item is some rows (packed queries) of one key head of one sequence, and a unit of work is one chunk of an item's
// keys. Which chunks there are follows from the shapes of a call, the number of multiprocessors, and from which keys
// count for the sequence itself: the other sequences do not change a row's bits. Nothing here needs CUDA, so the
// workspace and the plan of a call are known without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../anywhere.h"

namespace jaxsoft::cuda::decode {

constexpr int kFewRows = 16;       // the rows of the kernel for few of them, at most
constexpr int kPartRows = 64;      // of a warp group of the kernel for many
constexpr int kParts = 2;          // its warp groups that can have rows of their own
constexpr int kRun = 16;           // keys that lie in one page, whatever its size
constexpr int kChunkAlign = 64;    // keys: whole tiles of all kernels
constexpr int kLeastChunk = 128;   // keys: less is not worth a merge
constexpr int kUnits = 4;          // for each multiprocessor, wanted where there is enough to do
constexpr int kMostChunks = 256;   // of an item
constexpr int kShortKeys = 2048;   // of a block's units: up to here it does not pay to assign them as blocks finish
constexpr int kMostUnits = 32768;  // of 16 rows: beyond, chunks become longer, so that states take less memory

constexpr JAXSOFT_ANYWHERE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr JAXSOFT_ANYWHERE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
constexpr JAXSOFT_ANYWHERE int round_up_int(int a, int b) { return (a + b - 1) / b * b; }

// a / b, where the quotient is less than 2^20: a division of integers takes longer, and blocks begin with several.
JAXSOFT_ANYWHERE inline int short_quotient(int a, int b) {
#ifdef __CUDA_ARCH__
  int quotient = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int remainder = a - quotient * b;
  if (remainder < 0) quotient--;
  else if (remainder >= b) quotient++;
  return quotient;
#else
  return a / b;
#endif
}

// What a plan depends on.
struct Problem {
  int batch = 1, queries = 1, keys = 1, heads = 1, key_heads = 1;
  int left = -1, right = -1;  // limits by position; -1 for none
  bool ragged = false;        // whether sequences have lengths of their own
  // Whether keys have 8 bits: these are widened on the way to registers, from where products of warp groups do not take
  // keys.
  bool narrow = false;
  int rows() const { return queries * (heads / key_heads); }  // that attend to a key head of a sequence
  bool many() const { return rows() > kFewRows && !narrow; }
  int row_tile() const { return !many() ? kFewRows : rows() <= kPartRows ? kPartRows : kParts * kPartRows; }
  int item_rows() const { return many() ? row_tile() : std::min(kFewRows, rows()); }  // that a state has room for
};

struct Plan {
  int row_tile = 16;    // rows of an item, at most
  int heads_each = 1;   // query heads of a key head
  int row_groups = 1;   // items of a key head of a sequence
  int items = 1;
  int units = 1;        // of work, wanted where there is enough to do
  int wave = 1;         // chunks of an item with which the multiprocessors have about the same number of units
  int longest = 1;      // keys of a chunk
  int shortest = 1;     // the same, where there are more chunks than `wave`
  int most_chunks = 1;  // of an item

  // Keys of each chunk of an item for which `keys` count, or a few more.
  JAXSOFT_ANYWHERE int chunk(int keys) const {
    if (keys <= int64_t(wave) * longest) {
      const int length = short_quotient(keys + wave - 1, wave);
      return round_up_int(length < kLeastChunk ? kLeastChunk : length, kChunkAlign);
    }
    const int64_t all = int64_t(keys) * items + units - 1;  // of which a unit has `all / units`
    int length = longest;
    if (all < int64_t(longest + 1) * units)
      length = round_up_int(short_quotient(static_cast<int>(all), units), kLeastChunk);
    if (length < shortest) length = shortest;
    const int for_most = round_up_int((keys + kMostChunks - 1) / kMostChunks, kLeastChunk);
    return length < for_most ? for_most : length;
  }
};

// The keys that can count for the queries of a sequence: of chunks of whole tiles.
inline int64_t keys_in_reach(const Problem& problem) {
  if (problem.left < 0 || problem.right < 0) return problem.keys;
  return std::min<int64_t>(problem.keys, int64_t(problem.left) + problem.right + problem.queries + kChunkAlign);
}

// How keys are cut, by the multiprocessors of the GPU. The states of more rows are larger, and so chunks are longer.
// Where sequences have lengths, chunks are shorter, as one long sequence must not keep the others waiting.
inline Plan make_plan(const Problem& problem, int multiprocessors) {
  Plan plan;
  plan.heads_each = problem.heads / problem.key_heads;
  plan.row_tile = problem.row_tile();
  plan.row_groups = static_cast<int>(divide_up(problem.rows(), plan.row_tile));
  plan.items = problem.batch * problem.key_heads * plan.row_groups;
  plan.units = kUnits * multiprocessors;
  // With so many units, this percentage of the multiprocessors has one until the end.
  const int busy = plan.items < multiprocessors ? 94 : 85;
  auto idles = [&](int64_t units) {
    return units * 100 < busy * multiprocessors * divide_up(units, multiprocessors);
  };
  while (idles(int64_t(plan.wave) * plan.items)) plan.wave++;
  const bool many = problem.many(), ragged = problem.ragged && problem.batch > 1;
  const bool crowded = plan.items >= 2 * multiprocessors;  // then one long sequence is but a small part of the work
  plan.longest = many ? (ragged ? 16384 : 32768) : !ragged ? 8192 : crowded ? 4096 : 1024;
  const int64_t keys = keys_in_reach(problem);
  const int64_t for_memory =
      round_up(divide_up(keys * plan.items * (plan.row_tile / 16), kMostUnits), kLeastChunk);
  plan.shortest = static_cast<int>(std::clamp<int64_t>(for_memory, many ? 4096 : 512, 1 << 30));
  const int64_t in_wave = std::min<int64_t>(divide_up(keys, kLeastChunk), plan.wave);
  const bool exceeds = keys > int64_t(plan.wave) * plan.longest;
  int64_t beyond = 1;
  if (exceeds) {
    beyond = std::max(divide_up(plan.units, plan.items), divide_up(keys, plan.longest));
    beyond = std::min(std::min<int64_t>(beyond, kMostChunks), divide_up(keys, plan.shortest));
  }
  plan.most_chunks = static_cast<int>(std::max(in_wave, beyond));
  return plan;
}

// Calls use(n) with the size of the kernels that serve heads of `size`. See with_size.
template <class Use>
auto with_padded_size(int64_t size, Use use) {
  return with_size<64, 128, 256>(size, use);
}
inline int padded_size(int size) {
  return with_padded_size(size, [](int padded) { return padded; });
}

// The workspace: the counter of units, then maxima and sums of the chunks' states, then their outputs.
struct Workspace {
  static constexpr int64_t sums = 256;
  int64_t outputs, bytes;  // where the outputs begin, and how long all is
  Workspace(const Plan& plan, int rows, int padded) {
    const int64_t states = plan.most_chunks > 1 ? int64_t(plan.items) * plan.most_chunks : 0;
    outputs = sums + round_up(states * rows * 8, 256);
    bytes = outputs + states * rows * padded * 4;
  }
};

// The plan for a workspace of `bytes` bytes, at least `Workspace::sums`. It has fewer and longer chunks than the best
// one where the call was lowered for another GPU, whose plan has fewer.
inline Plan plan_within(int64_t bytes, const Problem& problem, int padded, int multiprocessors) {
  Plan plan = make_plan(problem, multiprocessors);
  const int rows = problem.item_rows();
  if (Workspace(plan, rows, padded).bytes <= bytes) return plan;
  const int64_t of_chunk = int64_t(plan.items) * rows * (8 + 4 * padded), room = bytes - Workspace::sums - 256;
  const int64_t chunks = std::max<int64_t>(room / of_chunk, 1), keys = keys_in_reach(problem);
  plan.wave = 0;  // so that all chunks have `shortest` keys at least
  plan.shortest = static_cast<int>(round_up(divide_up(keys, chunks), kLeastChunk));
  plan.most_chunks = static_cast<int>(divide_up(keys, plan.shortest));
  return plan;
}

}  // namespace jaxsoft::cuda::decode
