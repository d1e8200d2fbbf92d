"""vmap of operations on rows: the mapped dimension becomes one more leading dimension, which is more rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def as_leading_dimension(operands: Sequence[jax.Array], dims: Sequence[int | None], base: int) -> list[jax.Array]:
    """The operands with their mapped dimensions in front.

    One that is not mapped is repeated along it if it is among the `base` first ones; an extra gets length 1 there.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size if i < base else 1, *x.shape))
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]
