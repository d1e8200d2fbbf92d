"""vmap of operations on rows: the mapped dimension becomes one more leading dimension, which is more rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def as_leading_dimension(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """The operands with their mapped dimensions in front; one that is not mapped is repeated along it."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
