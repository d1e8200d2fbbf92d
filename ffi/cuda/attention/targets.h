// The FFI targets of attention: a record for each, which says what its calls take and return.
//
// The shapes are written in letters: B batch, T queries, S keys, N heads of queries, K heads of keys, H and D head
// sizes, of a block E keys or values, which are 2, and of a cache in pages P pages, G keys of a page, C pages of a
// sequence. What the arrays mean is said in attention.cuh and in jaxsoft/_attention/form.py.
#pragma once

#include <string>
#include <string_view>

#include "../../rows/lists.h"

namespace jaxsoft::attention {

// Operands and results. A gradient has the name of its operand.
enum class Name {
  query, key, value, block, key_pages, value_pages, page_table,
  bias, mask, query_segments, key_segments, query_begins, query_lengths, key_lengths, offset, sinks,
  key_scale, value_scale, state_output, state_lse, query_sum, key_sum, value_sum,
  lse, delta, cotangent, output, lse_residual, max_logits, output_residual, workspace,
};
inline constexpr int kNames = static_cast<int>(Name::workspace) + 1;

// The dtypes that an array may have. That of the query is F16 or BF16.
enum class Type { query, wide_or_query, page, score, number, integer, flag, byte };

// What an array is like; a gradient may also be in F32. `once` has the letters of the dimensions that may have length 1
// where others are longer.
struct Record {
  Name name;
  const char* text;
  Type type;
  std::string_view dims, once = "";
};

// In the order of the names, which is also that of the operands of a call.
inline constexpr Record kRecords[kNames] = {
    {Name::query, "query", Type::query, "BTNH"},
    {Name::key, "key", Type::query, "BSKH"},
    {Name::value, "value", Type::query, "BSKD"},
    {Name::block, "block", Type::query, "EBSKH"},
    {Name::key_pages, "key_pages", Type::page, "PGKH"},
    {Name::value_pages, "value_pages", Type::page, "PGKD"},
    {Name::page_table, "page_table", Type::integer, "BC"},
    {Name::bias, "bias", Type::score, "BNTS", "BNTS"},
    {Name::mask, "mask", Type::flag, "BNTS", "BNTS"},
    {Name::query_segments, "query_segments", Type::integer, "BT", "B"},
    {Name::key_segments, "key_segments", Type::integer, "BS", "B"},
    {Name::query_begins, "query_begins", Type::integer, "B", "B"},
    {Name::query_lengths, "query_lengths", Type::integer, "B", "B"},
    {Name::key_lengths, "key_lengths", Type::integer, "B", "B"},
    {Name::offset, "offset", Type::integer, "B", "B"},
    {Name::sinks, "sinks", Type::number, "BN", "BN"},
    {Name::key_scale, "key_scale", Type::number, "K"},
    {Name::value_scale, "value_scale", Type::number, "K"},
    {Name::state_output, "state_output", Type::number, "BTND"},
    {Name::state_lse, "state_lse", Type::number, "BNT"},
    {Name::query_sum, "query_sum", Type::number, "BTNH"},
    {Name::key_sum, "key_sum", Type::number, "BSKH"},
    {Name::value_sum, "value_sum", Type::number, "BSKD"},
    {Name::lse, "lse", Type::number, "BNT"},
    {Name::delta, "delta", Type::number, "BNT"},
    {Name::cotangent, "cotangent", Type::query, "BTND"},
    {Name::output, "output", Type::wide_or_query, "BTND"},
    {Name::lse_residual, "lse_residual", Type::number, "BNT"},
    {Name::max_logits, "max_logits", Type::number, "BN"},
    {Name::output_residual, "output_residual", Type::query, "BTND"},
    {Name::workspace, "workspace", Type::byte, "W"},
};

// Those that may exclude scores by the indices of queries and keys.
inline constexpr Set<Name> kLimits = {Name::query_begins, Name::query_lengths, Name::key_lengths};

constexpr const Record& record(Name name) { return kRecords[static_cast<int>(name)]; }

// What a target takes and returns. The attribute `extras` names those that a call has, which follow the operands, and
// the attribute `results` which of `more` it has; `after` follows the extras. A workspace is the last result of every
// call.
struct Target {
  const char* text;
  List<Name> operands;
  Set<Name> extras;
  List<Name> after, results;
  Set<Name> more;
  bool any_values = false;  // whether heads of values may have another size than those of keys
};

namespace targets {

inline constexpr Set<Name> kOfDecode = {Name::bias,         Name::mask,          Name::query_segments,
                                        Name::key_segments, Name::query_lengths, Name::key_lengths,
                                        Name::offset,       Name::sinks};
inline constexpr Set<Name> kOfPages = {Name::bias,         Name::mask,          Name::query_segments,
                                       Name::key_segments, Name::query_lengths, Name::key_lengths,
                                       Name::offset,       Name::sinks,         Name::key_scale,
                                       Name::value_scale};
inline constexpr Set<Name> kOfMany = {Name::query_segments, Name::key_segments, Name::query_begins, Name::query_lengths,
                                      Name::key_lengths,    Name::offset,       Name::sinks,        Name::state_output,
                                      Name::state_lse};
inline constexpr Set<Name> kOfGradients = {Name::query_segments, Name::key_segments, Name::query_begins,
                                           Name::query_lengths,  Name::key_lengths,  Name::offset,
                                           Name::sinks,          Name::query_sum,    Name::key_sum,
                                           Name::value_sum};

inline constexpr Target kForward = {"attention_forward",
                                    {Name::query, Name::key, Name::value},
                                    kOfMany,
                                    {},
                                    {Name::output, Name::lse},
                                    {Name::max_logits, Name::output_residual},
                                    true};
// The same where keys and values are one array, in which E is 2, the keys first.
inline constexpr Target kForwardOfBlock = {"attention_forward_of_block",
                                           {Name::query, Name::block},
                                           kOfMany,
                                           {},
                                           {Name::output, Name::lse},
                                           {Name::output_residual}};
inline constexpr Target kDecode = {"attention_decode",
                                   {Name::query, Name::key, Name::value},
                                   kOfDecode,
                                   {},
                                   {Name::output, Name::lse},
                                   {Name::lse_residual, Name::output_residual}};
inline constexpr Target kPaged = {"paged_attention",
                                  {Name::query, Name::key_pages, Name::value_pages, Name::page_table},
                                  kOfPages,
                                  {},
                                  {Name::output, Name::lse},
                                  {Name::lse_residual, Name::output_residual}};
inline constexpr Target kBackward = {"attention_backward",
                                     {Name::query, Name::key, Name::value},
                                     kOfGradients,
                                     {Name::lse, Name::delta, Name::cotangent},
                                     {Name::query, Name::key, Name::value},
                                     {},
                                     true};
inline constexpr Target kBackwardOfBlock = {"attention_backward_of_block",
                                            {Name::query, Name::block},
                                            kOfGradients,
                                            {Name::lse, Name::delta, Name::cotangent},
                                            {Name::query, Name::block},
                                            {}};

}  // namespace targets

// The records as text, a line each, for a test that compares them with Python's. An example:
// attention_forward(query,key,value)->(output,lse) extras=query_lengths,offset,sinks results=max_logits,output_residual
inline std::string targets_as_text() {
  auto listed = [](const List<Name>& names, std::string text) {
    for (Name name : names) text += (text.empty() ? "" : ",") + std::string(record(name).text);
    return text;
  };
  auto of_set = [](Set<Name> names) {
    std::string text;
    for (const Record& each : kRecords)
      if (names.has(each.name)) text += (text.empty() ? "" : ",") + std::string(each.text);
    return text;
  };
  std::string text;
  for (const Target& each : {targets::kForward, targets::kForwardOfBlock, targets::kBackward, targets::kBackwardOfBlock,
                             targets::kDecode, targets::kPaged})
    text += each.text + ("(" + listed(each.after, listed(each.operands, ""))) + ")->(" + listed(each.results, "") +
            ") extras=" + of_set(each.extras) + " results=" + of_set(each.more) + "\n";
  return text;
}

}  // namespace jaxsoft::attention
