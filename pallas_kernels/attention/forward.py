"""Attention forward on Hopper: the output and the log-sum-exp of every query, in one read of what matters. With a bias,
the residual of the log-sum-exp as well (see form.py).

A block, whose work is in forward_block.py, takes some queries of one head, an item, and mostly others after them
(schedule.py). One warp group copies tiles of keys and values, and of a bias and mask (extra_tiles.py), to rings in
shared memory; the others have 64 queries each, whose state (m, s, o) they keep in registers: m is the maximum, in base
2 or with a bias natural, s the sum of exp(score - m), and o the sum of values weighted by it. Where there are two of
them, one multiplies on the tensor cores while the other computes exponentials: a barrier makes them take turns. Of
three, the hardware finds one that can multiply.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft import fold
from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._core import gpus

from ..blocks import tiled
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
    interpret: Any = None,
    blocks: int | None = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of (query, key, value, *extras) that returns the output, the log-sum-exp and its residual, which is
    0 but with a bias, and the residual of an output that is rounded.

    Args:
      form: the call's.
      operands: the types of the operands.
      plan: the sizes of tiles, for tests; None for those of plan.py.
      interpret: Pallas interpreter parameters, for tests on a CPU.
      blocks: how many run at a time, for tests; None for one on each multiprocessor.
    """
    query, key, value = operands[:3]
    plan = plan or forward_plan(query.shape[3], value.shape[3], causal=form.right is not None)
    assert plan
    batch, length, heads, _ = query.shape
    shape = Shape(length, key.shape[1], plan.query_rows, plan.key_tile)
    size = value.shape[3]
    axes = {"batch": batch, "heads": heads, "queries": -(-length // plan.block_rows)}
    direct = form.dtype == jnp.float32
    whole = axes["queries"] * plan.block_rows
    rows = whole if direct else padded_length(length)
    columns = head_size(size) if direct else padded_head(size)
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
        names, refs = tuple(prepared), list(prepared.values())
        has_segments = Extra.QUERY_SEGMENTS in extras
        if has_segments:
            refs.append(
                segment_ranges(extras[Extra.QUERY_SEGMENTS], extras[Extra.KEY_SEGMENTS], plan.block_rows, plan.key_tile)
            )
        items = ordered(form, axes, length, prepared)
        assigned = schedule(form, plan, shape, items, blocks or gpus.multiprocessors())
        if assigned:
            refs += [jnp.asarray(part) for part in assigned]
        kernel = plgpu.kernel(
            functools.partial(
                _entry,
                form,
                plan,
                items,
                shape,
                names,
                tuple(results),
                has_segments,
                assigned is not None,
                interpret is not None,
                plan.free_bytes(head_size(query.shape[3]), head_size(size)),
            ),
            out_type=tuple(results.values()),
            grid=(len(assigned[1]) - 1 if assigned else math.prod(axes.values()),),
            grid_names=("block",),
            num_threads=plan.groups + 1,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                reduction_scratch_bytes=0,  # a row of scores is in one warp
            ),
            kernel_name="jaxsoft_attention",
            interpret=interpret,
        )
        found = kernel(*(padded(array) for array in arrays[:3]), *refs)
        given = dict(zip(results, found, strict=True))
        outputs = [given[name][:, :length, :, :size] for name in ("output", "output_residual") if name in given]
        lse = given["lse"][:, :, :length]
        lse_residual = (
            fold.reference(given["lse_residual"][:, :, :length]) if "lse_residual" in given else jnp.zeros_like(lse)
        )
        return outputs[0], lse, lse_residual, *outputs[1:]

    return function


def _entry(
    form: AttentionForm,
    plan: ForwardPlan,
    items: Mapping[str, int],
    shape: Shape,
    names: Sequence[Extra],
    result_names: Sequence[str],
    has_segments: bool,
    has_schedule: bool,
    interpreted: bool,
    free_bytes: int,
    *refs: Any,
) -> None:
    """Allocates shared memory, and runs every warp group's part."""
    (query, key, value, *extras), results = refs[: -len(result_names)], refs[-len(result_names) :]
    schedule = None
    if has_schedule:
        *extras, numbers, begins = extras
        schedule = numbers, begins
    named = dict(zip(names, extras, strict=False))
    dtype, groups, slots = query.dtype, plan.groups, plan.slots
    query_head, value_head = head_size(query.shape[3]), head_size(value.shape[3])
    rings = ExtraRings.fitting(named, (plan.query_rows, plan.key_tile), groups, free_bytes)
    output_bytes = 2 * plan.block_rows * value_head
    in_queries = value_head == query_head and rings.bytes + output_bytes > free_bytes
    scratch = Scratch(
        queries=tiled((groups, plan.query_rows, query_head), dtype),
        keys=tiled((slots, plan.key_tile, query_head), dtype),
        values=tiled((slots, plan.key_tile, value_head), dtype),
        output=None if in_queries else tiled((groups, plan.query_rows, value_head), dtype),
        lse=plgpu.SMEM((groups, plan.query_rows), jnp.float32),
        queries_there=plgpu.Barrier(num_barriers=groups),
        keys_there=plgpu.Barrier(num_barriers=slots),
        values_there=plgpu.Barrier(num_barriers=slots),
        keys_read=plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
        values_read=plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
        turns=plgpu.Barrier(num_arrivals=groups, num_barriers=1),
        extras=rings.scratch(),
    )

    def run(scratch: "Scratch") -> None:
        block = ForwardBlock(
            form=form,
            plan=plan,
            items=items,
            scores=Scores(form, shape, named),
            refs=(query, key, value),
            results=dict(zip(result_names, results, strict=True)),
            schedule=schedule,
            segments=extras[-1] if has_segments else None,
            scratch=scratch,
            extra_tiles=rings.tiles(named, scratch.extras, interpreted),
            interpreted=interpreted,
        )
        group = lax.axis_index("group")
        pl.when(group < groups)(lambda: block.compute(group))
        pl.when(group == groups)(block.copy)

    pl.run_scoped(run, scratch, collective_axes="group")
