"""Every public function in every dtype: values, gradients, tangents, maps and their gradients, beside the definitions.

Functions that have test modules of their own run here when asked to; one that is new in calls.py runs by default.
"""

import jax
import pytest
from calls import case_of, choices
from cases import Case
from common import OPS, each_dtype_in_turn, precision, served

KNOWN = (*OPS, "integer", "dense", "linear", "top_k", "attention", "ring attention", "paged attention", "write", "fold")
CHOICES = choices(lambda name: name.split(",")[0] in KNOWN)


@pytest.mark.cover()
@pytest.mark.parametrize(("name", "implementation"), CHOICES)
@each_dtype_in_turn
def test_in_one_program(name, implementation, dtype):
    """Under jit, all of what does not change the operands, and all of what maps them."""
    with precision(dtype), served(implementation):
        case = case_of(name, implementation, dtype)
        mapped = case.through("vmap of the last axis")
        for what, of in (("value, grad and jvp", case), ("map, its grad and jvp", mapped)):
            Case.together(f"{what} of {name}", [of, of.through("grad"), of.through("jvp")]).check()


@pytest.mark.parametrize(("name", "implementation"), CHOICES)
def test_eager(name, implementation):
    """Without jit, and mapped by a scan."""
    with served(implementation):
        case = case_of(name, implementation, "float32")
        case.check(lambda f: f)
        case.through("map").through("grad").check(jax.jit)
