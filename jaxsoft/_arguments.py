"""What the public functions do to their arguments: checks, and the axes that are reduced made one last axis."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

type Axis = int | Sequence[int] | None

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def as_scores(name: str, x: ArrayLike, *others: ArrayLike) -> jax.Array:
    """`x` as an array of floating-point or complex numbers, of the dtype that JAX promotes it to beside the others."""
    x = jnp.asarray(x)
    dtype = jnp.result_type(x, *others)
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        raise TypeError(f"{name} must hold numbers; got dtype {dtype.name}")
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), dtype)).dtype  # JAX's promotion of integers
    return x.astype(dtype)


def has_kernels(x: jax.Array) -> bool:
    """Whether jaxsoft computes in x's dtype; complex and 8-bit numbers are left to jax.nn."""
    return x.dtype in _DTYPES


def normalize_axis(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of distinct numbers from 0 to ndim - 1."""
    given = tuple(range(ndim)) if axis is None else tuple(axis) if isinstance(axis, Sequence) else (axis,)
    try:
        numbers = [operator.index(a) for a in given]
    except TypeError:
        raise TypeError(f"axis must be an integer, a sequence of integers or None; got {axis!r}") from None
    if any(not -ndim <= a < ndim for a in numbers):
        raise ValueError(f"axis must be between {-ndim} and {ndim - 1} for an array of {ndim} dimensions; got {axis!r}")
    axes = tuple(a % ndim for a in numbers)
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis must not name a dimension twice; got {axis!r}")
    return axes


def check_where(where: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array | None:
    """`where` as a boolean array, after checking that it broadcasts to `shape`."""
    if where is None:
        return None
    where = jnp.asarray(where)
    try:
        fits = np.broadcast_shapes(where.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"where must broadcast to the shape of the scores, {shape}; got shape {where.shape}")
    return where.astype(bool)


def to_rows(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`x` with `axes` moved to the end and made one."""
    if axes == (x.ndim - 1,):
        return x
    moved = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    if len(axes) == 1:
        return moved
    kept = moved.shape[: x.ndim - len(axes)]
    return moved.reshape(*kept, int(np.prod([x.shape[a] for a in axes], dtype=np.int64)))


def from_rows(y: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_rows` for an array of this shape."""
    ndim = len(shape)
    if axes == (ndim - 1,):
        return y
    kept = [n for a, n in enumerate(shape) if a not in axes]
    split = y.reshape(*kept, *(shape[a] for a in axes))
    return jnp.moveaxis(split, range(ndim - len(axes), ndim), axes)
