// The list of row operations. To add one, write its file in operations/ and add a line here: X(its struct, its file).
//
// The build reads this list and compiles every operation, for every element type, in a file of its own
// (../CMakeLists.txt). The operations that take longest to compile come first.
#pragma once

#define JAXSOFT_ROW_KERNELS(X)      \
  X(Softmax, softmax)               \
  X(LogSoftmax, log_softmax)        \
  X(LogsumexpVjp, logsumexp_vjp)    \
  X(StateOf, state)                 \
  X(LogSoftmaxVjp, log_softmax_vjp) \
  X(SoftmaxVjp, softmax_vjp)        \
  X(LabelSums, label_sums)          \
  X(Entropy, entropy)               \
  X(EntropyVjp, entropy_vjp)

namespace jaxsoft::cuda {

#define JAXSOFT_DECLARE_OPERATION(Op, file) template <class T> struct Op;
JAXSOFT_ROW_KERNELS(JAXSOFT_DECLARE_OPERATION)
#undef JAXSOFT_DECLARE_OPERATION

}  // namespace jaxsoft::cuda
