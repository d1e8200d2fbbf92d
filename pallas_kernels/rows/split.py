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

from . import arithmetic, held
from .memory import load, load_in_every_warp, store
from .tiling import FEW_BYTES


def plan(operation: str, rows: int, n: int, itemsize: int) -> tuple[int, held.Plan] | None:
    """Into how many parts to cut rows, and how to hold a part; None where rows are not to be split."""
    least = 256 << 10 if rows <= 2 else 2 << 20  # bytes: below, clusters fill the GPU as well
    if n * itemsize < least or rows * n * itemsize > FEW_BYTES or operation == "logsumexp_vjp":
        return None
    wanted = 256 if rows == 1 else 128 if rows < 8 else 64
    for parts in (64, 128, 256, 512):
        length, beyond = divmod(n, parts)
        if parts >= wanted and not beyond and length * itemsize % 16 == 0 and length * itemsize <= held.MOST_BYTES:
            found = held.plan(rows * parts, length, itemsize)
            if found and parts % found.rows == 0:
                return parts, found
    return None


def row_kernel(operation: str, rows: int, n: int, dtype: Any, parts: int, plan: held.Plan, interpret: Any = None):
    """The two kernels of an operation that has a reduction.

    Args:
      operation, rows, n, dtype: as for `held.row_kernel`.
      parts: of a row: 64, 128, or a multiple of that, and of plan.rows.
      plan: for rows of n / parts elements.
      interpret: Pallas interpreter parameters.

    Returns:
      A function of the operands of shape (rows, n) and (rows,) that returns a tuple of such.
    """
    of_rows, _, wide, narrow = arithmetic.SIGNATURES[operation]
    reduction = "state" if operation in arithmetic.SCORES else f"{operation}_sum"
    reduce = held.row_kernel(reduction, rows * parts, n // parts, dtype, plan, interpret=interpret)
    full, number = jax.ShapeDtypeStruct((rows * parts, n // parts), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    finish = plgpu.kernel(
        functools.partial(_body, operation, parts, plan),
        out_type=(full,) * wide + (number,) * narrow,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        grid=(rows * parts // plan.rows,),
        grid_names=("block",),
        kernel_name=f"jaxsoft_{operation}_split",
        interpret=interpret,
    )

    def kernel(*operands):
        arrays = [x.reshape(rows * parts, n // parts) for x in operands[:of_rows]]
        states = [v.reshape(rows, parts) for v in reduce(*arrays)]
        results = finish(*arrays, *operands[of_rows:], *states)
        return tuple(y.reshape(rows, -1) for y in results[:wide]) + tuple(results[wide:])

    return kernel


def _body(operation: str, parts: int, plan: held.Plan, *refs):
    in_refs, given_refs, states, out_refs, number_refs = arithmetic.sorted_refs(operation, refs)
    first = lax.axis_index("block") * plan.rows
    row, part = lax.div(first, parts), lax.rem(first, parts)
    totals = arithmetic.total([load_in_every_warp(ref.at[row]) for ref in states])
    if number_refs:

        @pl.when(part == 0)
        def _():
            for ref, value in zip(number_refs, totals, strict=True):
                ref[row] = value

    if out_refs:
        finished = arithmetic.finish(operation, totals, tuple(ref[row] for ref in given_refs), lambda v: v)
        for start in plan.starts(in_refs[0].shape[1]):
            place = pl.ds(first, plan.rows), pl.ds(start, plan.width)
            store(out_refs[0].at[place], finished(*(load(ref.at[place], plan.layout) for ref in in_refs)))
