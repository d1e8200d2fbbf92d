"""The split reduction: few long rows, each cut into parts over many blocks, in two launches.

The first launch reduces every part as if it were a row. The second combines the states of a row's parts, in every block
that writes one of them, and finishes the part, which it reads again, mostly from the L2. The states pass between the
launches through a workspace of XLA's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._rows.spec import RowSpec

from .. import versions
from . import operations, register_rows
from .memory import load, load_in_every_warp, store
from .operations import References, Signature
from .plan import SplitPlan


def row_kernel(operation: RowSpec, rows: int, n: int, dtype: Any, plan: SplitPlan):
    """The two kernels of an operation that has a reduction.

    Args:
      operation, rows, n, dtype: as for `register_rows.row_kernel`.
      plan: how rows are split.

    Returns:
      A function of the operands of shape (rows, n) and (rows,) that returns a tuple of such.
    """
    signature, parts = Signature.of(operation), plan.parts
    reduction = operations.reduction_of(operation)
    reduce = register_rows.row_kernel(reduction, rows * parts, n // parts, dtype, plan.part)
    full, number = jax.ShapeDtypeStruct((rows * parts, n // parts), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    finish = versions.kernel(
        functools.partial(_finish_body, operation, plan),
        out_type=(full,) * signature.row_results + (number,) * signature.number_results,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(rows * parts // plan.part.rows,),
        grid_names=("block",),
        kernel_name=f"jaxsoft_{operation.name}_split",
    )

    def kernel(*operands):
        arrays = [x.reshape(rows * parts, n // parts) for x in operands[: signature.rows]]
        states = [v.reshape(rows, parts) for v in reduce(*arrays)]
        results = finish(*arrays, *operands[signature.rows :], *states)
        wide = signature.row_results
        return tuple(y.reshape(rows, -1) for y in results[:wide]) + tuple(results[wide:])

    return kernel


def _finish_body(operation: RowSpec, plan: SplitPlan, *all_refs):
    refs = References.of(operation, all_refs)  # the states of parts take the place of extras
    reduction = operations.fold_of(operation)
    assert reduction
    first = lax.axis_index("block") * plan.part.rows
    row, part = lax.div(first, plan.parts), lax.rem(first, plan.parts)
    total = reduction.total(tuple(load_in_every_warp(ref.at[row]) for ref in refs.extras))
    if refs.number_results:

        @pl.when(part == 0)
        def _():
            for ref, value in zip(refs.number_results, total, strict=True):
                ref[row] = value

    if refs.row_results:
        finished = operations.finish(operation, total, tuple(ref[row] for ref in refs.numbers), lambda v: v)
        layout = register_rows.layout(plan.part)
        for start in plan.part.starts(refs.rows[0].shape[1]):
            place = pl.ds(first, plan.part.rows), pl.ds(start, plan.part.width)
            store(refs.row_results[0].at[place], finished(*(load(ref.at[place], layout) for ref in refs.rows)))
