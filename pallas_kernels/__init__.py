"""`implementation="pallas"`: row operations and attention as Pallas kernels for data-centre GPUs from Hopper on.

`rows.register_rows` takes rows that fit the registers of a block, `rows.tiled` longer ones, in shared memory, and
`rows.split` a few of these, cut over many blocks. `rows.choice` says what they can serve, and which of them does,
`rows.plan` how rows are cut up, and `rows.sizes` has the sizes for each generation of GPUs. `attention` has the like
for attention, and `head` for the scores of a linear layer. To import Pallas takes half as long as to import JAX, so
that waits until a kernel is asked for, and no GPU is touched before.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from jaxsoft._core import gpus
from jaxsoft._core.operation import Function
from jaxsoft._rows.forms import RowForm, RowKernels
from jaxsoft._rows.spec import RowSpec

if TYPE_CHECKING:
    from jaxsoft._attention.spec import AttentionSpec


_RUN_WITH = 0, 11, 2  # the oldest version of JAX with which these kernels were run on a GPU
_ROWS_LOWERED_BY = 0, 11, 1  # and that which can lower those for rows: before, not those of one row a block
BY_NAME_ONLY = (
    None
    if jax.__version_info__ >= _RUN_WITH
    else f"its kernels were compiled, but never run, with JAX {jax.__version__}, so they serve calls that name it alone"
)


def unavailable(platform: str) -> str | None:
    """None, or why the kernels cannot run on a platform."""
    if platform != "cuda":
        return "Pallas Mosaic GPU kernels run on NVIDIA GPUs only"
    from .rows import sizes

    found = gpus.targets()
    if not found:
        return "there is no NVIDIA GPU here"
    for kind, gpu in found.items():
        if gpu is None or gpu.generation not in sizes.SIZES:
            this = f"{kind} ({gpu.version})" if gpu else kind
            return f"it needs a data-centre GPU from Hopper on (compute capability 9 or 10); this is {this}"
    return None


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    if jax.__version_info__ < _ROWS_LOWERED_BY:
        return f"JAX {jax.__version__} cannot lower its kernels for rows, as JAX 0.11.1 and later can"
    from .rows import choice

    return choice.unsupported(operands)


def is_fastest(operation: RowSpec, form: RowForm, platform: str, operands: Sequence[jax.core.ShapedArray]) -> bool:
    """Whether these kernels are faster than all others."""
    del platform
    from .rows import choice

    return choice.is_fastest(operation, form, operands)


def kernel(
    operation: RowSpec, form: RowForm, platform: str, operands: Sequence[jax.core.ShapedArray]
) -> Function | str:
    """The kernel for an operation in this form, or why it has to be composed."""
    del platform
    from .rows import choice

    return choice.kernel(operation, form, operands)


def describe(operation: RowSpec, form: RowForm, platform: str, operands: Sequence[jax.core.ShapedArray]) -> str:
    """The kernel's name, and how it cuts up its work, in words."""
    del platform
    from .rows import choice

    return choice.describe(operation, form, operands)


def attention_unsupported(operation: "AttentionSpec", operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels of attention cannot serve an operation with such operands."""
    from .attention import choice

    return choice.unsupported(operation.form, operands)


def attention_kernels(operation: "AttentionSpec", operands: Sequence[jax.core.ShapedArray]) -> Function:
    """The kernels for an operation of attention."""
    from jaxsoft._attention.spec import AttentionPullback

    from .attention import backward, forward

    form = operation.form
    given = operands[: len(form.names)]
    if not isinstance(operation, AttentionPullback):
        return forward.forward(form, given)
    gradients = backward.backward(form, given, operation.wrt)

    def pullback(*arrays):
        *given, output, lse, lse_residual, delta, cotangent = arrays
        del output  # delta has what is needed of it
        return gradients(*given, lse, lse_residual, delta, cotangent)

    return pullback


def describe_attention(operation: "AttentionSpec", operands: Sequence[jax.core.ShapedArray]) -> str:
    """The names of the kernels, and how they cut up their work, in words."""
    from jaxsoft._attention.spec import AttentionPullback

    from .attention import choice

    wrt = operation.wrt if isinstance(operation, AttentionPullback) else None
    return choice.describe(operation.form, operands, wrt)


def head_unsupported(hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
    """None, or why the kernels for the scores of a linear layer cannot take its operands."""
    from .head import plan

    return plan.unsupported(hidden, weight)


def describe_head(kernel: str) -> str:
    """The name of one of these kernels, and how it cuts up its work, in words."""
    from .head import plan

    cut = plan.head_plan()
    return (
        f"jaxsoft_head_{kernel}: tiles of {cut.block_rows} rows and {cut.classes} classes, by {cut.groups} warp groups"
    )


ROWS = RowKernels(kernel, unsupported, is_fastest=is_fastest, describe=describe)
