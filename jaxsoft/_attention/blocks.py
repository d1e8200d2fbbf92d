"""Attention in plain JAX over blocks of keys: the scores of a block, and the loop over all blocks.

No array of queries times keys is ever in memory, but one of queries times a block. Heads come before lengths here, as
products want them: arrays of queries are (B, N, T, ...), those of keys (B, K, S, ...), and scores (B, N, T, keys).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import BASE, AttentionForm, Extra
from jaxsoft._attention.masks import Masks, Segments, all_of
from jaxsoft._core.rounding import rounded
from jaxsoft.fold import accumulator

# The fewest keys of a block, by platform. By measurement on a CPU, where its scores are to stay in the cache; on
# a GPU the products of shorter ones are slower.
LEAST = {"cpu": 128}
LEAST_ELSEWHERE = 1024
# Of few queries, as when decoding, a block has more keys: up to this number of scores of a head, and of keys.
SCORES, MOST = 2**16, 2**13


def keys_of_block(queries: int, platform: str | None) -> int:
    """How many keys a block has, by the queries of a head. The platform may not be known yet.

    It does not depend on the batch, so that no result of a sequence depends on the others.
    """
    least = LEAST.get(platform or "", LEAST_ELSEWHERE)
    if not isinstance(queries, int) or not queries:
        return least
    return min(MOST, max(least, 1 << (SCORES // queries).bit_length() >> 1))


class Block(NamedTuple):
    """The scores of all queries and a block of keys.

    Attributes:
      key, value: of the block.
      z: the scores, in the accumulator's dtype; -inf where one is not allowed.
      slope: the derivative of the capped scores by those before the cap; None without a cap.
    """

    key: jax.Array
    value: jax.Array
    z: jax.Array
    slope: jax.Array | None


class Call:
    """The operands of a call, for computing block by block."""

    def __init__(self, form: AttentionForm, operands: Sequence[jax.Array], platform: str | None = None):
        """Prepares the operands: query, key, value and the form's extras. The platform decides the size of blocks, and
        what is rounded.
        """
        query, key, value = operands[:BASE]
        self.form = form
        self.batch, self.length, self.heads, _ = query.shape
        self.groups = key.shape[2]
        self.dtype = accumulator(query.dtype)
        self.keys = keys_of_block(self.length, platform)
        # Whether weights and gradients of scores are multiplied as they are, and not rounded to 16 bits.
        self.wide = platform == "cpu"
        self.query = jnp.moveaxis(query, 2, 1)
        self.length_of_keys = form.keys(operands)
        # Rounded no more than the scores would be: a power of 2 is exact, but not where f16 has no exponent for it.
        exact = query.dtype == jnp.bfloat16 and math.frexp(form.scale)[0] in (-0.5, 0, 0.5)
        self.scaled = self.query * form.scale if exact or query.dtype == self.dtype else self.query
        self.extras = form.named(operands)
        self._lay(key, value)

    def _lay(self, key: jax.Array, value: jax.Array) -> None:
        """Prepares keys and values."""
        self.key, self.value = (jnp.moveaxis(x, 2, 1) for x in (key, value))

    def keys_and_values(self, begin: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """So many keys (B, K, keys, H) and values (B, K, keys, D) from this one on, in the dtype of query, and which of
        them are there (B, keys); None for all.
        """
        key, value = (_part(x, begin, size, 2) for x in (self.key, self.value))
        return key, value, None

    def product(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """An einsum in the accumulator's dtype, of operands that have one dtype.

        Args:
          spec: as `jnp.einsum` has it. Each term begins with "bn" for heads of queries, or "bk" for those of keys.
          a, b: the operands.
        """
        *terms, result = spec.replace("->", ",").split(",")
        if self.heads == self.groups:
            spec = spec.replace("n", "k")
        else:  # the query heads of a key head are beside each other
            spec = spec.replace("n", "kg")
            of_group = self.batch, self.groups, self.heads // self.groups
            pairs = zip((a, b), terms, strict=True)
            a, b = (x.reshape(*of_group, *x.shape[2:]) if "n" in term else x for x, term in pairs)
        b = b.astype(a.dtype)
        y = jnp.einsum(spec, a, b, preferred_element_type=self.dtype, precision=self.form.precision)
        return y.reshape(self.batch, self.heads, *y.shape[-2:]) if "n" in result else y

    def of_heads(self, x: jax.Array) -> jax.Array:
        """Numbers of the heads of keys (K,), for arrays (B, N, ..., ...) of the heads of queries."""
        return jnp.repeat(x, self.heads // self.groups)[None, :, None, None]

    def block(self, begin: jax.Array | int, size: int) -> Block:
        """The scores of `size` keys from `begin` on."""
        key, value, there = self.keys_and_values(begin, size)
        z, slope = self.product("bnth,bksh->bnts", self.scaled, key), None
        if self.scaled is self.query:
            # XLA may subtract from a product before it is rounded. Of large scores none would be near their maximum.
            z = jax.lax.optimization_barrier(z * self.form.scale)
        if Extra.KEY_SCALE in self.extras:
            z = rounded(z * self.of_heads(self.extras[Extra.KEY_SCALE]))
        if self.form.cap is not None:
            bent = jnp.tanh(z / self.form.cap)
            z, slope = rounded(bent * self.form.cap), 1 - bent * bent
        if Extra.BIAS in self.extras:
            z = z + _part(self.extras[Extra.BIAS], begin, size, 3).astype(z.dtype)
        allowed = self._allowed(begin, size)
        for condition in (allowed, None if there is None else there[:, None, None, :]):
            if condition is not None:
                z = jnp.where(condition, z, -jnp.inf)
        return Block(key, value, z, slope)

    def _allowed(self, begin: jax.Array | int, size: int) -> jax.Array | None:
        """Which scores of a block are allowed, broadcastable to them; None for all."""
        form, extras = self.form, self.extras
        segments = Segments(
            lambda i: extras[Extra.QUERY_SEGMENTS][:, :, None],
            lambda j: _part(extras[Extra.KEY_SEGMENTS], begin, size, 1)[:, None, :],
        )
        masks = Masks.of(form, self.length, self.length_of_keys, lambda extra: extras[extra][:, None, None], segments)
        queries = jnp.arange(self.length, dtype=jnp.int32)[None, :, None]
        keys = (jnp.arange(size, dtype=jnp.int32) + begin)[None, None, :]
        found = [condition[:, None] for condition in masks.conditions(queries, keys)]  # (B, 1, T, keys), or 1 for each
        if Extra.MASK in extras:
            found.append(_part(extras[Extra.MASK], begin, size, 3))
        return all_of(found)

    def over_keys[T](
        self,
        step: Callable[[T | None, Block], tuple[T, dict[str, jax.Array]]],
        axes: dict[str, int],
    ) -> tuple[T, dict[str, jax.Array]]:
        """Takes all blocks in turn.

        Args:
          step: (what the blocks before have given, or None for the first; a block) -> what the next gets, and arrays of
            this block's keys by name.
          axes: the dimension of the keys in arrays of these names.

        Returns:
          What the last step gave, and the arrays of all keys.
        """
        length = self.length_of_keys
        if not isinstance(length, int) or length <= self.keys:
            return step(None, self.block(0, length))
        # The first block is the one that may be shorter. It also gives the loop a state of the right type.
        first = length % self.keys or self.keys
        carry, parts = step(None, self.block(0, first))

        def next_step(carry, begin):
            return step(carry, self.block(begin, self.keys))

        begins = jnp.arange(first, length, self.keys, dtype=jnp.int32)
        # Where a derivative of higher order differentiates this loop, it keeps the operands and not the scores.
        carry, stacked = jax.lax.scan(jax.checkpoint(next_step, prevent_cse=False), carry, begins)
        return carry, {
            name: jnp.concatenate([parts[name], _joined(blocks, axes[name])], axes[name])
            for name, blocks in stacked.items()
        }


def _part(x: jax.Array, begin: jax.Array | int, size: int, axis: int) -> jax.Array:
    """A part of an array along an axis, or all of it where it has length 1 there or is that part."""
    if x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, begin, size, axis)


def _joined(blocks: jax.Array, axis: int) -> jax.Array:
    """Blocks (number, ...) joined along an axis of what each has."""
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
