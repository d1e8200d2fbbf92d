// What headers need that a C++ compiler without CUDA reads as well: plans, of which Python asks.
#pragma once

#include <cstdint>
#include <type_traits>

// Marks functions that host and device share.
#ifdef __CUDACC__
#define JAXSOFT_ANYWHERE __host__ __device__
#else
#define JAXSOFT_ANYWHERE
#endif

namespace jaxsoft::cuda {

constexpr int kWarpGroup = 128;  // threads

// Calls use(n) with the first of some ascending sizes, as a constant, in which `size` fits; or with the last one.
template <int first, int... others, class Use>
auto with_size(int64_t size, Use use) {
  if constexpr (sizeof...(others) > 0)
    if (size > first) return with_size<others...>(size, use);
  return use(std::integral_constant<int, first>());
}

}  // namespace jaxsoft::cuda
