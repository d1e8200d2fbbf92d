// The facts about the kernels of each row operation that plans depend on. rows.cu.in compares them with the kernels.
#pragma once

#include <string_view>

#include "table.cuh"

namespace jaxsoft::cuda {

struct OperationFacts {
  std::string_view kernels;
  unsigned operands;  // arrays of whole rows that are read, without a bias
  Kinds kind;
  int part;  // what a part of a row is reduced to, in numbers of the accumulator's type
};
constexpr OperationFacts kOperationFacts[] = {
    {"Softmax", 1, kSoftmax, 3},          {"SoftmaxVjp", 2, kSoftmax, 2},       {"LogSoftmax", 1, kLogSoftmax, 3},
    {"LogSoftmaxVjp", 2, kLogSoftmax, 2}, {"StateOf", 1, kState, 3},            {"LabelSums", 1, kSums, 6},
    {"Entropy", 1, kSums, 5},             {"LogsumexpVjp", 1, kElementwise, 2}, {"EntropyVjp", 1, kElementwise, 2},
};
constexpr const OperationFacts* facts_of(std::string_view kernels) {
  for (const OperationFacts& facts : kOperationFacts)
    if (facts.kernels == kernels) return &facts;
  return nullptr;
}

}  // namespace jaxsoft::cuda
