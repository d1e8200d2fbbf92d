// From registers to device memory: the results of a warp group's queries.
#pragma once

#include "scores.cuh"

namespace jaxsoft::cuda {

// Writes a thread's part of a row (two columns of every 8) with 16-bit elements, of which `word(c)` is a pair.
template <class T, int size, class Word>
__device__ void write_row(T* row, bool there, int columns, Word word) {
#pragma unroll
  for (int begin = 0; begin < size; begin += 32) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = word(begin / 8 + i);
    turn_in_four(words);
    const int column = begin + threadIdx.x % 4 * 8;
    if (there && column < columns)
      *reinterpret_cast<uint4*>(row + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// What the two rows of a thread end with, but for the output, and where they are to be written.
struct RowsResult {
  float inverse[2], lse[2];  // of the sums of weights; and natural
  int query;                 // the first of the two
  int64_t place;             // of element (batch, its first query, head)
  int64_t lse_place;
  RowsResult() = default;
  template <class Scores>
  __device__ RowsResult(const ForwardArguments& args, const ForwardItem& item, int query, const Scores& scores)
      : query(query) {
    const AttentionCall& call = args.call;
    place = ((int64_t(item.batch) * call.queries + query) * call.heads + item.head) * call.value_size;
    lse_place = (int64_t(item.batch) * call.heads + item.head) * call.queries + query;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const auto result = scores.result(r);
      inverse[r] = result.inverse, lse[r] = result.lse;
    }
  }
};

// Writes one of the two rows of a thread.
template <int r, class T, class Plan>
__device__ void write_row_result(const ForwardArguments& args, const RowsResult& rows,
                                 const float (&output)[Plan::size / 2]) {
  const AttentionCall& call = args.call;
  const AttentionResults& results = args.results;
  const bool there = rows.query + 8 * r < call.queries;
  const int64_t place = rows.place + 8 * r * int64_t(call.heads) * call.value_size;
  const float inverse = rows.inverse[r];
  if (there && threadIdx.x % 4 == 0) results.lse[rows.lse_place + 8 * r] = rows.lse[r];
  // A query without keys has 0, whatever the values are.
  auto value = [&](int i) { return inverse == 0 ? 0.f : output[i] * inverse; };
  if (results.wide) {
    float* row = static_cast<float*>(results.output) + place;
#pragma unroll
    for (int i = 2 * r; i < Plan::size / 2; i += 4) {
      const int column = i / 4 * 8 + column_of_thread();
      if (there && column < call.value_size) *reinterpret_cast<float2*>(row + column) = {value(i), value(i + 1)};
    }
    return;
  }
  write_row<T, Plan::size>(static_cast<T*>(results.output) + place, there, call.value_size, [&](int block) {
    const int i = 4 * block + 2 * r;
    return bits<uint32_t>(narrow_pair(value(i), value(i + 1), T()));
  });
  if (!results.output_rest) return;
  write_row<T, Plan::size>(static_cast<T*>(results.output_rest) + place, there, call.value_size, [&](int block) {
    // Beside an output that overflowed, or is not a number, there is none.
    auto rest = [&](int i) {
      const float lost = value(i) - widen(narrow<T>(value(i)));
      return isfinite(lost) ? lost : 0.f;
    };
    const int i = 4 * block + 2 * r;
    return bits<uint32_t>(narrow_pair(rest(i), rest(i + 1), T()));
  });
}
template <class T, class Plan>
__device__ void write_results(const ForwardArguments& args, const RowsResult& rows,
                              const float (&output)[Plan::size / 2]) {
  write_row_result<0, T, Plan>(args, rows, output);
  write_row_result<1, T, Plan>(args, rows, output);
}

}  // namespace jaxsoft::cuda
