"""Second derivatives in both modes and mixed, of a non-linear function of every result, beside the definitions.

A derivative that holds constant what is not, or the other way round, is right where the result enters linearly, as the
mean of a loss does, and wrong everywhere else.
"""

import jax
import numpy as np
import pytest
from calls import CASES
from cases import Case
from common import IMPLEMENTATIONS, served, slow

ORDERS = [(a, b) for a in ("grad", "jvp") for b in ("grad", "jvp")]
SLOW = (None, "xla", "reference")
STAND_FOR_THE_OTHERS = (
    "softmax, extras",
    "logsumexp, extras",
    "integer, smoothing",
    "integer, weights, mask",
    "dense, weights, mask",
    "linear, smoothing",
    "top_k",
    "fold",
)
CHOICES = [
    pytest.param(name, implementation, marks=slow if implementation in SLOW or name not in STAND_FOR_THE_OTHERS else ())
    for name in CASES
    for implementation in (["ffi"] if name.startswith(("linear", "fold")) else IMPLEMENTATIONS)
]


@pytest.mark.parametrize(("name", "implementation"), CHOICES)
def test_second_order(name, implementation):
    """Forward over reverse, reverse over forward, and each over itself."""
    x64 = implementation != "pallas"  # which has no f64
    with jax.enable_x64(x64), served(implementation):
        ours, theirs, operands = CASES[name](implementation)
        operands = [v if x64 else v.astype(np.float32) for v in operands]
        cases = [Case(name, ours, theirs, operands).through(a).through(b) for a, b in ORDERS]
        together = Case(
            f"{name}, every order of two modes",
            lambda *v: [case.ours(*v) for case in cases],
            lambda *v: [case.theirs(*v) for case in cases],
            operands,
        )
        together.check()
