"""The in-place weight gradient: gradients of all scores are kept in the memory of that of weight, and become it.

They fit there where there are no more rows than hidden has numbers. The gradient of weight takes their place: by a CUDA
kernel where it serves (see `ffi`), else a chunk of the classes at a time, which is read once more, and overwritten. So
it is no sum over chunks of the rows, and rounded once. Where there are as many rows as numbers, no chunk of rows is
needed, and the gradient of hidden states is one product of all gradients of scores, and no sum over chunks of the
classes. A few rows less are filled up with rows of zeros without a label, as in a batch of sequences without their last
tokens.

Over a mesh, the gradient of hidden is summed over the devices that have other classes while that of weight is computed,
and a chunk of the gradient of weight over those that have other rows while the next one is.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxsoft._core.implementations import Choice, report
from jaxsoft._head import ffi
from jaxsoft._head.chunks import Chunk, InParts, over_chunks, summed_during
from jaxsoft._head.head import Head, product
from jaxsoft._head.operation import HeadArray, Shards
from jaxsoft._rows.spec import NO_ROW

# At most how many classes are taken at a time. For 4096 rows of 4096 numbers these are 4 waves of tiles of 128 by 256
# on 132 multiprocessors, which are busy for 97 % of them. With 2048 classes the mean and its gradients took 2 % longer,
# and with 8192 no less.
_CLASSES = 4096
# The part of the rows that may be missing: the products of these take at most 3 % of the time.
_MISSING = 1 / 32


def fits_in_place(weight: jax.Array, rows: int, dtype: jnp.dtype) -> bool:
    """Whether gradients of all scores, which have this dtype, fit into the memory of the gradient of weight."""
    known = isinstance(rows, int) and isinstance(weight.shape[0], int)  # else it cannot be told
    return known and weight.dtype == dtype and rows <= weight.shape[0]


def almost_fills(weight: jax.Array, rows: int) -> bool:
    """Whether gradients of all scores that fit in place have almost as many rows as the gradient of weight."""
    return weight.shape[0] * (1 - _MISSING) <= rows < weight.shape[0]


def padded(
    function: Callable[..., Sequence[jax.Array]],
    kinds: Sequence[HeadArray],
    results: Sequence[HeadArray],
    *operands: jax.Array,
) -> tuple[jax.Array, ...]:
    """What a function gives for the rows of its operands and as many more as hidden then has of numbers.

    Args:
      function: any that leaves out rows with the label NO_ROW.
      kinds: those of its operands.
      results: the kinds of its results.
      operands: hidden, weight and others.
    """
    hidden, weight = operands[:2]
    rows, more = len(hidden), weight.shape[0] - len(hidden)

    def longer(kind: HeadArray, v: jax.Array) -> jax.Array:
        if not kind.has_rows:
            return v
        value = jnp.asarray(NO_ROW if kind is HeadArray.LABEL else 0, v.dtype)
        return jax.lax.pad(v, value, [(0, more, 0)] + [(0, 0, 0)] * (v.ndim - 1))

    found = function(*(longer(kind, v) for kind, v in zip(kinds, operands, strict=True)))
    return tuple(v[:rows] if kind.has_rows else v for kind, v in zip(results, found, strict=True))


def weight_in_place(
    head: Head, shards: Shards, hidden: jax.Array, dx: jax.Array, of_hidden: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of weight, in the place of the gradients of scores, and that of hidden; summed over devices.

    Args:
      head: the layer.
      shards: of the operands.
      hidden: the hidden states, in the dtype of the products.
      dx: of the shape of weight; its first rows are the gradients of scores. Nothing else may use it, or XLA copies it.
      of_hidden: the gradient of hidden by this device's classes; None if it is not wanted.
    """
    classes = dx.shape[1]
    size = min(_CLASSES, max(2048, classes // 8))
    of = functools.partial(_of_chunk, head, hidden)

    def beside_hidden(work: Callable[[], jax.Array]) -> tuple[jax.Array | None, jax.Array]:
        if of_hidden is None or not shards.classes:
            return of_hidden, work()
        return summed_during(of_hidden, shards.classes, work)

    if not shards.rows:
        total, dx = beside_hidden(lambda: _in_place(head, size, hidden, dx))
        return dx, total

    def step(parts: InParts, chunk: Chunk) -> InParts:
        return parts.followed(shards.rows, chunk, lambda: of(parts.array, chunk))

    first = min(size, classes)
    total, part = beside_hidden(lambda: of(dx, Chunk(0, first)))
    # With two chunks a step, XLA need not copy the one that the next step begins with.
    parts = over_chunks(size, classes, step, InParts(dx, part), first, unroll=2)
    return parts.whole(shards.rows), total


def _in_place(head: Head, size: int, hidden: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of weight on one device, in the place of dx: by a kernel, or in chunks of `size` classes."""

    def in_chunks(hidden: jax.Array, dx: jax.Array) -> jax.Array:
        def step(dx: jax.Array, chunk: Chunk) -> jax.Array:
            return chunk.written(dx, _of_chunk(head, hidden, dx, chunk))

        return over_chunks(size, dx.shape[1], step, dx)

    if ffi.serves(hidden, dx):
        choice = Choice("weight_gradient", "ffi", ffi.weight_gradient_in_place, ffi.plan(hidden, dx))
        report(choice)
        by_kernel = jax.named_scope(choice.scope)(choice.function)
        return jax.lax.platform_dependent(hidden, dx, cuda=by_kernel, default=in_chunks)
    return in_chunks(hidden, dx)


def _of_chunk(head: Head, hidden: jax.Array, dx: jax.Array, chunk: Chunk) -> jax.Array:
    """The gradient of a chunk of weight."""
    return product(head, hidden, chunk.of(dx)[: len(hidden)], (0, 0), dx.dtype)
