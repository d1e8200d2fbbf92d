// The fold over states (m, s) that every operation here is.
//
// All functions are static, so that each instruction set that this is compiled for keeps its own copy: the linker can
// then never hand code with AVX-512 instructions to the baseline build.
#pragma once

#include <math.h>

namespace jaxsoft::cpu {

// The state of a set of scores: their maximum m, and s, the sum of exp(x - reference(m)). Sums are in f64, whatever the
// scores are. A plain sum is a state whose m is 0.
struct State {
  double m, s;
};

inline constexpr double infinity = __builtin_inf();

// What the scores' exponentials are taken relative to: 0 where m is not finite, so that no exp sees inf - inf.
static inline double reference(double m) { return m - m == 0 ? m : 0; }

// exp(m - reference) of an m of -inf is 0, which makes (-inf, 0) the identity. A NaN in s stays.
static inline State combine(State a, State b) {
  double m = a.m > b.m ? a.m : b.m, ref = reference(m);
  return {m, a.s * exp(a.m - ref) + b.s * exp(b.m - ref)};
}

}  // namespace jaxsoft::cpu
