"""The row operations in their plain form as formulas, over whichever way a row is reduced.

Each operation is a reduction of the last axis followed by an elementwise step. `row_operations` writes them once,
given the two reductions: with the plain ones they are the `xla` implementation, with an associative scan the
`reference`, and with all-reduces what a sharded row needs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsoft._forms import Operation
from jaxsoft.fold import State, accumulator, reference


def row_operations(
    state: Callable[[jax.Array], State], total: Callable[[jax.Array], jax.Array]
) -> dict[str, Operation]:
    """The row operations of `jaxsoft._forms.OPERATIONS`.

    Args:
      state: the state of the last axis, in the accumulator's dtype.
      total: the sum over the last axis, likewise.
    """

    def softmax(x):
        m, s = state(x)
        scale = jnp.where(m == jnp.inf, jnp.nan, 1 / s)  # inf / inf has no value
        return ((_exp(x, m) * scale[..., None]).astype(x.dtype),)

    def log_softmax(x):
        m, s = state(x)
        log_s = jnp.where(jnp.isfinite(m), jnp.log(s), jnp.nan)
        return ((_wide(x) - reference(m)[..., None]) - log_s[..., None]).astype(x.dtype), m, s

    def softmax_vjp(y, g):
        y32, g32 = _wide(y), _wide(g)
        return ((y32 * (g32 - total(y32 * g32)[..., None])).astype(y.dtype),)

    def log_softmax_vjp(x, m, s, g):
        p, g32 = _log_softmax_probabilities(x, m, s), _wide(g)
        return ((g32 - p * total(g32)[..., None]).astype(x.dtype),)

    def log_softmax_jvp(x, m, s, t):
        p, t32 = _log_softmax_probabilities(x, m, s), _wide(t)
        return ((t32 - total(p * t32)[..., None]).astype(x.dtype),)

    def logsumexp_vjp(x, m, s, g):
        return ((_probabilities(x, m, s) * g[..., None]).astype(x.dtype),)

    def logsumexp_jvp(x, m, s, t):
        return (total(_probabilities(x, m, s) * _wide(t)),)

    return {
        "softmax": softmax,
        "softmax_vjp": softmax_vjp,
        "softmax_jvp": softmax_vjp,
        "log_softmax": log_softmax,
        "log_softmax_vjp": log_softmax_vjp,
        "log_softmax_jvp": log_softmax_jvp,
        "state": lambda x: tuple(state(x)),
        "logsumexp_vjp": logsumexp_vjp,
        "logsumexp_jvp": logsumexp_jvp,
    }


def _probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """exp(x - m) / s in the accumulator's dtype; 0 for a row without scores."""
    empty = s == 0
    scale = jnp.where(empty, 0, 1 / jnp.where(empty, 1, s))
    return _exp(x, m) * scale[..., None]


def _log_softmax_probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """`_probabilities`, but NaN in a row where log_softmax has no value."""
    return _probabilities(x, m, s) * jnp.where(jnp.isfinite(m), 1, jnp.nan)[..., None]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulator(x.dtype))


def _exp(x: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.exp(_wide(x) - reference(m)[..., None])
