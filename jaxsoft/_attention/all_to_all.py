"""Attention over a sequence on several devices, each of which gets some heads of the whole sequence.

Heads and tokens change places before and after: of each array a device sends all but its own heads' part. The kernel is
the one for a whole sequence. Heads of keys must be a multiple of the devices. Jacobs et al., "DeepSpeed Ulysses"
(arXiv:2309.14509).
"""

from collections.abc import Sequence

import jax

from jaxsoft._attention.form import SequenceShards
from jaxsoft._attention.layouts import Function, in_order
from jaxsoft._core.mesh import Axes


def over_heads(
    shards: SequenceShards, axes: Axes, operands: Sequence[str], results: Sequence[str], function: Function
) -> Function:
    """A function of some heads of a whole sequence as one of all heads of a device's part of it.

    Args:
      shards: how the sequence lies over devices.
      axes: the axes of the mesh over which it does.
      operands, results: the dimensions of each, by letters (see `jaxsoft._attention.spec`).
      function: what is computed.
    """
    function = in_order(shards, operands, results, function)

    def own_heads(x: jax.Array, dims: str) -> jax.Array:
        tokens, heads = _axis(dims, "ts"), _axis(dims, "nk")
        if tokens is None and heads is None:
            return x
        if heads is None:
            return jax.lax.all_gather(x, axes, axis=tokens, tiled=True)
        if tokens is None:
            size = x.shape[heads] // shards.devices
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, heads)
        return jax.lax.all_to_all(x, axes, heads, tokens, tiled=True)

    def own_tokens(y: jax.Array, dims: str) -> jax.Array:
        return jax.lax.all_to_all(y, axes, _axis(dims, "ts"), _axis(dims, "nk"), tiled=True)

    def call(*given: jax.Array) -> tuple[jax.Array, ...]:
        found = function(*(own_heads(x, dims) for x, dims in zip(given, operands, strict=True)))
        return tuple(own_tokens(y, dims) for y, dims in zip(found, results, strict=True))

    return call


def _axis(dims: str, letters: str) -> int | None:
    return next((axis for axis, letter in enumerate(dims) if letter in letters), None)
