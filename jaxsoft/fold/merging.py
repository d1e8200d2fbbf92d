"""Merges of blocks: softmaxes and outputs of attention that were computed apart, by their states."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoft.fold.attention import of_output, output
from jaxsoft.fold.states import State, combine, from_lse, lse, scaled, weight


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
    factors = [st.s * weight(st.m, total.m) * scale for st in states]
    pairs = zip(blocks, factors, strict=True)
    parts = [scaled(p.astype(factor.dtype), factor).astype(p.dtype) for p, factor in pairs]
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
    total = combine(of_output(o, lse_o), of_output(block, lse_block))
    return output(total, o.dtype), lse(total)


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
