// Which keys count for a query, as far as limits by position and lengths say: what a call has of them, and what the
// kernels of attention ask. Another limit is an operand in targets.h, also of kLimits there, and here its place, what
// it excludes, and whether it does.
#pragma once

#include <cstdint>

#include "targets.h"

namespace jaxsoft::cuda {

// No limit before or after a query's position.
constexpr int kNoLimit = -1;

// Numbers for each element of the batch, or one for all: element b is data[b * step], and step is 0 or 1.
struct OfBatch {
  const int32_t* data = nullptr;  // null if there are none
  int step = 0;
};

// The limits of a call.
struct LimitOperands {
  int left = kNoLimit, right = kNoLimit;  // right is 0 under a causal rule
  OfBatch query_begins;                   // queries before that are masked
  OfBatch query_lengths, key_lengths;     // queries and keys from there on are masked
  OfBatch offset;                         // the position of the first query: alone, it excludes nothing

  // Whether a query that counts may have masked keys before others.
  __device__ bool of_first_keys() const { return left != kNoLimit; }
  // Whether it may have masked keys.
  bool of_keys() const { return left != kNoLimit || right != kNoLimit || key_lengths.data; }
  // Whether any score may be masked by them.
  bool any() const { return of_keys() || query_begins.data || query_lengths.data; }
};
// Their operands.
constexpr struct {
  attention::Name name;
  OfBatch LimitOperands::*place;
} kLimitOperands[] = {
    {attention::Name::query_begins, &LimitOperands::query_begins},
    {attention::Name::query_lengths, &LimitOperands::query_lengths},
    {attention::Name::key_lengths, &LimitOperands::key_lengths},
    {attention::Name::offset, &LimitOperands::offset},
};

// More than the difference of any key and query: checks.h lets no call have 2^30 of either.
constexpr int kFar = (1 << 30) - 1;

// Keys or queries [begin, end), perhaps none.
struct ElementRange {
  int begin, end;
  __device__ bool empty() const { return end <= begin; }
  __device__ bool has(int element) const { return begin <= element && element < end; }
};

// The number of an element of the batch, between 0 and `most`. Without numbers it is `otherwise`.
__device__ inline int count_of(const OfBatch& counts, int batch, int most, int otherwise) {
  return counts.data ? min(max(__ldg(counts.data + int64_t(batch) * counts.step), 0), most) : otherwise;
}

// The limits of an element of the batch: queries in [begin, queries) and keys before `keys` count, where
// least <= key - query <= most.
struct AttentionLimits {
  int begin = 0, queries = 0, keys = 0;
  int least = -kFar, most = kFar;

  AttentionLimits() = default;
  __device__ AttentionLimits(int queries, int keys) : queries(queries), keys(keys) {}
  // `Call` is AttentionCall, or another with its members `limits`, `queries` and `keys`.
  template <class Call>
  __device__ AttentionLimits(const Call& call, int batch)
      : begin(count_of(call.limits.query_begins, batch, call.queries, 0)),
        queries(count_of(call.limits.query_lengths, batch, call.queries, call.queries)),
        keys(count_of(call.limits.key_lengths, batch, call.keys, call.keys)) {
    const OfBatch& given = call.limits.offset;
    const int64_t offset = given.data ? __ldg(given.data + int64_t(batch) * given.step) : 0;
    if (call.limits.left != kNoLimit) least = within(offset - call.limits.left);
    if (call.limits.right != kNoLimit) most = within(offset + call.limits.right);
  }

  // Those of another lane, in calls of decoding: these have no query_begins.
  __device__ AttentionLimits of_lane(int lane) const {
    AttentionLimits other;
    other.queries = __shfl_sync(~0u, queries, lane);
    other.keys = __shfl_sync(~0u, keys, lane);
    other.least = __shfl_sync(~0u, least, lane);
    other.most = __shfl_sync(~0u, most, lane);
    return other;
  }

  // The valid keys for any of the queries [first, last]. Both ends rise with the queries.
  __device__ ElementRange of_queries(int first, int last) const {
    first = max(first, begin), last = min(last, queries - 1);
    if (last < first) return {0, 0};
    const int first_key = min(max(first + least, 0), keys);
    return {first_key, min(max(last + most + 1, first_key), keys)};
  }
  __device__ ElementRange of_query(int query) const { return of_queries(query, query); }

  // The queries for which any of the keys [first_key, end) counts, which are before `keys`: from the first to one past
  // the last, if any.
  __device__ int first_query(int first_key) const { return max(first_key - most, begin); }
  __device__ int last_query(int end) const { return min(end - least, queries); }
  // The queries for which all of the keys [first_key, end) count, as far as these queries are there.
  __device__ ElementRange queries_of_all(int first_key, int end) const {
    if (end > keys) return {0, 0};
    return {max(end - 1 - most, 0), max(first_key - least + 1, 0)};
  }

 private:
  // Offsets may be any numbers. Differences that no query and key have are as good as others.
  static __device__ int within(int64_t difference) {
    return static_cast<int>(min(max(difference, int64_t(-kFar)), int64_t(kFar)));
  }
};

// The limits of scores near that of a key and a query.
class NearLimits {
 public:
  __device__ NearLimits(const AttentionLimits& limits, int key, int query)
      : difference_(key - query), keys_(limits.keys - key), least_(limits.least), most_(limits.most) {}
  // Whether the key that is so far behind counts for the query that is so far behind, if it is there.
  __device__ bool allow(int key, int query) const {
    const int difference = difference_ + key - query;
    return !(difference < least_ || difference > most_ || key >= keys_);
  }

 private:
  int difference_, keys_, least_, most_;
};

}  // namespace jaxsoft::cuda
