"""The row operations, and the forms they come in: what is done to the scores before they are reduced.

An operation reduces rows x of shape (..., n) to statistics of shape (...), one number a row, or writes arrays of x's
shape. In its plain form the scores are x itself. In others they are z = x * scale + bias, of which only some elements
count; they lie along another axis than the last; or the result has another dtype. A kernel may take a form as it is.
For one that knows only the plain form, `compose` does the rest in plain JAX, which XLA fuses as far as it can: this is
the definition of every form, for every implementation.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft.fold import accumulator

type Operation = Callable[..., tuple[jax.Array, ...]]
type Operands = Sequence[jax.Array | jax.core.ShapedArray]

# The operands of each operation, by kind: "x" scores, "y" a softmax, "g" a cotangent of the result and "t" a tangent of
# the scores, all of shape (..., n); "r" one number a row, "i" one int32 a row, "k" k of either a row. Tangents are
# formulas only: no implementation has kernels. In the last six i is the index of a row's label: NO_ROW in a row that is
# not to be read, of which nothing counts; any other that is out of range makes t NaN. The label counts, whatever the
# extras say.
OPERATIONS = {
    "softmax": "x",  # -> y
    "softmax_vjp": "yg",  # -> scale * y * (g - <y, g>)
    "softmax_jvp": "yt",  # the same, as the Jacobian is symmetric
    "log_softmax": "x",  # -> y, m, s
    "log_softmax_vjp": "xrrg",  # x, m, s, g -> scale * (g - p * sum(g)), with p = exp(z - m) / s
    "log_softmax_jvp": "xrrt",  # x, m, s, t -> scale * t - <p, scale * t>
    "state": "x",  # -> m, s
    "logsumexp_vjp": "xrrr",  # x, m, s, g -> scale * p * g
    "logsumexp_jvp": "xrrt",  # x, m, s, t -> <p, scale * t>
    "top_k": "x",  # -> the k largest, in order, and their indices; m, s
    "top_k_vjp": "xkrrrk",  # x, i, m, s, g, h -> p * g, and h at the indices
    "top_k_jvp": "xkrrt",  # x, i, m, s, t -> <p, t> without those at the indices, and t at the indices
    "label_state": "xi",  # x, i -> m, s of the scores but the label's, and t, the label's
    "label_state_vjp": "xirrrr",  # x, i, m, s, g, h -> p * g, and h at the label
    "label_state_jvp": "xirrt",  # x, i, m, s, t -> <p, t> without the label, and t at the label
    "label_sums": "xi",  # x, i -> m, s, t, and of the scores z > -inf: u = sum(z - reference(t)), and their number
    "label_sums_vjp": "xirrrrr",  # x, i, m, s, g, h, v -> p * g, and h at the label; plus v where z > -inf
    "label_sums_jvp": "xirrt",  # x, i, m, s, t -> those of label_state_jvp, and sum(t) where z > -inf
}
NO_ROW = -(2**31)
# The results of those that have kernels, by kind: "x" of x's shape, "r" one number a row, "k" k of a row's elements and
# "j" their indices.
RESULTS = {
    "softmax": "x",
    "softmax_vjp": "x",
    "log_softmax": "xrr",
    "log_softmax_vjp": "x",
    "state": "rr",
    "logsumexp_vjp": "x",
    "top_k": "kjrr",
    "label_state": "rrr",
    "label_state_vjp": "x",
    "label_sums": "rrrrr",
    "label_sums_vjp": "x",
}


def is_wide(kind: str) -> bool:
    """Whether an operand or a result of this kind has x's shape."""
    return kind not in "rik"


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a row operation. Extras have x's dimensions, or 1 where they are the same for all rows.

    Attributes:
      dtype: of the results of x's shape. The arithmetic is x's accumulator's.
      extras: which operands follow those of the operation, in this order: "s", the scale, one number a row in the
        accumulator's dtype; "l", the limit, one int32 a row: elements before it count; "w", where, booleans (..., n):
        elements where it is True count; "b", the bias (..., n).
      trailing: how many dimensions of x follow the reduced one; 0 beside extras.
      masked: of softmax_vjp and softmax_jvp: elements whose y is 0 do not count.
      cap: of the operations with labels: scores become cap * tanh(x / cap); None leaves them as they are.
      k: of top_k, which has no other form; 0 else.
    """

    dtype: np.dtype
    extras: str = ""
    trailing: int = 0
    masked: bool = False
    cap: float | None = None
    k: int = 0


def compose(operation: str, form: Form, plain: Operation) -> Operation:
    """The operation in this form, from a kernel that has the plain form."""
    kinds = OPERATIONS[operation]

    def function(*operands):
        given, extras = split(operation, form, operands)
        axis, dtype = -1 - form.trailing, working_dtype(operation, form, operands)
        base = [jnp.moveaxis(v, axis, -1) if is_wide(kind) else v for kind, v in zip(kinds, given, strict=True)]
        counts = counted(form, base[0], extras)
        if counts is not None and "i" in kinds:  # a row's label does
            counts = counts | (positions(base[0]) == base[1][..., None])
        prepared = []
        for kind, v in zip(kinds, base, strict=True):
            if kind == "x":
                v = scores(form, v, extras, dtype, counts)
            elif kind == "t":
                v = _select(counts, capped_slope(form, base[0], _scaled(counts, v.astype(dtype), extras)), 0)
            elif kind == "g":
                v = _select(counts, v.astype(dtype), 0)
            elif kind == "y":
                v = v.astype(dtype)
            prepared.append(v)

        def finished(v):
            if v.ndim < base[0].ndim or form.k:
                return v
            if operation.endswith("_vjp"):
                v = _scaled(counts, capped_slope(form, base[0], v), extras)
            v = _select(counts, v, -jnp.inf if operation == "log_softmax" else 0)
            return jnp.moveaxis(v.astype(form.dtype), -1, axis)

        return tuple(map(finished, plain(*prepared)))

    return function


def scores(
    form: Form, x: jax.Array, extras: dict[str, jax.Array], dtype: np.dtype, counts: jax.Array | None
) -> jax.Array:
    """z = x * scale + bias in this dtype, capped, along the last axis; -inf where an element does not count."""
    z = _scaled(counts, x.astype(dtype), extras)
    if "b" in extras:
        z = z + extras["b"].astype(dtype)
    z = softcap(z, form.cap)
    return _select(counts, z, -jnp.inf)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def capped_slope(form: Form, x: jax.Array, v: jax.Array) -> jax.Array:
    """v times the derivative of the capped scores by x, 1 - tanh(x / cap)^2, written without a difference."""
    if form.cap is None:
        return v
    e = jnp.exp(-2 * jnp.abs(x.astype(v.dtype) / form.cap))
    return v * (4 * e / (1 + e) ** 2)


def bind(plain: Operation, form: Form) -> Operation:
    """A formula with the number of its form that is beside its operands."""
    return functools.partial(plain, k=form.k) if form.k else plain


def split[T](operation: str, form: Form, operands: Sequence[T]) -> tuple[tuple[T, ...], dict[str, T]]:
    """The operands of the operation itself, and the extras by name."""
    k = len(OPERATIONS[operation])
    return tuple(operands[:k]), dict(zip(form.extras, operands[k:], strict=True))


def groups(leading: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[tuple[tuple[bool, ...], int]]:
    """x's leading dimensions, where neighbours count as one along which the same extras of these shapes are broadcast.

    Returns:
      For each, outermost first: whether each extra is broadcast along it, and how long it is.
    """
    dims = [(tuple(shape[i] == 1 for shape in shapes), size) for i, size in enumerate(leading) if size != 1]
    neighbours = itertools.groupby(dims, key=lambda dim: dim[0])
    return [(broadcast, math.prod(size for _, size in dims)) for broadcast, dims in neighbours]


def is_plain(operation: str, form: Form, operands: Operands) -> bool:
    """Whether nothing has to be done to the scores, and all operands and results of their shape have one dtype."""
    return form == Form(operands[0].dtype, k=form.k) and _one_dtype(operation, form, operands)


def working_dtype(operation: str, form: Form, operands: Operands) -> np.dtype:
    """The dtype in which `compose` calls the plain kernel: x's, if nothing is computed or converted before."""
    computed = "s" in form.extras or "b" in form.extras or form.cap is not None
    computed = computed or not _one_dtype(operation, form, operands)
    return accumulator(operands[0].dtype) if computed else operands[0].dtype


def _one_dtype(operation: str, form: Form, operands: Operands) -> bool:
    kinds = OPERATIONS[operation]
    return {form.dtype} == {v.dtype for kind, v in zip(kinds, operands, strict=False) if is_wide(kind)}


def counted(form: Form, first: jax.Array, extras: dict[str, jax.Array]) -> jax.Array | None:
    """Which elements of rows count; None for all."""
    conditions = [extras["w"]] if "w" in extras else []
    if "l" in extras:
        conditions.append(positions(first) < extras["l"][..., None])
    if form.masked:
        conditions.append(first != 0)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def positions(x: jax.Array) -> jax.Array:
    """The index of each element of rows like those of x, of as many dimensions and length 1 but for the last."""
    return jax.lax.broadcast_to_rank(jnp.arange(x.shape[-1], dtype=jnp.int32), x.ndim)


def _scaled(counts: jax.Array | None, v: jax.Array, extras: dict[str, jax.Array]) -> jax.Array:
    """v * scale; of 0 where nothing counts, as what is hidden there would be in the derivative by the scale."""
    return _select(counts, v, 0) * extras["s"].astype(v.dtype)[..., None] if "s" in extras else v


def _select(counts: jax.Array | None, v: jax.Array, other: float) -> jax.Array:
    return v if counts is None else jnp.where(counts, v, other)
