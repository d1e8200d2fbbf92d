"""`implementation="xla"`: jax.nn where it has the function, else the formulas, in plain JAX for XLA to fuse.

16-bit rows are computed in f32 and rounded once, which jax.nn by itself does not do.
"""

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._rows.forms import Operation
from jaxsoft._rows.formulas import pick, row_operations
from jaxsoft.fold import accumulator

_jax_softmax = jax.nn.softmax  # taken here and not when called, when someone may have put jaxsoft's in its place


def _softmax(x: jax.Array) -> tuple[jax.Array]:
    return (_jax_softmax(x.astype(accumulator(x.dtype)), axis=-1).astype(x.dtype),)


def total(x: jax.Array) -> jax.Array:
    """The sum over the last axis."""
    return jnp.sum(x, axis=-1)


OPERATIONS: dict[str, Operation] = {
    **row_operations(fold.state, total, pick),
    "softmax": _softmax,
}
