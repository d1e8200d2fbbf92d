"""What devices tell each other where each has a part of the classes: the numbers of its rows, and sums over devices.

An exchange of a few numbers a row takes the time that a message takes, whatever is in it. So all numbers of a row go
in one. The gradients of hidden states are large, and travel while something else is computed.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import Axes

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
