"""Keys and values in pages: those of a sequence gathered, and attention in plain JAX over blocks of whole pages."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention.blocks import Call
from jaxsoft._attention.form import Extra, Form
from jaxsoft._attention.gather import gather


class PagedCall(Call):
    """The operands of a call whose keys and values are in pages, for computing block by block.

    Only the pages of a block are gathered at a time.
    """

    def __init__(self, form: Form, operands: Sequence[jax.Array], platform: str | None = None):
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
        found = (gathered(pages, table, there).astype(self.query.dtype) for pages in (self.key, self.value))
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
    real = jnp.repeat((table >= 0) & (table < pages), page_size, axis=1)
    return real & (keys[None] < lengths[:, None])


def gathered(pages: jax.Array, table: jax.Array, there: jax.Array) -> jax.Array:
    """The numbers of some pages of each sequence (B, keys, heads, size); 0 for keys that are not there.

    Args:
      pages: (P, page size, heads, size).
      table: (B, pages of a sequence).
      there: which keys are (B, keys).
    """
    # Of entries that are not used, no page is read, and none gets a gradient.
    used = there.reshape(*table.shape, pages.shape[1])[:, :, 0]
    found = gather(pages, jnp.where(used, table, -1)).reshape(*there.shape, *pages.shape[2:])
    return jnp.where(there[:, :, None, None], found, 0)
