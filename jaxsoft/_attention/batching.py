"""vmap of attention: a mapped dimension joins the batch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import DIMENSIONS, Extra
from jaxsoft._attention.spec import PAGES, WHOLE
from jaxsoft._core.mesh import whole_along
from jaxsoft._core.operation import Function


def mapped(
    function: Function,
    names: Sequence[str],
    results: Sequence[str],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    wrt: Sequence[str],
) -> list[jax.Array]:
    """The results of a function for mapped operands, mapped along their first dimension.

    Args:
      function: any that is computed for each element of the batch by itself, but for gradients that are sums over it.
      names: those of its operands, the first of which is query.
      results: those of its results, where a gradient has the name of its operand.
      operands: what it is called with.
      dims: along which dimension each of the operands is mapped; None for one that is not.
      wrt: operands of which there are gradients or tangents.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    in_front = [
        _batch_first(name, x if d is None else jnp.moveaxis(x, d, 0), 0 if d is None else 1)
        for name, x, d in zip(names, operands, dims, strict=True)
    ]
    batches = {name: x.shape[0 if d is None else 1] for name, x, d in zip(names, in_front, dims, strict=True)}
    batch = batches["query"]
    # Over explicit axes of a mesh, the one of the two dimensions that is sharded comes first.
    specs = [jax.typeof(x).sharding.spec for x in in_front]
    inside = specs[0][0 if dims[0] is None else 1] is not None
    inside = inside and all(spec[0] is None for spec, d in zip(specs, dims, strict=True) if d is not None)

    def joined(name: str, x: jax.Array, d: int | None) -> jax.Array:
        if d is None and x.shape[0] == 1 and name not in WHOLE and name not in wrt:
            return jnp.moveaxis(x, 0, _batch_axis(name))
        x = x if d is not None else x[None]
        x = whole_along(jnp.broadcast_to(x, (size, batch, *x.shape[2:])), (0 if inside else 1,))
        x = jnp.moveaxis(x, 0, 1) if inside else x
        return jnp.moveaxis(x.reshape(size * batch, *x.shape[2:]), 0, _batch_axis(name))

    def apart(name: str, y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, _batch_axis(name), 0)
        y = y.reshape(*((batch, size) if inside else (size, batch)), *y.shape[1:])
        y = jnp.moveaxis(y, 1, 0) if inside else y
        y = jnp.moveaxis(y, 1, 1 + _batch_axis(name))
        once = batches.get(name, batch) == 1 and batch != 1  # then the gradient is a sum over the batch
        return jnp.sum(y, axis=1, keepdims=True) if once else y

    found = function(*map(joined, names, in_front, dims))
    return [apart(name, y) for name, y in zip(results, found, strict=True)]


def _batch_axis(name: str) -> int:
    """The dimension of an array of this name that is the batch."""
    return max(DIMENSIONS[name].find("b"), 0)


def _batch_first(name: str, x: jax.Array, axis: int) -> jax.Array:
    """An array with its batch at this dimension, where its own dimensions begin."""
    return jnp.moveaxis(x, axis + _batch_axis(name), axis)


_SCALES = (Extra.KEY_SCALE.value, Extra.VALUE_SCALE.value)


def paged_mapped(
    function: Function,
    names: Sequence[str],
    results: Sequence[str],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
) -> list[jax.Array]:
    """As `mapped`, for attention over pages. Several caches are joined to one, in which each has its pages.

    Of scales there is one for all sequences, so where these are mapped, it is called for one element after the other.
    """
    named = {name: x if d is None else jnp.moveaxis(x, d, 0) for name, x, d in zip(names, operands, dims, strict=True)}
    are_mapped = {name for name, d in zip(names, dims, strict=True) if d is not None}
    if are_mapped.intersection(_SCALES):

        def one(of_element):
            return tuple(function(*(named | of_element).values()))

        return list(jax.lax.map(one, {name: named[name] for name in are_mapped}))
    if are_mapped.intersection(PAGES):
        size = next(named[name].shape[0] for name in are_mapped)
        for name in PAGES:
            x = named[name] if name in are_mapped else jnp.broadcast_to(named[name], (size, *named[name].shape))
            x = whole_along(x, (0, 1))
            number = x.shape[1]
            named[name] = x.reshape(size * number, *x.shape[2:])
        table = named["page_table"] if "page_table" in are_mapped else named["page_table"][None]
        first = jnp.arange(size, dtype=table.dtype)[:, None, None] * number
        # An entry that is out of range must not become one of another cache.
        named["page_table"] = jnp.where((table >= 0) & (table < number), table + first, -1)
        are_mapped.add("page_table")
    common = {name: named.pop(name) for name in (*PAGES, *_SCALES) if name in named}

    def of_sequences(*operands):
        given = common | dict(zip(named, operands, strict=True))
        return function(*(given[name] for name in names))

    axes = [0 if name in are_mapped else None for name in named]
    return mapped(of_sequences, tuple(named), results, tuple(named.values()), axes, ())
