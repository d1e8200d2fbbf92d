"""Attention for the layers of Flax: the function that `nnx.MultiHeadAttention` and linen's take as `attention_fn`.

It is imported only if asked for, by `import jaxsoft.flax`, and does not import Flax itself.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._ops.arguments import broadcastable, check_flag
from jaxsoft._ops.attention import dot_product_attention
from jaxsoft._ops.softmax import softmax
from jaxsoft.fold import accumulator

__all__ = ["attention_fn"]

type _Einsum = Callable[..., jax.Array]


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    *,
    promote_dtype: Callable[..., Sequence[jax.Array]] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    r"""Attention as Flax's layers call it, for `nnx.dot_product_attention` and `linen.dot_product_attention`.

    .. math::
      o_i = \sum_j \frac{e^{z_{ij}}}{\sum_k e^{z_{ik}}} v_j, \qquad z_{ij} = q_i^T k_j / \sqrt{H} + bias_{ij}

    It takes the arguments of both functions, and is `jaxsoft.dot_product_attention` wherever no weights are asked for.
    They are computed, by `jaxsoft.softmax`, where dropout acts on them, where a module captures them, and where other
    functions than JAX's compute the products. The letters of the shapes: T queries, S keys, N heads of queries, K heads
    of keys, of which N is a multiple, H and D head sizes. There may be any number of batch dimensions, or none.

    Args:
      query: of shape (batch..., T, N, H).
      key: of shape (batch..., S, K, H).
      value: of shape (batch..., S, K, D).
      bias: an array broadcastable to (batch..., N, T, S), added to the scaled products: also a mask of numbers that is
        to be added. One that is the same for all of several batch dimensions is not repeated for each.
      mask: broadcastable to (batch..., N, T, S), of any dtype: scores where it is not 0 count.
      broadcast_dropout: whether all heads and elements of the batch drop the same weights.
      dropout_rng: a key of `jax.random`. The same key drops the same weights as in Flax.
      dropout_rate: the probability with which a weight is dropped, from 0 to below 1.
      deterministic: whether nothing is dropped, whatever the rate is.
      dtype: of query, key and value, to which they are converted; None for the one to which they promote.
      precision: of the products, as `jax.lax.dot_general` takes it.
      module: an nnx or linen module that sows the weights, before dropout, as "attention_weights" among its
        intermediates. One of linen does where the collection "intermediates" is mutable, and else asks for no weights.
      promote_dtype: what converts ((query, key, value), dtype=dtype), as nnx has it; None for the usual promotion.
      is_causal: count key j of query i only if j <= i.
      force_fp32_for_softmax: give the weights and the output in f32. They are computed in f32 (f64 for f64) anyway.
      einsum_dot_general: what computes the products, in the place of `jax.lax.dot_general`.
      qk_attn_weights_einsum, attn_weights_value_einsum: what computes the products, in the place of `jax.numpy.einsum`.

    Returns:
      The output, of shape (batch..., T, N, D). A query without a valid key gets 0, and so are its weights; Flax gives
      it the mean of the values. In 16 bits, scores are f32 and only weights and the output are rounded, where Flax
      rounds the scores and what it computes of them.

    Raises:
      TypeError, ValueError: an argument does not fit the others, or dropout acts and there is no `dropout_rng`.

    Derivatives are those of `jaxsoft.dot_product_attention`, or of the weights and products.

    Source: the functions of the same arguments in Flax (https://github.com/google/flax), whose layers call it.

    >>> from flax import nnx
    >>> import jaxsoft.flax
    >>> layer = nnx.MultiHeadAttention(
    ...     4, 32, dropout_rate=0.1, decode=False, attention_fn=jaxsoft.flax.attention_fn, rngs=nnx.Rngs(0)
    ... )
    >>> x = jnp.ones((2, 3, 16, 32))
    >>> mask = nnx.make_causal_mask(x[..., 0])
    >>> layer(x, mask=mask, deterministic=False).shape
    (2, 3, 16, 32)
    """
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be in the range [0, 1); got {dropout_rate}")
    drops = dropout_rate > 0 and not deterministic
    if drops and dropout_rng is None:
        raise ValueError(f"dropout_rng is required where dropout acts; got None beside dropout_rate={dropout_rate}")
    is_causal = check_flag("is_causal", is_causal)
    einsums = _einsums(precision, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    query, key, value = (promote_dtype or _promoted)((query, key, value), dtype=dtype)
    _check_shapes(query.shape, key.shape, value.shape)
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    bias = None if bias is None else broadcastable("bias", bias, shape)
    mask = None if mask is None else broadcastable("mask", mask, shape).astype(bool)
    dtype, wide = query.dtype, accumulator(query.dtype)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    forced = force_fp32_for_softmax and not is_complex
    result = wide if forced else dtype
    captures = _captures(module)
    has_name = not isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
    if not (drops or captures or einsums or is_complex) and has_name:
        with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(_name(precision)):
            return _without_weights(query, key, value, bias, mask, is_causal, result)

    scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if einsums:
        # What they give may have the dtype of query, so they get scaled queries, whose products are in its range.
        of_scores, of_output = einsums
        query, scale = query * scale, 1.0
    else:
        of_output = functools.partial(jnp.einsum, precision=precision)
        of_scores = functools.partial(of_output, preferred_element_type=wide)
    scores = _scores(of_scores, query, key)
    weights_dtype = None if is_complex else jnp.float32 if forced else dtype
    weights = softmax(scores, where=mask, scale=scale, bias=bias, is_causal=is_causal, dtype=weights_dtype)
    if captures:
        module.sow("intermediates", "attention_weights", weights)
    if drops:
        assert dropout_rng is not None
        weights = _dropped(weights, dropout_rng, dropout_rate, broadcast_dropout)
    return _output(of_output, weights.astype(result), value.astype(result))


def _einsums(precision, dot_general, of_scores, of_output) -> tuple[_Einsum, _Einsum] | None:
    """What computes the products, where it is not JAX's."""
    if (of_scores is None) != (of_output is None):
        raise ValueError("qk_attn_weights_einsum and attn_weights_value_einsum must be given together; got one of them")
    if of_scores is not None:
        if precision is not None or dot_general is not None:
            raise ValueError(
                "precision and einsum_dot_general must be None beside qk_attn_weights_einsum and "
                f"attn_weights_value_einsum, which are given in their place; got {precision} and {dot_general}"
            )
        return of_scores, of_output
    if dot_general is None:
        return None
    einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=dot_general)
    return einsum, einsum


def _promoted(arrays: Sequence[ArrayLike], dtype: DTypeLike | None) -> list[jax.Array]:
    """The arrays in a dtype, or in the one to which they promote; integers become f32."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"dtype must be None or one of floating-point or complex numbers; got {np.dtype(dtype).name}")
    return [jnp.asarray(x, dtype) for x in arrays]


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """Raises where the shapes of query, key and value do not fit."""
    got = f"got shapes {query}, {key} and {value}"
    if not 3 <= len(query) == len(key) == len(value):
        raise ValueError(f"query, key and value must have the same rank, at least 3; {got}")
    if not query[:-3] == key[:-3] == value[:-3]:
        raise ValueError(f"query, key and value must have the same batch dims; {got}")
    if query[-1] != key[-1]:
        raise ValueError(f"query and key depths must match; {got}")
    if key[-3] != value[-3]:
        raise ValueError(f"key and value lengths must match; {got}")
    if key[-2] != value[-2]:
        raise ValueError(f"key and value must have the same number of heads; {got}")
    if query[-2] != key[-2] and (key[-2] == 0 or query[-2] % key[-2]):
        raise ValueError(f"the number of heads of query must be a multiple of that of key; {got}")


def _captures(module: Any) -> bool:
    """Whether a module takes weights. One of linen knows; one of nnx is only given where it does."""
    asks = getattr(module, "is_mutable_collection", None)
    return module is not None and (asks is None or asks("intermediates"))


def _name(precision: Any) -> str:
    """A precision as `jax.default_matmul_precision` takes it. Of one for each operand, it is the higher."""
    if isinstance(precision, str):
        return precision
    both = precision if isinstance(precision, Sequence) else [precision]
    return max(map(jax.lax.Precision, both), key=lambda p: p.value).name.lower()


def _without_weights(query, key, value, bias, mask, is_causal: bool, dtype: np.dtype) -> jax.Array:
    """`dot_product_attention` over any batch dimensions."""
    batch = query.shape[:-3]
    if len(batch) <= 1:
        return dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, dtype=dtype)

    def joined(x):
        return x.reshape(-1, *x.shape[-3:])

    def extra(x):
        if x is None:
            return None
        return joined(x if math.prod(x.shape[:-3]) == 1 else jnp.broadcast_to(x, (*batch, *x.shape[-3:])))

    query, key, value, bias, mask = joined(query), joined(key), joined(value), extra(bias), extra(mask)
    y = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, dtype=dtype)
    return y.reshape(*batch, *y.shape[1:])


def _scores(einsum: _Einsum, query: jax.Array, key: jax.Array) -> jax.Array:
    """The products of queries and keys, (batch..., N, T, S)."""
    *rest, heads, size = query.shape
    groups = key.shape[-2]
    if heads == groups:
        return einsum("...qhd,...khd->...hqk", query, key)
    scores = einsum("...qhgd,...khd->...hgqk", query.reshape(*rest, groups, heads // groups, size), key)
    return scores.reshape(*scores.shape[:-4], heads, *scores.shape[-2:])


def _output(einsum: _Einsum, weights: jax.Array, value: jax.Array) -> jax.Array:
    """The sums of the values with their weights, (batch..., T, N, D)."""
    *rest, heads, length, keys = weights.shape
    groups = value.shape[-2]
    if heads == groups:
        return einsum("...hqk,...khd->...qhd", weights, value)
    y = einsum("...hgqk,...khd->...qhgd", weights.reshape(*rest, groups, heads // groups, length, keys), value)
    return y.reshape(*y.shape[:-3], heads, y.shape[-1])


def _dropped(weights: jax.Array, rng: jax.Array, rate: float, broadcast: bool) -> jax.Array:
    """The weights after dropout, with the random numbers that Flax draws."""
    keep_prob = 1.0 - rate
    shape = (*(1,) * (weights.ndim - 2), *weights.shape[-2:]) if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, keep_prob, shape)
    return weights * (keep.astype(weights.dtype) / jnp.asarray(keep_prob, weights.dtype))
