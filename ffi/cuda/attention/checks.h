// Checks an FFI call of attention by the record of its target, so that a bad call is an error and never reaches a
// kernel. It knows dtypes, shapes and attributes, and nothing of CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../../rows/buffers.h"
#include "bounds.h"
#include "targets.h"

namespace jaxsoft::attention {

// The attributes of a call.
struct Form {
  std::string_view extras;   // names, with commas between them, in the order of kRecords
  std::string_view results;  // likewise the results beside those that every call has
  double scale, cap;         // cap is 0 for none
  int64_t left, right;       // -1 for no limit
  bool deterministic;        // of gradients
};

// A call: its arrays by name, those that it lacks with null data, and the lengths of the dimensions by letter.
class Call {
 public:
  // Reads and checks everything. Returns what is wrong, or "".
  std::string read(const Target& target, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                   const Form& form) {
    std::vector<Name> given(target.operands.begin(), target.operands.end());
    if (auto reason = add_names("extras", form.extras, target.extras, &given); !reason.empty()) return reason;
    given.insert(given.end(), target.after.begin(), target.after.end());
    std::vector<Name> wanted(target.results.begin(), target.results.end());
    if (auto reason = add_names("results", form.results, target.more, &wanted); !reason.empty()) return reason;
    wanted.push_back(Name::workspace);
    if (auto reason = check_number("operands", args.size(), given); !reason.empty()) return reason;
    if (auto reason = check_number("results", rets.size(), wanted); !reason.empty()) return reason;
    for (size_t i = 0; i < given.size(); i++) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error().message();
      if (auto reason = take(given[i], Buffer(*buffer), &operands_); !reason.empty()) return reason;
    }
    if (auto reason = check_sizes(target); !reason.empty()) return reason;
    for (size_t i = 0; i < wanted.size(); i++) {
      // Not const, as the * of a result must not be in the headers of JAX 0.10.
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error().message();
      if (auto reason = take(wanted[i], Buffer(**buffer), &results_); !reason.empty()) return reason;
    }
    return check_form(form);
  }

  const Buffer& operand(Name name) const { return operands_[static_cast<int>(name)]; }
  const Buffer& result(Name name) const { return results_[static_cast<int>(name)]; }
  // The length of a dimension by its letter.
  int size(char letter) const { return static_cast<int>(sizes_[letter - 'A']); }

 private:
  using Buffers = std::array<Buffer, kNames>;
  static constexpr int64_t kUnknown = 0;

  // Appends the names that an attribute lists, which must be some of those that are allowed, in their order.
  static std::string add_names(const char* attribute, std::string_view listed, Set<Name> allowed,
                               std::vector<Name>* names) {
    std::string all;
    std::string_view left = listed;
    bool more = !left.empty();
    for (const Record& each : kRecords) {
      if (!allowed.has(each.name)) continue;
      all += (all.empty() ? "" : ",") + std::string(each.text);
      const size_t end = std::min(left.find(','), left.size());
      if (!more || left.substr(0, end) != each.text) continue;
      names->push_back(each.name);
      more = end < left.size();
      left.remove_prefix(std::min(end + 1, left.size()));
    }
    if (!more) return "";
    return std::string(attribute) + "='" + std::string(listed) + "' must be some of '" + all + "', in this order";
  }

  static std::string check_number(const char* what, size_t number, const std::vector<Name>& names) {
    if (number == names.size()) return "";
    std::string all;
    for (Name name : names) all += (all.empty() ? "" : ", ") + std::string(record(name).text);
    return std::string("wrong number of ") + what + ": got " + std::to_string(number) + " instead of (" + all + ")";
  }

  // Checks an array and keeps it. The first array that has a dimension says how long that is.
  std::string take(Name name, const Buffer& buffer, Buffers* buffers) {
    Record is = record(name);
    if (buffers == &results_ && operand(name).data) is.type = Type::wide_or_query;  // a gradient
    const std::string_view dims = is.dims;
    const auto allowed = dtypes(is.type);
    if (std::find(allowed.begin(), allowed.end(), buffer.dtype) == allowed.end() || buffer.dims.size() != dims.size())
      return must(is, buffer);
    for (size_t i = 0; i < dims.size(); i++) {
      const int64_t size = sizes_[dims[i] - 'A'];
      const bool once = buffer.dims[i] == 1 && is.once.find(dims[i]) != std::string_view::npos;
      if (buffer.dims[i] != size && size != kUnknown && !once) return must(is, buffer);
      if (buffer.dims[i] < 1) return std::string(is.text) + " must have elements: got " + describe(buffer);
    }
    for (size_t i = 0; i < dims.size(); i++)
      if (int64_t& size = sizes_[dims[i] - 'A']; size == kUnknown) size = buffer.dims[i];
    const bool copied = is.type == Type::query || is.type == Type::wide_or_query || is.type == Type::page ||
                        (is.type == Type::number && dims.size() == 4);
    if ((copied || is.type == Type::byte) && reinterpret_cast<uintptr_t>(buffer.data) % kAlignment)
      return std::string(is.text) + " must begin at a multiple of " + std::to_string(kAlignment) + " bytes";
    if (name == Name::block) {
      if (buffer.dims[0] != 2) return must(is, buffer);
      sizes_['D' - 'A'] = sizes_['H' - 'A'];
    }
    if (name == Name::page_table) sizes_['S' - 'A'] = sizes_['C' - 'A'] * sizes_['G' - 'A'];
    (*buffers)[static_cast<int>(name)] = buffer;
    return "";
  }

  // The dtypes that an array may have. The first array of pages says which all of them have, as the query does.
  List<ffi::DataType> dtypes(Type type) const {
    const Buffer &query = operand(Name::query), &pages = operand(Name::key_pages);
    switch (type) {
      case Type::query:
        if (query.data) return {query.dtype};
        return {ffi::F16, ffi::BF16};
      case Type::wide_or_query: return {query.dtype, ffi::F32};
      case Type::page:
        if (pages.data) return {pages.dtype};
        return {query.dtype, ffi::F8E4M3FN, ffi::F8E5M2};
      case Type::score: return {ffi::F16, ffi::BF16, ffi::F32};
      case Type::number: return {ffi::F32};
      case Type::integer: return {ffi::S32};
      case Type::flag: return {ffi::PRED};
      case Type::byte: return {ffi::U8};
    }
    return {};
  }

  // For example "bias must be F16, BF16 or F32 of shape (2 or 1,N or 1,8 or 1,9 or 1): got F32(3) beside query ..."
  std::string must(const Record& is, const Buffer& buffer) const {
    std::string allowed, shape;
    const auto types = dtypes(is.type);
    for (size_t i = 0; i < types.size(); i++)
      allowed += (i == 0 ? "" : i + 1 < types.size() ? ", " : " or ") + as_text(types[i]);
    for (const char letter : is.dims) {
      const int64_t size = sizes_[letter - 'A'];
      shape += (shape.empty() ? "" : ",") + (size == kUnknown ? std::string(1, letter) : std::to_string(size));
      if (is.once.find(letter) != std::string_view::npos) shape += " or 1";
    }
    std::string beside;
    for (const Name name : {Name::query, Name::key, Name::block, Name::key_pages})
      if (operand(name).data) beside += std::string(", ") + record(name).text + " " + describe(operand(name));
    if (!beside.empty()) beside = " beside " + beside.substr(2);
    return std::string(is.text) + " must be " + allowed + " of shape (" + shape + "): got " + describe(buffer) + beside;
  }

  // Checks the lengths of dimensions, which all operands have by now.
  std::string check_sizes(const Target& target) {
    const int64_t n = sizes_['N' - 'A'], k = sizes_['K' - 'A'], h = sizes_['H' - 'A'], d = sizes_['D' - 'A'];
    for (const int64_t size : sizes_)
      if (size > INT32_MAX) return "dimensions must be at most " + std::to_string(INT32_MAX) + ": got " +
                                   std::to_string(size);
    for (const char letter : {'T', 'S'})
      if (const int64_t size = sizes_[letter - 'A']; size >= kFurthest)
        return "queries and keys of a sequence must be fewer than " + std::to_string(kFurthest) + ": got " +
               std::to_string(size);
    if (n % k)
      return "the heads of query must be a multiple of those of keys: got " + std::to_string(n) + " and " +
             std::to_string(k);
    if ((h != d && !target.any_values) || h % kSizes || d % kSizes || std::max(h, d) > kLargestSize)
      return std::string("head sizes must be ") + (target.any_values ? "" : "equal, and ") + "multiples of " +
             std::to_string(kSizes) + " up to " + std::to_string(kLargestSize) + ": got " + std::to_string(h) +
             " and " + std::to_string(d);
    if (operand(Name::page_table).data) {
      const int64_t page = sizes_['G' - 'A'];
      if (h % (kAlignment / ffi::ByteWidth(operand(Name::key_pages).dtype)))
        return "head sizes of pages in 8 bits must be multiples of " + std::to_string(kAlignment) + ": got " +
               std::to_string(h);
      if (page < kSmallestPage || page > kLargestPage || (page & (page - 1)))
        return "pages must have a power of 2 of keys, " + std::to_string(kSmallestPage) + " to " +
               std::to_string(kLargestPage) + ": got " + std::to_string(page);
    }
    if (!operand(Name::query_segments).data != !operand(Name::key_segments).data)
      return "query_segments and key_segments must be given together";
    if (!operand(Name::state_output).data != !operand(Name::state_lse).data)
      return "state_output and state_lse must be given together";
    return "";
  }

  std::string check_form(const Form& form) const {
    if (!(form.scale >= kSmallestScale && form.scale <= kLargestScale))
      return "scale must be from 1e-30 to 1e30: got " + as_text(form.scale);
    if (!(form.cap >= 0 && form.cap <= kLargestCap))
      return "cap must be from 0 to " + std::to_string(int(kLargestCap)) + ": got " + as_text(form.cap);
    for (const int64_t limit : {form.left, form.right})
      if (limit < -1 || limit > kFurthest)
        return "left and right must be from -1 to " + std::to_string(kFurthest) + ": got " + std::to_string(limit);
    if (result(Name::lse_residual).data && !operand(Name::bias).data)
      return "there is an lse_residual only beside a bias";
    if (result(Name::output_residual).data && result(Name::output).dtype != operand(Name::query).dtype)
      return "there is an output_residual only where output has the dtype of query: got " +
             describe(result(Name::output));
    return check_gradients();
  }

  std::string check_gradients() const {
    const auto dtype = result(Name::query).dtype;
    for (const Name name : {Name::key, Name::value, Name::block})
      if (result(name).data && result(name).dtype != dtype)
        return "gradients must have one dtype: got " + describe(result(Name::query)) + " and " + describe(result(name));
    for (const Name name : {Name::query_sum, Name::key_sum, Name::value_sum})
      if (operand(name).data && dtype != ffi::F32)
        return std::string("there is a ") + record(name).text + " only where gradients are in F32: got " +
               describe(result(Name::query));
    return "";
  }

  Buffers operands_, results_;
  int64_t sizes_[26] = {};  // by letter, at first all unknown
};

}  // namespace jaxsoft::attention

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoft::attention::Form, xla::ffi::StructMember<std::string_view>("extras"),
                                      xla::ffi::StructMember<std::string_view>("results"),
                                      xla::ffi::StructMember<double>("scale"), xla::ffi::StructMember<double>("cap"),
                                      xla::ffi::StructMember<int64_t>("left"),
                                      xla::ffi::StructMember<int64_t>("right"),
                                      xla::ffi::StructMember<bool>("deterministic"));
