"""The classes of a linear head in chunks, or its rows: the loops over them, and the part of an array of a chunk.

Arrays that are sums over devices, as gradients of hidden where each device has a part of the classes, or that of weight
where it has a part of the rows, travel while the next chunk is computed. The few numbers of each row are exchanged as
those of any row are: see `jaxsoft._core.mesh`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import Axes
from jaxsoft._head.head import Head, Parameters
from jaxsoft._head.operation import HeadArray


class Chunk(NamedTuple):
    """Neighbouring classes or rows.

    Attributes:
      begin: the index of the first one, traced or a Python integer.
      size: how many there are.
      axis: along which every array that is cut into such chunks has them: the last one for classes, the first for rows.
    """

    begin: jax.Array | int
    size: int
    axis: int = -1

    def of(self, x: jax.Array) -> jax.Array:
        """The part of x that belongs to the chunk."""
        axis = self.axis % x.ndim
        return x if self.size == x.shape[axis] else jax.lax.dynamic_slice_in_dim(x, self.begin, self.size, axis)

    def written(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x with the chunk's part of it overwritten, in x's dtype."""
        return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), self.begin, self.axis % x.ndim)

    def layer(self, parameters: Parameters) -> Parameters:
        """The parameters of the linear layer, for a chunk of classes."""
        of_classes = {
            kind: self.of(parameters[kind]) for kind in (HeadArray.WEIGHT, HeadArray.BIAS) if kind in parameters
        }
        return {HeadArray.HIDDEN: parameters[HeadArray.HIDDEN], **of_classes}


def chunk_size(head: Head, rows: int) -> int:
    """The head's, or 2048 classes, or as many as give 2^20 scores if these are more and the number of rows is known."""
    return head.chunk_size or (max(2048, 2**20 // max(rows, 1)) if isinstance(rows, int) else 2048)


def over_chunks[T](
    size: int, classes: int, step: Callable[[T, Chunk], T], carry: T, first: int = 0, unroll: int = 1
) -> T:
    """Takes all chunks in turn, carry = step(carry, chunk), and returns the last carry.

    Args:
      size: how many classes a chunk has; the last one may have fewer.
      classes: how many classes there are.
      step: what is done with a chunk, which is traced once, and once more for a shorter last chunk.
      carry: an array, or a tree of them.
      first: the class that the first chunk begins with.
      unroll: how many chunks a round of the loop takes.
    """
    whole, rest = divmod(classes - first, size)
    last = first + whole * size
    if whole == 1:
        carry = step(carry, Chunk(first, size))
    elif whole:
        begins = jnp.arange(first, last, size, dtype=jnp.int32)
        carry = jax.lax.scan(
            lambda carry, begin: (step(carry, Chunk(begin, size)), None), carry, begins, unroll=unroll
        )[0]
    return step(carry, Chunk(last, rest)) if rest else carry


# A chunk of r rows that is added to the gradient of weight reads and writes it once, which takes 109 / r of the time of
# its three products (bf16 on an H200): a tenth for this number of rows.
_LEAST_ROWS = 1024
# More rows are taken where their scores have fewer bytes than this, as the gradient of weight is small then, too.
_CHUNK_BYTES = 2**28

# The tiles of matrix products have that many rows, or a divisor. Chunks of 896 rows took 2 % longer than chunks of 512.
_TILE = 256

# The part of the memory of the gradient of weight that scores take before it is computed. For 4096 rows of 4096 numbers
# in bf16, these are chunks of 1024 rows in f32: with chunks of 512 the losses and their gradients took 3 % longer, and
# with chunks of the classes 2 to 5 % longer.
_OF_WEIGHT = 1 / 2
# Each chunk reads all of weight, which takes longer than its product where it has fewer than some 200 rows.
_LEAST_WITHIN = 512
# XLA makes a longer copy of a matrix of 16 bits whose rows are no multiple of this number: of all of weight here.
_ALIGNED = 8


def default_row_chunk(rows: int, classes: int, itemsize: int) -> int:
    """How many of the rows are taken at a time, where a score takes this number of bytes: all, or whole tiles.

    As whole tiles, a chunk may have a tile more than the bounds above, and the first one what is left.
    """
    most = max(_LEAST_ROWS, _CHUNK_BYTES // max(classes * itemsize, 1))
    return _whole_tiles(rows, most)


def _whole_tiles(rows: int, most: int) -> int:
    """How many of the rows are taken at a time: all, or as many whole tiles as give few chunks of about that many."""
    if rows <= most:
        return max(rows, 1)
    return math.ceil(math.ceil(rows / math.ceil(rows / most)) / _TILE) * _TILE


def row_chunk_within(weight: jax.Array, rows: int, itemsize: int) -> int | None:
    """How many rows are taken at a time in the memory of the gradient of weight; None where that does not pay.

    Args:
      weight: the layer's matrix.
      rows: how many there are.
      itemsize: the bytes of a score.
    """
    if not isinstance(rows, int) or not isinstance(weight.shape[0], int) or weight.shape[1] % _ALIGNED:
        return None
    most = int(weight.shape[0] * weight.dtype.itemsize * _OF_WEIGHT / itemsize) // _TILE * _TILE
    return None if most < _LEAST_WITHIN else _whole_tiles(rows, most)


def over_rows[T](size: int, rows: int, step: Callable[[T, Chunk], T], carry: T) -> T:
    """Takes all chunks in turn, carry = step(carry, chunk), and returns the last carry.

    Args:
      size: how many rows a chunk has; the first one may have fewer.
      rows: how many rows there are.
      step: what is done with a chunk, which is traced once for the first, and once more for all others. The first may
        make arrays of what is None in the carry.
      carry: a tree of arrays, and None.
    """
    if not rows:
        return carry
    first = rows % size or size
    carry = step(carry, Chunk(0, first, axis=0))
    if rows == first:
        return carry
    # The barrier keeps XLA from computing the scores of two chunks before the first ones are done with.
    begins, carry = jax.lax.optimization_barrier((jnp.arange(first, rows, size, dtype=jnp.int32), carry))
    return jax.lax.scan(lambda carry, begin: (step(carry, Chunk(begin, size, axis=0)), None), carry, begins)[0]


def summed_during[T](part: jax.Array, axes: Axes, work: Callable[[], T]) -> tuple[jax.Array, T]:
    """The sum of the devices' parts of an array, which XLA can take while it computes something else, and that."""
    total, result = jax.lax.psum(part, axes), work()
    # Else XLA may want to round the sum before, and wait for it.
    return jax.lax.optimization_barrier((total, result))


class InParts(NamedTuple):
    """An array in chunks of the classes, each of which is summed over devices while the next one is computed.

    Attributes:
      array: with the sums of all chunks but the last one.
      part: this device's part of the last chunk; None before the first one.
    """

    array: jax.Array
    part: jax.Array | None = None

    def followed(self, axes: Axes, chunk: Chunk, work: Callable[[], jax.Array]) -> "InParts":
        """With one more chunk, whose part `work` computes."""
        if self.part is None:
            return InParts(self.array, work())
        total, part = summed_during(self.part, axes, work)
        return InParts(self._before(chunk.begin).written(self.array, total), part)

    def whole(self, axes: Axes) -> jax.Array:
        """The array, when there are no more chunks."""
        if self.part is None:
            return self.array
        return self._before(self.array.shape[-1]).written(self.array, jax.lax.psum(self.part, axes))

    def _before(self, end: jax.Array | int) -> Chunk:
        """The last chunk, given where it ends."""
        assert self.part is not None
        size = self.part.shape[-1]
        return Chunk(end - size, size)
