"""What the public functions do with their arguments: they check them, and make operands of row operations of them."""

import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft._core.implementations import Names, accepts
from jaxsoft._core.mesh import sharded_like, whole_along
from jaxsoft._core.numbers import as_array, as_float, as_mask, check_axis, holds
from jaxsoft._core.rounding import rounded
from jaxsoft._rows.losses import Options
from jaxsoft._rows.spec import RowExtra
from jaxsoft.fold import accumulator

type Axis = int | Sequence[int] | None

_DTYPES = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))
_NAMES = "float16, bfloat16, float32 and float64"
_FLAG = bool | np.bool_
_F32 = np.dtype(np.float32)


def without_old_names[F: Callable](function: F) -> F:
    """The function, whose signature does not tell of `**old`, which takes what `refuse_old_names` refuses."""
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "old"]
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def refuse_old_names(function: Callable, old: Mapping[str, object], **renamed: str) -> None:
    """Raises for arguments that the function does not take: for those that were renamed with the new name."""
    for name in old:
        new = f"; {renamed[name]!r} is what {name!r} was" if name in renamed else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{new}")


def as_kernel_scores(name: str, x: ArrayLike) -> jax.Array:
    """The argument of this name as scores of a dtype that kernels take, for functions that jax.nn does not have."""
    x = as_float(name, x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must hold {_NAMES.replace('and', 'or')}; got dtype {x.dtype.name}")
    return x


def is_left_to_jax(x: jax.Array, implementation: Names) -> bool:
    """Whether x has a dtype in which only jax.nn computes: complex or of 8 bits.

    Raises an error if it has, and another implementation than "xla" was named.
    """
    if x.dtype in _DTYPES:
        return False
    if not accepts(implementation, "xla"):
        raise ValueError(
            f"implementation={implementation!r} cannot serve this call: it computes in {_NAMES}, not {x.dtype.name}. "
            "implementation=None and 'xla' leave it to jax.nn"
        )
    return True


def normalize_axis(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of distinct numbers from 0 to ndim - 1."""
    if isinstance(axis, int) and -ndim <= axis < ndim:  # as most are, so no time is spent on these
        return (axis % ndim,)
    given = tuple(range(ndim)) if axis is None else tuple(axis) if isinstance(axis, Sequence) else (axis,)
    try:
        numbers = [operator.index(a) for a in given]
    except TypeError:
        raise TypeError(f"axis must be an integer, a sequence of integers or None; got {axis!r}") from None
    check_axis(axis, numbers, ndim)
    axes = tuple(a % ndim for a in numbers)
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis must not name a dimension twice; got {axis!r}")
    return axes


def check_extras(
    x: jax.Array,
    axes: tuple[int, ...],
    where: ArrayLike | None,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    is_causal: bool,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """`where`, `scale` and `bias` as arrays, after checking that they and `is_causal` fit the scores and the axes."""
    if where is not None:
        where = as_mask("where", broadcastable("where", where, x.shape))
    if scale is not None:
        scale = _numbers("scale", of_rows("scale", scale, x.shape, axes), x)
    if bias is not None:
        bias = _numbers("bias", broadcastable("bias", bias, x.shape), x)
    if check_flag("is_causal", is_causal) and (axes != (x.ndim - 1,) or x.ndim < 2):
        raise ValueError(
            "is_causal needs one reduced axis, the last, and an array of at least 2 dimensions; "
            f"got axis={axes} for an array of shape {x.shape}"
        )
    return where, scale, bias


def as_number(name: str, value: ArrayLike, allowed: str, least: float, most: float) -> float | jax.Array:
    """The argument of this name, one real number: as a float where Python or NumPy has it, and else as JAX's array.

    The former is a constant of the compiled program, so another one compiles again; the latter is an operand, traced or
    not. Only the constant is checked to be from least to most, in words `allowed`.
    """
    if hasattr(value, "__jax_array__"):  # as a parameter of Flax, which holds an array
        value = as_array(name, value)
    if not isinstance(value, jax.Array):
        return known_number(name, value, allowed, least, most)
    _check_number(name, value)
    return as_float(name, value)


def as_scale(scale: ArrayLike, dtype: np.dtype = _F32) -> float | jax.Array:
    """The argument scale, which kernels have as a constant: a float, and only where it is traced an array.

    Args:
      scale: the argument.
      dtype: in which a constant must be finite.
    """
    largest = float(jnp.finfo(dtype).max)
    bounds = f"finite in {dtype.name}", -largest, largest
    number = as_number("scale", scale, *bounds)
    return number if isinstance(number, float | jax.core.Tracer) else known_number("scale", number, *bounds)


def known_number(name: str, value: ArrayLike, allowed: str, least: float, most: float) -> float:
    """The argument of this name, a constant of the compiled program, as a float.

    Python's and NumPy's numbers are taken, and arrays of one number unless they are traced, after checking that the
    number is from least to most, in words `allowed`.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a real number that is {_known(value)}")
    _check_number(name, value)
    exact: Any = value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value
    if not least <= exact <= most:  # in Python, as NumPy would round the bounds to its dtype
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
    return float(exact)


def _check_number(name: str, value: object) -> None:
    """Raises unless this is a real number, or an array of one."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        if value.shape != () or not holds(value.dtype, np.floating, np.integer):
            raise TypeError(f"{name} must be a real number; got dtype {value.dtype.name} and shape {value.shape}")
    elif not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a real number; got {reprlib.repr(value)}")


def known_integer(name: str, value: object, allowed: str = "an integer") -> int:
    """The argument of this name, a constant of the compiled program, as a Python integer; in words, `allowed`."""
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_:
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be {allowed} that is {_known(value)}") from None


def _known(value: object) -> str:
    """The end of an error: what a constant must be, what was given, and what to write if that is traced."""
    advice = ". Under jax.jit, static_argnames keeps it a constant" if isinstance(value, jax.core.Tracer) else ""
    return f"known when the call is traced; got {reprlib.repr(value)}{advice}"


def check_options(
    ignore_index: int | None, label_smoothing: ArrayLike, z_loss: ArrayLike, logits_soft_cap: float | None
) -> tuple[Options, list[jax.Array]]:
    """The options of a cross-entropy as a record, after checking each, and its operands."""
    if ignore_index is not None:
        ignore_index = known_integer("ignore_index", ignore_index, "None or an integer")
    if logits_soft_cap is not None:  # within these bounds x / cap is a number of float32 for every x that matters
        logits_soft_cap = known_number("logits_soft_cap", logits_soft_cap, "from 1e-30 to 1e30, or None", 1e-30, 1e30)
    given = {
        "label_smoothing": as_number("label_smoothing", label_smoothing, "between 0 and 1", 0, 1),
        "z_loss": as_number("z_loss", z_loss, "at least 0, and finite in float32", 0, float(np.finfo(_F32).max)),
    }
    constants = {name: v for name, v in given.items() if isinstance(v, float)}
    operands = {name: v for name, v in given.items() if isinstance(v, jax.Array)}
    options = Options(ignore_index, **constants, logits_soft_cap=logits_soft_cap, operands=tuple(operands))
    return options, list(operands.values())


def check_flag(name: str, value: bool) -> bool:
    """The argument of this name as a Python bool, after checking that it is one, or one of NumPy's."""
    if not isinstance(value, _FLAG):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def as_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """The argument of this name, which may be None as well, as a dtype that kernels take, after checking it."""
    try:
        given = jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be None or one of {_NAMES}; got {dtype!r}") from None
    if given not in _DTYPES:
        raise ValueError(f"{name} must be None or one of {_NAMES}; got {given.name}")
    return given


def check_dtype(dtype: DTypeLike | None, x: jax.Array) -> np.dtype:
    """The dtype of a result, after checking it: that of x unless another is given."""
    if dtype is None:
        return x.dtype
    given = as_dtype("dtype", dtype)
    if holds(x.dtype, np.complexfloating):
        raise ValueError(f"dtype must be None for complex scores, as {_NAMES} cannot hold them; got {given.name}")
    return given


def of_rows(
    name: str, value: ArrayLike, shape: tuple[int, ...], axes: tuple[int, ...], beside: str = "scores"
) -> jax.Array:
    """One number for all rows, or one for each, as an array of as many dimensions as `shape`, with length 1 along axes.

    It may also have the shape of the rows, which is `shape` without the axes. Where that shape broadcasts to `shape`
    as well, it says the same: all of its lengths are then 1, or each is at its own axis.
    """
    value = as_array(name, value)
    if axes and value.shape == tuple(size for a, size in enumerate(shape) if a not in axes):
        return jnp.expand_dims(value, axes)
    return broadcastable(name, value, shape, axes, beside)


def broadcastable(
    name: str, value: ArrayLike, shape: tuple[int, ...], ones: tuple[int, ...] = (), beside: str = "scores"
) -> jax.Array:
    """`value` as an array of as many dimensions as `shape`, to which it broadcasts, with length 1 along some axes."""
    value = as_array(name, value)
    whole = (*(1,) * (len(shape) - value.ndim), *value.shape)
    if len(whole) != len(shape) or any(d != 1 and (a in ones or d != shape[a]) for a, d in enumerate(whole)):
        rows = tuple(size for a, size in enumerate(shape) if a not in ones)
        along = f", with length 1 along the reduced axes {ones}, or have that of the rows, {rows}" if ones else ""
        raise ValueError(f"{name} must broadcast to the shape of the {beside}, {shape}{along}; got shape {value.shape}")
    return value if value.ndim == len(whole) else value.reshape(whole)


def _numbers(name: str, value: jax.Array, x: jax.Array) -> jax.Array:
    """The scale or bias for scores x: a bias of x's dtype keeps it, and all else gets the accumulator's."""
    if not holds(value.dtype, np.number):
        raise TypeError(f"{name} must hold numbers; got dtype {value.dtype.name}")
    if holds(value.dtype, np.complexfloating) and not holds(x.dtype, np.complexfloating):
        raise TypeError(f"{name} must hold real numbers beside real scores; got dtype {value.dtype.name}")
    return value if name == "bias" and value.dtype == x.dtype else value.astype(accumulator(x.dtype))


def plain_scores(
    x: jax.Array, where: jax.Array | None, scale: jax.Array | None, bias: jax.Array | None, is_causal: bool
) -> tuple[jax.Array, jax.Array | None]:
    """x * scale + bias, and which of it is valid, in plain JAX, for computations that have no kernels."""
    if scale is not None or bias is not None:
        x = x.astype(accumulator(x.dtype))
    if scale is not None:
        x = rounded(x * scale)
    if bias is not None:
        x = x + bias.astype(x.dtype)
    if is_causal:
        below = jax.lax.broadcast_to_rank(jnp.tri(x.shape[-2], x.shape[-1], dtype=bool), x.ndim)
        where = below if where is None else where & below
    return x, where


def to_rows(
    x: jax.Array,
    axes: tuple[int, ...],
    where: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    is_causal: bool,
) -> tuple[jax.Array, dict[RowExtra, jax.Array], int]:
    """The operands of a row operation: x, its extras in their order, and the number of trailing dimensions.

    A single axis stays where it is if there are no extras. Otherwise the axes become one, which is the last.
    """
    if where is None and scale is None and bias is None and not is_causal and len(axes) == 1:
        return x, {}, x.ndim - 1 - axes[0]
    rows = merged(x, axes, x.shape)
    n = rows.shape[-1]
    extras: dict[RowExtra, jax.Array] = {}
    if scale is not None:
        extras[RowExtra.SCALE] = merged(scale, axes, x.shape)[..., 0]
    if is_causal:
        extras[RowExtra.LIMIT] = jax.lax.broadcast_to_rank(jnp.arange(1, x.shape[-2] + 1, dtype=jnp.int32), x.ndim - 1)
    if where is not None:
        where = merged(where, axes, x.shape)
        if where.shape[-1] == 1:  # whole rows are valid or masked
            extras[RowExtra.LIMIT] = jnp.where(where[..., 0], extras.get(RowExtra.LIMIT, jnp.int32(n)), 0)
        else:
            extras[RowExtra.WHERE] = where
    if bias is not None:
        bias = merged(bias, axes, x.shape)
        extras[RowExtra.BIAS] = jnp.broadcast_to(bias, (*bias.shape[:-1], n))
    return rows, extras, 0


def merged(v: jax.Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """`v`, which broadcasts to `shape`, with `axes` moved to the end and merged into one.

    The merged axis has length 1 where v has length 1 along all of them.
    """
    ndim, k = len(shape), len(shape) - len(axes)
    if axes == (ndim - 1,):
        return v
    if len(axes) == 1:
        return jnp.moveaxis(v, axes, range(k, ndim))
    moved = jnp.moveaxis(whole_along(v, axes), axes, range(k, ndim))  # a sharded dimension can not be merged
    whole = () if all(d == 1 for d in moved.shape[k:]) else tuple(shape[a] for a in axes)
    moved = jnp.broadcast_to(moved, (*moved.shape[:k], *whole)) if whole else moved
    return moved.reshape(*moved.shape[:k], math.prod(whole))


def from_rows(y: jax.Array, x: jax.Array, axes: tuple[int, ...], trailing: int) -> jax.Array:
    """The inverse of `to_rows` for a result of x's shape."""
    if trailing or axes == (x.ndim - 1,):
        return y
    kept = [n for a, n in enumerate(x.shape) if a not in axes]
    split = y.reshape(*kept, *(x.shape[a] for a in axes))
    return sharded_like(jnp.moveaxis(split, range(x.ndim - len(axes), x.ndim), axes), x)
