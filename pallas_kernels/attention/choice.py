"""Whether the kernels of attention can take a call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._core import gpus

from .backward_plan import bias_plan, key_value_plan, query_plan
from .plan import FORWARD, forward_plan

_LARGEST_GRID = 65535  # in the dimensions that are not the first
_DTYPES = (jnp.float16, jnp.bfloat16)
_EXTRAS = {
    Extra.BIAS,
    Extra.MASK,
    Extra.QUERY_SEGMENTS,
    Extra.KEY_SEGMENTS,
    Extra.QUERY_LENGTHS,
    Extra.KEY_LENGTHS,
    Extra.OFFSET,
    Extra.SINKS,
}
_LARGEST_CAP = 1000  # whose error is then less than what a weight loses when it is rounded to 16 bits


def unsupported(form: AttentionForm, operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take a call of this form and these operands."""
    if gpus.assumed().generation not in FORWARD:
        return "its kernels for attention are for Hopper (compute capability 9.0)"
    query, key, value = operands[:3]
    names = sorted({operand.dtype.name for operand in (query, key, value)})
    if len(names) > 1 or query.dtype not in _DTYPES:
        return f"its kernels take queries, keys and values in float16 or in bfloat16, not {' and '.join(names)}"
    if form.dtype not in (query.dtype, jnp.float32):
        return f"its kernels return {query.dtype.name} or float32 for these operands, not {form.dtype.name}"
    if form.returns_max_logits:
        return "its kernels do not give the largest scores"
    if not all(isinstance(length, int) for operand in operands for length in operand.shape):
        return "its kernels are compiled for shapes that are known"
    heads = query.shape[3], value.shape[3]
    if any(size % 8 for size in heads):
        return f"head sizes must be multiples of 8, the alignment of bulk copies; got {heads[0]} and {heads[1]}"
    if forward_plan(*heads) is None:
        return f"head sizes must be at most 256; got {heads[0]} and {heads[1]}"
    if max(query.shape[0], query.shape[2]) > _LARGEST_GRID:
        return (
            f"the batch and the heads may be at most {_LARGEST_GRID}, as a grid of blocks may be; "
            f"got {query.shape[0]} and {query.shape[2]}"
        )
    if form.cap is not None and form.cap > _LARGEST_CAP:
        return f"its soft cap is off by 2e-7 of itself, so it may be at most {_LARGEST_CAP}; got {form.cap}"
    if others := [extra.value for extra in form.extras if extra not in _EXTRAS]:
        return f"its kernels take no {' and '.join(others)}"
    if not all(query.shape + key.shape + value.shape):
        return "it has no kernel for arrays without elements"
    return None


def describe(form: AttentionForm, operands: Sequence[jax.core.ShapedArray], wrt: Sequence[str] | None) -> str:
    """The names of the kernels, forward or for gradients, and how they cut up their work, in words."""
    query, _, value = operands[:3]
    heads = query.shape[3], value.shape[3]
    if wrt is None:
        forward = forward_plan(*heads, causal=form.right is not None)
        assert forward is not None
        return f"jaxsoft_attention: {forward.block_rows} queries a block, tiles of {forward.key_tile} keys"
    found = []  # the kernels, the first of which has the name before the colon
    if "query" in wrt:
        query_sizes = query_plan(*heads)
        found.append(f"query_gradient: {query_sizes.block} queries a block, tiles of {query_sizes.key_tile} keys")
    if "key" in wrt or "value" in wrt:
        sizes = key_value_plan(*heads)
        found.append(f"key_value_gradients: {sizes.block} keys a block, tiles of {sizes.query_tile} queries")
    if "bias" in wrt:
        found.append(f"bias_gradient: tiles of {bias_plan(*heads).columns} columns")
    return "; ".join(f"jaxsoft_attention_{kernel}" for kernel in found)
