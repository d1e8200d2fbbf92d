"""Attention over a sequence on several devices by one exchange and one kernel, where a ring has one of each for every
device: faster where devices are few or have few tokens each.

Either each device gets some heads of the whole sequence: heads and tokens change places before and after, of each array
a device sends all but its own heads' part, and the kernel is the one for a whole sequence. Heads of keys must be a
multiple of the devices. Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).

Or each device gets the keys and values of all. Those of the whole sequence are in the memory of each device, and
backward, in f32, the gradients by them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention.form import AttentionForm, Extra, SequenceShards
from jaxsoft._attention.layouts import AXES_OF_COTANGENTS, AXES_OF_RESULTS, chunk, in_order, joined, order
from jaxsoft._core.mesh import Axes
from jaxsoft._core.operation import Function


def over_heads(
    shards: SequenceShards, axes: Axes, operands: Sequence[str], results: Sequence[str], function: Function
) -> Function:
    """A function of some heads of a whole sequence as one of all heads of a device's part of it.

    Args:
      shards: how the sequence lies over devices.
      axes: the axes of the mesh over which it does.
      operands, results: the dimensions of each, by letters (see `jaxsoft._attention.form`).
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


_KEYS = ("key", "value")


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """What one device has of a call, and the keys and values of all devices."""

    form: AttentionForm
    axes: Axes
    named: dict[str, jax.Array]
    chunks: int

    @classmethod
    def of(cls, form: AttentionForm, axes: Axes, operands: Sequence[jax.Array]) -> "_Gathered":
        """Of the operands of the device's part of the sequence."""
        assert form.shards is not None
        named = dict(zip(form.names, operands, strict=False))
        limited = form.left is not None or form.right is not None
        found = cls(form, axes, named, 2 if limited and form.shards.layout == "zigzag" else 1)
        for name in (*_KEYS, Extra.KEY_SEGMENTS.value):
            if name in named:
                named[name] = found._placed(jax.lax.all_gather(named[name], axes, axis=1, tiled=True), inverse=True)
        return found

    def _placed(self, x: jax.Array, inverse: bool) -> jax.Array:
        """The keys of all devices in the order of the sequence, or the other way. Without limits any order does."""
        if self.chunks == 1:
            return x
        assert self.form.shards is not None
        chunks = order(2 * self.form.shards.devices, self.form.shards.devices, "zigzag")
        y = x.reshape(x.shape[0], len(chunks), -1, *x.shape[2:])
        return jnp.take(y, np.argsort(chunks) if inverse else chunks, axis=1).reshape(x.shape)

    def returned(self, gradient: jax.Array) -> jax.Array:
        """The device's part of a gradient by all keys, of which each device has one."""
        gradient = self._placed(gradient, inverse=False)
        return jax.lax.psum_scatter(gradient, self.axes, scatter_dimension=1, tiled=True)

    def call(self, index: int) -> tuple[AttentionForm, list[jax.Array]]:
        """The form of a call for the queries of one chunk, and its operands."""
        form, named = self.form.whole, self.named
        assert self.form.shards is not None
        extras = {extra: named[extra.value] for extra in form.extras}
        if Extra.QUERY_SEGMENTS in extras:
            extras[Extra.QUERY_SEGMENTS] = chunk(extras[Extra.QUERY_SEGMENTS], 1, index, self.chunks)
        query = chunk(named["query"], 1, index, self.chunks)
        if form.left is not None or form.right is not None:
            rank = jax.lax.axis_index(self.axes).astype(jnp.int32)
            place = rank if index == 0 else 2 * self.form.shards.devices - 1 - rank
            extras[Extra.OFFSET] = (place * query.shape[1])[None]
        names = [extra for extra in Extra if extra in extras]
        operands = [query, named["key"], named["value"], *(extras[extra] for extra in names)]
        return dataclasses.replace(form, extras=tuple(names)), operands


def forward(form: AttentionForm, axes: Axes, run: Function) -> Function:
    """Attention on one device; see `jaxsoft._attention.ring.forward`."""

    def function(*operands):
        gathered = _Gathered.of(form, axes, operands)
        found = []
        for index in range(gathered.chunks):
            of_chunk, given = gathered.call(index)
            found.append(run(of_chunk, *given))
        pairs = zip(zip(*found, strict=True), AXES_OF_RESULTS, strict=False)
        return tuple(joined(chunks, axis) for chunks, axis in pairs)

    return function


def pullback(form: AttentionForm, wrt: Sequence[str], axes: Axes, run: Function) -> Function:
    """The gradients on one device; see `jaxsoft._attention.ring.pullback`."""
    of_keys = [name for name in _KEYS if name in wrt]

    def function(*operands):
        # Else XLA may keep the keys of all devices from the forward pass until here.
        operands = jax.lax.optimization_barrier(operands)
        given, known = operands[: len(form.names)], operands[len(form.names) :]
        gathered = _Gathered.of(form, axes, given)
        of_query: list[jax.Array] = []
        sums: dict[str, jax.Array] = {}
        for index in range(gathered.chunks):
            of_chunk, base = gathered.call(index)
            pairs = zip(known, AXES_OF_COTANGENTS, strict=True)
            results = (chunk(x, axis, index, gathered.chunks) for x, axis in pairs)
            found = dict(zip(wrt, run(of_chunk, tuple(sums), *base, *results, *sums.values()), strict=True))
            of_query += [found["query"]] if "query" in wrt else []
            sums = {name: found[name] for name in of_keys}
        sums = {name: gathered.returned(x) for name, x in sums.items()}
        if "query" in wrt:
            sums["query"] = joined(of_query, 1)
        dtypes = {name: x.dtype for name, x in zip(form.names, given, strict=True)}
        return tuple(sums[name].astype(dtypes[name]) for name in wrt)

    return function
