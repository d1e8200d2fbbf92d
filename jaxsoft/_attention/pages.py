"""Keys and values in pages: those of a sequence gathered, its transpose, and attention in plain JAX over whole pages.

The transpose sums what several sequences have of a page. XLA adds numbers that belong to one place in an order of its
own, which on a GPU is another on every run. Here those of a page are added in the order of the sequences, and rounded
once.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention.blocks import Call
from jaxsoft._attention.form import BASE, AttentionForm, Extra
from jaxsoft._core.linear_map import LinearMap
from jaxsoft._core.mesh import varying_alike, whole_along
from jaxsoft.fold import accumulator


@dataclasses.dataclass(frozen=True)
class _Gather(LinearMap):
    """(numbers, there, pages) -> the pages of these numbers; transposed, their cotangents -> that of the pages.

    The numbers (B, n) are negative for pages of which nothing is there. Of the pages (P, page size, ...) as they are
    gathered (B, n, page size, ...), what is not there (B, n, page size) is 0, whatever pages hold.

    Attributes:
      pages: how many there are.
      dtype: of the result. Gradients are summed in its accumulator, and then rounded to that of the pages.
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


_SCALES = (Extra.KEY_SCALE, Extra.VALUE_SCALE)


class PagedCall(Call):
    """The operands of a call whose keys and values are in pages, for computing block by block.

    Only the pages of a block are gathered at a time.
    """

    def __init__(self, form: AttentionForm, operands: Sequence[jax.Array], platform: str | None = None):
        """Prepares the operands. A block has whole pages."""
        super().__init__(form, operands, platform)
        page_size = operands[1].shape[1]
        self.keys = max(self.keys // page_size, 1) * page_size

    def _lay(self, key: jax.Array, value: jax.Array) -> None:
        self.key, self.value = key, value  # which is how they are gathered

    def keys_and_values(self, begin: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """A block's, after gathering its pages."""
        page_size = self.key.shape[1]
        table, lengths = (self.extras[extra] for extra in (Extra.PAGE_TABLE, Extra.KEY_LENGTHS))
        table = jax.lax.dynamic_slice_in_dim(table, begin // page_size, size // page_size, 1)
        there = which_are_there(table, lengths - begin, *self.key.shape[:2])
        found = (gathered(pages, table, there, self.query.dtype) for pages in (self.key, self.value))
        key, value = (jnp.moveaxis(x, 2, 1) for x in found)
        return key, value, there


def which_are_there(table: jax.Array, lengths: jax.Array, pages: int, page_size: int) -> jax.Array:
    """Which keys of some pages of each sequence (B, keys) are before its end, and in a page that there is.

    Args:
      table: of these pages (B, pages of a sequence).
      lengths: of the sequences, from these pages on (B,), or (1,) for all.
      pages, page_size: of the cache.
    """
    keys = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)
    return jnp.repeat(is_real(table, pages), page_size, axis=1) & (keys[None] < lengths[:, None])


def gathered(pages: jax.Array, table: jax.Array, there: jax.Array, dtype: np.dtype) -> jax.Array:
    """The keys or values of some pages of each sequence (B, keys, heads, size), 0 for those that are not there.

    Args:
      pages: (P, page size, heads, size).
      table: (B, pages of a sequence).
      there: which are (B, keys).
      dtype: of the result.
    """
    shape = (*there.shape, *pages.shape[2:])
    there = there.reshape(*table.shape, pages.shape[1])
    # Of entries that are not used, no page is read, and none gets a gradient.
    return _Gather(pages.shape[0], dtype)(jnp.where(there[:, :, 0], table, -1), there, pages)[0].reshape(shape)


def contiguous_form(form: AttentionForm) -> AttentionForm:
    """That of the call that a paged one is once its pages are gathered."""
    left = {*form.extras, Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS} - {Extra.PAGE_TABLE, *_SCALES}
    return dataclasses.replace(form, extras=tuple(extra for extra in Extra if extra in left))


def contiguous(form: AttentionForm, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The operands of that call. Keys of entries that are out of range are in another segment than the queries.

    With scales they are in the accumulator's dtype, as products with these would be rounded in that of query.
    """
    query, *pages = operands[:BASE]
    extras = form.named(operands)
    table, lengths = extras[Extra.PAGE_TABLE], extras[Extra.KEY_LENGTHS]
    number, page_size = pages[0].shape[:2]
    scales = [extras.get(extra) for extra in _SCALES]
    dtype = next((scale.dtype for scale in scales if scale is not None), query.dtype)
    there = which_are_there(table, lengths, number, page_size)
    found = [query.astype(dtype)]
    for x, scale in zip(pages, scales, strict=True):
        x = gathered(x, table, there, dtype)
        found.append(x if scale is None else x * scale[None, None, :, None])
    extras[Extra.QUERY_SEGMENTS] = jnp.zeros((1, query.shape[1]), jnp.int32)
    real = is_real(table, number)
    extras[Extra.KEY_SEGMENTS] = jnp.repeat(jnp.where(real, jnp.int32(0), jnp.int32(1)), page_size, axis=1)
    return *found, *(extras[extra] for extra in contiguous_form(form).extras)


def is_real(table: jax.Array, pages: int) -> jax.Array:
    """Which entries of a table name one of `pages` pages."""
    return (table >= 0) & (table < pages)
