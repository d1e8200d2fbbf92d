"""The row operations in their plain form as formulas, over whichever way a row is reduced.

Each operation is a reduction of the last axis followed by an elementwise step. `row_operations` writes them once,
given the two reductions: with the plain ones they are the `xla` implementation, with an associative scan the
`reference`, and with all-reduces what a sharded row needs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxsoft._rows.forms import NO_ROW, Operation, positions
from jaxsoft.fold import State, accumulator, reference


def row_operations(
    state: Callable[[jax.Array], State],
    total: Callable[[jax.Array], jax.Array],
    take: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, Operation]:
    """The row operations of `jaxsoft._rows.forms.OPERATIONS`.

    Args:
      state: the state of the last axis, in the accumulator's dtype.
      total: the sum over the last axis, likewise.
      take: of x and an index a row, the elements there, likewise; NaN for an index out of range.
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
        p, g32 = defined_probabilities(x, m, s), _wide(g)
        return ((g32 - p * total(g32)[..., None]).astype(x.dtype),)

    def log_softmax_jvp(x, m, s, t):
        p, t32 = defined_probabilities(x, m, s), _wide(t)
        return ((t32 - total(p * t32)[..., None]).astype(x.dtype),)

    def logsumexp_vjp(x, m, s, g):
        return ((_probabilities(x, m, s) * g[..., None]).astype(x.dtype),)

    def logsumexp_jvp(x, m, s, t):
        return (total(_probabilities(x, m, s) * _wide(t)),)

    def top_k(x, k):
        m, s = state(x)
        i = largest(x, k, has_softmax(m, s))
        return at(x, i), i, m, s

    def top_k_jvp(x, i, m, s, t):
        return total(_probabilities(x, m, s) * _wide(put(t, i, jnp.zeros_like(i, t.dtype)))), _wide(at(t, i))

    def label_state(x, i):
        none, label = _label(x, i)
        m, s = state(jnp.where(none | label, -jnp.inf, x))
        return m, s, jnp.where(none[..., 0], 0, take(x, i))

    def label_state_vjp(x, i, m, s, g, h):
        dx = _probabilities(x, m, s) * g[..., None]
        none, label = _label(x, i)
        return (jnp.where(none, 0, jnp.where(label, h[..., None], dx)).astype(x.dtype),)

    def label_state_jvp(x, i, m, s, t):
        none, label = _label(x, i)
        t = jnp.where(none, 0, _wide(t))
        return total(jnp.where(label, 0, _probabilities(x, m, s) * t)), total(jnp.where(label, t, 0))

    def label_sums(x, i):
        m, s, t = label_state(x, i)
        finite = ~_label(x, i)[0] & (x != -jnp.inf)
        ref = jax.lax.stop_gradient(reference(t))  # a constant, as the derivative has it
        above = jnp.where(finite, _wide(x) - ref[..., None], 0)
        return m, s, t, total(above), total(finite.astype(t.dtype))

    def label_sums_vjp(x, i, m, s, g, h, v):
        dx = _wide(label_state_vjp(_wide(x), i, m, s, g, h)[0])
        finite = ~_label(x, i)[0] & (x != -jnp.inf)
        return ((dx + jnp.where(finite, v[..., None], 0)).astype(x.dtype),)

    def label_sums_jvp(x, i, m, s, t):
        finite = ~_label(x, i)[0] & (x != -jnp.inf)
        return *label_state_jvp(x, i, m, s, t), total(jnp.where(finite, _wide(t), 0))

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
        "top_k": top_k,
        "top_k_jvp": top_k_jvp,
        "label_state": label_state,
        "label_state_vjp": label_state_vjp,
        "label_state_jvp": label_state_jvp,
        "label_sums": label_sums,
        "label_sums_vjp": label_sums_vjp,
        "label_sums_jvp": label_sums_jvp,
    }


def take(x: jax.Array, i: jax.Array) -> jax.Array:
    """The element of each row at an index, in the accumulator's dtype; NaN for an index out of range."""
    n = x.shape[-1]
    if n == 0:
        return jnp.full(x.shape[:-1], jnp.nan, accumulator(x.dtype))
    found = jnp.take_along_axis(x, jnp.clip(i, 0, n - 1)[..., None], axis=-1)[..., 0]
    return jnp.where((i >= 0) & (i < n), _wide(found), jnp.nan)


def largest(x: jax.Array, k: int, ordered: jax.Array) -> jax.Array:
    """The indices of the k largest elements of each row, the largest first; of equal ones, which -0.0 and 0.0 are, the
    one of the lowest index first. 0 to k - 1 of rows that are not to be ordered."""

    def of_rows(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
        return jax.lax.top_k(jnp.where(bits == jnp.iinfo(bits.dtype).min, 0, x), k)[1]  # to lax.top_k, -0.0 < 0.0

    indices = _automatically(of_rows, jax.typeof(ordered).sharding, x)
    return jnp.where(ordered[..., None], indices, positions(indices))


def at(x: jax.Array, i: jax.Array) -> jax.Array:
    """The elements of each row at its indices."""
    return _automatically(lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode="clip"), jax.typeof(i).sharding, x, i)


def put(x: jax.Array, i: jax.Array, values: jax.Array) -> jax.Array:
    """x with these values at each row's indices, which differ."""

    def of_row(x, i, values):
        return x.at[i].set(values, unique_indices=True)

    for _ in range(x.ndim - 1):
        of_row = jax.vmap(of_row)
    return _automatically(of_row, jax.typeof(x).sharding, x, i, values)


def _automatically(function: Callable[..., jax.Array], sharding: NamedSharding, *operands: jax.Array) -> jax.Array:
    """The function's result, of this sharding; where operands lie over explicit axes of a mesh, XLA partitions it."""
    if all(axis is None for v in operands for axis in jax.typeof(v).sharding.spec):
        return function(*operands)
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=sharding)(*operands)


def has_softmax(m: jax.Array, s: jax.Array) -> jax.Array:
    """Whether the softmax of a row has a value: not if it holds NaN or +inf, or nothing but -inf."""
    return jnp.isfinite(m) & ~jnp.isnan(s)


def pick(x: jax.Array, i: jax.Array) -> jax.Array:
    """The same as a sum over the row, which XLA fuses with others, and knows how to take over a mesh."""
    found = jnp.sum(jnp.where(_label(x, i)[1], _wide(x), 0), axis=-1)
    return jnp.where((i >= 0) & (i < x.shape[-1]), found, jnp.nan)


def _label(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows are not to be read, of shape (..., 1), and which element of a row is its label's."""
    i = i[..., None]
    return i == NO_ROW, i == positions(x)


def _probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """exp(x - m) / s in the accumulator's dtype; 0 for a row without scores."""
    empty = s == 0
    scale = jnp.where(empty, 0, 1 / jnp.where(empty, 1, s))
    return _exp(x, m) * scale[..., None]


def defined_probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """`_probabilities`, but NaN in a row whose softmax has no value."""
    return _probabilities(x, m, s) * jnp.where(jnp.isfinite(m), 1, jnp.nan)[..., None]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulator(x.dtype))


def _exp(x: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.exp(_wide(x) - reference(m)[..., None])
