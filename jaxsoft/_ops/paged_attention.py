"""paged_attention and write_pages: attention over a cache whose keys and values lie in pages."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._attention.form import Extra
from jaxsoft._attention.paged import paged_attention as attention_over_pages
from jaxsoft._core.mesh import whole_along, with_batch_of
from jaxsoft._core.numbers import as_array
from jaxsoft._ops.arguments import as_kernel_scores
from jaxsoft._ops.attention_arguments import (
    Arrays,
    Window,
    as_position,
    attend,
    check_extras,
    check_integers,
    of_integers,
)
from jaxsoft.fold import AttentionState, accumulator

_EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: str | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    state: AttentionState | None = None,
    return_state: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array | tuple:
    r"""Attention of a few queries of each sequence over a cache in pages."""
    query = as_kernel_scores("query", query)
    if query.ndim != 4:
        raise ValueError(f"query must have the shape (B, T, N, H); got shape {query.shape}")
    pages = _pages(query, key_pages, value_pages)
    query = whole_along(query, (1, 3))
    batch, length, *_ = query.shape
    _, page_size, groups, _ = pages[0].shape
    table = _table(query, page_table)
    keys = table.shape[1] * page_size
    key_lengths = _lengths(key_value_seq_lengths, batch, keys)
    if query_offset is None:
        query_offset = _last(length, key_lengths, query_seq_lengths)
    extras = check_extras(
        query, keys, False, bias, mask, query_seq_lengths, key_lengths, sinks, None, None, query_offset
    )  # fmt: skip
    extras = {Extra.PAGE_TABLE: table} | extras
    for extra, number in ((Extra.KEY_SCALE, key_scale), (Extra.VALUE_SCALE, value_scale)):
        if number is not None:
            extras[extra] = _scale(extra.value, number, groups).astype(accumulator(query.dtype))
    return attend(
        attention_over_pages,
        implementation,
        Arrays(query, *pages, no_batch=False),
        extras,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        return_residual=return_residual,
        logits_soft_cap=logits_soft_cap,
        state=state,
        return_state=return_state,
        deterministic=True,
        dtype=dtype,
    )


def _pages(query: jax.Array, key_pages: ArrayLike, value_pages: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The pages of keys and values, after checking that they fit each other and the query."""
    named = {name: as_array(name, x) for name, x in (("key_pages", key_pages), ("value_pages", value_pages))}
    dtypes = (query.dtype, *_EIGHT_BITS)
    for (name, x), letter in zip(named.items(), "HD", strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name} must have the shape (P, page size, K, {letter}); got shape {x.shape}")
        if x.dtype not in dtypes:
            names = f"{query.dtype.name}, or be float8_e4m3fn or float8_e5m2"
            raise TypeError(f"{name} must have the dtype of query, {names}; got {x.dtype.name}")
    keys, values = named.values()
    if keys.shape[3] != query.shape[3]:
        raise ValueError(f"key_pages must have the head size of query, {query.shape[3]}; got shape {keys.shape}")
    if keys.shape[1] == 0:
        raise ValueError(f"key_pages must have room for one key in a page at least; got shape {keys.shape}")
    if values.dtype != keys.dtype:
        raise TypeError(f"value_pages must have the dtype of key_pages, {keys.dtype.name}; got {values.dtype.name}")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"value_pages must have the shape {keys.shape[:3]} and a head size; got shape {values.shape}")
    heads, groups = query.shape[2], keys.shape[2]
    if heads != groups and (groups == 0 or heads % groups):
        raise ValueError(
            f"query must have a multiple of the number of heads of key_pages, {groups}; got {heads} in shape "
            f"{query.shape}"
        )
    # Over explicit axes of a mesh, only the heads may be sharded: each sequence may have any page.
    return whole_along(keys, (0, 1, 3)), whole_along(values, (0, 1, 3))


def _table(like: jax.Array, page_table: ArrayLike) -> jax.Array:
    """The page table (B, pages of a sequence) as int32, for sequences that lie as those of another array do."""
    table = of_integers("page_table", page_table)
    if table.ndim != 2 or table.shape[0] != like.shape[0]:
        raise ValueError(
            f"page_table must have the shape ({like.shape[0]}, pages of a sequence); got shape {table.shape}"
        )
    # What is out of range stays so: a cache has fewer pages than the largest number of 32 bits.
    limits, most = jnp.iinfo(table.dtype), jnp.iinfo(jnp.int32).max
    if limits.max > most:
        table = jnp.clip(table, max(limits.min, -1), most)
    return with_batch_of(like, whole_along(table.astype(jnp.int32), (1,)))


def _lengths(lengths: ArrayLike, batch: int, keys: int) -> jax.Array:
    """The lengths of the sequences as int32, cut to what the table has room for."""
    lengths = as_position(check_integers("key_value_seq_lengths", lengths, (batch,), False))
    return jnp.clip(lengths, 0, keys)


def _last(length: int, key_lengths: jax.Array, query_lengths: ArrayLike | None) -> jax.Array:
    """The position of the first of so many queries, of which those that count are the last tokens of a sequence."""
    if query_lengths is None:
        return key_lengths - length
    query_lengths = as_position(check_integers("query_seq_lengths", query_lengths, key_lengths.shape, False))
    return key_lengths - jnp.clip(query_lengths, 0, length)


def _scale(name: str, scale: ArrayLike, heads: int) -> jax.Array:
    """A scale of keys or values as one number for each of so many heads of these."""
    scale = as_kernel_scores(name, scale)
    if scale.shape not in ((), (heads,)):
        raise ValueError(f"{name} must be a number or have the shape ({heads},); got shape {scale.shape}")
    return jnp.broadcast_to(scale, (heads,))


def write_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    query_seq_lengths: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the keys and values of new tokens into pages."""
    key, value = as_kernel_scores("key", key), as_kernel_scores("value", value)
    key_pages, value_pages = as_array("key_pages", key_pages), as_array("value_pages", value_pages)
    batch, length, heads, _ = key.shape
    pages, page_size = key_pages.shape[:2]
    table = _table(key, page_table)
    key_lengths = _lengths(key_value_seq_lengths, batch, table.shape[1] * page_size)
    if query_offset is None:
        query_offset = _last(length, key_lengths, query_seq_lengths)
    first = as_position(of_integers("query_offset", query_offset))
    first = jnp.broadcast_to(first, (batch,))
    token = jnp.arange(length, dtype=jnp.int32)[None]
    position = first[:, None] + token
    written = (position >= 0) & (position < key_lengths[:, None])
    if query_seq_lengths is not None:
        counts = as_position(check_integers("query_seq_lengths", query_seq_lengths, (batch,), False))
        written = written & (token < counts[:, None])
    position = jnp.where(written, position, 0)
    page = jnp.take_along_axis(table, position // page_size, 1, mode="clip")
    page = jnp.where(written & (page >= 0) & (page < pages), page, pages)
    slot = position % page_size

    def put(pages, new, scale, name):
        if scale is not None:
            wide = accumulator(new.dtype)
            new = new.astype(wide) / _scale(name, scale, heads).astype(wide)[None, None, :, None]
        if pages.dtype in _EIGHT_BITS:
            largest = float(jnp.finfo(pages.dtype).max)
            new = jnp.clip(new, -largest, largest)
        return pages.at[page, slot].set(new.astype(pages.dtype), mode="drop")

    return put(key_pages, key, key_scale, "key_scale"), put(value_pages, value, value_scale, "value_scale")
