// Which keys count for a query, as far as limits by position and lengths say. All kernels of attention ask this.
#pragma once

#include "attention.cuh"

namespace jaxsoft::cuda {

// More than the difference of any key and query: checks.h lets no call have 2^30 of either.
constexpr int kFar = (1 << 30) - 1;

// Keys [begin, end), perhaps none.
struct KeyRange {
  int begin, end;
  __device__ bool empty() const { return end <= begin; }
};

// The number of an element of the batch, between 0 and `most`. Without numbers it is `otherwise`.
__device__ inline int count_of(const OfBatch& counts, int batch, int most, int otherwise) {
  return counts.data ? min(max(__ldg(counts.data + int64_t(batch) * counts.step), 0), most) : otherwise;
}
__device__ inline int count_of(const OfBatch& counts, int batch, int most) {
  return count_of(counts, batch, most, most);
}

// The limits of an element of the batch: queries in [begin, queries) and keys before `keys` count, where
// least <= key - query <= most.
struct AttentionLimits {
  int begin = 0, queries = 0, keys = 0;
  int least = -kFar, most = kFar;

  AttentionLimits() = default;
  __device__ AttentionLimits(int queries, int keys) : queries(queries), keys(keys) {}
  // `Call` is AttentionCall, or another that has its members for lengths, limits and the offset.
  template <class Call>
  __device__ AttentionLimits(const Call& call, int batch)
      : begin(count_of(call.query_begins, batch, call.queries, 0)),
        queries(count_of(call.query_lengths, batch, call.queries)),
        keys(count_of(call.key_lengths, batch, call.keys)) {
    const int64_t offset = call.offset.data ? __ldg(call.offset.data + int64_t(batch) * call.offset.step) : 0;
    if (call.left != kNoLimit) least = within(offset - call.left);
    if (call.right != kNoLimit) most = within(offset + call.right);
  }

  // The valid keys for any of the queries [first, last]. Both ends rise with the queries.
  __device__ KeyRange of_queries(int first, int last) const {
    first = max(first, begin), last = min(last, queries - 1);
    if (last < first) return {0, 0};
    const int first_key = min(max(first + least, 0), keys);
    return {first_key, min(max(last + most + 1, first_key), keys)};
  }
  __device__ KeyRange of_query(int query) const { return of_queries(query, query); }

  // The queries for which any of the keys [first_key, end) counts, which are before `keys`: from the first to one past
  // the last, if any.
  __device__ int first_query(int first_key) const { return max(first_key - most, begin); }
  __device__ int last_query(int end) const { return min(end - least, queries); }

 private:
  // Offsets may be any numbers. Differences that no query and key have are as good as others.
  static __device__ int within(int64_t difference) {
    return static_cast<int>(min(max(difference, int64_t(-kFar)), int64_t(kFar)));
  }
};

}  // namespace jaxsoft::cuda
