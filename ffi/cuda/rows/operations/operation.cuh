// What a row operation is to the kernels: a struct that says what is accumulated over a row, and what is written from
// it.
//
// An operation derives from `Operation`, overrides the constants that differ, and has
//
//   Part                          what a row, or a part of one, is reduced to; the kernels combine parts
//   Values                        what the results of a row are computed from
//   fill()                        the element that changes no reduction
//   finish(part, arguments, row, first) -> Values    the thread with `first` set writes the row's statistics
//
// Where the label's score is a result, `finish` can also be given a function that returns the element at the label.
//
// If it reduces rows, it also has
//
//   Thread                        what one thread accumulates before it becomes a Part
//   accumulate(thread, a, b, form)   adds some packs to what a thread has
//
// and if it writes whole rows
//
//   value(values, x, b)           one result; x is the score, or the element of `a` where `a` makes no scores; the
//                                 kernels multiply a gradient by the scale and the slope of the cap
//   ordinary(values)              whether `value` gives masked_value where the score is -inf and b is 0
#pragma once

#include "../../fold.cuh"
#include "../../pack.cuh"
#include "../arguments.cuh"

namespace jaxsoft::cuda {

struct Operation {
  static constexpr int operands = 1;               // arrays of whole rows that are read: a, or a and b
  static constexpr bool reduces = false;           // whether rows are reduced at all
  static constexpr bool scores = false;            // whether the reduction is the fold of scores to their state
  static constexpr bool separates_maximum = false;       // whether that state keeps one score apart that is its maximum
  static constexpr bool sums = false;              // whether the reduction has sums beside the state
  static constexpr bool compensates = false;       // whether sums are compensated in short rows, too
  static constexpr bool reads_a_to_reduce = true;  // whether the reduction reads a, or only b
  static constexpr bool writes = false;            // whether there is a result of whole rows
  static constexpr bool gradient = false;          // whether that result is a gradient with respect to x
  static constexpr bool a_is_scores = false;       // whether a is x, from which the extras make scores
  static constexpr bool labelled = false;          // whether a call may have a label for each row
  static constexpr bool has_quick = false;         // whether 16-bit results have a formula with fewer instructions
  static constexpr double masked_value = 0;        // the result for a masked element
};

// Adds the terms pairwise, as a tree. The terms are overwritten.
template <int count, class A>
__device__ A tree_sum(A (&x)[count]) {
#pragma unroll
  for (int left = count; left > 1; left = (left + 1) / 2)
#pragma unroll
    for (int k = 0; k < left / 2; k++) x[k] += x[k + (left + 1) / 2];
  return x[0];
}

}  // namespace jaxsoft::cuda
