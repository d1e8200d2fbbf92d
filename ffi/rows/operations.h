// The table of row operations: what an FFI call of each takes and gives, for both platforms. The handlers, the checks
// of their calls and the lists of kernels are made from it. To add an operation, add its record here and its kernels on
// each platform.
//
// This file includes no other, so that code for any instruction set may include it. specification.h makes objects of
// the records.
#pragma once

// The places among the buffers of a call (call.h). No operation has two operands or results of one place.
#define JAXSOFT_ROW_PLACES(place)                                                                              \
  place(first)               /* scores, or the probabilities that softmax_vjp reads instead */                 \
  place(other)               /* the other scores, of operations with two arrays of them */                     \
  place(cotangents)          /* one an element */                                                              \
  place(maximum)             /* the state, with the sum: results of some operations, operands of others */     \
  place(sum)                                                                                                   \
  place(beside)              /* a sum beside the state: label_sums' distances, the products; the divergence */ \
  place(other_reference)     /* what exponentials of the other scores are relative to */                       \
  place(ratio)               /* the logarithm of the other sum of exponentials to that of the scores */        \
  place(cotangent)           /* one a row: of the logsumexp, the entropy or the divergence */                  \
  place(label)               /* a row's label; kNoRow in a row that is not read */                             \
  place(label_score)         /* results of operations with labels */                                           \
  place(count)                                                                                                 \
  place(label_cotangent)     /* operands of their derivatives */                                               \
  place(distance_cotangent)                                                                                    \
  place(entropy_cotangent)   /* the same, where `cotangent` is the logsumexp's */                              \
  place(result)              /* one an element; of top_k, the probabilities of the values */                   \
  place(other_result)        /* one an element of the other scores */                                          \
  place(values)              /* results of top_k */                                                            \
  place(indices)

// The operands and results: name, kind, place. specification.h explains the kinds.
#define JAXSOFT_ROW_OPERANDS(operand)                       \
  operand(scores, row, first)                               \
  operand(probabilities, row, first)                        \
  operand(cotangents, row, cotangents)                      \
  operand(maximum, number, maximum)                         \
  operand(sum, number, sum)                                 \
  operand(products, number, beside)                         \
  operand(cotangent, number, cotangent)                     \
  operand(label, label, label)                              \
  operand(label_score, number, label_score)                 \
  operand(distances, number, beside)                        \
  operand(count, number, count)                             \
  operand(label_cotangent, number, label_cotangent)         \
  operand(distance_cotangent, number, distance_cotangent)   \
  operand(entropy_cotangent, number, entropy_cotangent)     \
  operand(result, row, result)                              \
  operand(other_scores, row, other)                         \
  operand(other_result, row, other_result)                  \
  operand(other_reference, number, other_reference)         \
  operand(ratio, number, ratio)                             \
  operand(divergence, number, beside)                       \
  operand(values, chosen, values)                           \
  operand(chosen_probabilities, chosen_result, result)      \
  operand(indices, index, indices)

// The records: name, struct of the CUDA kernels, operands, results, extras, features. Operations may share a struct.
// The build finds it in a file of cuda/rows/operations, and compiles it for every element type. Some are only names:
// the kernels of TopK are in cuda/rows/top_k, those of KlDivergence in cuda/rows/kl_divergence.cu.
//
// In what follows (m, s) is the state of a row's scores z, which is their maximum and the sum of exp(z - m), and
// p = exp(z - m) / s. An element that is masked is 0 in a result, and -inf in log_softmax's.
//
//   softmax          p.
//   softmax_vjp      scale * p * (g - <p, g>), of the cotangents g.
//   log_softmax      log(p), and the state.
//   log_softmax_vjp  scale * (g - p * sum(g)), of the cotangents g.
//   state            The state.
//   logsumexp_vjp    scale * p * g, of a row's cotangent g.
//   entropy          The state, and the sum of exp(z - m) * (z - m): the products.
//   entropy_vjp      -scale * p * ((z - m) - products / s) * g, of a row's cotangent g.
//   top_k            The k largest scores of a row in descending order, their p, their indices, and the state. Of equal
//                    scores, the lowest index comes first; -0.0 and 0.0 are equal. A row whose m is not finite or whose
//                    s is NaN has no softmax: it gives its first k scores, and NaN for their p.
//   label_state      The state of a row without its label's score, and that score. A label is valid whatever the extras
//                    say. The score is NaN where the label is out of range, but 0 where it is kNoRow.
//   label_state_vjp  p * g, of a row's cotangent g; and at the label, the label's cotangent.
//   label_sums       What label_state gives, and for the scores above -inf the sum of their distances from the label's,
//                    and their number.
//   label_sums_vjp   What label_state_vjp gives, and where the score is above -inf, also the distances' cotangent.
//   label_entropy    What label_state gives, and the products of the row without its label's score.
//   label_entropy_vjp  p * (g - ((z - m) - products / s) * h), of a row's cotangent g and the entropy's cotangent h;
//                    and at the label, the label's cotangent.
//   kl_divergence    Of the softmax p of scores z, and q of the other scores w: the state of z; the other reference o,
//                    which is m where z and w are near each other, and else a number within some tens of the logsumexp
//                    of w; the ratio c, which is the logsumexp of w - o less that of z - m; and the divergence,
//                    sum(p * (log(p) - log(q))). Where z has nothing above -inf, the ratio is the logsumexp of w - o,
//                    and the divergence 0. Where w has nothing above it, o and the ratio are -inf.
//   kl_divergence_vjp  scale * g * p * (-d - divergence) and other_scale * g * (q - p), of a row's cotangent g, with
//                    d = ((w - o) - (z - m)) - c, or (w - z) - c if o is m.
//   kl_divergence_vjp_other  The latter alone.
#define JAXSOFT_ROW_OPERATIONS(record)                                                                                 \
  record(softmax, Softmax, {scores}, {result}, {scale, limit, where, bias}, {trailing, workspace})                     \
  record(softmax_vjp, SoftmaxVjp, {probabilities, cotangents}, {result}, {scale, limit},                               \
         {masked, trailing, workspace})                                                                                \
  record(log_softmax, LogSoftmax, {scores}, {result, maximum, sum}, {scale, limit, where, bias},                       \
         {trailing, workspace})                                                                                        \
  record(log_softmax_vjp, LogSoftmaxVjp, {scores, maximum, sum, cotangents}, {result}, {scale, limit, where},          \
         {trailing, workspace})                                                                                        \
  record(state, StateOf, {scores}, {maximum, sum}, {scale, limit, where, bias}, {trailing, workspace})                 \
  record(logsumexp_vjp, LogsumexpVjp, {scores, maximum, sum, cotangent}, {result}, {scale, limit, where, bias},        \
         {trailing})                                                                                                   \
  record(entropy, Entropy, {scores}, {maximum, sum, products}, {scale, limit, where}, {workspace})                     \
  record(entropy_vjp, EntropyVjp, {scores, maximum, sum, products, cotangent}, {result},                               \
         {scale, limit, where, bias}, {})                                                                              \
  record(top_k, TopK, {scores}, {values, chosen_probabilities, indices, maximum, sum}, {}, {workspace})                \
  record(label_state, StateOf, {scores, label}, {maximum, sum, label_score}, {limit, where}, {cap, workspace})         \
  record(label_state_vjp, LogsumexpVjp, {scores, label, maximum, sum, cotangent, label_cotangent}, {result},           \
         {limit, where}, {cap})                                                                                        \
  record(label_sums, LabelSums, {scores, label}, {maximum, sum, label_score, distances, count},                        \
         {limit, where}, {cap, workspace})                                                                             \
  record(label_sums_vjp, LogsumexpVjp,                                                                                 \
         {scores, label, maximum, sum, cotangent, label_cotangent, distance_cotangent}, {result},                      \
         {limit, where}, {cap})                                                                                        \
  record(label_entropy, Entropy, {scores, label}, {maximum, sum, label_score, products}, {limit, where},               \
         {cap, workspace})                                                                                             \
  record(label_entropy_vjp, EntropyVjp,                                                                                \
         {scores, label, maximum, sum, products, cotangent, label_cotangent, entropy_cotangent}, {result},             \
         {limit, where}, {cap})                                                                                        \
  /* --8<-- [start:kl_divergence] */                                                                                   \
  record(kl_divergence, KlDivergence, {scores, other_scores}, {maximum, sum, other_reference, ratio, divergence},      \
         {scale, limit, where, other_scale}, {workspace})                                                              \
  record(kl_divergence_vjp, KlDivergence,                                                                              \
         {scores, other_scores, maximum, sum, other_reference, ratio, divergence, cotangent}, {result, other_result},  \
         {scale, limit, where, other_scale}, {})                                                                       \
  record(kl_divergence_vjp_other, KlDivergence,                                                                        \
         {scores, other_scores, maximum, sum, other_reference, ratio, divergence, cotangent}, {other_result},          \
         {scale, limit, where, other_scale}, {})
// --8<-- [end:kl_divergence]

namespace jaxsoft {

#define JAXSOFT_ENUMERATOR(name, ...) name,
enum class Name { JAXSOFT_ROW_OPERATIONS(JAXSOFT_ENUMERATOR) };
#undef JAXSOFT_ENUMERATOR

#define JAXSOFT_ONE(...) + 1
inline constexpr int kOperations = 0 JAXSOFT_ROW_OPERATIONS(JAXSOFT_ONE);
#undef JAXSOFT_ONE

}  // namespace jaxsoft
