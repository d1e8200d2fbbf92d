"""The pages of sequences, gathered from a cache, and the transpose of that: the sums of what several sequences have.

XLA adds numbers that belong to one place in an order of its own, which on a GPU is another on every run. Here those of
a page are added in the order of the sequences, and rounded once.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.mesh import varying_alike, whole_along
from jaxsoft.fold import accumulator


def gather(pages: jax.Array, numbers: jax.Array, there: jax.Array, dtype: np.dtype) -> jax.Array:
    """Pages (P, page size, ...) by their numbers (B, n), as (B, n, page size, ...), with derivatives of every order.

    Args:
      pages: of the cache.
      numbers: of those that are gathered. One is negative if nothing of it is there.
      there: what of the gathered pages is (B, n, page size). The rest is 0, whatever pages hold.
      dtype: of the result. Gradients are summed in its accumulator, and then rounded to that of the pages.
    """
    return _Gather(pages.shape[0], dtype)(numbers, there, pages)[0]


@dataclasses.dataclass(frozen=True)
class _Gather(LinearMap):
    """(numbers, there, pages) -> the pages of these numbers; transposed, their cotangents -> that of the pages.

    Attributes:
      pages: how many there are.
      dtype: of the result.
      transposed: whether this is the transpose.
    """

    pages: int
    dtype: np.dtype
    transposed: bool = False

    @property
    def linear(self) -> range:
        """The last operand."""
        return range(2, 3)

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The pages, or the sums."""
        numbers, there, x = operands
        there = there.reshape(*there.shape, *(1,) * (x.ndim - 2 - self.transposed))
        if self.transposed:
            return (self._sums(numbers, jnp.where(there, x, 0)),)
        if not self.pages:
            return (jnp.zeros((*there.shape[:3], *x.shape[2:]), self.dtype),)
        # On a CPU, XLA would convert all pages of 8-bit floats first, but not those of 8-bit integers.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
        bits = jnp.where(there, bits.at[jnp.maximum(numbers, 0)].get(mode="promise_in_bounds"), 0)
        found = jax.lax.bitcast_convert_type(bits, x.dtype) if x.dtype.itemsize == 1 else bits
        return (found.astype(self.dtype),)

    def _sums(self, numbers: jax.Array, x: jax.Array) -> jax.Array:
        """Page by page: the first ones of each number, then the second ones, and so on."""
        numbers, x = numbers.reshape(-1), x.reshape(numbers.size, *x.shape[2:])
        places = jnp.arange(numbers.size, dtype=jnp.int32)
        numbers = jnp.where(numbers < 0, self.pages, numbers)
        numbers, order = jax.lax.sort((numbers, places), num_keys=1)
        begins = jnp.where(jnp.diff(numbers, prepend=jnp.int32(-1)) != 0, places, 0)
        rank = jnp.where(numbers < self.pages, places - jax.lax.cummax(begins), -1)
        x = x.at[order].get(mode="promise_in_bounds", unique_indices=True)

        def add(carry):
            i, total = carry
            at = jnp.where(rank == i, numbers, self.pages + places)  # no two are the same, as is promised
            return i + 1, total.at[at].add(x.astype(total.dtype), mode="drop", unique_indices=True)

        total = jnp.zeros((self.pages, *x.shape[1:]), accumulator(x.dtype))
        first, total, most, *_ = varying_alike(jnp.int32(0), total, jnp.max(rank, initial=-1), x)
        return jax.lax.while_loop(lambda carry: carry[0] <= most, add, (first, total))[1].astype(self.dtype)

    def transpose(self, dtypes: Sequence[np.dtype], wanted: Sequence[int]) -> "_Gather":
        """The transpose, whose results have the dtype of the operands."""
        del wanted
        return dataclasses.replace(self, dtype=dtypes[0], transposed=not self.transposed)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """Several caches are joined to one, and sequences of several batches to one batch."""
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        numbers, there, x = (
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else whole_along(jnp.moveaxis(x, d, 0), (0, 1))
            for x, d in zip(operands, dims, strict=True)
        )
        first = jnp.arange(size, dtype=numbers.dtype)[:, None, None] * self.pages
        joined = jnp.where(numbers < 0, -1, numbers + first)
        several = dataclasses.replace(self, pages=size * self.pages)
        (found,) = several(*(v.reshape(size * v.shape[1], *v.shape[2:]) for v in (joined, there, x)))
        number = self.pages if self.transposed else joined.shape[1]
        return [found.reshape(size, number, *found.shape[1:])]
