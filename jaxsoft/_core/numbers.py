"""Arguments as arrays: of numbers, of floating-point numbers as JAX makes them of others, and of booleans; one axis."""

import functools
import operator
import reprlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


@functools.cache  # a call of a small array takes no longer than some ten of these questions to JAX
def holds(dtype: np.dtype, *kinds: type) -> bool:
    """Whether a dtype is of one of these kinds, as NumPy's hierarchy has them."""
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def as_array(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array. Where JAX cannot make one of it, the error has the name."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):  # jnp.asarray takes 10 us to find that out
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if x is None or isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be a number or an array of numbers; got {reprlib.repr(x)} ({error})") from error


def as_numbers(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array, after checking that it holds numbers or booleans."""
    x = as_array(name, x)
    if not holds(x.dtype, np.number, np.bool_):
        raise TypeError(f"{name} must hold numbers; got dtype {x.dtype.name}")
    return x


def as_float(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array of floating-point or complex numbers.

    Integers and booleans become what JAX makes of them: f32, and f64 for 64-bit integers where x64 is enabled.
    """
    x = as_numbers(name, x)
    if holds(x.dtype, np.inexact):
        return x
    return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)


def as_mask(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array of booleans: True where an integer is not 0.

    Floats are refused: most masks of floats hold what is added to scores, 0 where they count and -inf where not.
    """
    x = as_array(name, x)
    if not holds(x.dtype, np.bool_, np.integer):
        raise TypeError(
            f"{name} must hold booleans or integers; got dtype {x.dtype.name}. What is added to scores is a bias, and "
            f"other numbers become booleans by {name} != 0"
        )
    return x if x.dtype == np.bool_ else x.astype(bool)


def as_axis(axis: int, ndim: int) -> int:
    """`axis` as a number from 0 to ndim - 1."""
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be an integer; got {axis!r}") from None
    check_axis(axis, [number], ndim)
    return number % ndim


def check_axis(axis: object, numbers: Sequence[int], ndim: int) -> None:
    """Raises if one of these numbers, which were given as `axis`, is no axis of an array of ndim dimensions."""
    if numbers and ndim == 0:
        raise ValueError(f"axis must name an axis of the array, and one of shape () has none; got {axis!r}")
    if any(not -ndim <= number < ndim for number in numbers):
        raise ValueError(f"axis must be between {-ndim} and {ndim - 1} for an array of {ndim} dimensions; got {axis!r}")
