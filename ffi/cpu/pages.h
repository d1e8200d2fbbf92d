// Large results on large pages.
//
// XLA takes every large result fresh from the operating system, which maps it page by page as it is first written:
// with pages of 4 KB that takes longer than the softmax itself (25 ms for 128 MB, measured on 2 cores of an AMD
// EPYC). Linux maps 2 MB at a time where it is asked to. This is only advice: where it is refused, nothing changes.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxsoft::cpu {

inline void advise_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jaxsoft::cpu
