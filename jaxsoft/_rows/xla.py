"""`implementation="xla"`: jax.nn.softmax, and the formulas of all other operations, in plain JAX for XLA to fuse.

16-bit rows are computed in f32 and rounded once, which jax.nn by itself does not do.
"""

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._rows import forms
from jaxsoft._rows.forms import Form
from jaxsoft._rows.formulas import pick, wide
from jaxsoft._rows.operation import Operation, Reductions, RowFunction
from jaxsoft._rows.operations.softmax import SOFTMAX

_jax_softmax = jax.nn.softmax  # looked up at import, as a user may later put jaxsoft's function in its place


def _softmax(x: jax.Array) -> tuple[jax.Array]:
    return (_jax_softmax(wide(x), axis=-1).astype(x.dtype),)


REDUCTIONS = Reductions(fold.state, total=lambda x: jnp.sum(x, axis=-1), take=pick)


def formula(operation: Operation, form: Form) -> RowFunction:
    """The operation in its plain form."""
    return _softmax if operation is SOFTMAX else forms.formula(operation, form, REDUCTIONS)
