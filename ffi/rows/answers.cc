// What both libraries answer about row operations: limits, the bytes of a workspace, and the plan of a call on a GPU.
// Python asks by `jaxsoft._core.library`. A text stays where it is until the thread asks again.
#include <cstdint>
#include <string>
#include <string_view>

#include "../cuda/rows/description.h"
#include "limits.h"
#include "specification.h"
#include "workspace.h"

#define JAXSOFT_ANSWER extern "C" __attribute__((visibility("default")))

// -1 for a name that is none.
JAXSOFT_ANSWER int64_t jaxsoft_limit(const char* name) {
  const std::string_view asked = name;
  if (asked == "most_k") return jaxsoft::kMostK;
  if (asked == "longest_sampled") return jaxsoft::kLongestSampled;
  return asked == "most_groups" ? jaxsoft::kGroups : -1;
}

// 0 for an operation that takes no workspace. n is -1 where the shape is not known, or where the reduced axis is not the
// last one.
JAXSOFT_ANSWER int64_t jaxsoft_row_workspace(const char* operation, int64_t rows, int64_t n, int64_t element_bytes,
                                             int64_t k) {
  for (const jaxsoft::Operation& each : jaxsoft::operations::kAll)
    if (std::string_view(each.text) == operation && each.features.has(jaxsoft::Feature::workspace))
      return jaxsoft::row_workspace(rows, n, element_bytes, k);
  return 0;
}

// For example "ring: rows in the shared memory of 2 blocks each". See RowCall for the arguments.
JAXSOFT_ANSWER const char* jaxsoft_row_plan(const char* operation, int64_t rows, int64_t n, int64_t inner,
                                            int64_t element_bytes, int64_t result_bytes, const char* extras,
                                            int64_t capability, int64_t multiprocessors, int64_t workspace_bytes) {
  static thread_local std::string text;
  text = jaxsoft::cuda::describe_plan({operation, rows, n, inner, element_bytes, result_bytes, extras,
                                       static_cast<int>(capability), static_cast<int>(multiprocessors),
                                       workspace_bytes});
  return text.c_str();
}
