// The workspace of a row operation, in bytes. Callers allocate it, so they ask for it before a call.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jaxsoft {

// On a GPU it holds the states of the parts of a long row, or a counter from which blocks take their next work.
inline constexpr int64_t kWorkspace = 1 << 17;
// The bytes from which on rows may be too long for a cluster of blocks: then the workspace holds the states of the
// parts of all rows, for which 1/512 of the memory of the rows is enough.
inline constexpr int64_t kLongRow = 1 << 20, kLongRowShare = 512;
// For the k largest elements it holds those of each part as words of 8 bytes, and the part's state in 16. All rows
// together have up to so many parts.
inline constexpr int64_t kTopKParts = 1024, kTopKWord = 8, kTopKState = 16;

// Where the shape is not known, n is -1: then it is the smallest one, which suffices for rows of any shape. k is 0 but
// for the k largest elements. The same for rows along another axis than the last, which are not cut.
inline int64_t row_workspace(int64_t rows, int64_t n, int64_t element_bytes, int64_t k) {
  if (k) return kTopKParts * (kTopKWord * k + kTopKState);
  if (n * element_bytes < kLongRow) return kWorkspace;
  return std::max(kWorkspace, rows * n * element_bytes / kLongRowShare);
}

}  // namespace jaxsoft
