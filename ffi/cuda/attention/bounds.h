// Which calls of attention the kernels take, as numbers that checks.h and Python agree on.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace jaxsoft::attention {

// A sequence has fewer queries and keys than that, so no limit needs to be further away.
inline constexpr int64_t kFurthest = int64_t(1) << 30;
inline constexpr double kSmallestScale = 1e-30, kLargestScale = 1e30, kLargestCap = 1000;
inline constexpr int64_t kLargestSize = 256, kSizes = 8;          // head sizes are multiples of the latter
inline constexpr int64_t kSmallestPage = 16, kLargestPage = 256;  // keys of a page, a power of 2
inline constexpr uintptr_t kAlignment = 16;                       // of bulk copies, in bytes
// Fewer queries of all heads than that, for counters of 32 bits. Those of a head count as a tile at least.
inline constexpr int64_t kAllQueries = int64_t(1) << 30, kTile = 128;

// As text, a line each: name=number.
inline std::string bounds_as_text() {
  const struct {
    const char* name;
    double number;
  } bounds[] = {
      {"smallest_scale", kSmallestScale}, {"largest_scale", kLargestScale}, {"largest_cap", kLargestCap},
      {"size_multiple", kSizes},          {"largest_size", kLargestSize},   {"narrow_size_multiple", kAlignment},
      {"smallest_page", kSmallestPage},   {"largest_page", kLargestPage},   {"keys", kFurthest},
      {"all_queries", kAllQueries},       {"tile", kTile},
  };
  std::ostringstream text;
  text.precision(17);
  for (const auto& [name, number] : bounds) text << name << '=' << number << '\n';
  return text.str();
}

}  // namespace jaxsoft::attention
