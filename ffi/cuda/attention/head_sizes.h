// Sizes of heads that kernels are compiled for, and which of them serve a call.
#pragma once

#include <cstdint>

namespace jaxsoft::cuda {

// Of keys, and of values.
template <int head_size, int size_of_values>
struct HeadSizes {
  static constexpr int size = head_size, value_size = size_of_values;
};

// Calls use(sizes) with the first of some HeadSizes, from small to large, which hold such heads; or with the last ones.
// Columns past the end of a head are zeros.
template <class First, class... Others, class Use>
auto with_sizes(int64_t size, int64_t value_size, Use use) {
  if constexpr (sizeof...(Others) > 0)
    if (size > First::size || value_size > First::value_size) return with_sizes<Others...>(size, value_size, use);
  return use(First());
}

}  // namespace jaxsoft::cuda
