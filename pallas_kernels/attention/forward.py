"""Attention forward on Hopper: the output and the log-sum-exp of every query, in one read of what matters. With a bias,
the residual of the log-sum-exp as well (see form.py).

A block, whose work is in forward_block.py, takes some queries of one head, an item, and mostly others after them
(schedule.py). One warp group copies tiles of keys and values, and of a bias and mask (extra_tiles.py), to rings in
shared memory; the others have 64 queries each, whose state (m, s, o) they keep in registers: m is the maximum, in base
2 or with a bias natural, s the sum of exp(score - m), and o the sum of values weighted by it. Where there are two of
them, one multiplies on the tensor cores while the other computes exponentials: a barrier makes them take turns. Of
three, the hardware finds one that can multiply.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft import fold
from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._core import gpus
from jaxsoft._core.operation import Function

from ..blocks import kernel_of_blocks, roles, tiled
from .extra_tiles import ExtraRings
from .forward_block import ForwardBlock, Scratch
from .operands import head_size, padded, padded_head, padded_length
from .plan import ForwardPlan, forward_plan
from .ranges import Shape, segment_ranges
from .schedule import ordered, schedule
from .scores import Scores, has_residual, prepare


def forward(
    form: AttentionForm,
    operands: Sequence[jax.core.ShapedArray],
    plan: ForwardPlan | None = None,
    blocks: int | None = None,
) -> Function:
    """The function of (query, key, value, *extras) that returns the output, the log-sum-exp and its residual, which is
    0 but with a bias, and the residual of an output that is rounded.

    Args:
      form: the call's.
      operands: the types of the operands.
      plan: the sizes of tiles, for tests; None for those of plan.py.
      blocks: how many run at a time, for tests; None for one on each multiprocessor.
    """
    query, key, value = operands[:3]
    plan = plan or forward_plan(query.shape[3], value.shape[3], causal=form.right is not None)
    assert plan
    batch, length, heads, _ = query.shape
    shape = Shape(length, key.shape[1], plan.query_rows, plan.key_tile)
    size = value.shape[3]
    query_head, value_head = head_size(query.shape[3]), head_size(size)
    axes = {"batch": batch, "heads": heads, "queries": -(-length // plan.block_rows)}
    direct = form.dtype == jnp.float32
    whole = axes["queries"] * plan.block_rows
    rows = whole if direct else padded_length(length)
    columns = value_head if direct else padded_head(size)
    # Copies along one dimension do not stop at its end: on an H100 they went on into the next head's numbers.
    numbers = jax.ShapeDtypeStruct((batch, heads, whole), jnp.float32)
    output = jax.ShapeDtypeStruct((batch, rows, heads, columns), form.dtype)
    results = {"output": output, "lse": numbers}
    if has_residual(form):
        results["lse_residual"] = numbers
    if form.rounded:
        results["output_residual"] = jax.ShapeDtypeStruct(output.shape, query.dtype)

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):  # the kernel counts in 32 bits
            return attend(*arrays)

    def attend(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        extras = form.named(arrays)
        prepared = prepare(form, extras, shape)
        segments = segment_ranges(extras, Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS, plan.block_rows, plan.key_tile)
        items = ordered(form, axes, length, prepared)
        assigned = schedule(form, plan, shape, items, blocks or gpus.multiprocessors())
        free_bytes = plan.free_bytes(query_head, value_head)
        rings = ExtraRings.fitting(prepared, (plan.query_rows, plan.key_tile), plan.groups, free_bytes)
        output_bytes = 2 * plan.block_rows * value_head
        in_queries = value_head == query_head and rings.bytes + output_bytes > free_bytes
        scratch = Scratch(
            queries=tiled((plan.groups, plan.query_rows, query_head), query.dtype),
            keys=tiled((plan.slots, plan.key_tile, query_head), query.dtype),
            values=tiled((plan.slots, plan.key_tile, value_head), query.dtype),
            output=None if in_queries else tiled((plan.groups, plan.query_rows, value_head), query.dtype),
            lse=plgpu.SMEM((plan.groups, plan.query_rows), jnp.float32),
            queries_there=plgpu.Barrier(num_barriers=plan.groups),
            keys_there=plgpu.Barrier(num_barriers=plan.slots),
            values_there=plgpu.Barrier(num_barriers=plan.slots),
            keys_read=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.slots),
            values_read=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.slots),
            turns=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=1),
            extras=rings.scratch(),
        )

        def body(query: Any, key: Any, value: Any, extras: Any, segments: Any, schedule: Any, *written: Any) -> None:
            named = dict(zip(prepared, extras, strict=True))

            def run(scratch: Scratch) -> None:
                block = ForwardBlock(
                    form=form,
                    plan=plan,
                    items=items,
                    scores=Scores(form, shape, named),
                    refs=(query, key, value),
                    results=dict(zip(results, written, strict=True)),
                    schedule=schedule,
                    segments=segments,
                    scratch=scratch,
                    extra_tiles=rings.tiles(named, scratch.extras),
                )
                roles(plan.groups, lambda: block.compute(lax.axis_index("warp_group")), block.copy)

            pl.run_scoped(run, scratch, collective_axes="warp_group")

        kernel = kernel_of_blocks(
            body,
            "attention",
            plan.groups,
            {"block": len(assigned[1]) - 1 if assigned else math.prod(axes.values())},
            {"reduction_scratch_bytes": 0},  # a row of scores is in one warp
            out_type=tuple(results.values()),
        )
        found = kernel(
            *map(padded, arrays[:3]), [*prepared.values()], segments, assigned and [*map(jnp.asarray, assigned)]
        )
        given = dict(zip(results, found, strict=True))
        outputs = [given[name][:, :length, :, :size] for name in ("output", "output_residual") if name in given]
        lse = given["lse"][:, :, :length]
        lse_residual = (
            fold.reference(given["lse_residual"][:, :, :length]) if "lse_residual" in given else jnp.zeros_like(lse)
        )
        return outputs[0], lse, lse_residual, *outputs[1:]

    return function
