"""The gradients of attention: kernels for queries, for keys and values, and for a bias, put together."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsoft._attention.form import AttentionForm, Extra

from . import backward_call
from .backward_bias import bias_gradient
from .backward_call import BackwardCall, numbers_of, padded
from .backward_key_value import key_value_gradients
from .backward_query import query_gradient


def backward(
    form: AttentionForm, operands: Sequence[Any], wrt: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The gradients of a call.

    Args:
      form: its form.
      operands: the types of its operands.
      wrt: which gradients are asked for, of "query", "key", "value" and "bias", in this order.

    Returns:
      A function of query, key, value, the extras, and then lse, its residual and delta (B, N, T) and the output's
      cotangent (B, T, N, D) in the operands' dtype, that returns the gradients.
    """
    call = BackwardCall.of(form, operands)

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, *extras, lse, lse_residual, delta, cotangent = arrays
        with jax.enable_x64(False):  # the kernels count in 32 bits
            numbers = numbers_of(form, lse, lse_residual, delta)
            named = dict(zip(form.extras, extras, strict=True))
            found = _gradients(call, wrt, (query, key, value), named, numbers, cotangent)
        dtypes = [arrays[form.place(name)].dtype for name in wrt]  # of which that of a bias may be f64
        return tuple(x.astype(dtype) for x, dtype in zip(found, dtypes, strict=True))

    return gradients


def _gradients(call, wrt, base, extras, numbers, cotangent):
    common = [*map(padded, (*base, cotangent)), extras, numbers]
    found, interpret = {}, backward_call.INTERPRET
    if "query" in wrt:
        found["query"] = query_gradient(call, interpret=interpret)(*common)
    if "key" in wrt or "value" in wrt:
        found["key"], found["value"] = key_value_gradients(call, interpret=interpret)(*common)
    for name, like in zip(("query", "key", "value"), base, strict=True):
        if name in found:
            found[name] = found[name][:, : like.shape[1], :, : like.shape[3]]
    if "bias" in wrt:
        found["bias"] = bias_gradient(call, extras[Extra.BIAS].shape, interpret=interpret)(*common)
    return tuple(found[name] for name in wrt)
