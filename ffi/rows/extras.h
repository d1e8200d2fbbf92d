// Extras: operands that change what a row's scores are, or which of them count. They may follow an operation's own
// operands, and each may be broadcast over leading dimensions. The scores are z = x * scale + bias, and the other
// scores y * other_scale; the valid elements are those before the limit whose `where` is true.
//
// read_extras.h reads those of a call. The kernels include this file alone, as XLA's headers take long to compile.
#pragma once

#include <cstdint>

#include "limits.h"

namespace jaxsoft {

// One extra of a call. A stride is counted in elements, and is 0 in a group of dimensions that it is broadcast over.
struct Extra {
  const void* data = nullptr;  // null where the call has no such extra
  int64_t stride[kGroups] = {};
};

// The extras of a call. Neighbouring leading dimensions over which the same extras are broadcast make one group, so a
// mask over (batch, 1, query) beside a scale of (1, head, 1) makes three. Group 0 is the innermost.
struct Extras {
  int groups = 0;
  int64_t size[kGroups] = {};
  int64_t divisor[kGroups] = {};  // rows from one step in a group to the next: the product of the sizes inside it
  Extra scale, limit, where, bias, other_scale;

  // The element at which a row's part of an extra begins.
  int64_t offset(const Extra& extra, int64_t row) const {
    int64_t sum = 0;
    for (int i = 0; i < groups; i++) sum += row / divisor[i] % size[i] * extra.stride[i];
    return sum;
  }
};

}  // namespace jaxsoft
