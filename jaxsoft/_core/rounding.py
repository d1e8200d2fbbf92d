"""Numbers as they are rounded, wherever they are read.

The fold takes the maximum m of a row's scores in one place, and the differences of the same scores from it in others.
XLA may compute an operand again in each place, and not round it there: it makes one operation of a product and the
subtraction that follows (FMA), and leaves out the 16-bit numbers between products in f32. The difference of a score
from itself is then the rounding error of the score, which for large scores is more than exp can take.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def rounded(product: jax.Array) -> jax.Array:
    """A product, which XLA may compute again for each that reads it, but not within an addition or a subtraction.

    What keeps it from that is a choice that has no effect: only NaN differs from itself.
    """
    return jax.lax.select(product == product, product, -product)


def stored(*operands: jax.Array) -> list[jax.Array]:
    """Floating-point operands as they are in memory, so that all that is computed of them reads the same numbers.

    A kernel needs them there in any case. What XLA serves is no longer fused with what computes its operands. Tangents
    are left to XLA.
    """
    floating = [i for i, v in enumerate(operands) if jnp.issubdtype(v.dtype, jnp.floating)]
    found = list(operands)
    for i, v in zip(floating, _stored(*(operands[i] for i in floating)), strict=True):
        found[i] = v
    return found


@jax.custom_jvp
def _stored(*operands):
    return jax.lax.optimization_barrier(operands)


@_stored.defjvp
def _stored_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]):
    return _stored(*primals), tuple(tangents)
