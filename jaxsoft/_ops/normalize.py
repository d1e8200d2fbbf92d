"""What softmax and log_softmax have in common: everything but the function of rows."""

import functools

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation, Names, as_names
from jaxsoft._core.numbers import as_array, as_float, holds
from jaxsoft._ops.arguments import (
    Axis,
    check_dtype,
    check_extras,
    from_rows,
    normalize_axis,
    plain_scores,
    to_rows,
)
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm

type _Extras = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # where, scale and bias


def checked(
    x: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    is_causal: bool,
    dtype: DTypeLike | None,
    implementation: Implementation,
) -> tuple[jax.Array, tuple[int, ...], _Extras, np.dtype, Names]:
    """The arguments of a public function, after checking them: x, its axes, where, scale and bias, the dtype of the
    result, and the implementations.
    """
    names = as_names(implementation)
    given, x = x, as_float("x", x)
    if where is not None and not holds(as_array("x", given).dtype, np.inexact):
        x = x.astype(float)  # jax.nn puts -inf in the place of masked elements, which makes this of integers
    axes, out_dtype = normalize_axis(axis, x.ndim), check_dtype(dtype, x)
    return x, axes, check_extras(x, axes, where, scale, bias, is_causal), out_dtype, names


@functools.partial(jax.jit, static_argnames=("function", "axes", "is_causal", "dtype", "names"))
def normalize(function, x, axes, extras, dtype, names, is_causal):
    """A function of rows, softmax or log_softmax, of arguments as `checked` has them."""
    where, scale, bias = extras
    rows, extras, trailing = to_rows(x, axes, where, scale, bias, is_causal)
    (y,) = differentiable(function, RowForm(dtype, tuple(extras), trailing), names)(rows, *extras.values())
    return from_rows(y, x, axes, trailing)


def by_jax(function, x, axes, extras, dtype, is_causal):
    """jax.nn's function, for the dtypes that have no kernels."""
    where, scale, bias = extras
    z, valid = plain_scores(x, where, scale, bias, is_causal)
    return function(z, axes, valid).astype(dtype)
