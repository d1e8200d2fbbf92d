"""What the kernels compute, whatever holds a row: the two reductions, and a result from a row's totals. All in f32.

A reduction is a fold. Each thread folds its own elements into its own state, and the threads' states are combined once
a row. The state of scores is (m, s) as in `jaxsoft.fold`, kept as four numbers: the maximum, the reference that exp
subtracts, the sum of exponentials, and the sum's rounding error. Backward operations fold a sum, kept with its error.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._rows.operation import Kind
from jaxsoft._rows.operations import OPERATIONS

# How many row operands and how many operands of one number a row an operation has, and of its results likewise. Those
# with labels are others with extras.
SIGNATURES = {
    operation.name: (
        sum(kind.is_wide for kind in operation.kinds),
        operation.kinds.count(Kind.STATISTIC),
        operation.results.count(Kind.ROW),
        operation.results.count(Kind.STATISTIC),
    )
    for operation in OPERATIONS
    if operation.has_kernels and not operation.has_label and not operation.selects
}
# What backward operations reduce, by itself.
SIGNATURES |= {f"{name}_sum": (2, 0, 0, 1) for name in ("softmax_vjp", "log_softmax_vjp")}
SCORES = ("softmax", "log_softmax", "state")  # that reduce scores to their state
SUMS = ("softmax_vjp", "log_softmax_vjp", "softmax_vjp_sum", "log_softmax_vjp_sum")

type Lanes = tuple[jax.Array, ...]


def sorted_refs(operation: str, refs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """A kernel's references: to row operands, to operands of one number a row, to what else it is given, and likewise
    to its results."""
    sizes = list(SIGNATURES[operation])
    sizes.insert(2, len(refs) - sum(sizes))
    rest = iter(refs)
    return tuple(tuple(itertools.islice(rest, size)) for size in sizes)


def reference(m: jax.Array) -> jax.Array:
    """What exp subtracts: m where it is finite, else 0, so that no exponent is inf - inf."""
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)


def terms(operation: str, *chunks: jax.Array) -> jax.Array:
    """What a backward operation sums."""
    return chunks[0] * chunks[1] if operation.startswith("softmax") else chunks[-1]


def folded(operation: str) -> tuple[int, ...]:
    """Which of its row operands an operation's fold needs: none where there is no fold."""
    if operation == "logsumexp_vjp":
        return ()
    return (1,) if operation == "log_softmax_vjp" else tuple(range(SIGNATURES[operation][0]))


def identity(operation: str, size: int) -> Lanes:
    """The state of nothing, in every thread."""
    values = (-jnp.inf, -jnp.inf, 0, 0) if operation in SCORES else (0, 0)
    return tuple(jnp.full((size,), value, jnp.float32) for value in values)


def accumulate_scores(lanes: Lanes, chunks: Sequence[jax.Array]) -> Lanes:
    """Folds a tile, as chunks of shape (threads, vector), into the threads' states.

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


def accumulate_sum(lanes: Lanes, chunks: Sequence[jax.Array]) -> Lanes:
    """Likewise for a sum."""
    s, error = lanes
    s, rounding = _two_sum(s, jnp.sum(_tree_sum(chunks), axis=1))
    return s, error + rounding


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a + b and its rounding error (Knuth)."""
    s = a + b
    virtual = s - a
    return s, (a - (s - virtual)) + (b - virtual)


def _tree_sum(values: Sequence[jax.Array]) -> jax.Array:
    while len(values) > 1:
        values = [functools.reduce(operator.add, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def total(states: Sequence[jax.Array]) -> Lanes:
    """Combines states (m, s), or sums, along their only axis."""
    if len(states) == 1:
        return (jnp.sum(states[0]),)
    m, s = states
    top = jnp.max(m)
    s = jnp.sum(s * jnp.exp(m - reference(top)))
    return top, jnp.where(top == jnp.inf, jnp.inf, s)  # where the sum's error is inf - inf


def total_of(states: Sequence[Lanes]) -> Lanes:
    """Likewise for a few scalars."""
    if len(states[0]) == 1:
        return (functools.reduce(operator.add, [s for (s,) in states]),)
    top = functools.reduce(jnp.maximum, [m for m, _ in states])
    ref = reference(top)
    s = functools.reduce(operator.add, [s * jnp.exp(m - ref) for m, s in states])
    return top, jnp.where(top == jnp.inf, jnp.inf, s)


def state(lanes: Lanes) -> Lanes:
    """The states as (m, s), or the sums, of threads."""
    if len(lanes) == 2:
        return (_rounded(*lanes),)
    m, ref, s, error = lanes
    return m, _rounded(s, error) * jnp.exp(ref - reference(m))


def _rounded(s: jax.Array, error: jax.Array) -> jax.Array:
    """s + error, where the error of an infinite sum is NaN."""
    return jnp.where(jnp.abs(s) < jnp.inf, s + error, s)


def finish(operation: str, totals: Lanes, given: Lanes, spread: Callable) -> Callable[..., jax.Array]:
    """The result of chunks of a row.

    Args:
      operation: which.
      totals: what its fold gave: (m, s) or a sum. Nothing for logsumexp_vjp.
      given: its operands of one number a row.
      spread: makes a chunk of a number a row.
    """
    if operation == "softmax_vjp":
        total_ = spread(totals[0])
        return lambda y, g: y * (g - total_)
    m, s = given[:2] or totals
    finite = jnp.abs(m) < jnp.inf
    ref = spread(reference(m))
    if operation == "log_softmax":
        log_s = spread(jnp.where(finite, jnp.log(s), jnp.nan))
        return lambda x: x - ref - log_s
    if operation == "softmax":
        scale = spread(jnp.where(m == jnp.inf, jnp.nan, 1 / s))  # inf / inf has no value
        return lambda x: jnp.exp(x - ref) * scale
    scale = jnp.where(s == 0, 0.0, 1 / s)
    if operation == "logsumexp_vjp":
        scale = spread(scale * given[2])
        return lambda x: jnp.exp(x - ref) * scale
    factor = spread(jnp.where(finite, scale * totals[0], jnp.nan))
    return lambda x, g: g - jnp.exp(x - ref) * factor
