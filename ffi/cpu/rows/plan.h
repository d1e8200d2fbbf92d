// The numbers that decide how the CPU kernels of row operations cut and share their work.
//
// They suit x86 processors with a first-level cache of 32 KB or more; no timings of other values are on record. The
// bits of a row's result may depend on these numbers, but never on the number of threads or on other rows.
#pragma once

#include <stdint.h>

namespace jaxsoft::cpu {

struct Plan {
  // Elements of a row that are reduced under one maximum: they are read twice, the second time from the first-level
  // cache, of which they take 16 KB in f64.
  int64_t tile = 2048;
  // Elements at which a long row is cut. Its segments are reduced apart, by several threads where there are few rows.
  int64_t segment = 1 << 16;
  // Threads share each long row where there are fewer rows than this for each thread; else each row has one thread.
  int64_t rows_a_thread = 4;
  // The fewest elements that are worth handing to another thread.
  int64_t task_elements = 1 << 15;
  // Tasks for each thread, where there is enough work. More tasks would balance the threads little better.
  int64_t tasks_a_thread = 8;

  // Columns, where the reduced dimension is not the last, that are reduced together: their states stay in the
  // first-level cache.
  int64_t columns = 256;
  // Fewer columns than this do not fill a vector. They are then reduced in parts side by side, as many columns as
  // `folded_columns` has room for.
  int64_t few_columns = 16;
  int64_t folded_columns = 64;
  // Rows up to this length are transposed and reduced as columns, this many elements at a time.
  int64_t short_row = 24;
  int64_t short_elements = 2048;

  // The elements of a row that top_k reduces and then searches, while they are in the first-level cache.
  int64_t top_k_tile = 4096;
  // Elements that top_k compares with the k-th largest so far at once, at most.
  int candidate_block = 128;
  // Candidates up to this number are sorted as fast as they are cut to fewer.
  int few_candidates = 48;

  // The gradients of rows with labels are written several rows together where a row is no longer than this many
  // vectors, and then as many rows as have this many elements.
  int64_t short_gradient_vectors = 3;
  int64_t short_gradient_elements = 1024;
};

inline constexpr Plan kPlan;

}  // namespace jaxsoft::cpu
