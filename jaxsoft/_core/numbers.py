"""Arguments as arrays of numbers, of floating-point numbers as JAX makes them of others, and of booleans."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def as_numbers(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array, after checking that it holds numbers or booleans."""
    x = jnp.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_):
        raise TypeError(f"{name} must hold numbers; got dtype {x.dtype.name}")
    return x


def as_float(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array of floating-point or complex numbers.

    Integers and booleans become what JAX makes of them: f32, and f64 for 64-bit integers where x64 is enabled.
    """
    x = as_numbers(name, x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)


def as_mask(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as an array of booleans: True where a number is not 0."""
    return as_numbers(name, x).astype(bool)
