// The row operations: for each, a record of what an FFI call of it takes and gives. Both platforms export a symbol for
// each record (targets.h), check their calls by it (checks.h), and choose the kernel by its name (handlers.cc and
// handlers.cu). To add an operation, add its record here and its kernel on each platform.
#pragma once

#include <string>

#include "call.h"
#include "lists.h"

namespace jaxsoft {

// What a buffer must be like beside the first operand, which is of kind `row` and has a floating-point dtype.
enum class Kind {
  row,     // an operand of the first one's shape and dtype; or a result of its shape, whose dtype goes with its dtype
  number,  // one number a row, in the dtype of the state
  label,   // one int32 a row
  chosen,  // k elements of a row, in the first operand's dtype
  index,   // k int32 a row
};

// An operand or a result: its name in error messages, and its place among the buffers that a kernel gets.
struct Operand {
  const char* name = "";
  Kind kind = Kind::row;
  Buffer Buffers::*place = nullptr;
};

// What calls of an operation may have: the attributes masked, cap and trailing other than false or 0; and a workspace,
// which then is the last result of every call.
enum class Feature { masked, cap, trailing, workspace };

namespace operations {

inline constexpr Operand
    scores{"scores", Kind::row, &Buffers::first}, probabilities{"probabilities", Kind::row, &Buffers::first},
    cotangents{"cotangents", Kind::row, &Buffers::cotangents}, maximum{"maximum", Kind::number, &Buffers::maximum},
    sum{"sum", Kind::number, &Buffers::sum}, cotangent{"cotangent", Kind::number, &Buffers::cotangent},
    products{"products", Kind::number, &Buffers::products}, label{"label", Kind::label, &Buffers::label},
    label_score{"label_score", Kind::number, &Buffers::label_score},
    distances{"distances", Kind::number, &Buffers::distances}, count{"count", Kind::number, &Buffers::count},
    label_cotangent{"label_cotangent", Kind::number, &Buffers::label_cotangent},
    distance_cotangent{"distance_cotangent", Kind::number, &Buffers::distance_cotangent},
    result{"result", Kind::row, &Buffers::result}, values{"values", Kind::chosen, &Buffers::values},
    indices{"indices", Kind::index, &Buffers::indices};

inline constexpr auto scale = ExtraName::scale, limit = ExtraName::limit, where = ExtraName::where,
                      bias = ExtraName::bias;
inline constexpr auto masked = Feature::masked, cap = Feature::cap, trailing = Feature::trailing,
                      workspace = Feature::workspace;

}  // namespace operations

// The records: name, operands, results, extras, features.
//
// In what follows (m, s) is the state of a row's scores z, which is their maximum and the sum of exp(z - m), and
// p = exp(z - m) / s. An element that does not count is 0 in a result, and -inf in log_softmax's.
//
//   softmax          p.
//   softmax_vjp      scale * p * (g - <p, g>), of the cotangents g.
//   log_softmax      log(p), and the state.
//   log_softmax_vjp  scale * (g - p * sum(g)), of the cotangents g.
//   state            The state.
//   logsumexp_vjp    scale * p * g, of a row's cotangent g.
//   entropy          The state, and the sum of exp(z - m) * (z - m): the products.
//   entropy_vjp      -scale * p * ((z - m) - products / s) * g, of a row's cotangent g.
//   top_k            The k largest scores of a row in descending order, their indices, and the state. Of equal scores,
//                    which -0.0 and 0.0 are, the lowest index comes first. A row whose m is not finite or whose s is
//                    NaN has no softmax: it gives its first k scores.
//   label_state      The state of a row without its label's score, and that score. A label counts whatever the extras
//                    say. The score is NaN where the label is out of range, unless it is kNoRow.
//   label_state_vjp  p * g, of a row's cotangent g; and at the label, the label's cotangent.
//   label_sums       What label_state gives, and for the scores above -inf the sum of their distances from the label's,
//                    and their number.
//   label_sums_vjp   What label_state_vjp gives, and where the score is above -inf, also the distances' cotangent.
#define JAXSOFT_ROW_OPERATIONS(record)                                                                                 \
  record(softmax, {scores}, {result}, {scale, limit, where, bias}, {trailing, workspace})                              \
  record(softmax_vjp, {probabilities, cotangents}, {result}, {scale, limit}, {masked, trailing, workspace})            \
  record(log_softmax, {scores}, {result, maximum, sum}, {scale, limit, where, bias}, {trailing, workspace})            \
  record(log_softmax_vjp, {scores, maximum, sum, cotangents}, {result}, {scale, limit, where},                         \
         {trailing, workspace})                                                                                        \
  record(state, {scores}, {maximum, sum}, {scale, limit, where, bias}, {trailing, workspace})                          \
  record(logsumexp_vjp, {scores, maximum, sum, cotangent}, {result}, {scale, limit, where, bias}, {trailing})          \
  record(entropy, {scores}, {maximum, sum, products}, {scale, limit, where}, {workspace})                              \
  record(entropy_vjp, {scores, maximum, sum, products, cotangent}, {result}, {scale, limit, where, bias}, {})          \
  record(top_k, {scores}, {values, indices, maximum, sum}, {}, {workspace})                                            \
  record(label_state, {scores, label}, {maximum, sum, label_score}, {limit, where}, {cap, workspace})                  \
  record(label_state_vjp, {scores, label, maximum, sum, cotangent, label_cotangent}, {result},                         \
         {limit, where}, {cap})                                                                                        \
  record(label_sums, {scores, label}, {maximum, sum, label_score, distances, count},                                   \
         {limit, where}, {cap, workspace})                                                                             \
  record(label_sums_vjp, {scores, label, maximum, sum, cotangent, label_cotangent, distance_cotangent}, {result},      \
         {limit, where}, {cap})

#define JAXSOFT_ENUMERATOR(name, ...) name,
enum class Name { JAXSOFT_ROW_OPERATIONS(JAXSOFT_ENUMERATOR) };
#undef JAXSOFT_ENUMERATOR

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
#define JAXSOFT_RECORD(name, ...) {Name::name, #name, __VA_ARGS__},
inline constexpr Operation kAll[] = {JAXSOFT_ROW_OPERATIONS(JAXSOFT_RECORD)};
#undef JAXSOFT_RECORD
}  // namespace operations

constexpr const Operation& operation(Name name) { return operations::kAll[static_cast<int>(name)]; }

inline const char* word(Kind kind) {
  switch (kind) {
    case Kind::row: return "row";
    case Kind::number: return "number";
    case Kind::label: return "label";
    case Kind::chosen: return "chosen";
    case Kind::index: return "index";
  }
  return "";
}

// The records as text, a line each, for a test that compares them with Python's. An example:
// log_softmax(row)->(row,number,number) extras=scale,limit,where,bias masked=0 cap=0 trailing=1 workspace=1
inline std::string operations_as_text() {
  auto joined = [](const List<Operand>& operands) {
    std::string text;
    for (const Operand& operand : operands) text += (text.empty() ? "" : ",") + std::string(word(operand.kind));
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
