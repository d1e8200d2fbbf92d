"""Every public function in every dtype: values, gradients, tangents, maps and their gradients, beside the definitions.

By default each function runs with each implementation through every transformation, in float32, and one whose numbers
are traced in another dtype as well. The others with all their options and dtypes have test modules of their own, so
they run here when asked to; one that is new in calls.py does by default.
"""

import jax
import pytest
from calls import CALLS, case_of, choices
from cases import Case
from common import OPS, each_dtype_in_turn, precision, served

TESTED = (*OPS, "entropy", "integer", "dense", "kl", "linear", "top_k", "write", "fold")
TESTED += ("attention", "ring attention", "paged attention")
CHOICES = choices(lambda name: name.split(",")[0] in TESTED and name != "integer, numbers")


@pytest.mark.parametrize(("name", "implementation"), CHOICES)
@each_dtype_in_turn
def test_in_one_program(name, implementation, dtype):
    """Under jit, all of what does not change the operands, and all of what maps them."""
    with precision(dtype), served(implementation):
        case = case_of(name, implementation, dtype)
        mapped = case.through("vmap of the last axis")
        for what, of in (("value, grad and jvp", case), ("map, its grad and jvp", mapped)):
            Case.together(f"{what} of {name}", [of, of.through("grad"), of.through("jvp")]).check()


# A call of each function is without options, and the name of that has no comma. None is one of the implementations.
PLAIN = [choice.values for choice in choices(lambda name: False) if "," not in choice.values[0]]
PLAIN = [(name, i) for name, i in PLAIN if i is not None or (name, "xla") not in PLAIN]


def test_every_function_has_a_plain_call():
    assert {name for name, _ in PLAIN} == {name.split(",")[0] for name in CALLS}


@pytest.mark.parametrize(("name", "implementation"), PLAIN, ids=str)
def test_every_implementation(name, implementation):
    """Each function with each implementation, those too that other tests leave out by default."""
    with precision("float32"), served(implementation):
        case = case_of(name, implementation, "float32")
        mapped = case.through("vmap of the last axis")
        recomputed = case.through("checkpoint").through("grad")
        Case.together(f"{name}, its jvp, grad and checkpoint", [case, case.through("jvp"), recomputed]).check()
        Case.together(f"{name}, its map and the grad of that", [mapped, mapped.through("grad")]).check()


@pytest.mark.parametrize(("name", "implementation"), CHOICES)
def test_eager(name, implementation):
    """Without jit, and mapped by a scan."""
    with served(implementation):
        case = case_of(name, implementation, "float32")
        case.check(lambda f: f)
        case.through("map").through("grad").check(jax.jit)
