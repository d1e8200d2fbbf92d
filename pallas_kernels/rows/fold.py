"""How the kernels reduce a row: the two folds, in f32, whatever holds the row.

A fold has three levels. Every thread folds the elements that it has loaded into a state of its own, its lanes. Once a
row, the lanes become plain states, and the states of all threads combine to the row's total: (m, s), as in
`jaxsoft.fold`, or a sum. The lanes of (m, s) are four numbers: the maximum, the reference that exp subtracts, the sum
of exponentials, and the sum's rounding error. A plain sum is kept with its error, too.
"""

import abc
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

type Lanes = tuple[jax.Array, ...]  # what each thread has folded
type State = tuple[jax.Array, ...]  # (m, s), or (sum,)


class Fold(abc.ABC):
    """A reduction of rows.

    Attributes:
      neutral: the element that changes no state.
      numbers: how many numbers a state has.
    """

    neutral: float
    numbers: int

    @abc.abstractmethod
    def identity(self, size: int) -> Lanes:
        """The lanes of threads that have folded nothing."""

    @abc.abstractmethod
    def accumulate(self, lanes: Lanes, chunks: Sequence[jax.Array]) -> Lanes:
        """Folds a tile, as chunks of shape (threads, vector), into the threads' lanes."""

    @abc.abstractmethod
    def state(self, lanes: Lanes) -> State:
        """The states that lanes stand for."""

    @abc.abstractmethod
    def total(self, states: State) -> State:
        """Combines states along the only axis of their arrays."""

    @abc.abstractmethod
    def combine(self, states: Sequence[State]) -> State:
        """Combines a few states of scalars."""


class _ScoresFold(Fold):
    """Folds scores into (m, s)."""

    neutral = -jnp.inf
    numbers = 2

    def identity(self, size: int) -> Lanes:
        return tuple(jnp.full((size,), value, jnp.float32) for value in (-jnp.inf, -jnp.inf, 0, 0))

    def accumulate(self, lanes: Lanes, chunks: Sequence[jax.Array]) -> Lanes:
        """Folds a tile.

        The reference of a sum follows the maximum only when it falls behind by more than 1. A slowly rising row would
        otherwise rescale the sum with every tile, each time with a rounding error, and these add up. The additions are
        compensated for the same reason: a thread makes thousands in a long row.
        """
        m, ref, s, error = lanes
        m = jnp.maximum(m, jnp.max(functools.reduce(jnp.maximum, chunks), axis=1))
        new = jnp.where(m > ref + 1.0, m, ref)
        shift = reference(new)
        scale = jnp.exp(ref - shift)  # 0 for the identity
        part = jnp.sum(_tree_sum([jnp.exp(x - lax.broadcast_in_dim(shift, x.shape, (0,))) for x in chunks]), axis=1)
        s, rounding = _two_sum(s * scale, part)
        return m, new, s, error * scale + rounding

    def state(self, lanes: Lanes) -> State:
        m, ref, s, error = lanes
        return m, _rounded(s, error) * weight(ref, m)

    def total(self, states: State) -> State:
        m, s = states
        top = jnp.max(m)
        s = jnp.sum(s * weight(m, top))
        return top, _sum_below(top, s)

    def combine(self, states: Sequence[State]) -> State:
        top = functools.reduce(jnp.maximum, [m for m, _ in states])
        ref = reference(top)
        s = functools.reduce(operator.add, [s * jnp.exp(m - ref) for m, s in states])
        return top, _sum_below(top, s)


class _SumFold(Fold):
    """Folds numbers into their sum."""

    neutral = 0.0
    numbers = 1

    def identity(self, size: int) -> Lanes:
        return tuple(jnp.full((size,), value, jnp.float32) for value in (0, 0))

    def accumulate(self, lanes: Lanes, chunks: Sequence[jax.Array]) -> Lanes:
        s, error = lanes
        s, rounding = _two_sum(s, jnp.sum(_tree_sum(chunks), axis=1))
        return s, error + rounding

    def state(self, lanes: Lanes) -> State:
        return (_rounded(*lanes),)

    def total(self, states: State) -> State:
        return (jnp.sum(states[0]),)

    def combine(self, states: Sequence[State]) -> State:
        return (functools.reduce(operator.add, [s for (s,) in states]),)


SCORES: Fold = _ScoresFold()
SUM: Fold = _SumFold()


def reference(m: jax.Array) -> jax.Array:
    """What exp subtracts, as in `jaxsoft.fold`: Mosaic GPU has no jnp.isfinite (JAX 0.12)."""
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)


def weight(m: jax.Array, total: jax.Array) -> jax.Array:
    """The weight exp(m - total) of a sum relative to m in one relative to a total, as in `jaxsoft.fold`."""
    return jnp.exp(m - reference(total))


def _sum_below(top: jax.Array, s: jax.Array) -> jax.Array:
    """The sum of exponentials relative to a maximum; inf where that is inf, and s may be NaN by its rounding error."""
    return jnp.where(top == jnp.inf, jnp.inf, s)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a + b and its rounding error (Knuth)."""
    s = a + b
    virtual = s - a
    return s, (a - (s - virtual)) + (b - virtual)


def _tree_sum(values: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays, in pairs."""
    while len(values) > 1:
        values = [functools.reduce(operator.add, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _rounded(s: jax.Array, error: jax.Array) -> jax.Array:
    """s + error; s where that is infinite, as its error is NaN then."""
    return jnp.where(jnp.abs(s) < jnp.inf, s + error, s)
