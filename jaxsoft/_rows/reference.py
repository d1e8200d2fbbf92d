"""`implementation="reference"`: the definition. A row is folded by `jax.lax.associative_scan` over (m, s) pairs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._rows import forms
from jaxsoft._rows.forms import Form
from jaxsoft._rows.formulas import pick
from jaxsoft._rows.operation import Operation, Reductions, RowFunction
from jaxsoft.fold import State, accumulator, identity, running_states


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the scan cannot take these operands."""
    n = operands[0].shape[-1]
    return None if isinstance(n, int) else f"its scan needs rows whose length is known; got n={n}"


def _last_running_state(x: jax.Array) -> State:
    if x.shape[-1] == 0:
        return identity(x.shape[:-1], accumulator(x.dtype))
    return State(*(v[..., -1] for v in running_states(x)))


def _last_running_sum(x: jax.Array) -> jax.Array:
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], x.dtype)
    return jax.lax.associative_scan(jnp.add, x, axis=-1)[..., -1]


REDUCTIONS = Reductions(_last_running_state, _last_running_sum, pick)


def formula(operation: Operation, form: Form) -> RowFunction:
    """The operation in its plain form."""
    return forms.formula(operation, form, REDUCTIONS)
