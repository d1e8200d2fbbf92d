"""The operations that the C++ and CUDA libraries were built with are those of the records, and a few more of CUDA's.

Those of attention, which the CUDA library may have as well, are looked at in `tests/attention/test_attention_ffi.py`.
"""

import ctypes

import pytest

from jaxsoft._core import library
from jaxsoft._rows.operations import OPERATIONS
from jaxsoft._rows.spec import Reduction, RowExtra, RowKind, RowSpec

KINDS = {
    RowKind.SCORES: "row",
    RowKind.PROBABILITIES: "row",
    RowKind.COTANGENT: "row",
    RowKind.ROW: "row",
    RowKind.STATISTIC: "number",
    RowKind.LABEL: "label",
    RowKind.VALUES: "chosen",
    RowKind.INDICES: "index",
    RowKind.CHOSEN_PROBABILITIES: "chosen_result",
}


def specification(operation: RowSpec) -> str:
    """The line that a library has for an operation."""
    operands, results = (
        ",".join(f"{operand.name}:{KINDS[operand.kind]}" for operand in side)
        for side in (operation.operands, operation.results)
    )
    extras = ",".join(extra.name.lower() for extra in RowExtra if extra in operation.extras)
    flags = {
        "masked": operation.may_be_masked,
        "cap": operation.may_be_capped,
        "trailing": operation.any_axis,
        "workspace": operation.reduces is not Reduction.NOTHING,
    }
    return f"{operation.name}({operands})->({results}) extras={extras} " + " ".join(
        f"{name}={value:d}" for name, value in flags.items()
    )


OTHERS = [
    "sample(logits,uniform,temperature,top_p,min_p)->(token,probability) k",
    "top_k_candidates(scores)->(candidates) k",
    "top_k_of_candidates(candidates)->(values,chosen_probabilities,indices,maximum,sum) part",
]


WEIGHT_GRADIENT = "weight_gradient_in_place(hidden,gradients)->(gradients)"


@pytest.mark.parametrize("platform", library.PLATFORMS)
def test_libraries_have_the_operations_of_the_records(platform):
    path = library.find(platform)
    if path is None:
        pytest.skip(f"libjaxsoft_{platform} was not built")
    expected = [specification(operation) for operation in OPERATIONS if operation.has_kernels]
    expected += OTHERS * (platform == "cuda")
    lines = library.specification(ctypes.CDLL(str(path)))
    # Whether it has this one and those of attention depends on the GPUs that it was built for.
    expected += [line for line in lines if line == WEIGHT_GRADIENT]
    assert sorted(line for line in lines if "attention" not in line) == sorted(expected)
