"""Keys and values in pages: those of a sequence gathered, and attention in plain JAX over blocks of whole pages."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention.blocks import Call
from jaxsoft._attention.form import BASE, AttentionForm, Extra
from jaxsoft._attention.gather import gather

_SCALES = (Extra.KEY_SCALE, Extra.VALUE_SCALE)
_OF_PAGES = (Extra.PAGE_TABLE, *_SCALES)


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
    return gather(pages, jnp.where(there[:, :, 0], table, -1), there, dtype).reshape(shape)


def contiguous_form(form: AttentionForm) -> AttentionForm:
    """That of the call that a paged one is once its pages are gathered."""
    left = {extra for extra in form.extras if extra not in _OF_PAGES} | {Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS}
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
    """Which entries of a table name one of so many pages."""
    return (table >= 0) & (table < pages)
