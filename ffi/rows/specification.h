// The records of operations.h as objects, by which both platforms export a symbol for each operation (targets.h) and
// check its calls (checks.h).
#pragma once

#include <string>

#include "call.h"
#include "lists.h"
#include "operations.h"

namespace jaxsoft {

// What a buffer must be like beside the first operand, which is of kind `row` and has a floating-point dtype.
enum class Kind {
  row,     // an operand of the first one's shape and dtype; or a result of its shape, whose dtype goes with its dtype
  number,  // one number a row, in the dtype of the state
  label,   // one int32 a row
  chosen,  // k elements of a row, in the first operand's dtype
  index,   // k int32 a row
  chosen_result,  // a result of k numbers a row, whose dtype goes with the first operand's
};

// An operand or a result: its name in error messages, and its place among the buffers that a kernel gets.
struct Operand {
  const char* name = "";
  Kind kind = Kind::row;
  const char* kind_text = "";
  Buffer Buffers::*place = nullptr;
};

// What calls of an operation may have: the attributes masked, cap and trailing other than false or 0; and a workspace,
// which then is the last result of every call.
enum class Feature { masked, cap, trailing, workspace };

namespace operations {

#define JAXSOFT_OPERAND(name, kind, place) inline constexpr Operand name{#name, Kind::kind, #kind, &Buffers::place};
JAXSOFT_ROW_OPERANDS(JAXSOFT_OPERAND)
#undef JAXSOFT_OPERAND

inline constexpr auto scale = ExtraName::scale, limit = ExtraName::limit, where = ExtraName::where,
                      bias = ExtraName::bias, other_scale = ExtraName::other_scale;
inline constexpr auto masked = Feature::masked, cap = Feature::cap, trailing = Feature::trailing,
                      workspace = Feature::workspace;

}  // namespace operations

struct Operation {
  Name name;
  const char* text;
  List<Operand> operands, results;
  Set<ExtraName> extras;
  Set<Feature> features;

  constexpr bool gives(Buffer Buffers::*place) const {
    for (const Operand& result : results)
      if (result.place == place) return true;
    return false;
  }
};

namespace operations {
#define JAXSOFT_RECORD(name, Kernels, ...) {Name::name, #name, __VA_ARGS__},
inline constexpr Operation kAll[] = {JAXSOFT_ROW_OPERATIONS(JAXSOFT_RECORD)};
#undef JAXSOFT_RECORD
}  // namespace operations

constexpr const Operation& operation(Name name) { return operations::kAll[static_cast<int>(name)]; }

// The records as text, a line each, for a test that compares them with Python's. An example:
// softmax(scores:row)->(result:row) extras=scale,limit,where,bias masked=0 cap=0 trailing=1 workspace=1
inline std::string operations_as_text() {
  auto joined = [](const List<Operand>& operands) {
    std::string text;
    for (const Operand& operand : operands)
      text += (text.empty() ? "" : ",") + std::string(operand.name) + ":" + operand.kind_text;
    return "(" + text + ")";
  };
  std::string text;
  for (const Operation& each : operations::kAll) {
    std::string extras;
    for (const ExtraRecord& extra : kExtraRecords)
      if (each.extras.has(extra.name)) extras += (extras.empty() ? "" : ",") + std::string(extra.word);
    auto has = [&](const char* name, Feature feature) {
      return " " + std::string(name) + (each.features.has(feature) ? "=1" : "=0");
    };
    text += each.text + joined(each.operands) + "->" + joined(each.results) + " extras=" + extras +
            has("masked", Feature::masked) + has("cap", Feature::cap) + has("trailing", Feature::trailing) +
            has("workspace", Feature::workspace) + "\n";
  }
  return text;
}

}  // namespace jaxsoft
