"""dot_product_attention: the public function."""

from typing import Any, Literal, Unpack, overload

import jax

from jaxsoft._attention.derivative import attention
from jaxsoft._core.implementations import Implementation
from jaxsoft._ops.attention_arguments import (
    Array,
    Arrays,
    AttentionArguments,
    AttentionOptions,
    Dtype,
    Lengths,
    Mask,
    SegmentIds,
    Window,
    attend,
)  # fmt: skip
from jaxsoft.fold import AttentionState


class _DotOptions(AttentionOptions, total=False):
    """The options of the overloads."""

    query_seq_lengths: Lengths | None
    key_value_seq_lengths: Lengths | None
    query_segment_ids: SegmentIds | None
    key_value_segment_ids: SegmentIds | None
    query_offset: Lengths
    state: AttentionState | None
    deterministic: bool | None
    dropout_rate: float


@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[False] = False, return_state: Literal[False] = False,
    return_max_logits: Literal[False] = False, **options: Unpack[_DotOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[True], return_state: Literal[False] = False,
    return_max_logits: Literal[False] = False, **options: Unpack[_DotOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[False] = False, return_state: Literal[True],
    return_max_logits: Literal[False] = False, **options: Unpack[_DotOptions],
) -> tuple[jax.Array, AttentionState]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[True], return_state: Literal[True],
    return_max_logits: Literal[False] = False, **options: Unpack[_DotOptions],
) -> tuple[jax.Array, jax.Array, AttentionState]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[False] = False, return_state: Literal[False] = False,
    return_max_logits: Literal[True], **options: Unpack[_DotOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[True], return_state: Literal[False] = False,
    return_max_logits: Literal[True], **options: Unpack[_DotOptions],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[False] = False, return_state: Literal[True],
    return_max_logits: Literal[True], **options: Unpack[_DotOptions],
) -> tuple[jax.Array, AttentionState, jax.Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: Literal[True], return_state: Literal[True],
    return_max_logits: Literal[True], **options: Unpack[_DotOptions],
) -> tuple[jax.Array, jax.Array, AttentionState, jax.Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Mask | None = None, *,
    return_residual: bool = False, return_state: bool = False, return_max_logits: bool = False,
    **options: Unpack[_DotOptions],
) -> jax.Array | tuple[Any, ...]: ...  # fmt: skip
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | None = None,
    *,
    scale: Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: Window = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    query_segment_ids: SegmentIds | None = None,
    key_value_segment_ids: SegmentIds | None = None,
    query_offset: Lengths = 0,
    state: AttentionState | None = None,
    return_state: bool = False,
    return_max_logits: bool = False,
    deterministic: bool | None = None,
    dropout_rate: float = 0.0,
    dtype: Dtype | None = None,
) -> jax.Array | tuple[Any, ...]:
    r"""Scaled dot-product attention, a drop-in for `jax.nn.dot_product_attention`, as one fold over the keys.

    .. math::
      o_i = \sum_j \frac{e^{z_{ij}}}{\sum_k e^{z_{ik}}} v_j, \qquad z_{ij} = scale \cdot q_i^T k_j + bias_{ij}

    No array of all scores is in memory, in either pass. The letters of the shapes: B batch, T queries, S keys, N heads
    of queries, K heads of keys, H and D head sizes. N is a multiple of K, and each head of keys serves N / K heads of
    queries in a row.

    Args:
      query: of shape (B, T, N, H) or (T, N, H), in f16, bf16, f32 or f64; the three arrays have one dtype. Integers
        become f32.
      key: of shape (B, S, K, H) or (S, K, H).
      value: of shape (B, S, K, D) or (S, K, D). Masked keys, and their values, must
        still be finite, and so must their products with queries and the output's cotangent.
      bias: an array broadcastable to (B, N, T, S), added to the scaled products. It is read where it lies.
      mask: booleans or integers, broadcastable to (B, N, T, S): scores where it is True count.
      scale: of the products, a number; None for 1 / sqrt(H). A traced one multiplies the queries, is rounded with
        them, and may overflow with them in f16; another one is a constant of the program.
      is_causal: count key j of query i only if j is not after the query's position, i + query_offset.
      query_seq_lengths: of shape (B,), integers: queries from there on attend to nothing.
      key_value_seq_lengths: of shape (B,), integers: keys from there on are masked.
      local_window_size: (left, right), or one number for both: only keys from `left` before to `right` after a query's
        position count. None, and not -1, is no limit.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "cudnn", "xla" and
        "reference"; see `jaxsoft.implementations`.
      return_residual: also return the log-sum-exp of every query's scores.
      logits_soft_cap: cap the scaled products before the bias is added, as cap * tanh(product / cap). The cap is a
        number that is not traced: kernels are compiled for it.
      sinks: of shape (N,): one more score for each head, with the value 0, which takes weight from the keys.
      query_segment_ids, key_value_segment_ids: of shapes (B, T) and (B, S), integers: packed sequences. A key is valid
        only for queries with the same number.
      query_offset: the position of the first query, a number or an array of shape (B,): where it lies among the keys
        when decoding, or for a part of a sequence. The first key has position 0.
      state: what came before: the state of other keys for the same queries, as `return_state` gives it. The result is
        attention over both.
      return_state: also return the state of all keys so far, to go on from.
      return_max_logits: also return the largest score of each head: of those that count among all queries and keys of
        the call, with scale, cap and bias, and without sinks and `state`. QK-Clip is a rule on it.
      deterministic: whether gradients must have the same bits on every run; None for True. False allows kernels that
        are faster, and less exact in 16 bits where one key has nearly all the weight of a query.
      dropout_rate: 0, as there is no dropout: the weights are not in memory. Flax's layers pass it, so that theirs is
        not lost without a word. Another rate is an error, unless `deterministic=True` is given beside it, by which Flax
        says that dropout does not act, as in evaluation.
      dtype: of the output; None for that of query.

    Returns:
      The output, of shape (B, T, N, D), or (T, N, D) for inputs of 3 dimensions. With `return_residual`,
      `return_state` or `return_max_logits`, a tuple of the output, the log-sum-exp (B, T, N) in f32 (f64), natural
      logarithm, the `jaxsoft.fold.AttentionState`, and the largest scores (B, N), in f32 (f64), as far as they are
      asked for. A query without a valid key gets 0 and a log-sum-exp of -inf, and all its gradients are 0; jax.nn gives
      it the mean of the values, unless it is past query_seq_lengths. The largest score is -inf for a head without a
      valid key, and NaN where a valid score is NaN; a sink of inf or NaN, which makes the output NaN, takes its place.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or the named implementation cannot serve the call.

    Derivatives by query, key, value, bias, sinks, a traced scale and the state, of the output, the log-sum-exp and the
    state, of every order, in forward and reverse mode, for every implementation. The largest scores are constants to
    them. Reverse mode keeps the inputs, the output, with what its rounding to 16 bits took from it, and the
    log-sum-exp; all but the inputs have the name "jaxsoft_attention" for policies of `jax.checkpoint`, such as
    `save_only_these_names`. Over a mesh, batch and heads may be sharded and stay where they are; other dimensions are
    gathered. The output is linear in value, and `jax.linear_transpose` has its transpose, unless it takes or returns a
    state.

    Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao et al.,
    "FlashAttention" (arXiv:2205.14135); Shah et al., "FlashAttention-3" (arXiv:2407.08608), for the order of work on
    Hopper; Ainslie et al., "GQA" (arXiv:2305.13245), for grouped queries; Xiao et al., "Efficient streaming language
    models with attention sinks" (arXiv:2309.17453); Kimi Team, "Kimi K2" (arXiv:2507.20534), for QK-Clip.

    >>> query = key = jnp.eye(3)[:, None]
    >>> value = jnp.array([1.0, 2.0, 4.0])[:, None, None]
    >>> dot_product_attention(query, key, value, scale=100.0, is_causal=True)[:, 0, 0]
    Array([1., 2., 4.], dtype=float32)

    Attention over the keys in two parts, the first of them only through its state:

    >>> _, state = dot_product_attention(query, key[:2], value[:2], return_state=True)
    >>> y = dot_product_attention(query, key[2:], value[2:], state=state)
    >>> bool(jnp.allclose(y, dot_product_attention(query, key, value), atol=1e-5))
    True

    The largest score of each head:

    >>> y, largest = dot_product_attention(query, key, value, scale=100.0, return_max_logits=True)
    >>> largest
    Array([100.], dtype=float32)
    """
    arguments = AttentionArguments(
        scale=scale, is_causal=is_causal, local_window_size=local_window_size, implementation=implementation,
        return_residual=return_residual, logits_soft_cap=logits_soft_cap, sinks=sinks, dtype=dtype, bias=bias,
        mask=mask, query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset, state=state, return_state=return_state, return_max_logits=return_max_logits,
        deterministic=deterministic, dropout_rate=dropout_rate,
    )  # fmt: skip
    given = Arrays.of(query, key, value)
    return attend(attention, given, arguments.operands(given), arguments)
