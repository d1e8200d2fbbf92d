"""What softmax and log_softmax have in common: everything but the function of rows."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.numbers import as_array, as_float, holds
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
from jaxsoft._rows.derivative import differentiable
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.spec import RowFunction


def normalize(
    function: RowFunction,
    of_jax: Callable[..., jax.Array],
    x: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    is_causal: bool,
    dtype: DTypeLike | None,
    implementation: Implementation,
) -> jax.Array:
    """The function, of arguments as a user gives them.

    Args:
      function: softmax or log_softmax of rows.
      of_jax: jax.nn's function, which serves the dtypes that have no kernels.
      x, axis, where, scale, bias, is_causal, dtype, implementation: as of the public functions.
    """
    implementation = as_names(implementation)
    given, x = x, as_float("x", x)
    if where is not None and not holds(as_array("x", given).dtype, np.inexact):
        x = x.astype(float)  # jax.nn puts -inf in the place of masked elements, which makes this of integers
    axes, out_dtype = normalize_axis(axis, x.ndim), check_dtype(dtype, x)
    extras = check_extras(x, axes, where, scale, bias, is_causal)
    if is_left_to_jax(x, implementation):
        z, counts = plain_scores(x, *extras, is_causal)
        return of_jax(z, axes, counts).astype(out_dtype)
    return _normalize(function, x, axes, *extras, is_causal, out_dtype, implementation)


@functools.partial(jax.jit, static_argnames=("function", "axes", "is_causal", "dtype", "implementation"))
def _normalize(function, x, axes, where, scale, bias, is_causal, dtype, implementation):
    rows, extras, trailing = to_rows(x, axes, where, scale, bias, is_causal)
    (y,) = differentiable(function, RowForm(dtype, tuple(extras), trailing), implementation)(rows, *extras.values())
    return from_rows(y, x, axes, trailing)
