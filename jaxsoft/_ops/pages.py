"""The arguments that functions over a cache in pages share: what they must be, and where the tokens of a call are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft._core.mesh import whole_along, with_batch_of
from jaxsoft._core.numbers import as_array
from jaxsoft._ops.arguments import as_kernel_scores
from jaxsoft._ops.attention_arguments import as_position, check_integers, of_integers

_EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, *_EIGHT_BITS)


def has_eight_bits(dtype: np.dtype) -> bool:
    """Whether pages of this dtype are of 8-bit floats."""
    return dtype in _EIGHT_BITS


def check_pages(key_pages: ArrayLike, value_pages: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The pages of keys and values as arrays, after checking that they fit each other.

    Over explicit axes of a mesh only their heads may be sharded, as each sequence may have any page.
    """
    keys, values = as_array("key_pages", key_pages), as_array("value_pages", value_pages)
    for name, x, letter in (("key_pages", keys, "H"), ("value_pages", values, "D")):
        if x.ndim != 4:
            raise ValueError(f"{name} must have the shape (P, page size, K, {letter}); got shape {x.shape}")
        if x.dtype not in _DTYPES:
            names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES[:-1])
            raise TypeError(f"{name} must hold {names} or {_DTYPES[-1].dtype.name}; got dtype {x.dtype.name}")
    if keys.shape[1] == 0:
        raise ValueError(f"key_pages must have room for a key or more in a page; got shape {keys.shape}")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"value_pages must have the shape {keys.shape[:3]} and a head size; got shape {values.shape}")
    if values.dtype != keys.dtype:
        raise TypeError(f"value_pages must have the dtype of key_pages, {keys.dtype.name}; got {values.dtype.name}")
    return whole_along(keys, (0, 1, 3)), whole_along(values, (0, 1, 3))


def check_table(like: jax.Array, page_table: ArrayLike) -> jax.Array:
    """The page table (B, pages of a sequence) as int32, whose sequences lie over a mesh as those of another array."""
    table = of_integers("page_table", page_table)
    if table.ndim != 2 or table.shape[0] != like.shape[0]:
        raise ValueError(
            f"page_table must have the shape ({like.shape[0]}, pages of a sequence); got shape {table.shape}"
        )
    # What is out of range stays so: no cache has as many pages as the largest number of 32 bits.
    limits, most = jnp.iinfo(table.dtype), jnp.iinfo(jnp.int32).max
    if limits.max > most:
        table = jnp.clip(table, max(limits.min, -1), most)
    return with_batch_of(like, whole_along(table.astype(jnp.int32), (1,)))


def check_lengths(lengths: ArrayLike, batch: int) -> jax.Array:
    """The lengths of the sequences as int32, from 0 on. The table may have no room for them."""
    return jnp.maximum(as_position(check_integers("key_value_seq_lengths", lengths, (batch,), False)), 0)


def first_position(
    offset: ArrayLike | None, query_lengths: ArrayLike | None, key_lengths: jax.Array, length: int
) -> jax.Array:
    """The position of the first of so many tokens of each sequence (B,) or (1,).

    If it was not given, those that are valid are the last ones of their sequence.
    """
    if offset is not None:
        number = of_integers("query_offset", offset)
        number = number[None] if number.ndim == 0 else number
        if number.shape not in (key_lengths.shape, (1,)):
            raise ValueError(
                f"query_offset must be None or a number, or have the shape {key_lengths.shape}; got shape "
                f"{number.shape}"
            )
        return as_position(number)
    if query_lengths is None:
        return key_lengths - length
    query_lengths = as_position(check_integers("query_seq_lengths", query_lengths, key_lengths.shape, False))
    return key_lengths - jnp.clip(query_lengths, 0, length)


def check_scale(name: str, scale: ArrayLike, heads: int) -> jax.Array:
    """The scale of keys or values, of this name, as one number for each of so many heads of these."""
    scale = as_kernel_scores(name, scale)
    if scale.shape not in ((), (heads,)):
        raise ValueError(f"{name} must be a number or have the shape ({heads},); got shape {scale.shape}")
    return jnp.broadcast_to(scale, (heads,))
