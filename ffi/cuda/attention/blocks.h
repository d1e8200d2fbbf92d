// How many blocks a sequence with segments has: known before its segments are.
#pragma once

#include <cstdint>

#include "../anywhere.h"

namespace jaxsoft::cuda {

// Blocks of `size` elements, of which the last one may have fewer.
JAXSOFT_ANYWHERE constexpr int64_t full_blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The most blocks of up to `size`, if each piece of a segment may have blocks of its own: a quarter more, which are
// enough for pieces of two blocks on average. More would make the workspace larger.
JAXSOFT_ANYWHERE constexpr int64_t most_blocks(int64_t count, int64_t size) {
  return full_blocks(count, size) + full_blocks(count, size) / 4;
}

// Numbers that say where the blocks of a sequence begin (BlockBegins).
JAXSOFT_ANYWHERE constexpr int64_t begin_numbers(int64_t most) { return most + 3; }

}  // namespace jaxsoft::cuda
