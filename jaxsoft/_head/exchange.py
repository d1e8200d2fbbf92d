"""Sums of the devices' parts of large arrays, such as gradients of hidden where each device has a part of the classes.

They travel while something else is computed. The few numbers of each row are exchanged as those of any row are: see
`jaxsoft._core.mesh`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxsoft._core.mesh import Axes
from jaxsoft._head.chunks import Chunk


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
