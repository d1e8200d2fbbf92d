"""Row operations in plain JAX, from their formulas: `implementation="xla"` and `implementation="reference"`.

"xla" is jax.nn.softmax, and the formulas of all other operations for XLA to fuse. 16-bit rows are computed in f32 and
rounded once, which jax.nn by itself does not do. "reference" is the definition: a row is folded by
`jax.lax.associative_scan` over (m, s) pairs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._core.operation import Function
from jaxsoft._rows import forms
from jaxsoft._rows.forms import Operands, RowForm, RowKernels, is_plain, other_form
from jaxsoft._rows.formulas import pick, wide
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft._rows.spec import Reduction, Reductions, RowSpec
from jaxsoft.fold import State, accumulator, identity, running_states

_jax_softmax = jax.nn.softmax  # looked up at import, as a user may later put jaxsoft's function in its place

BY_XLA = Reductions(fold.state, total=lambda x: jnp.sum(x, axis=-1), take=pick)


def formula(operation: RowSpec, form: RowForm) -> Function:
    """The operation in its plain form, for XLA."""
    if operation is SOFTMAX:
        return lambda x: (_jax_softmax(wide(x), axis=-1).astype(x.dtype),)
    return forms.formula(operation, form, BY_XLA)


def _last_running_state(x: jax.Array) -> State:
    if x.shape[-1] == 0:
        return identity(x.shape[:-1], accumulator(x.dtype))
    return State(*(v[..., -1] for v in running_states(x)))


def _last_running_sum(x: jax.Array) -> jax.Array:
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], x.dtype)
    return jax.lax.associative_scan(jnp.add, x, axis=-1)[..., -1]


_BY_SCAN = Reductions(_last_running_state, _last_running_sum, pick)


def _without_known_length(operands: Operands) -> str | None:
    n = operands[0].shape[-1]
    return None if isinstance(n, int) else f"its scan needs rows whose length is known; got n={n}"


def _in_plain_form(formula: Callable[[RowSpec, RowForm], Function]):
    """The `kernel` of an implementation that has nothing but formulas for the plain form."""

    def kernel(operation: RowSpec, form: RowForm, platform: str, operands: Operands) -> Function | str:
        del platform
        plain = is_plain(operation, form, operands)
        return formula(operation, form) if plain else other_form(operation, form, operands)

    return kernel


def _is_fastest(operation: RowSpec, form: RowForm, platform: str, operands: Operands) -> bool:
    """Whether XLA's loops are faster than all kernels.

    By measurement on an H200 they are for pullbacks that reduce nothing and write another dtype than that of the
    scores.
    """
    elementwise = operation.is_pullback and operation.reduces is Reduction.NOTHING
    return platform == "cuda" and elementwise and form.dtype != operands[0].dtype


XLA = RowKernels(_in_plain_form(formula), composed=True, is_fastest=_is_fastest)
REFERENCE = RowKernels(_in_plain_form(functools.partial(forms.formula, reductions=_BY_SCAN)), _without_known_length)
