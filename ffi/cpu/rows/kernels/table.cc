// The table of CPU kernels for one instruction set. It is compiled once for each, with another JAXSOFT_ISA.
#include "columns.h"
#include "entropy.h"
#include "labels.h"
#include "operations.h"
#include "reduce.h"
#include "top_k.h"
#include "write.h"

namespace JAXSOFT_ISA {
namespace {

using jaxsoft::cpu::Kernels;

template <Reduction reduction, class T, bool extras>
constexpr auto reduces() -> State (*)(const Segment&, int64_t) {
  if constexpr (reduction == kNone) return nullptr;
  else return reduce<reduction, T, extras>;
}

template <class Op, class T, class Out, bool extras>
constexpr Kernels kernels = [] {
  Kernels k{};
  k.reduce = reduces<Op::reduction, T, extras>();
  k.write = write<Op, T, Out, extras>;
  k.fill = fill<Op, Out>, k.put = put<Out>, k.get = get<T>;
  k.reduce_columns = reduce_columns<Op::reduction, T, keeps_digits<Op>>;
  k.combine_columns = combine_columns;
  k.finish_columns = finish_columns<Op, T>;
  k.write_columns = write_columns<Op, T, Out>;
  return k;
}();

template <class T, class Out, bool extras>
constexpr Kernels softmax = [] {
  Kernels k = kernels<Softmax, T, Out, extras>;
  k.at_once = softmax_at_once<T, Out, extras>;
  return k;
}();

template <class T, bool extras>
constexpr Kernels state_of = [] {
  Kernels k = kernels<Softmax, T, T, extras>;
  k.write = nullptr;
  k.find = find<T>, k.cut = cut<T>, k.order = order<T>;
  k.label_rows = extras ? nullptr : label_states<T, false>;
  return k;
}();

template <class T, bool extras>
constexpr Kernels label_sums = [] {
  Kernels k = state_of<T, extras>;
  k.above = above<T, extras>;
  k.label_rows = extras ? nullptr : label_states<T, true>;
  return k;
}();

template <class T, bool extras>
constexpr Kernels entropy = [] {
  Kernels k = state_of<T, extras>;
  k.products = products<T, extras>;
  return k;
}();

template <class Op, class T, class Out, bool extras>
constexpr Kernels label_gradient = [] {
  Kernels k = kernels<Op, T, Out, extras>;
  k.label_rows = extras ? nullptr : label_gradients<Op, T, Out>;
  return k;
}();

}  // namespace
}  // namespace JAXSOFT_ISA

// In the order of jaxsoft::cpu::Arithmetic, and then of jaxsoft::cpu::DTypes.
#define JAXSOFT_ARITHMETICS(T, Out, extras)                                                 \
  {JAXSOFT_ISA::softmax<T, Out, extras>, JAXSOFT_ISA::kernels<LogSoftmax, T, Out, extras>,  \
   JAXSOFT_ISA::state_of<T, extras>, JAXSOFT_ISA::label_sums<T, extras>,                    \
   JAXSOFT_ISA::kernels<SoftmaxVjp, T, Out, extras>,                                        \
   JAXSOFT_ISA::kernels<LogSoftmaxVjp, T, Out, extras>,                                     \
   JAXSOFT_ISA::label_gradient<LogsumexpVjp, T, Out, extras>,                               \
   JAXSOFT_ISA::label_gradient<LabelSumsVjp, T, Out, extras>,                               \
   JAXSOFT_ISA::entropy<T, extras>, JAXSOFT_ISA::kernels<EntropyVjp, T, Out, extras>}
#define JAXSOFT_DTYPES(extras)                                                                     \
  {JAXSOFT_ARITHMETICS(Float16, Float16, extras), JAXSOFT_ARITHMETICS(BFloat16, BFloat16, extras), \
   JAXSOFT_ARITHMETICS(float, float, extras),     JAXSOFT_ARITHMETICS(double, double, extras),     \
   JAXSOFT_ARITHMETICS(Float16, float, extras),   JAXSOFT_ARITHMETICS(BFloat16, float, extras),    \
   JAXSOFT_ARITHMETICS(float, Float16, extras),   JAXSOFT_ARITHMETICS(float, BFloat16, extras)}
#define JAXSOFT_JOIN_(a, b) a##b
#define JAXSOFT_JOIN(a, b) JAXSOFT_JOIN_(a, b)

namespace jaxsoft::cpu {
using namespace JAXSOFT_ISA;
const KernelTable JAXSOFT_JOIN(kernels_, JAXSOFT_ISA) = {JAXSOFT_DTYPES(false), JAXSOFT_DTYPES(true)};
}  // namespace jaxsoft::cpu
