"""What the formulas of row operations share: probabilities, elements at an index, and the k largest elements."""

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import automatically
from jaxsoft._core.operation import compiled
from jaxsoft._rows.spec import NO_ROW
from jaxsoft.fold import accumulator, weight


def wide(x: jax.Array) -> jax.Array:
    """x in the accumulator's dtype."""
    return x.astype(accumulator(x.dtype))


@compiled
def nan_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """x, but NaN where a condition holds.

    It is compiled, as jax.debug_nans would else stop at the constant under jax.disable_jit.
    """
    return jnp.where(condition, jnp.nan, x)


def exp_above(x: jax.Array, m: jax.Array) -> jax.Array:
    """exp(x - m) in the accumulator's dtype."""
    return weight(wide(x), m[..., None])


def probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """exp(x - m) / s in the accumulator's dtype; 0 for a row without scores."""
    empty = s == 0
    scale = jnp.where(empty, 0, 1 / jnp.where(empty, 1, s))
    return exp_above(x, m) * scale[..., None]


def defined_probabilities(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
    """`probabilities`, but NaN in a row whose softmax has no value."""
    return probabilities(x, m, s) * jnp.where(jnp.isfinite(m), 1, jnp.nan)[..., None]


def has_softmax(m: jax.Array, s: jax.Array) -> jax.Array:
    """Whether the softmax of a row has a value: not if it holds NaN or +inf, or nothing but -inf."""
    return jnp.isfinite(m) & ~jnp.isnan(s)


def positions(x: jax.Array) -> jax.Array:
    """The index of each element of rows like those of x, of as many dimensions and length 1 but for the last."""
    return jax.lax.broadcast_to_rank(jnp.arange(x.shape[-1], dtype=jnp.int32), x.ndim)


def label_places(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows are not to be read, of shape (..., 1), and which element of each row is its label's."""
    i = i[..., None]
    return i == NO_ROW, i == positions(x)


def labels_within(label: jax.Array, begin: jax.Array | int) -> jax.Array:
    """The labels of rows as indices into the part of each row that begins at this element."""
    return jnp.where(label == NO_ROW, label, jnp.maximum(label, -1) - begin)


def take(x: jax.Array, i: jax.Array) -> jax.Array:
    """The element of each row at an index, in the accumulator's dtype; NaN for an index out of range."""
    n = x.shape[-1]
    if n == 0:
        return jnp.full(x.shape[:-1], jnp.nan, accumulator(x.dtype))
    found = jnp.take_along_axis(x, jnp.clip(i, 0, n - 1)[..., None], axis=-1)[..., 0]
    return nan_where((i < 0) | (i >= n), wide(found))


def pick(x: jax.Array, i: jax.Array) -> jax.Array:
    """`take` as a sum over the row, which XLA fuses with other sums, and partitions over a mesh."""
    found = jnp.sum(jnp.where(label_places(x, i)[1], wide(x), 0), axis=-1)
    return nan_where((i < 0) | (i >= x.shape[-1]), found)


def at(x: jax.Array, i: jax.Array) -> jax.Array:
    """The elements of each row at its indices."""
    return automatically(lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode="clip"), jax.typeof(i).sharding, x, i)


def put(x: jax.Array, i: jax.Array, values: jax.Array) -> jax.Array:
    """x with these values at the indices of each row, no two of which are equal."""

    def of_row(x, i, values):
        return x.at[i].set(values, unique_indices=True)

    for _ in range(x.ndim - 1):
        of_row = jax.vmap(of_row)
    return automatically(of_row, jax.typeof(x).sharding, x, i, values)


def largest(x: jax.Array, k: int, ordered: jax.Array) -> jax.Array:
    """The indices of the k largest elements of each row, the largest first.

    Of equal elements, which -0.0 and 0.0 are, the one with the lowest index comes first. A row that is not to be
    ordered gets 0 to k - 1.
    """

    def of_rows(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
        return jax.lax.top_k(jnp.where(bits == jnp.iinfo(bits.dtype).min, 0, x), k)[1]  # to lax.top_k, -0.0 < 0.0

    indices = automatically(of_rows, jax.typeof(ordered).sharding, x)
    return jnp.where(ordered[..., None], indices, positions(indices))
