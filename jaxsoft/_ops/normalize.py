"""What softmax and log_softmax are to each other: one function, of a row operation's name."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.numbers import as_float
from jaxsoft._ops.arguments import (
    Axis,
    check_dtype,
    check_extras,
    from_rows,
    is_left_to_jax,
    normalize_axis,
    plain_scores,
    to_rows,
)
from jaxsoft._rows.choice import check_name
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import Form

# Taken here and not when called, when someone may have put jaxsoft's functions in their place.
_OF_JAX = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}


def normalize(
    operation: str,
    x: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    causal: bool,
    dtype: DTypeLike | None,
    implementation: str | None,
) -> jax.Array:
    """ "softmax" or "log_softmax" of arguments as a user gives them."""
    check_name(implementation)
    given = jnp.asarray(x)
    x = as_float("x", given)
    if where is not None and not jnp.issubdtype(given.dtype, jnp.inexact):
        x = x.astype(float)  # jax.nn has -inf in the place of masked elements, beside which integers become this
    axes, out_dtype = normalize_axis(axis, x.ndim), check_dtype(dtype, x)
    extras = check_extras(x, axes, where, scale, bias, causal)
    if is_left_to_jax(x, implementation):
        z, counts = plain_scores(x, *extras, causal)
        return _OF_JAX[operation](z, axes, counts).astype(out_dtype)
    return _normalize(operation, x, axes, *extras, causal, out_dtype, implementation)


@functools.partial(jax.jit, static_argnames=("operation", "axes", "causal", "dtype", "implementation"))
def _normalize(operation, x, axes, where, scale, bias, causal, dtype, implementation):
    rows, extras, trailing = to_rows(x, axes, where, scale, bias, causal)
    function = differentiable(operation, Form(dtype, "".join(extras), trailing), implementation)
    return from_rows(function(rows, *extras.values()), x.shape, axes, trailing)
