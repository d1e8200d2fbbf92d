"""Second derivatives in both modes and mixed, of a non-linear function of every result, beside the definitions.

A derivative that holds constant what is not, or the other way round, is right where the result enters linearly, as the
mean of a loss does, and wrong everywhere else.
"""

import dataclasses

import jax
import numpy as np
import pytest
from calls import CALLS, case_of, choices
from cases import Case
from common import served, some

ORDERS = [(a, b) for a in ("grad", "jvp") for b in ("grad", "jvp")]
# The others run when asked to, and so do those whose derivatives are made of these.
FAST = ("softmax, extras", "integer, weights, mask", "kl, scale, mask", "linear, smoothing", "top_k", "fold")
FAST += ("integer, numbers, entropy", "linear, numbers, mean")
OTHERS = ("log_softmax, extras", *(name for name in CALLS if "extras" not in name))
CHOICES = choices(lambda name: name in OTHERS and name not in FAST)


@pytest.mark.costly(1)
@pytest.mark.parametrize(("name", "implementation"), CHOICES)
def test_second_order(name, implementation):
    """Forward over reverse, reverse over forward, and each over itself."""
    x64 = implementation != "pallas"  # which has no f64
    with jax.enable_x64(x64), served(implementation):
        case = case_of(name, implementation, np.float64 if x64 else np.float32)
        cases = [case.through(a).through(b) for a, b in ORDERS]
        Case.together(f"{name}, every order of two modes", cases).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("name", some(FAST, ["softmax, extras", "integer, weights, mask", "top_k"]))
def test_second_order_of_a_loop(name):
    """JAX 0.11 forgets custom derivatives of what is in the body of a loop once that has been differentiated."""
    with jax.enable_x64(True):
        case = case_of(name, None, np.float64)

        def looped(*operands):
            once = jax.tree.map(lambda x: x[None], operands)
            return jax.tree.map(lambda y: y[0], jax.lax.scan(lambda _, v: (None, case.ours(*v)), None, once)[1])

        in_loop = dataclasses.replace(case, ours=looped)
        Case.together(f"{name} in a loop", [in_loop.through("grad").through(mode) for mode in ("grad", "jvp")]).check()
