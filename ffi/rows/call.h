// A call of a row operation as the kernels of both platforms get it: checked, with a name for each buffer.
#pragma once

#include <cstdint>
#include <string_view>

#include "buffers.h"
#include "limits.h"
#include "read_extras.h"

namespace jaxsoft {

// The attributes of a call.
struct Form {
  std::string_view extras;  // a letter for each extra that follows the operands: see read_extras.h
  int64_t trailing;         // how many dimensions follow the reduced one
  bool masked;              // softmax_vjp: elements whose probability is 0 are masked, whatever their cotangent is
  double cap;               // scores become cap * tanh(x / cap); 0 leaves them as they are
};

// The first operand as an array of rows * n * inner elements, of which n are reduced. All leading dimensions are rows,
// so that vmap needs no code here. What has one number a row has rows * inner of them.
struct Shape {
  int64_t rows = 1, n = 1, inner = 1;
};

// The buffers of a call. An operation's record in operations.h says which of them it has, and of which kind they are.
struct Buffers {
  Buffer first;                                // scores, or the probabilities that softmax_vjp reads instead
  Buffer other;                                // the other scores, of operations with two arrays of them
  Buffer cotangents;                           // one an element
  Buffer maximum, sum;                         // the state: results of some operations, operands of others
  Buffer beside;                               // beside the state: label_sums' distances, the products, the divergence
  Buffer other_reference;                      // what exponentials of the other scores are relative to
  Buffer ratio;                                // the logarithm of the other sum of exponentials to that of the scores
  Buffer cotangent;                            // one a row: of the logsumexp or the entropy
  Buffer label;                                // a row's label; kNoRow in a row that is not read
  Buffer label_score, count;                   // results of operations with labels
  Buffer label_cotangent, distance_cotangent;  // operands of their derivatives
  Buffer entropy_cotangent;                    // the same, where `cotangent` is the logsumexp's
  Buffer result;                               // one an element; of top_k, the probabilities of the values
  Buffer other_result;                         // one an element of the other scores
  Buffer values, indices;                      // results of top_k
  Buffer workspace;  // bytes for the kernel's own use, allocated by XLA with the other buffers: what a handler asks for
                     // while a CUDA graph is recorded would be gone when the graph runs
};

struct Call {
  Shape shape;
  Extras extras;
  Buffers buffers;
  bool masked = false;
  double cap = 0;
};

}  // namespace jaxsoft

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoft::Form, xla::ffi::StructMember<std::string_view>("extras"),
                                      xla::ffi::StructMember<int64_t>("trailing"),
                                      xla::ffi::StructMember<bool>("masked"), xla::ffi::StructMember<double>("cap"));
