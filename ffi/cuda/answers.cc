// What the library for CPUs answers about the limits of row operations, on CPUs too, and about the CUDA kernels: which
// calls they take, the bytes of their workspaces, and their plans in words. Python asks by `jaxsoft._core.library`.
// Nothing here needs CUDA.
//
// A plan depends on the number of multiprocessors, and that of rows also on the compute capability, 90 for 9.0. A text
// stays where it is until the thread asks again.
#include <cstdint>
#include <string>
#include <string_view>

#include "../rows/limits.h"
#include "../rows/specification.h"
#include "../rows/workspace.h"
#include "attention/bounds.h"
#include "attention/plans.h"
#include "head/plan.h"
#include "rows/description.h"
#include "rows/sample/plan.h"
#include "rows/top_k/plan.h"

namespace {

const char* keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

// The limits of attention, a line each: name=number.
JAXSOFT_EXPORT const char* jaxsoft_attention_bounds() { return keep(jaxsoft::attention::bounds_as_text()); }

// Of `target`, an FFI target; `extras` are as in its call. -1 is no limit, and key_bytes those of an element of keys.
JAXSOFT_EXPORT int64_t jaxsoft_attention_workspace(const char* target, const char* extras, int64_t batch,
                                                   int64_t queries, int64_t keys, int64_t heads, int64_t key_heads,
                                                   int64_t size, int64_t value_size, int64_t left, int64_t right,
                                                   int64_t capped, int64_t key_bytes, int64_t multiprocessors) {
  return jaxsoft::attention::workspace_bytes(
      {target, extras, batch, queries, keys, heads, key_heads, size, value_size, left, right, capped != 0, key_bytes},
      static_cast<int>(multiprocessors));
}
JAXSOFT_EXPORT const char* jaxsoft_attention_plan(const char* target, const char* extras, int64_t batch,
                                                  int64_t queries, int64_t keys, int64_t heads, int64_t key_heads,
                                                  int64_t size, int64_t value_size, int64_t left, int64_t right,
                                                  int64_t capped, int64_t key_bytes, int64_t multiprocessors) {
  return keep(jaxsoft::attention::plan_as_text(
      {target, extras, batch, queries, keys, heads, key_heads, size, value_size, left, right, capped != 0, key_bytes},
      static_cast<int>(multiprocessors)));
}

// How many multiprocessors are at work where hidden is (rows, width); 0 where the kernel does not take such arrays.
JAXSOFT_EXPORT int64_t jaxsoft_weight_gradient_multiprocessors(int64_t rows, int64_t width, int64_t classes,
                                                               int64_t multiprocessors) {
  using Limits = jaxsoft::cuda::WeightLimits;
  if (!Limits::take_hidden(rows, width) || !Limits::take_classes(classes)) return 0;
  const int64_t of_group = jaxsoft::cuda::blocks_of_group(width);
  return multiprocessors / of_group * of_group;
}
JAXSOFT_EXPORT int64_t jaxsoft_weight_gradient_workspace(int64_t rows, int64_t classes, int64_t element_bytes) {
  return jaxsoft::cuda::weight_gradient_workspace(rows, classes, element_bytes);
}
JAXSOFT_EXPORT const char* jaxsoft_weight_gradient_plan(int64_t width, int64_t classes, int64_t multiprocessors) {
  return keep(jaxsoft::cuda::weight_gradient_plan(width, classes, multiprocessors));
}

// The kernel for the k largest of rows of n elements that begin at a multiple of 16 bytes.
JAXSOFT_EXPORT const char* jaxsoft_top_k_plan(int64_t rows, int64_t n, int64_t k, int64_t element_bytes,
                                              int64_t capability, int64_t multiprocessors, int64_t workspace_bytes) {
  const int element = static_cast<int>(element_bytes);
  const bool whole = n * element % 16 == 0;
  return keep(jaxsoft::cuda::top_k_plan(
      {rows, jaxsoft::cuda::packs_of_row(n, element, whole), static_cast<int>(k), element},
      static_cast<int>(capability / 10), static_cast<int>(multiprocessors), workspace_bytes));
}
// A limit of the exchange of a row's k largest elements between devices, by its name; -1 for a name that is none.
JAXSOFT_EXPORT int64_t jaxsoft_top_k_limit(const char* name) {
  if (std::string_view(name) == "short_part") return jaxsoft::cuda::kShortPart;
  return std::string_view(name) == "most_received" ? jaxsoft::cuda::kMostReceived : -1;
}

JAXSOFT_EXPORT const char* jaxsoft_sample_plan(int64_t rows, int64_t n, int64_t element_bytes, int64_t capability,
                                               int64_t multiprocessors) {
  return keep(jaxsoft::cuda::sample_plan(rows, (n * element_bytes + 15) / 16, static_cast<int>(capability / 10),
                                         static_cast<int>(multiprocessors)));
}

// A limit of row operations; -1 for a name that is none.
JAXSOFT_EXPORT int64_t jaxsoft_limit(const char* name) {
  const std::string_view asked = name;
  if (asked == "most_k") return jaxsoft::kMostK;
  if (asked == "longest_sampled") return jaxsoft::kLongestSampled;
  return asked == "most_groups" ? jaxsoft::kGroups : -1;
}

// 0 for a row operation that takes no workspace. n is -1 where the shape is not known, or where the reduced axis is not
// the last one.
JAXSOFT_EXPORT int64_t jaxsoft_row_workspace(const char* operation, int64_t rows, int64_t n, int64_t element_bytes,
                                             int64_t k) {
  for (const jaxsoft::Operation& each : jaxsoft::operations::kAll)
    if (std::string_view(each.text) == operation && each.features.has(jaxsoft::Feature::workspace))
      return jaxsoft::row_workspace(rows, n, element_bytes, k);
  return 0;
}

// For example "ring: rows in the shared memory of 2 blocks each". See RowCall for the arguments.
JAXSOFT_EXPORT const char* jaxsoft_row_plan(const char* operation, int64_t rows, int64_t n, int64_t inner,
                                            int64_t element_bytes, int64_t result_bytes, const char* extras,
                                            int64_t capability, int64_t multiprocessors, int64_t workspace_bytes) {
  return keep(jaxsoft::cuda::describe_plan({operation, rows, n, inner, element_bytes, result_bytes, extras,
                                            static_cast<int>(capability), static_cast<int>(multiprocessors),
                                            workspace_bytes}));
}
