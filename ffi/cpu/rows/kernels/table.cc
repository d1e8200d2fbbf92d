// The table of CPU kernels for one instruction set. It is compiled once for each, with another JAXSOFT_ISA.
#include "columns.h"
#include "divergence.h"
#include "entropy.h"
#include "labels.h"
#include "operations.h"
#include "reduce.h"
#include "top_k.h"
#include "write.h"

namespace JAXSOFT_ISA {
namespace {

using jaxsoft::Name;
using jaxsoft::cpu::DTypes;
using jaxsoft::cpu::Kernels;
using jaxsoft::cpu::KernelTable;

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

template <class T, bool extras>
constexpr Kernels state_alone = [] {
  Kernels k = kernels<Softmax, T, T, extras>;
  k.write = nullptr;
  return k;
}();

template <class Op, class T, class Out, bool extras>
constexpr Kernels label_gradient = [] {
  Kernels k = kernels<Op, T, Out, extras>;
  k.label_rows = extras ? nullptr : label_gradients<Op, T, Out>;
  return k;
}();

// The kernels of each operation.
template <Name name, class T, class Out, bool extras>
constexpr Kernels kernels_of;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::softmax, T, Out, extras> = [] {
  Kernels k = kernels<Softmax, T, Out, extras>;
  k.at_once = softmax_at_once<T, Out, extras>;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::softmax_vjp, T, Out, extras> = kernels<SoftmaxVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::log_softmax, T, Out, extras> = kernels<LogSoftmax, T, Out, extras>;
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::log_softmax_vjp, T, Out, extras> = kernels<LogSoftmaxVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::state, T, Out, extras> = state_alone<T, extras>;
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::logsumexp_vjp, T, Out, extras> = kernels<LogsumexpVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::entropy, T, Out, extras> = [] {
  Kernels k = state_alone<T, extras>;
  k.reduce_with_sum = products<T, extras>, k.moved = moved_products;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::entropy_vjp, T, Out, extras> = kernels<EntropyVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::top_k, T, Out, extras> = [] {
  Kernels k = kernels<Softmax, T, Out, extras>;
  k.find = find<T>, k.cut = cut<T>, k.order = order<T>;
  return k;
}();

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_state, T, Out, extras> = [] {
  Kernels k = state_alone<T, extras>;
  k.label_rows = extras ? nullptr : label_states<T, kNothing>;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_state_vjp, T, Out, extras> = label_gradient<LogsumexpVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_sums, T, Out, extras> = [] {
  Kernels k = state_alone<T, extras>;
  k.sums = distances<T, extras>;
  k.label_rows = extras ? nullptr : label_states<T, kDistances>;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_sums_vjp, T, Out, extras> = label_gradient<LabelSumsVjp, T, Out, extras>;

template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_entropy, T, Out, extras> = [] {
  Kernels k = kernels_of<Name::entropy, T, Out, extras>;
  k.label_rows = extras ? nullptr : label_states<T, kProducts>;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::label_entropy_vjp, T, Out, extras> = label_gradient<LabelEntropyVjp, T, Out, extras>;

// --8<-- [start:kl_divergence]
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::kl_divergence, T, Out, extras> = [] {
  Kernels k{};
  k.reduce_two = reduce_divergence<T, extras>, k.combine_two = combine_divergence, k.finish_two = finish_divergence;
  return k;
}();
// --8<-- [end:kl_divergence]
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::kl_divergence_vjp, T, Out, extras> = [] {
  Kernels k{};
  k.write_two = write_divergence<T, Out, extras>, k.fill = fill<LogsumexpVjp, Out>;
  return k;
}();
template <class T, class Out, bool extras>
constexpr Kernels kernels_of<Name::kl_divergence_vjp_other, T, Out, extras> =
    kernels_of<Name::kl_divergence_vjp, T, Out, extras>;

template <class T, class Out>
constexpr void set(KernelTable* table, DTypes dtypes) {
#define JAXSOFT_SET(name, ...)                                                          \
  table->of[false][dtypes][(int)Name::name] = kernels_of<Name::name, T, Out, false>; \
  table->of[true][dtypes][(int)Name::name] = kernels_of<Name::name, T, Out, true>;
  JAXSOFT_ROW_OPERATIONS(JAXSOFT_SET)
#undef JAXSOFT_SET
}

constexpr KernelTable make_table() {
  KernelTable table{};
  set<Float16, Float16>(&table, DTypes::F16);
  set<BFloat16, BFloat16>(&table, DTypes::BF16);
  set<float, float>(&table, DTypes::F32);
  set<double, double>(&table, DTypes::F64);
  set<Float16, float>(&table, DTypes::F16ToF32);
  set<BFloat16, float>(&table, DTypes::BF16ToF32);
  set<float, Float16>(&table, DTypes::F32ToF16);
  set<float, BFloat16>(&table, DTypes::F32ToBF16);
  return table;
}

}  // namespace
}  // namespace JAXSOFT_ISA

#define JAXSOFT_JOIN_(a, b) a##b
#define JAXSOFT_JOIN(a, b) JAXSOFT_JOIN_(a, b)

namespace jaxsoft::cpu {
constexpr KernelTable JAXSOFT_JOIN(kernels_, JAXSOFT_ISA) = JAXSOFT_ISA::make_table();
}  // namespace jaxsoft::cpu
