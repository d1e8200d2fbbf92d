"""Caches in pages: write_pages, and the arguments that functions over such a cache share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft._core.mesh import automatically, varying_alike, whole_along, with_batch_of
from jaxsoft._core.numbers import as_array
from jaxsoft._ops.arguments import as_kernel_scores
from jaxsoft._ops.attention_arguments import as_offset, as_position, check_integers, of_integers
from jaxsoft.fold import accumulator


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
    r"""Writes the keys and values of new tokens into a cache in pages, for `jaxsoft.paged_attention`.

    .. math::
      page_{table[b,\, p\, //\, size],\; p \bmod size} = key_{b,i} / scale, \qquad p = offset_b + i

    Under `jax.jit` with `donate_argnums=(0, 1)`, the pages are changed where they lie, and nothing is copied but the
    new tokens. The letters of the shapes: B batch, T tokens, K heads, H and D head sizes, P pages of the cache.

    Args:
      key_pages: of shape (P, page size, K, H), in f16, bf16, f32, f64, or float8_e4m3fn or float8_e5m2.
      value_pages: of shape (P, page size, K, D), in the same dtype.
      key: of shape (B, T, K, H), in any of the dtypes f16, bf16, f32 and f64. It is rounded to that of the pages; where
        these are 8-bit floats, what is too large becomes the largest number that they have.
      value: of shape (B, T, K, D), likewise.
      page_table: of shape (B, pages of a sequence), integers: which pages a sequence has, in the order of its tokens.
      key_value_seq_lengths: of shape (B,), integers: how many tokens each sequence has, the new ones included. It may
        be more than the table has room for, and less than 0 is 0.
      query_seq_lengths: of shape (B,), integers: how many of the T tokens of each sequence are new; None for all. The
        others come after them, and are not written.
      query_offset: the position of the first new token, a number or an array of shape (B,). None says that the new ones
        are the last of their sequence: it is key_value_seq_lengths - T, or key_value_seq_lengths - query_seq_lengths.
      key_scale, value_scale: a number, or an array of shape (K,), by which keys and values are divided, in f32 (f64),
        before they are rounded. `jaxsoft.paged_attention` gets the same ones, and multiplies by them.

    Returns:
      The pages of keys and the pages of values. A token is not written if its position is negative or not before
      key_value_seq_lengths, or if the table has no page for it or one that there is not. No two tokens may have the
      same place: what is there afterwards is not defined.

    Raises:
      TypeError, ValueError: an argument does not fit the others.

    Derivatives by pages, key, value and scales, of every order, in forward and reverse mode. Over a mesh, the heads may
    be sharded and stay where they are; tokens are gathered.

    Source: Kwon et al., "Efficient memory management for large language model serving with PagedAttention"
    (arXiv:2309.06180).

    >>> pages = jnp.zeros((4, 2, 1, 1))
    >>> new = jnp.array([[1.0, 2.0, 3.0]])[:, :, None, None]
    >>> key_pages, _ = write_pages(pages, pages, new, new, jnp.array([[3, 1]]), jnp.array([3]))
    >>> key_pages[:, :, 0, 0]
    Array([[0., 0.],
           [3., 0.],
           [0., 0.],
           [1., 2.]], dtype=float32)
    """
    pages = check_pages(key_pages, value_pages)
    new = _new(pages, key, value)
    batch, length, heads, _ = new[0].shape
    table = check_table(new[0], page_table)
    key_lengths = check_lengths(key_value_seq_lengths, batch)
    places = {"table": table, "lengths": jnp.minimum(key_lengths, table.shape[1] * pages[0].shape[1])}
    places["first"] = first_position(query_offset, query_seq_lengths, key_lengths, length)
    if query_seq_lengths is not None:
        places["count"] = as_position(check_integers("query_seq_lengths", query_seq_lengths, (batch,), False))
    given = {"key_scale": key_scale, "value_scale": value_scale}
    scales = [None if scale is None else check_scale(name, scale, heads) for name, scale in given.items()]
    return _write(pages, new, places, scales)


def _new(pages: tuple[jax.Array, jax.Array], key: ArrayLike, value: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The new keys and values as arrays, after checking that they fit the pages."""
    new = as_kernel_scores("key", key), as_kernel_scores("value", value)
    for name, x, of_name in zip(("key", "value"), new, pages, strict=True):
        heads = of_name.shape[2:]
        if x.ndim != 4 or x.shape[2:] != heads or x.shape[:2] != new[0].shape[:2]:
            rows = "B, T" if name == "key" else ", ".join(map(str, new[0].shape[:2]))
            raise ValueError(
                f"{name} must have the shape ({rows}, {heads[0]}, {heads[1]}), as {name}_pages have these heads; got "
                f"shape {x.shape}"
            )
    return new


@jax.jit
def _write(pages, new, places, scales):
    leaves, tree = jax.tree.flatten((pages, new, places, scales))

    def write(*leaves):
        pages, new, places, scales = jax.tree.unflatten(tree, leaves)
        number, page_size = pages[0].shape[:2]
        page, slot = _places(number, page_size, new[0].shape[1], **places)
        return tuple(
            of_name.at[page, slot].set(_rounded(x, scale, of_name.dtype), mode="drop", unique_indices=True)
            for of_name, x, scale in zip(pages, new, scales, strict=True)
        )

    return automatically(write, tuple(jax.typeof(x).sharding for x in pages), *varying_alike(*leaves))


def _places(pages, page_size, length, table, lengths, first, count=None):
    """The page and the slot in it (B, T) of each token. One that is not written has a page that there is not, which no
    other one has, as XLA is told that no two places are the same: on a GPU it is then several times as fast.

    Args:
      pages, page_size, table: of the cache.
      length: how many tokens of each sequence there are, of which the first `count` (B,) are new; None for all.
      lengths: of the sequences (B,), as far as the table has room for them.
      first: the position of the first token (B,) or (1,).
    """
    token = jnp.arange(length, dtype=jnp.int32)[None]
    position = first[:, None] + token
    is_new = (position >= 0) & (position < lengths[:, None])
    if count is not None:
        is_new = is_new & (token < count[:, None])
    position = jnp.where(is_new, position, 0)
    page = jnp.full_like(position, -1)
    if table.shape[1]:
        page = jnp.take_along_axis(table, position // page_size, 1, mode="promise_in_bounds")
    beyond = pages + jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape)
    return jnp.where(is_new & (page >= 0) & (page < pages), page, beyond), position % page_size


def _rounded(x: jax.Array, scale: jax.Array | None, dtype: np.dtype) -> jax.Array:
    """Keys or values of new tokens as pages have them."""
    if scale is not None:
        wide = accumulator(x.dtype)
        x = x.astype(wide) / scale.astype(wide)[None, None, :, None]
    if has_eight_bits(dtype):  # or what is too large would be no number
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


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
    """The position of the first token of each sequence (B,) or (1,).

    If it was not given, those that are valid are the last ones of their sequence.
    """
    if offset is not None:
        return as_offset(offset, key_lengths.shape[0], "None or a number,")
    if query_lengths is None:
        return key_lengths - length
    query_lengths = as_position(check_integers("query_seq_lengths", query_lengths, key_lengths.shape, False))
    return key_lengths - jnp.clip(query_lengths, 0, length)


def check_scale(name: str, scale: ArrayLike, heads: int) -> jax.Array:
    """The scale of keys or values, of this name, as one number for each of their heads."""
    scale = as_kernel_scores(name, scale)
    if scale.shape not in ((), (heads,)):
        raise ValueError(f"{name} must be a number or have the shape ({heads},); got shape {scale.shape}")
    return jnp.broadcast_to(scale, (heads,))
