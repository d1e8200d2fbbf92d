// top_k: a tile's state is taken and its candidates are found while it is in the first-level cache.
#pragma once

#include <cmath>
#include <cstring>
#include <numeric>

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

// Writes to[j] = from[at[j]], of words of `size` bytes.
template <class Word>
void gather(const char* from, const int32_t* at, int64_t n, char* to) {
  for (int64_t j = 0; j < n; j++) reinterpret_cast<Word*>(to)[j] = reinterpret_cast<const Word*>(from)[at[j]];
}
inline void gather(const char* from, const int32_t* at, int64_t n, char* to, int64_t size) {
  if (size == 2) gather<uint16_t>(from, at, n, to);
  else if (size == 4) gather<uint32_t>(from, at, n, to);
  else gather<uint64_t>(from, at, n, to);
}

// What a segment of a row is reduced to.
struct Found {
  State state{-infinity, 0};
  Candidates candidates;
};

inline Found find_in_segment(const Kernels& kernels, const Elements& a, int64_t first, int64_t begin, int64_t size,
                             int k) {
  Found found;
  found.candidates.limit = 2 * (k + kPlan.candidate_block);
  for (int64_t i = begin; i < begin + size; i += kPlan.top_k_tile) {
    const int64_t length = std::min(kPlan.top_k_tile, begin + size - i);
    State state = kernels.reduce({a.at(first + i)}, length);
    found.state = i == begin ? state : combine(found.state, state);
    for (int64_t at = 0;;) {
      at += kernels.find({a.at(first + i + at)}, length - at, i + at, &found.candidates);
      if (at == length) break;
      kernels.cut(&found.candidates, k);
    }
  }
  kernels.cut(&found.candidates, k);
  return found;
}

inline void add_candidates(const Candidates& part, int64_t key_size, Candidates* all) {
  std::copy_n(part.indices, part.count, all->indices + all->count);
  std::memcpy(reinterpret_cast<char*>(all->keys) + all->count * key_size, part.keys, part.count * key_size);
  all->count += part.count;
}

inline void run_top_k(ffi::ThreadPool& pool, const Kernels& kernels, const Call& call, const Arrays& arrays) {
  const int64_t n = call.shape.n, key_size = arrays.a.size == 8 ? 8 : 4;
  const int k = static_cast<int>(call.buffers.values.dims.back());
  const Elements values(call.buffers.values);
  auto* const indices = static_cast<int32_t*>(call.buffers.indices.data);
  reduce_then_write(
      pool, call.shape.rows, n, n,
      [&](int64_t row, int64_t begin, int64_t size) {
        return find_in_segment(kernels, arrays.a, row * n, begin, size, k);
      },
      [&](Found& total, const Found& part) {
        total.state = combine(total.state, part.state);
        add_candidates(part.candidates, key_size, &total.candidates);
        kernels.cut(&total.candidates, k);
      },
      [&](int64_t row, Found& found) {
        const RowNumbers numbers = arrays.finish(row, found.state);
        int32_t* const to = indices + row * k;
        const bool has_softmax = std::isfinite(found.state.m) && !std::isnan(found.state.s);
        if (has_softmax) kernels.order(&found.candidates, k, to);
        else std::iota(to, to + k, 0);
        gather(arrays.a.at(row * n), to, k, values.at(row * k), values.size);
        if (has_softmax) kernels.write({values.at(row * k)}, arrays.out.at(row * k), k, numbers);
        for (int j = 0; j < k && !has_softmax; j++) kernels.put(arrays.out.at(row * k + j), NAN);
        return 0;
      },
      [](int64_t, int64_t, int64_t, int) {});
}

}  // namespace jaxsoft::cpu
