// Short rows are transposed to columns, some at a time in the first-level cache. A row by itself would leave lanes of
// its vectors idle, and would cost as much as several rows do together.
#pragma once

#include <cmath>
#include <cstring>

#include "arrays.h"
#include "schedule.h"

namespace jaxsoft::cpu {

// Writes to[j][i] = from[i][j], of words of `size` bytes.
template <class Word>
void transpose(const char* from, char* to, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j++)
    for (int64_t i = 0; i < rows; i++)
      reinterpret_cast<Word*>(to)[j * rows + i] = reinterpret_cast<const Word*>(from)[i * columns + j];
}
inline void transpose(const char* from, char* to, int64_t rows, int64_t columns, int64_t size) {
  if (size == 2) transpose<uint16_t>(from, to, rows, columns);
  else if (size == 4) transpose<uint32_t>(from, to, rows, columns);
  else transpose<uint64_t>(from, to, rows, columns);
}

// Moves the scores of the labels from columns to `label_scores`. Leaves -inf in their place, and in that of all scores
// of rows that are not read.
template <class Word, class Score>
void take_label_scores(const Kernels& k, char* columns, int64_t n, int64_t rows, const int32_t* labels,
                       void* label_scores) {
  auto* const scores = reinterpret_cast<Word*>(columns);
  Word none;
  k.put(&none, -infinity);
  for (int64_t j = 0; j < rows; j++) {
    const int64_t label = labels[j];
    Score score = label == kNoRow ? 0 : static_cast<Score>(std::nan(""));
    if (label >= 0 && label < n) {
      Word& at = scores[label * rows + j];
      if constexpr (sizeof(Word) == sizeof(Score)) std::memcpy(&score, &at, sizeof score);
      else score = static_cast<Score>(k.get(&at));
      at = none;
    }
    for (int64_t c = 0; label == kNoRow && c < n; c++) scores[c * rows + j] = none;
    static_cast<Score*>(label_scores)[j] = score;
  }
}
inline void take_label_scores(const Kernels& k, char* columns, int64_t size, int64_t n, int64_t rows,
                              const int32_t* labels, void* label_scores) {
  if (size == 2) take_label_scores<uint16_t, float>(k, columns, n, rows, labels, label_scores);
  else if (size == 4) take_label_scores<uint32_t, float>(k, columns, n, rows, labels, label_scores);
  else take_label_scores<uint64_t, double>(k, columns, n, rows, labels, label_scores);
}

// Rows with labels come here for their states alone.
inline void run_short_rows(ffi::ThreadPool& pool, const Kernels& k, const Shape& shape, const Arrays& arrays,
                           const Labels* labels = nullptr) {
  const int64_t n = shape.n, together = std::min(kPlan.columns, kPlan.short_elements / n / 16 * 16);
  each_row(pool, (shape.rows + together - 1) / together, n * together, [&](int64_t group) {
    alignas(64) char a[kPlan.short_elements * 8], b[kPlan.short_elements * 8], out[kPlan.short_elements * 8];
    const int64_t row = group * together, rows = std::min(together, shape.rows - row);
    const Block block{n, rows, rows, 0, rows};
    transpose(arrays.a.at(row * n), a, rows, n, arrays.a.size);
    if (arrays.b.data) transpose(arrays.b.at(row * n), b, rows, n, arrays.b.size);
    if (labels) take_label_scores(k, a, arrays.a.size, n, rows, labels->label + row, labels->score.at(row));
    const Segment at{a, b};
    ColumnStates states;
    ColumnNumbers numbers;
    k.reduce_columns(at, block, &states);
    k.finish_columns(states, block, arrays.m.at(row), arrays.s.at(row), arrays.cotangent.at(row), &numbers);
    if (!k.write) return;
    k.write_columns(at, out, block, numbers);
    transpose(out, arrays.out.at(row * n), n, rows, arrays.out.size);
  });
}

}  // namespace jaxsoft::cpu
