// From registers to device memory: the results of a warp group's queries.
#pragma once

#include "../stage.cuh"
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

// What the two rows of a thread end with, but for the output.
struct RowsResult {
  float inverse[2], lse[2];  // of the sums of weights; and natural
  RowsResult() = default;
  template <class Scores>
  __device__ explicit RowsResult(const Scores& scores) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const auto result = scores.result(r);
      inverse[r] = result.inverse, lse[r] = result.lse;
    }
  }
};

// A number of an accumulator, divided by the sum of its row's weights. A query without keys has 0, whatever the values
// are.
__device__ inline float divided(float number, float inverse) { return inverse == 0 ? 0.f : number * inverse; }

// Where one of the rows of a thread is.
struct RowPlace {
  bool there;
  int row, number;  // in the output, by rows, and in the log-sum-exps: launch.cuh lets no call have 2^30
  __device__ RowPlace(const AttentionCall& call, const ForwardItem& item, int query)
      : there(query < item.query_end),
        row((item.batch * call.queries + query) * call.heads + item.head),
        number((item.batch * call.heads + item.head) * call.queries + query) {}
  __device__ int64_t output(const AttentionCall& call) const { return int64_t(row) * call.value_size; }
  __device__ void write_lse(const ForwardArguments& args, float lse) const {
    if (there && threadIdx.x % 4 == 0) args.results.lse[number] = lse;
  }
};

// Raises the largest score of a head, if it is wanted, to that of the queries of a warp, whose rows have ended. `query`
// is the thread's first.
//
// The bits of positive numbers, as integers, are in the order of these, and so is what becomes of negative ones when
// all but their sign is inverted. A NaN among the scores is in the log-sum-exp, and never in the maximum. It is to be
// above all numbers: its bits are the largest integer.
template <class Scores>
__device__ void note_maximum(const ForwardArguments& args, const ForwardItem& item, int query, const RowsResult& rows,
                             const Scores& scores) {
  if (!args.results.max_logits) return;
  const AttentionCall& call = args.call;
  constexpr int nan = 0x7fffffff;
  auto turn = [&](int x) { return x < 0 ? x ^ nan : x; };
  const int lowest = turn(bits<int>(-infinity<float>()));
  int top = lowest;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (query + 8 * r >= item.query_end) continue;
    const float largest = scores.largest(r) * (call.cap > 0 ? 1 : call.scale), lse = rows.lse[r];
    top = max(top, isnan(lse) ? nan : turn(bits<int>(lse == infinity<float>() ? lse : largest)));
  }
  top = __reduce_max_sync(0xffffffffu, top);
  if (threadIdx.x % 32 != 0 || top == lowest) return;
  // What is there is -inf at first. Negative numbers are the largest unsigned integers, and the lower, the larger.
  float* of_head = args.results.max_logits + int64_t(item.batch) * call.heads + item.head;
  if (top >= 0) atomicMax(reinterpret_cast<int*>(of_head), top);
  else atomicMin(reinterpret_cast<unsigned*>(of_head), static_cast<unsigned>(turn(top)));
}

// Beside an output that overflowed, or is not a number, there is none.
template <class T>
__device__ float lost_by_rounding(float value) {
  const float lost = value - widen(narrow<T>(value));
  return isfinite(lost) ? lost : 0.f;
}

// Writes the output of one of the two rows of a thread, from its place on. `value(i)` is what becomes of number i of an
// accumulator.
template <int r, class T, class Plan, class Value>
__device__ void write_output(const ForwardArguments& args, int64_t place, bool there, Value value) {
  const AttentionCall& call = args.call;
  const AttentionResults& results = args.results;
  if (results.wide) {
    float* row = static_cast<float*>(results.output) + place;
#pragma unroll
    for (int i = 2 * r; i < Plan::value_size / 2; i += 4) {
      const int column = i / 4 * 8 + column_of_thread();
      if (there && column < call.value_size) *reinterpret_cast<float2*>(row + column) = {value(i), value(i + 1)};
    }
    return;
  }
  write_row<T, Plan::value_size>(static_cast<T*>(results.output) + place, there, call.value_size, [&](int block) {
    const int i = 4 * block + 2 * r;
    return bits<uint32_t>(narrow_pair(value(i), value(i + 1), T()));
  });
  if (!results.output_residual) return;
  T* const lost = static_cast<T*>(results.output_residual) + place;
  write_row<T, Plan::value_size>(lost, there, call.value_size, [&](int block) {
    auto residual = [&](int i) { return lost_by_rounding<T>(value(i)); };
    const int i = 4 * block + 2 * r;
    return bits<uint32_t>(narrow_pair(residual(i), residual(i + 1), T()));
  });
}

// Writes the output of one of the two rows of a thread. Log-sum-exps are written apart.
template <int r, class T, class Plan>
__device__ void write_row_result(const ForwardArguments& args, const RowPlace& place, float inverse,
                                 const float (&output)[Plan::value_size / 2]) {
  write_output<r, T, Plan>(args, place.output(args.call), place.there,
                           [&](int i) { return divided(output[i], inverse); });
}

// Stores the first rows of a warp group that are staged in boxes, where the rows after them are not the group's.
template <class T, class Plan>
__device__ void store_first_rows(const ForwardArguments& args, const ForwardItem& item, int query, T* output,
                                 const unsigned char (&boxes)[Plan::value_boxes][kBoxBytes]) {
  const int columns = args.call.value_size, units = columns / 8;  // of 16 bytes
  for (int i = threadIdx.x % kWarpGroup; i < (item.query_end - query) * units; i += kWarpGroup) {
    const int row = i / units, column = i % units * 8;
    *reinterpret_cast<uint4*>(output + RowPlace(args.call, item, query + row).output(args.call) + column) =
        *reinterpret_cast<const uint4*>(boxes[column / 64] + place_in_box(row, column % 64 * 2));
  }
}

// The same results by copies from shared memory, which go on while the warp group does.
template <class T, class Plan, ScoreKind kind>
__device__ void store_results(const ForwardArguments& args, ForwardMemory<Plan>& memory, const ForwardItem& item,
                              int group, const RowsResult& rows, const float (&output)[Plan::value_size / 2]) {
  const bool copies = threadIdx.x % kWarpGroup == 0;
  const NamedBarrier all{1 + Plan::groups + group, kWarpGroup};
  auto& stages = memory.results.rows[group];
  auto value = [&](int i) { return divided(output[i], rows.inverse[i / 2 % 2]); };
  if (copies) wait_for_reads_of_stores();
  all.wait();
  static_assert(sizeof stages[0][0] == kBoxBytes);
  stage_rows<T, Plan::value_size>(stages[0], value);
  const bool residual = args.results.output_residual;
  if (residual) stage_rows<T, Plan::value_size>(stages[1], [&](int i) { return lost_by_rounding<T>(value(i)); });
  const int query = item.query + group * Plan::group_queries;
  show_to_copies();
  all.wait();
  // Copies store nothing past the end of the output, but before it 64 rows.
  if (may_have_segments<kind> && item.query_end < min(query + 64, args.call.queries)) {
    const AttentionResults& to = args.results;
    store_first_rows<T, Plan>(args, item, query, static_cast<T*>(to.output), stages[0]);
    if (residual) store_first_rows<T, Plan>(args, item, query, static_cast<T*>(to.output_residual), stages[1]);
    return;
  }
  if (!copies) return;
  for (int box = 0; box < Plan::value_boxes; box++) {
    const BoxPlace place{box * 64, item.head, query, item.batch};
    store_box(args.output, place, stages[0][box]);
    if (residual) store_box(args.output_residual, place, stages[1][box]);
  }
  commit_stores();
}

// The same where they take the place of queries, one after the other: when it returns, they have been read. A warp
// multiplies its own rows of the queries alone, so it can put others there when it is done.
template <class T, class Plan, ScoreKind kind>
__device__ void store_over_queries(const ForwardArguments& args, ForwardMemory<Plan>& memory, const ForwardItem& item,
                                   int group, const RowsResult& rows, const float (&output)[Plan::value_size / 2]) {
  static_assert(!may_have_segments<kind>, "the rows after an item's would have to be left as they are");
  const bool copies = threadIdx.x % kWarpGroup == 0;
  const NamedBarrier all{1 + Plan::groups + group, kWarpGroup};
  auto& boxes = reinterpret_cast<typename ForwardMemory<Plan>::Rows&>(memory.queries[group]);
  static_assert(sizeof boxes[0] == kBoxBytes);
  const int query = item.query + group * Plan::group_queries;
  auto store = [&](const CUtensorMap& map) {
    show_to_copies();
    all.wait();
    if (!copies) return;
    for (int box = 0; box < Plan::value_boxes; box++)
      store_box(map, {box * 64, item.head, query, item.batch}, boxes[box]);
    commit_stores();
    wait_for_reads_of_stores();
  };
  auto value = [&](int i) { return divided(output[i], rows.inverse[i / 2 % 2]); };
  stage_rows<T, Plan::value_size>(boxes, value);
  store(args.output);
  if (!args.results.output_residual) return;
  all.wait();
  stage_rows<T, Plan::value_size>(boxes, [&](int i) { return lost_by_rounding<T>(value(i)); });
  store(args.output_residual);
}

template <class T, class Plan, ScoreKind kind>
__device__ void write_results(const ForwardArguments& args, ForwardMemory<Plan>& memory, const ForwardItem& item,
                              int group, const RowsResult& rows, const float (&output)[Plan::value_size / 2]) {
  if constexpr (Plan::over_queries) {
    if (!args.results.wide) return store_over_queries<T, Plan, kind>(args, memory, item, group, rows, output);
  } else if constexpr (ForwardMemory<Plan>::staged) {
    if (!args.results.wide) return store_results<T, Plan, kind>(args, memory, item, group, rows, output);
  }
  const int query = item.query + group * Plan::group_queries + row_of_thread();
  write_row_result<0, T, Plan>(args, {args.call, item, query}, rows.inverse[0], output);
  __syncwarp();  // one after the other, as there are no registers for both
  write_row_result<1, T, Plan>(args, {args.call, item, query + 8}, rows.inverse[1], output);
}

__device__ inline void write_lses(const ForwardArguments& args, const ForwardItem& item, int query,
                                  const RowsResult& rows) {
#pragma unroll
  for (int r = 0; r < 2; r++) RowPlace(args.call, item, query + 8 * r).write_lse(args, rows.lse[r]);
}

// The shares of these keys and of those before in the weights of a row, and the log-sum-exp of all of them.
struct Shares {
  float own = 0, before = 0, lse = -infinity<float>();
  __device__ Shares(float own_lse, float lse_before) {
    // A NaN is not the maximum, but it is in the exponentials.
    const float from = reference(fmaxf(own_lse, lse_before));
    const float of_own = expf(own_lse - from), of_before = expf(lse_before - from), sum = of_own + of_before;
    if (sum == 0) return;
    own = of_own / sum, before = of_before / sum, lse = from + logf(sum);
  }
};

// Brings to the cache what other keys gave for the rows of a warp. It is read when these keys have all been seen.
__device__ inline void prefetch_before(const ForwardArguments& args, const ForwardItem& item, int first_query) {
  const AttentionCall& call = args.call;
  constexpr int line = 128 / sizeof(float);
  const int lines = (call.value_size + line - 1) / line, first = first_query + threadIdx.x % kWarpGroup / 32 * 16;
  for (int i = threadIdx.x % 32; i < 16 * lines; i += 32) {
    const int query = first + i / lines;
    if (query >= call.queries) continue;
    const float* from = args.before.output +
                        ((int64_t(item.batch) * call.queries + query) * call.heads + item.head) * call.value_size +
                        i % lines * line;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
  }
  __syncwarp();
}

// The row number r of a thread, of these keys and those before, whose output a thread reads where it writes. Where that
// is the same place, a row to which nothing is added stays as it is.
template <int r, class T, class Plan>
struct ContinuedRow {
  int64_t place;
  float own, before;  // factors of what the accumulator has, and of the output before
  bool written;
  float2 values[Plan::value_size / 8];  // two columns of every 8

  // Issues the reads of the output before. All threads of the row have read `lse_before`.
  __device__ ContinuedRow(const ForwardArguments& args, const RowPlace& row, const RowsResult& rows, float lse_before) {
    const AttentionCall& call = args.call;
    const Shares shares(rows.lse[r], lse_before);
    const bool there = row.there;
    row.write_lse(args, shares.lse);
    place = row.output(call);
    own = shares.own * rows.inverse[r], before = shares.before;
    written = there && !(own == 0 && before == 1 && args.results.output == args.before.output);
#pragma unroll
    for (int i = 0; i < Plan::value_size / 8; i++) {
      const int column = i * 8 + column_of_thread();
      const bool read = written && before != 0 && column < call.value_size;
      values[i] = read ? *reinterpret_cast<const float2*>(args.before.output + place + column) : float2{};
    }
  }

  __device__ void write(const ForwardArguments& args, const float (&output)[Plan::value_size / 2]) {
    // What has no share has no part in it, whatever the values are.
    auto combine = [&](float& value, float accumulated) {
      value = fmaf(value, before, own == 0 ? 0.f : accumulated * own);
    };
#pragma unroll
    for (int i = 0; i < Plan::value_size / 8; i++) {
      combine(values[i].x, output[4 * i + 2 * r]);
      combine(values[i].y, output[4 * i + 2 * r + 1]);
    }
    write_output<r, T, Plan>(args, place, written, [&](int i) { return i % 2 ? values[i / 4].y : values[i / 4].x; });
  }
};

template <class T, class Plan>
__device__ void write_continued_results(const ForwardArguments& args, const ForwardItem& item, int query,
                                        const RowsResult& rows, const float (&output)[Plan::value_size / 2]) {
  const RowPlace places[2] = {{args.call, item, query}, {args.call, item, query + 8}};
  float lse_before[2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    lse_before[r] = places[r].there ? args.before.lse[places[r].number] : -infinity<float>();
  __syncwarp();  // results may be written to where threads of the same row read
  ContinuedRow<0, T, Plan> first(args, places[0], rows, lse_before[0]);
  if constexpr (Plan::value_size > 128) first.write(args, output);  // there are no registers for both rows
  ContinuedRow<1, T, Plan> second(args, places[1], rows, lse_before[1]);
  if constexpr (Plan::value_size <= 128) first.write(args, output);
  second.write(args, output);
}

}  // namespace jaxsoft::cuda
