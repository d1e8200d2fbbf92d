// Numbers that Python, the checks of a call and the kernels agree on. Python asks for the most and the longest (see
// ../cuda/answers.cc); jaxsoft/_rows has the same kNoRow.
#pragma once

#include <stdint.h>

namespace jaxsoft {

// The most groups of leading dimensions that the extras of one call may tell apart (see Extras).
inline constexpr int kGroups = 4;

// The label of a row that is not read: all of it is masked.
inline constexpr int32_t kNoRow = INT32_MIN;

// The largest k of top_k.
inline constexpr int64_t kMostK = 256;

// The most tokens of a row that is sampled.
inline constexpr int64_t kLongestSampled = int64_t(1) << 22;

}  // namespace jaxsoft
