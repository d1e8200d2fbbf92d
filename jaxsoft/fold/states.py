"""The monoid of states: (m, s), and (m, s, o) for scores that have values; and what makes states of scores."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.numbers import as_axis, as_float, as_mask
from jaxsoft._core.rounding import rounded, stored


class State(NamedTuple):
    """The state of a set of scores, or of many sets at once.

    Attributes:
      m: the maximum of the scores; -inf for the empty set.
      s: the sum of exp(x - m) over the scores, of m's shape; 0 for the empty set. Where m is infinite or NaN, the sum
        is that of exp(x), so that no exponent is ever inf - inf.
    """

    m: jax.Array
    s: jax.Array


export.register_namedtuple_serialization(State, serialized_name="jaxsoft.fold.State")


class AttentionState(NamedTuple):
    """The state of a set of scores that have values, or of many sets at once.

    Attributes:
      m: the maximum of the scores; -inf for the empty set.
      s: the sum of exp(x - m) over the scores, of m's shape; 0 for the empty set.
      o: the sum of exp(x - m) times the value of each score, of shape (..., d): the output of attention, but for the
        division by s.
    """

    m: jax.Array
    s: jax.Array
    o: jax.Array


export.register_namedtuple_serialization(AttentionState, serialized_name="jaxsoft.fold.AttentionState")


def reference(m: jax.Array) -> jax.Array:
    """What exp subtracts: m where it is finite, else 0. The guard that makes (-inf, 0) the identity."""
    return jnp.where(jnp.isfinite(m), m, 0)


def weight(m: jax.Array, total: jax.Array) -> jax.Array:
    """The weight exp(m - total) with which a sum that was taken relative to m goes into one relative to `total`.

    Every rescaling of online softmax is a product with it: of s where two states are combined, and of an unnormalised
    output in online attention.

    Args:
      m: the maximum of a set of scores; -inf for the empty set, whose weight is 0.
      total: the maximum of a set that contains it, or of several, of a shape that broadcasts with m's.

    >>> weight(jnp.array([1.0, -jnp.inf]), jnp.array([1.0, -jnp.inf]))
    Array([1., 0.], dtype=float32)
    """
    return jnp.exp(m - reference(total))


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which scores of a dtype are summed: f64 for f64, itself for a complex one, else f32."""
    # Not by jnp.promote_types, which refuses two dtypes under JAX's strict promotion.
    dtype = jnp.dtype(dtype)
    return dtype if dtype == jnp.float64 or jnp.issubdtype(dtype, jnp.complexfloating) else jnp.dtype(jnp.float32)


def identity(shape: int | Sequence[int] = (), dtype: DTypeLike = jnp.float32) -> State:
    """The state of the empty set, (-inf, 0): `combine(identity(), a)` is `a`.

    Args:
      shape: the shape of m and s, as `jax.numpy.zeros` takes it.
      dtype: their dtype, one of real floating-point numbers.

    >>> identity()
    State(m=Array(-inf, dtype=float32), s=Array(0., dtype=float32))
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be one of real floating-point numbers; got {dtype!r}")
    return State(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def combine[S: (State, AttentionState)](a: S, b: S) -> S:
    r"""The state of the union of two disjoint sets of scores, elementwise.

    .. math::
      m = \max(m_a, m_b), \qquad s = s_a e^{m_a - m} + s_b e^{m_b - m}, \qquad o = o_a e^{m_a - m} + o_b e^{m_b - m}

    Associative and commutative up to rounding, with `identity` (`attention_identity`) as its unit, so it can be given
    to `jax.lax.associative_scan` and `jax.lax.reduce`.

    Args:
      a, b: states of one kind, whose shapes broadcast against each other.

    >>> a, b = state(jnp.array([1.0, 2.0])), state(jnp.array([3.0]))
    >>> bool(jnp.allclose(lse(combine(a, b)), jax.nn.logsumexp(jnp.array([1.0, 2.0, 3.0]))))
    True
    """
    m = jnp.maximum(a.m, b.m)
    weight_a, weight_b = weight(a.m, m), weight(b.m, m)
    s = a.s * weight_a + b.s * weight_b
    if isinstance(a, State):
        return State(m, s)
    return AttentionState(m, s, scaled(a.o, weight_a) + scaled(b.o, weight_b))


def scaled(values: jax.Array, factor: jax.Array) -> jax.Array:
    """values * factor, and 0 for a factor of 0 even where a value is NaN, as the output over no keys may be."""
    factor = factor[..., None]
    return jnp.where(factor == 0, 0, jnp.where(factor == 0, 0, values) * factor)


def state(x: ArrayLike, axis: int | Sequence[int] | None = -1, where: ArrayLike | None = None) -> State:
    """The state of the scores of `x` along `axis`.

    Args:
      x: scores, of any real dtype. f64 and, where x64 is enabled, 64-bit integers give an f64 state, others an f32 one.
      axis: the axis or axes that are reduced; None for all.
      where: booleans or integers, broadcastable to x; only elements where it is True count.

    Returns:
      A state of the shape of x without `axis`. No scores, or only scores of -inf, give the identity. To derivatives m
      is a constant, so that those of `lse`, and of all that any other m would give as well, are right.

    >>> state(jnp.array([0.0, 0.0, -jnp.inf]))
    State(m=Array(0., dtype=float32), s=Array(2., dtype=float32))
    """
    x = wide("x", x)
    if where is not None:
        x = jnp.where(mask_of(where, "x", x.shape), x, -jnp.inf)
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    m = maximum_of(x, axis)
    s = jnp.sum(weight(x, m), axis=axis)
    return State(m.reshape(s.shape), s)


def maximum_of(x: jax.Array, axis: int | tuple[int, ...] | None) -> jax.Array:
    """The maximum along axes, which are kept, as a constant: what does not depend on the m of its state needs no more.

    JAX finds the place of a maximum again by comparing it with every score. Where XLA computes the scores twice, with
    products and sums fused in one place and not in the other, none may be equal, and the derivative would be 0 / 0.
    """
    return jax.lax.stop_gradient(jnp.max(x, axis=axis, initial=-jnp.inf, keepdims=True))


def lse(st: State | AttentionState) -> jax.Array:
    """The natural log-sum-exp of a state, m + log(s): the same state in one number. -inf for the empty set.

    >>> lse(state(jnp.array([1.0])))
    Array(1., dtype=float32)
    """
    empty = st.s == 0
    return jnp.where(empty, -jnp.inf, reference(st.m) + jnp.log(jnp.where(empty, 1, st.s)))


def running_states(x: ArrayLike, axis: int = -1, reverse: bool = False) -> State:
    """The state of every prefix of `x` along `axis`, by `jax.lax.associative_scan`: O(log n) depth.

    Args:
      x: scores, as for `state`.
      axis: the axis along which prefixes are taken.
      reverse: take suffixes instead.

    Returns:
      A state of x's shape.

    >>> running_states(jnp.array([0.0, 0.0, 1.0])).m
    Array([0., 0., 1.], dtype=float32)
    """
    x = wide("x", x)
    along = as_axis(axis, x.ndim)
    if not isinstance(x.shape[along], int):
        raise ValueError(f"x must have a known length along axis {axis}, as the scan needs it; got shape {x.shape}")
    elements = State(x, weight(x, x))
    return jax.lax.associative_scan(combine, elements, reverse=reverse, axis=along)


def cumlogsumexp(x: ArrayLike, axis: int = -1, reverse: bool = False) -> jax.Array:
    """The log-sum-exp of every prefix of `x` along `axis`: `jax.lax.cumlogsumexp`, without NaN for leading -inf.

    >>> jnp.round(jnp.exp(cumlogsumexp(jnp.log(jnp.array([1.0, 2.0, 3.0])))), 4)
    Array([1., 3., 6.], dtype=float32)
    """
    return lse(running_states(x, axis, reverse))


def from_lse(value: ArrayLike) -> State:
    """The state (lse, 1) of a set of scores, given its log-sum-exp.

    It is the state of one score of that value, and combines with others as the state of the set would.

    Args:
      value: log-sum-exps; -inf for the empty set.

    >>> from_lse(2.0)
    State(m=Array(2., dtype=float32), s=Array(1., dtype=float32))
    """
    value = wide("value", value)
    return State(value, weight(value, value))


def wide(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name in the accumulator's dtype, after checking that it holds real numbers.

    It may be a product, of which a maximum is taken and then subtracted: both read it as it is rounded.
    """
    x = as_float(name, x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must hold real numbers; got dtype {x.dtype.name}")
    dtype = accumulator(x.dtype)
    return rounded(x.astype(dtype)) if x.dtype == dtype else stored(x)[0].astype(dtype)


def mask_of(where: ArrayLike, name: str, shape: tuple[int, ...]) -> jax.Array:
    """`where` as booleans of the shape of the scores, which are the argument of this name."""
    where = as_mask("where", where)
    try:
        return jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(f"where must broadcast to the shape of {name}, {shape}; got shape {where.shape}") from None
