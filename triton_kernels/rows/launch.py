"""Launches a kernel on JAX arrays. This is the only file that knows jax-triton."""

import inspect
import math

import jax
import jax_triton

from jaxsoft._core.gpus import Gpu
from jaxsoft._rows.spec import RowKind, RowSpec
from jaxsoft.fold import accumulator

from . import kernels
from .plan import TritonPlan, of_call

# jax-triton 0.4 renamed the argument that takes the results' types.
_RESULTS = next(
    name for name in ("out_type", "out_shape") if name in inspect.signature(jax_triton.triton_call).parameters
)


# --8<-- [start:call]
def call(operation: RowSpec, gpu: Gpu, *operands: jax.Array, cut: TritonPlan | None = None) -> tuple[jax.Array, ...]:
    """Runs an operation in its plain form.

    Args:
      operation: which.
      gpu: that the kernel is compiled for.
      operands: those of the operation, of shape (..., n), or (...) for one number a row.
      cut: how the work is cut up, if not as `plan` says.
    """
    x = operands[0]
    *leading, n = x.shape
    rows = math.prod(leading)
    cut = cut or of_call(gpu.generation, operands)
    full = jax.ShapeDtypeStruct((rows, n), x.dtype)
    statistic = jax.ShapeDtypeStruct((rows,), accumulator(x.dtype))
    results = tuple({RowKind.ROW: full, RowKind.STATISTIC: statistic}[kind] for kind in operation.result_kinds)
    returned = jax_triton.triton_call(
        rows,
        *(v.reshape(full.shape if v.ndim == x.ndim else statistic.shape) for v in operands),
        kernel=getattr(kernels, f"{operation.name}_kernel"),
        grid=(-(-rows // cut.rows),),
        name=f"jaxsoft_{operation.name}",
        num_warps=cut.warps,
        compute_capability=gpu.capability,
        plan=cut,
        **{_RESULTS: results},
    )
    return tuple(v.reshape(*leading, *v.shape[1:]) for v in returned)
    # --8<-- [end:call]
