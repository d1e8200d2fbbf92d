"""The monoid of states (m, s, o): the fold of online attention, which carries a weighted sum of values along.

Online attention is the fold of scores with one more sum. Every score has a value, and o is the sum of the values times
exp(score - m). The weights of a softmax are in it as well: there the values are unit vectors.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.numbers import as_float
from jaxsoft.fold.states import AttentionState, identity, mask_of, maximum_of, scaled, weight, wide


def attention_identity(shape: int | Sequence[int], size: int, dtype: DTypeLike = jnp.float32) -> AttentionState:
    """The state of the empty set, (-inf, 0, 0): `combine` of it and another is the other.

    Args:
      shape: the shape of m and s, as `jax.numpy.zeros` takes it.
      size: the length of the values.
      dtype: one of real floating-point numbers.

    >>> attention_identity((), 2)
    AttentionState(m=Array(-inf, dtype=float32), s=Array(0., dtype=float32), o=Array([0., 0.], dtype=float32))
    """
    m, s = identity(shape, dtype)
    return AttentionState(m, s, jnp.zeros((*m.shape, size), dtype))


def attention_state(scores: ArrayLike, values: ArrayLike, where: ArrayLike | None = None) -> AttentionState:
    r"""The state of a block of keys: that of its scores along their last axis, with the weighted sum of its values.

    .. math::
      m = \max_j x_j, \qquad s = \sum_j e^{x_j - m}, \qquad o = \sum_j e^{x_j - m} v_j

    `combine` of a state and that of the next block is the update of online attention, for a single key as for many.

    Args:
      scores: of shape (..., n), or (..., t, n) for t queries, of any real dtype.
      values: of shape (n, d), or (..., n, d): they multiply from the right as in `jax.numpy.matmul`.
      where: booleans or integers, broadcastable to the scores; only those where it is True count. The values of others
        count as finite.

    Returns:
      A state in f32 (f64 if the scores are f64), of the shape of the scores without their last axis. The products are
      of the highest precision. To derivatives m is a constant, as in `state`.

    Source: Dao et al., "FlashAttention" (arXiv:2205.14135).

    >>> a = attention_state(jnp.zeros(2), jnp.array([[1.0], [3.0]]))
    >>> b = attention_state(jnp.zeros(1), jnp.array([[5.0]]))
    >>> output(combine(a, b))
    Array([3.], dtype=float32)
    """
    scores = wide("scores", scores)
    values = as_float("values", values).astype(scores.dtype)
    if not scores.ndim:
        raise ValueError("scores must have at least one axis, that of the keys; got shape ()")
    n = scores.shape[-1]
    if values.ndim < 2 or values.shape[-2] != n:
        raise ValueError(
            f"values must have the shape ({n}, d) or (..., {n}, d) for {n} scores; got shape {values.shape}"
        )
    if where is not None:
        scores = jnp.where(mask_of(where, "scores", scores.shape), scores, -jnp.inf)
    m = maximum_of(scores, -1)
    weights = weight(scores, m)
    return AttentionState(m[..., 0], jnp.sum(weights, axis=-1), jnp.matmul(weights, values, precision="highest"))


def output(st: AttentionState, dtype: DTypeLike | None = None) -> jax.Array:
    """The output of attention over the keys of a state, o / s: 0 for the empty set.

    Args:
      st: a state.
      dtype: of the result; None for that of the state.

    >>> output(AttentionState(jnp.float32(7.0), jnp.float32(2.0), jnp.array([2.0, 4.0])))
    Array([1., 2.], dtype=float32)
    """
    y = st.o / jnp.where(st.s == 0, 1, st.s)[..., None]
    return y if dtype is None else y.astype(dtype)


def of_output(y: jax.Array, lse: jax.Array) -> AttentionState:
    """The state of a set of keys, given the output of attention over them and the log-sum-exp of their scores."""
    lse = wide("lse", lse)
    s = weight(lse, lse)
    return AttentionState(lse, s, scaled(y.astype(lse.dtype), s))
