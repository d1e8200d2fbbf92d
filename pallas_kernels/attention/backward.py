"""The gradients of attention: kernels for queries, for keys and values, and for a bias, put together."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._core.operation import Function

from .backward_bias import bias_gradient
from .backward_call import BackwardCall, numbers_of, padded
from .backward_key_value import key_value_gradients
from .backward_query import query_gradient


def backward(form: AttentionForm, operands: Sequence[Any], wrt: tuple[str, ...]) -> Function:
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
            named = dict(zip(form.extras, extras, strict=True))
            numbers = numbers_of(form, lse, lse_residual, delta)
            common = [*map(padded, (query, key, value, cotangent)), named, numbers]
            found = {}
            if "query" in wrt:
                found["query"] = query_gradient(call)(*common)
            if "key" in wrt or "value" in wrt:
                found["key"], found["value"] = key_value_gradients(call)(*common)
            for name, like in (("query", query), ("key", key), ("value", value)):
                if name in found:
                    found[name] = found[name][:, : like.shape[1], :, : like.shape[3]]
            if "bias" in wrt:
                found["bias"] = bias_gradient(call, named[Extra.BIAS].shape)(*common)
        # That of a bias may be f64.
        return tuple(found[name].astype(arrays[form.place(name)].dtype) for name in wrt)

    return gradients
