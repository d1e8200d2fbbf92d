"""What devices tell each other where each has a part of the classes: the numbers of its rows, and sums over devices.

An exchange of a few numbers a row takes the time that a message takes, whatever is in it. So all numbers of a row go
in one. The gradients of hidden states are large, and travel while something else is computed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import Axes
from jaxsoft._head.chunks import Chunk

# Among more devices the numbers are summed on the way, which takes one exchange more, but does not grow with them.
_MOST_GATHERED = 16


def are_few(axes: Axes) -> bool:
    """Whether so few devices lie along these axes of a mesh that each takes the numbers of all."""
    return jax.lax.axis_size(axes) <= _MOST_GATHERED


def gathered(numbers: Sequence[jax.Array], axes: Axes) -> list[list[jax.Array]]:
    """The numbers of each device, in the order of the devices, by one all-gather. All have one shape and dtype."""
    of_all = jax.lax.all_gather(jnp.stack(numbers), axes)
    return [[of_all[device, i] for i in range(len(numbers))] for device in range(len(of_all))]


def summed(numbers: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """The numbers summed over devices, by one all-reduce. All have one shape and dtype."""
    return list(jax.lax.psum(jnp.stack(numbers), axes))


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
