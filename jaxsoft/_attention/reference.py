"""`implementation="reference"`: the definition. Every key is a state, folded by `jax.lax.associative_scan`.

It takes memory for the values of all keys times all queries, so it is for short sequences. Its gradients are those that
JAX finds of the scan.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._attention import xla
from jaxsoft._attention.blocks import Call
from jaxsoft._attention.form import BASE, AttentionForm
from jaxsoft._attention.pages import PagedCall
from jaxsoft._attention.spec import AttentionSpec
from jaxsoft._core.operation import Function
from jaxsoft.fold import AttentionState

_MOST = 2**28  # numbers in the states of all keys and queries: 1 GiB in f32


def unsupported(operation: AttentionSpec, operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the scan cannot take these operands."""
    query, key, value = operands[:BASE]
    sizes = (*query.shape[:3], operation.form.keys(operands), *value.shape[3:])
    if not all(isinstance(size, int) for size in sizes):
        return f"its scan needs shapes that are known; got {query.shape} and {key.shape}"
    if math.prod(sizes) > _MOST:
        return f"its scan would take {math.prod(sizes)} numbers of memory, and takes up to {_MOST}"
    return None


def forward(form: AttentionForm) -> Function:
    """(query, key, value, *extras) -> the results of a call."""

    def function(*operands):
        call = (PagedCall if form.paged else Call)(form, operands)
        keys = call.length_of_keys
        block = call.block(0, keys)
        value = jnp.repeat(block.value.astype(call.dtype), call.heads // call.groups, axis=1)
        value = value[:, :, None]  # (B, N, 1, S, D)
        weights = fold.weight(block.z, block.z)
        states = AttentionState(block.z, weights, weights[..., None] * value)
        if keys:
            folded = jax.lax.associative_scan(fold.combine, states, axis=3)
            st = AttentionState(folded.m[..., -1], folded.s[..., -1], folded.o[..., -1, :])
        else:
            st = fold.attention_identity(block.z.shape[:-1], value.shape[-1], call.dtype)
        return xla.results(call, st)

    return function


def pullback(form: AttentionForm, wrt: Sequence[str]) -> Function:
    """The gradients by the differentiated operands, as `jaxsoft._attention.xla.pullback` has them."""

    def function(*operands):
        *given, _, lse, lse_residual, delta, cotangent = operands
        named = dict(zip(form.names, given, strict=True))

        def along(*moved):
            varied = named | dict(zip(wrt, moved, strict=True))
            return forward(dataclasses.replace(form, dtype=delta.dtype, rounded=False))(*varied.values())

        (y, own_lse, own_residual), transpose = jax.vjp(along, *(named[name] for name in wrt))
        # What of all weights are those of these keys: 1, unless the log-sum-exp is that of other keys as well.
        same = (own_lse == lse) & ~jnp.isfinite(lse)
        share = jnp.where(same, 1, jnp.exp((own_lse - lse) + (own_residual - lse_residual)))
        cotangent = fold.scaled(cotangent.astype(y.dtype), jnp.moveaxis(share, 1, 2))
        d_lse = jnp.moveaxis(jnp.sum(y * cotangent, axis=-1), 1, 2) - jnp.where(share == 0, 0, share * delta)
        return transpose((cotangent, d_lse, jnp.zeros_like(own_residual)))

    return function
