// What each extra is like, and how the extras of a call are checked and read.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "buffers.h"
#include "extras.h"
#include "lists.h"

namespace jaxsoft {

enum class ExtraName { scale, limit, where, bias, other_scale };

// What each extra is like. No other code knows the letters of the attribute `extras`.
struct ExtraRecord {
  ExtraName name;
  char letter;
  const char* word;
  bool whole_rows;  // one element for each element of a row; else one number a row
  Extra Extras::*place;
};

// In the order in which they follow an operation's operands.
inline constexpr ExtraRecord kExtraRecords[] = {
    {ExtraName::scale, 's', "scale", false, &Extras::scale},
    {ExtraName::limit, 'l', "limit", false, &Extras::limit},
    {ExtraName::where, 'w', "where", true, &Extras::where},
    {ExtraName::bias, 'b', "bias", true, &Extras::bias},
    {ExtraName::other_scale, 'S', "other_scale", false, &Extras::other_scale},
};

inline ffi::DataType extra_dtype(ExtraName name, ffi::DataType dtype) {
  switch (name) {
    case ExtraName::scale: return state_dtype(dtype);
    case ExtraName::limit: return ffi::S32;
    case ExtraName::where: return ffi::PRED;
    case ExtraName::bias: return dtype;
    case ExtraName::other_scale: return state_dtype(dtype);
  }
  return ffi::DataType::INVALID;
}

// Decodes the attribute `extras` to the records of the extras that a call has. Returns what is wrong with it, or "".
inline std::string decode_extras(std::string_view letters, Set<ExtraName> allowed,
                                 std::vector<const ExtraRecord*>* present) {
  std::string allowed_letters;
  for (const ExtraRecord& record : kExtraRecords) {
    if (!allowed.has(record.name)) continue;
    allowed_letters += record.letter;
    if (present->size() < letters.size() && letters[present->size()] == record.letter) present->push_back(&record);
  }
  if (present->size() == letters.size()) return "";
  return "extras='" + std::string(letters) + "' must be some of '" + allowed_letters + "', in this order";
}

// Checks the buffer of an extra against the first operand, whose last dimension is the reduced one.
inline std::string check_extra(const ExtraRecord& record, const Buffer& extra, const Buffer& first) {
  const size_t leading = first.dims.size() - 1;
  const auto dtype = extra_dtype(record.name, first.dtype);
  bool fits = extra.dtype == dtype && extra.dims.size() == leading + record.whole_rows &&
              (!record.whole_rows || extra.dims[leading] == first.dims[leading]);
  for (size_t i = 0; fits && i < leading; i++) fits = extra.dims[i] == first.dims[i] || extra.dims[i] == 1;
  if (fits) return "";
  std::ostringstream text;
  text << record.word << " must be " << dtype << " of the first operand's shape "
       << (record.whole_rows ? "" : "without its last dimension, ") << "or 1 in leading dimensions: got "
       << describe(extra) << " beside " << describe(first);
  return text.str();
}

// Reads the extras of a call whose first operand is `first`. Returns what is wrong with them, or "".
inline std::string read_extras(const std::vector<const ExtraRecord*>& present, const std::vector<Buffer>& buffers,
                               const Buffer& first, Extras* extras) {
  const size_t leading = first.dims.size() - 1, count = present.size();
  std::vector<Extra*> read;
  std::vector<int64_t> step;  // elements of an extra from one index of its dimension i to the next, for i below
  for (size_t k = 0; k < count; k++) {
    if (auto reason = check_extra(*present[k], buffers[k], first); !reason.empty()) return reason;
    read.push_back(&(extras->*present[k]->place));
    read[k]->data = buffers[k].data;
    step.push_back(present[k]->whole_rows ? first.dims[leading] : 1);
  }

  int64_t rows = 1;  // in the dimensions inside i
  for (size_t i = leading; i-- > 0;) {
    const int64_t size = first.dims[i];
    if (size == 1) continue;
    int group = extras->groups - 1;
    bool joins = extras->groups > 0;  // this dimension is like the group inside it
    for (size_t k = 0; joins && k < count; k++) joins = (buffers[k].dims[i] == 1) == (read[k]->stride[group] == 0);
    if (joins) {
      extras->size[group] *= size;
    } else {
      if (extras->groups == kGroups)
        return "the extras are broadcast in more ways than the kernels know: at most " + std::to_string(kGroups) +
               " groups of leading dimensions, beside " + describe(first);
      group = extras->groups++;
      extras->size[group] = size;
      extras->divisor[group] = rows;
      for (size_t k = 0; k < count; k++) read[k]->stride[group] = buffers[k].dims[i] == 1 ? 0 : step[k];
    }
    rows *= size;
    for (size_t k = 0; k < count; k++) step[k] *= buffers[k].dims[i];
  }
  return "";
}

}  // namespace jaxsoft
