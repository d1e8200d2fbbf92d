"""paged_attention: the public function."""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import Extra
from jaxsoft._attention.paged import paged_attention as attention_over_pages
from jaxsoft._core.implementations import Implementation
from jaxsoft._core.mesh import whole_along
from jaxsoft._ops.arguments import as_kernel_scores
from jaxsoft._ops.attention_arguments import (
    Array,
    Arrays,
    AttentionArguments,
    AttentionOptions,
    Dtype,
    Lengths,
    Mask,
    Window,
    attend,
    check_heads,
)  # fmt: skip
from jaxsoft._ops.write_pages import (
    check_lengths,
    check_pages,
    check_scale,
    check_table,
    first_position,
    has_eight_bits,
)
from jaxsoft.fold import AttentionState, accumulator


class _PagedOptions(AttentionOptions, total=False):
    """The options of the overloads."""

    bias: Array | None
    mask: Mask | None
    query_seq_lengths: Lengths | None
    query_offset: Lengths | None
    key_scale: Array | None
    value_scale: Array | None
    state: AttentionState | None


@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, key_value_seq_lengths: Lengths, *,
    return_residual: Literal[False] = False, return_state: Literal[False] = False, **options: Unpack[_PagedOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, key_value_seq_lengths: Lengths, *,
    return_residual: Literal[True], return_state: Literal[False] = False, **options: Unpack[_PagedOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, key_value_seq_lengths: Lengths, *,
    return_residual: Literal[False] = False, return_state: Literal[True], **options: Unpack[_PagedOptions],
) -> tuple[jax.Array, AttentionState]: ...  # fmt: skip
@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, key_value_seq_lengths: Lengths, *,
    return_residual: Literal[True], return_state: Literal[True], **options: Unpack[_PagedOptions],
) -> tuple[jax.Array, jax.Array, AttentionState]: ...  # fmt: skip
@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, key_value_seq_lengths: Lengths, *,
    return_residual: bool = False, return_state: bool = False, **options: Unpack[_PagedOptions],
) -> jax.Array | tuple[Any, ...]: ...  # fmt: skip
def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    key_value_seq_lengths: Lengths,
    *,
    bias: Array | None = None,
    mask: Mask | None = None,
    scale: Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Lengths | None = None,
    local_window_size: Window = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    query_offset: Lengths | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    state: AttentionState | None = None,
    return_state: bool = False,
    dtype: Dtype | None = None,
) -> jax.Array | tuple[Any, ...]:
    r"""Attention of a few queries of each sequence, or of a chunk, over a cache whose keys and values lie in pages.

    .. math::
      o_i = \sum_j \frac{e^{z_{ij}}}{\sum_k e^{z_{ik}}} v_j, \qquad z_{ij} = scale \cdot q_i^T k_j + bias_{ij}, \qquad
      k_j = page_{table[b,\, j\, //\, size],\; j \bmod size}

    The result is that of `jaxsoft.dot_product_attention` over the pages of each sequence, one after the other. The
    letters of the shapes: B sequences, T queries of each, N heads of queries, K heads of keys, H and D head sizes, P
    pages of the cache, and S the number of pages of a sequence times the page size. N is a multiple of K.

    Args:
      query: of shape (B, T, N, H), in f16, bf16, f32 or f64. Integers become f32.
      key_pages: of shape (P, page size, K, H), in the dtype of query, or in float8_e4m3fn or float8_e5m2.
      value_pages: of shape (P, page size, K, D), in the dtype of key_pages.
      page_table: of shape (B, pages of a sequence), integers: which pages a sequence has, in the order of its keys.
        Sequences may share pages.
      key_value_seq_lengths: of shape (B,), integers: how many keys each sequence has, those of its queries included,
        which `jaxsoft.write_pages` puts there. Neither the entries of the table for pages from there on are used, nor
        what pages hold of other keys: these may be anything. An entry that is used and names no page, as it is negative
        or not less than P, has masked keys, and so have the keys that the table has no room for: more
        columns of such entries change nothing. A length below 0 is 0.
      bias: an array broadcastable to (B, N, T, S), added to the scaled products.
      mask: booleans or integers, broadcastable to (B, N, T, S): scores where it is True count.
      scale: of the products, a number; None for 1 / sqrt(H). A traced one multiplies the queries, is rounded with them,
        and may overflow with them in f16; another one is a constant of the program.
      is_causal: count key j of query i only if j is not after the query's position, i + query_offset.
      query_seq_lengths: of shape (B,), integers: queries from there on attend to nothing. For chunks of different
        lengths, and with 0 for a sequence that has no queries in this call.
      local_window_size: (left, right), or one number for both: only keys from `left` before to `right` after a query's
        position count. None, and not -1, is no limit.
      implementation: None for the fastest that serves the call, or one of "ffi", "xla" and "reference"; see
        `jaxsoft.implementations`.
      return_residual: also return the log-sum-exp of every query's scores.
      logits_soft_cap: cap the scaled products before the bias is added, as cap * tanh(product / cap). The cap is a
        number that is not traced: kernels are compiled for it.
      sinks: of shape (N,): one more score for each head, with the value 0, which takes weight from the keys.
      query_offset: the position of the first query, a number or an array of shape (B,). None says that the queries are
        the last tokens of their sequence: it is key_value_seq_lengths - T, or key_value_seq_lengths -
        query_seq_lengths where these are given.
      key_scale, value_scale: a number, or an array of shape (K,), by which keys and values are multiplied.
      state: what came before: the state of other keys for the same queries, as `return_state` gives it. The result is
        attention over both.
      return_state: also return the state of all keys so far, to go on from.
      dtype: of the output; None for that of query.

    Returns:
      The output, of shape (B, T, N, D). With `return_residual` or `return_state`, a tuple of the output, the
      log-sum-exp (B, T, N) in f32 (f64), natural logarithm, and the `jaxsoft.fold.AttentionState`, as far as they are
      asked for. A query without a valid key gets 0 and a log-sum-exp of -inf.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by query, pages, scales, bias, sinks, a traced scale and the state, of every order, in forward and
    reverse mode. They are those of attention over the gathered keys and values, and not meant to be fast. The gradient
    of a page is the sum over all sequences that have it. Over a mesh, batch and heads may be sharded and stay where
    they are, with all pages of these heads on each device; see the guide for a cache of which each device has a part.

    Sources: Kwon et al., "Efficient memory management for large language model serving with PagedAttention"
    (arXiv:2309.06180), for pages; Dao et al., "Flash-Decoding for long-context inference" (2023), for keys in parts
    that are merged; and those of `jaxsoft.dot_product_attention`.

    >>> key_pages = jnp.array([[9.0, 9.0], [3.0, 9.0], [1.0, 2.0]])[:, :, None, None]
    >>> query, table, lengths = jnp.zeros((1, 1, 1, 1)), jnp.array([[2, 1]]), jnp.array([3])
    >>> paged_attention(query, key_pages, key_pages, table, lengths)[0, 0, 0]  # the mean of 1, 2 and 3
    Array([2.], dtype=float32)
    """
    query = as_kernel_scores("query", query)
    if query.ndim != 4:
        raise ValueError(f"query must have the shape (B, T, N, H); got shape {query.shape}")
    query = whole_along(query, (1, 3))
    pages = check_pages(key_pages, value_pages)
    _check_heads(query, pages[0])
    batch, length, *_ = query.shape
    _, page_size, groups, _ = pages[0].shape
    table = check_table(query, page_table)
    keys = table.shape[1] * page_size
    key_lengths = check_lengths(key_value_seq_lengths, batch)
    arguments = AttentionArguments(
        scale=scale, is_causal=is_causal, local_window_size=local_window_size, implementation=implementation,
        return_residual=return_residual, logits_soft_cap=logits_soft_cap, sinks=sinks, dtype=dtype, bias=bias,
        mask=mask, query_seq_lengths=query_seq_lengths, key_value_seq_lengths=jnp.minimum(key_lengths, keys),
        query_offset=first_position(query_offset, query_seq_lengths, key_lengths, length), state=state,
        return_state=return_state,
    )  # fmt: skip
    given = Arrays(query, *pages, no_batch=False)
    extras = {Extra.PAGE_TABLE: table} | arguments.operands(given, keys)
    for extra, number in ((Extra.KEY_SCALE, key_scale), (Extra.VALUE_SCALE, value_scale)):
        if number is not None:
            extras[extra] = check_scale(extra.value, number, groups).astype(accumulator(query.dtype))
    return attend(attention_over_pages, given, extras, arguments)


def _check_heads(query: jax.Array, key_pages: jax.Array) -> None:
    """Raises where query and pages do not fit each other."""
    if key_pages.dtype != query.dtype and not has_eight_bits(key_pages.dtype):
        raise TypeError(
            f"key_pages must have the dtype of query, {query.dtype.name}, or be of float8_e4m3fn or float8_e5m2; got "
            f"{key_pages.dtype.name}"
        )
    if key_pages.shape[3] != query.shape[3]:
        raise ValueError(f"key_pages must have the head size of query, {query.shape[3]}; got shape {key_pages.shape}")
    check_heads(query, "key_pages", key_pages)
