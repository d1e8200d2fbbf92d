"""The fold that every operation here is: the monoid of states (m, s).

A *state* summarises a set of scores x by its maximum m and s = sum(exp(x - m)). States of two sets combine to the
state of their union, so a row can be reduced in any order and in any parts: tiles of a kernel, splits of a long row,
shards of a mesh, blocks of keys in attention. This module is that fold in plain JAX: differentiable in both modes,
to every order, and the definition that the kernels are tested against.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), for the state and its
combination; Rabe and Staats, "Self-attention does not need O(n^2) memory" (arXiv:2112.05682), and Dao et al.,
"FlashAttention" (arXiv:2205.14135), for merging blocks; Liu et al., "Ring attention" (arXiv:2310.01889), for the
running update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.numbers import as_axis, as_float, as_mask

__all__ = [
    "State",
    "combine",
    "cumlogsumexp",
    "from_lse",
    "identity",
    "lse",
    "merge_softmax",
    "merge_softmax_lse",
    "running_states",
    "state",
    "update_output",
    "weight",
]


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


def combine(a: State, b: State) -> State:
    r"""The state of the union of two disjoint sets of scores, elementwise.

    .. math::
      m = \max(m_a, m_b), \qquad s = s_a e^{m_a - m} + s_b e^{m_b - m}

    Associative and commutative up to rounding, with `identity` as its unit, so it can be given to
    `jax.lax.associative_scan` and `jax.lax.reduce`.

    Args:
      a, b: states whose shapes broadcast against each other.

    >>> a, b = state(jnp.array([1.0, 2.0])), state(jnp.array([3.0]))
    >>> bool(jnp.allclose(lse(combine(a, b)), jax.nn.logsumexp(jnp.array([1.0, 2.0, 3.0]))))
    True
    """
    m = jnp.maximum(a.m, b.m)
    return State(m, a.s * weight(a.m, m) + b.s * weight(b.m, m))


def state(x: ArrayLike, axis: int | Sequence[int] | None = -1, where: ArrayLike | None = None) -> State:
    """The state of the scores of `x` along `axis`.

    Args:
      x: scores, of any real dtype. f64 and, where x64 is enabled, 64-bit integers give an f64 state, others an f32 one.
      axis: the axis or axes that are reduced; None for all.
      where: boolean, broadcastable to x; only elements where it is True count.

    Returns:
      A state of the shape of x without `axis`. No scores, or only scores of -inf, give the identity.

    >>> state(jnp.array([0.0, 0.0, -jnp.inf]))
    State(m=Array(0., dtype=float32), s=Array(2., dtype=float32))
    """
    x = _wide("x", x)
    if where is not None:
        x = jnp.where(_mask(where, x.shape), x, -jnp.inf)
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    if x.size:
        m = jnp.max(x, axis=axis, initial=-jnp.inf, keepdims=True)
    else:
        m = jnp.sum(x, axis=axis, keepdims=True) - jnp.inf  # the maximum of nothing has NaN as its derivative in JAX
    s = jnp.sum(weight(x, m), axis=axis)
    return State(m.reshape(s.shape), s)


def lse(st: State) -> jax.Array:
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
    x = _wide("x", x)
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


def merge_softmax(blocks: Sequence[jax.Array], states: Sequence[State]) -> tuple[jax.Array, State]:
    """The softmax of a row from the softmaxes of its blocks and their states.

    Args:
      blocks: one softmax for each block, of shape (..., n_i); the n_i may differ.
      states: the state of each block's scores, of shape (...).

    Returns:
      The softmax of the concatenated blocks, of shape (..., sum of n_i), and its state. A block without a finite score
      gets probability 0, whatever its softmax holds; a row of nothing else is 0.

    >>> x = jnp.array([1.0, 2.0, 3.0])
    >>> y, st = merge_softmax([jax.nn.softmax(x[:1]), jax.nn.softmax(x[1:])], [state(x[:1]), state(x[1:])])
    >>> bool(jnp.allclose(y, jax.nn.softmax(x))) and bool(jnp.allclose(lse(st), jax.nn.logsumexp(x)))
    True
    """
    _same_number("blocks", blocks, "states", states)
    _check_broadcast(_rows_of("blocks", blocks) | {f"states[{i}].m": st.m.shape for i, st in enumerate(states)})
    total = states[0]
    for st in states[1:]:
        total = combine(total, st)
    scale = 1 / jnp.where(total.s == 0, 1, total.s)
    parts = [_weighted(p, st.s * weight(st.m, total.m) * scale) for p, st in zip(blocks, states, strict=True)]
    return jnp.concatenate(parts, axis=-1), total


def merge_softmax_lse(blocks: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """`merge_softmax` for blocks that come with their log-sum-exp instead of their state.

    Args:
      blocks: one softmax for each block, of shape (..., n_i).
      lses: the natural log-sum-exp of each block's scores, of shape (...).

    Returns:
      The softmax of the concatenated blocks and its log-sum-exp.

    >>> x = jnp.array([1.0, 2.0, 3.0])
    >>> y, _ = merge_softmax_lse([jnp.ones(1), jax.nn.softmax(x[1:])], [x[0], jax.nn.logsumexp(x[1:])])
    >>> bool(jnp.allclose(y, jax.nn.softmax(x)))
    True
    """
    _same_number("blocks", blocks, "lses", lses)
    _check_broadcast(_rows_of("blocks", blocks) | {f"lses[{i}]": jnp.shape(value) for i, value in enumerate(lses)})
    y, st = merge_softmax(blocks, [from_lse(v) for v in lses])
    return y, lse(st)


def update_output(
    o: jax.Array, lse_o: jax.Array, block: jax.Array, lse_block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The running update of ring attention: attention over the keys so far, merged with attention over a new block.

    Args:
      o: the output so far, of shape (..., d). Start with zeros, and with lse_o = -inf.
      lse_o: the log-sum-exp of the scores so far, of shape (...).
      block: the output over the new block of keys, of o's shape.
      lse_block: the log-sum-exp of its scores, of lse_o's shape; -inf where every key of the block is masked.

    Returns:
      The output and the log-sum-exp over both. No difference of log-sum-exps is exponentiated but the one that is at
      most 0, so any values are safe; where both sides are -inf the output is 0.

    >>> o, lse_o = update_output(jnp.zeros(2), jnp.full((), -jnp.inf), jnp.ones(2), jnp.float32(3.0))
    >>> o, lse_o
    (Array([1., 1.], dtype=float32), Array(3., dtype=float32))
    """
    _check_broadcast({"o": jnp.shape(o), "block": jnp.shape(block)})
    rows = {"o[..., 0]": jnp.shape(o)[:-1], "block[..., 0]": jnp.shape(block)[:-1]}
    _check_broadcast(rows | {"lse_o": jnp.shape(lse_o), "lse_block": jnp.shape(lse_block)})
    a, b = from_lse(lse_o), from_lse(lse_block)
    total = combine(a, b)
    scale = 1 / jnp.where(total.s == 0, 1, total.s)
    merged = _weighted(o, a.s * weight(a.m, total.m) * scale) + _weighted(block, b.s * weight(b.m, total.m) * scale)
    return merged, lse(total)


def from_lse(value: ArrayLike) -> State:
    """The state (lse, 1) of a set of scores, given its log-sum-exp.

    It is the state of one score of that value, and combines with others as the state of the set would.

    Args:
      value: log-sum-exps; -inf for the empty set.

    >>> from_lse(2.0)
    State(m=Array(2., dtype=float32), s=Array(1., dtype=float32))
    """
    value = _wide("value", value)
    return State(value, weight(value, value))


def _weighted(p: jax.Array, factor: jax.Array) -> jax.Array:
    """p * factor, and 0 for a factor of 0 even where p is NaN, as the softmax of a block without scores is."""
    factor = factor[..., None]
    return jnp.where(factor == 0, 0, jnp.where(factor == 0, 0, p).astype(factor.dtype) * factor).astype(p.dtype)


def _wide(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name in the accumulator's dtype, after checking that it holds real numbers."""
    x = as_float(name, x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must hold real numbers; got dtype {x.dtype.name}")
    return x.astype(accumulator(x.dtype))


def _mask(where: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """`where` as booleans of the shape of the scores."""
    where = as_mask("where", where)
    try:
        return jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(f"where must broadcast to the shape of x, {shape}; got shape {where.shape}") from None


def _check_broadcast(shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises unless these shapes broadcast with each other. Each has the name of what it is the shape of."""
    try:
        jax.lax.broadcast_shapes(*shapes.values())
    except ValueError:
        given = ", ".join(map(str, shapes.values()))
        raise ValueError(f"{', '.join(shapes)} must have shapes that broadcast with each other; got {given}") from None


def _rows_of(name: str, values: Sequence[ArrayLike]) -> dict[str, tuple[int, ...]]:
    """The shape of the rows of each of some arrays (..., n), by name."""
    return {f"{name}[{i}][..., 0]": jnp.shape(value)[:-1] for i, value in enumerate(values)}


def _same_number(name: str, values: Sequence[object], other: str, others: Sequence[object]) -> None:
    if len(values) != len(others) or not values:
        raise ValueError(
            f"{name} and {other} must have the same number of entries, at least one; "
            f"got {len(values)} and {len(others)}"
        )
