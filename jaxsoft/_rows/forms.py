"""The forms that a row operation comes in: what is done to the scores before they are reduced.

In the plain form the scores are x itself. In others they are z = x * scale + bias, of which only some elements count;
they lie along another axis than the last; or the result has another dtype. A kernel may take a form as it is. For one
that knows only the plain form, `compose` does the rest in plain JAX, which XLA fuses as far as it can: this is the
definition of every form, for every implementation.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.operation import Function, Types
from jaxsoft._core.rounding import rounded
from jaxsoft._rows.formulas import positions
from jaxsoft._rows.spec import NO_ROW, SCALES, Reductions, RowExtra, RowKind, RowSpec
from jaxsoft.fold import accumulator

type Operands = Sequence[jax.Array | jax.core.ShapedArray]
type Extras = dict[RowExtra, jax.Array]


@dataclasses.dataclass(frozen=True)
class RowForm:
    """The form of a row operation.

    Attributes:
      dtype: of the results of x's shape, and of the probabilities of selected elements. The arithmetic is done in the
        accumulator's dtype of x.
      other_dtype: of the results of x's shape that belong to the second input; None where there are none.
      extras: which operands follow those of the operation, in the order of `RowExtra`.
      trailing: how many dimensions of x follow the reduced one; 0 beside extras.
      masked: whether elements whose first operand, a softmax, is 0 are masked.
      cap: scores become cap * tanh(x / cap); None leaves them as they are. There is none beside scale or bias.
      k: how many elements of a row an operation selects, which then has no other form; 0 if it selects none.
      in_place: a result of x's shape may be written where x is, if the caller has no use for x after the call.
    """

    dtype: np.dtype
    extras: tuple[RowExtra, ...] = ()
    trailing: int = 0
    masked: bool = False
    cap: float | None = None
    k: int = 0
    in_place: bool = False
    other_dtype: np.dtype | None = None

    def dtype_of(self, input: int) -> np.dtype:
        """That of the results that belong to an input."""
        return self.other_dtype if input and self.other_dtype is not None else self.dtype

    def __post_init__(self):
        assert self.cap is None or not {RowExtra.SCALE, RowExtra.BIAS} & {*self.extras}, "the cap's slope is taken at x"


# --8<-- [start:kernels]
@dataclasses.dataclass(frozen=True)
class RowKernels:
    """The kernels for rows that an implementation has.

    Attributes:
      kernel: (operation, form, platform, operands) -> the kernel that takes the form as it is, or why there is none.
        There is one for the plain form of every operation, but for those that can be made of the state
        (`RowSpec.from_state`).
      unsupported: (operands) -> None, or why it cannot take operands of these shapes and dtypes.
      composed: whether the default choice takes it for forms that have to be composed, too. Before its plain kernel XLA
        then writes the scores anew, which only the fastest kernel makes up for.
      is_fastest: (operation, form, platform, operands) -> whether the default choice tries it before all others.
      describe: (operation, form, platform, operands) -> of such a kernel, its name and how it cuts up its work, in
        words.
    """

    kernel: Callable[[RowSpec, RowForm, str, Types], Function | str]
    unsupported: Callable[[Types], str | None] = lambda operands: None
    composed: bool = False
    is_fastest: Callable[[RowSpec, RowForm, str, Types], bool] = lambda operation, form, platform, operands: False
    describe: Callable[[RowSpec, RowForm, str, Types], str] = lambda operation, form, platform, operands: ""
    # --8<-- [end:kernels]


def formula(operation: RowSpec, form: RowForm, reductions: Reductions) -> Function:
    """The operation in its plain form, in plain JAX, with one way to reduce a row."""
    chosen = {"k": form.k, "dtype": form.dtype} if form.k else {}
    return functools.partial(operation.formula, reductions, **chosen)


def result_types(operation: RowSpec, form: RowForm, x: jax.Array | jax.core.ShapedArray) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the results, given the first operand."""
    axis = x.ndim - 1 - form.trailing
    rows = (*x.shape[:axis], *x.shape[axis + 1 :])
    types = {
        RowKind.STATISTIC: (rows, accumulator(x.dtype)),
        RowKind.VALUES: ((*rows, form.k), accumulator(x.dtype) if operation.is_tangent else x.dtype),
        RowKind.CHOSEN_PROBABILITIES: ((*rows, form.k), form.dtype),
        RowKind.INDICES: ((*rows, form.k), jnp.int32),
    }
    return [
        jax.ShapeDtypeStruct(*types.get(result.kind, (x.shape, form.dtype_of(result.input))))
        for result in operation.results
    ]


def compose(operation: RowSpec, form: RowForm, plain: Function) -> Function:
    """The operation in this form, from a kernel that has the plain form."""

    def function(*operands):
        given, extras = split(operation, form, operands)
        axis, dtype = -1 - form.trailing, working_dtype(operation, form, operands)
        base = [
            jnp.moveaxis(v, axis, -1) if kind.whole_rows else v for kind, v in zip(operation.kinds, given, strict=True)
        ]
        valid = valid_elements(form, base[0], extras)
        if valid is not None and operation.has_label:  # the label is valid in any case
            label = base[operation.kinds.index(RowKind.LABEL)]
            valid = valid | (positions(base[0]) == label[..., None])
        if form.cap is not None:  # the derivative of tanh at NaN would stay, where that is masked or is not read
            read = base[operation.kinds.index(RowKind.LABEL)][..., None] != NO_ROW
            base[0] = jnp.where(read if valid is None else read & valid, base[0], 0)
        prepared = []
        for (_, kind, _, input), v in zip(operation.operands, base, strict=True):
            if kind is RowKind.SCORES:
                v = scores(form, v, extras, dtype, valid, input)
            elif kind is RowKind.TANGENT:
                v = _select(valid, capped_slope(form, base[0], _scaled(valid, v.astype(dtype), extras, input)), 0)
            elif kind is RowKind.COTANGENT:
                v = _select(valid, v.astype(dtype), 0)
            elif kind is RowKind.PROBABILITIES:
                v = v.astype(dtype)
            prepared.append(v)

        def finished(result, v):
            if result.kind is RowKind.CHOSEN_PROBABILITIES:
                return v.astype(form.dtype)
            if result.kind is not RowKind.ROW:
                return v
            if operation.is_pullback:
                v = _scaled(valid, capped_slope(form, base[0], v), extras, result.input)
            v = _select(valid, v, operation.masked_result)
            return jnp.moveaxis(v.astype(form.dtype_of(result.input)), -1, axis)

        return tuple(map(finished, operation.results, plain(*prepared)))

    return function


def scores(
    form: RowForm, x: jax.Array, extras: Extras, dtype: np.dtype, valid: jax.Array | None, input: int = 0
) -> jax.Array:
    """z = x * scale + bias in this dtype, capped, along the last axis; -inf where an element is masked.

    There is a bias and a cap for the first input alone.
    """
    z = _scaled(valid, x.astype(dtype), extras, input)
    z = rounded(z) if SCALES[input] in extras else z
    if RowExtra.BIAS in extras and not input:
        z = z + extras[RowExtra.BIAS].astype(dtype)
    if form.cap is not None:
        z = softcap(_select(valid, z, 0), form.cap)
    return _select(valid, z, -jnp.inf)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x without a cap."""
    return x if cap is None else rounded(cap * jnp.tanh(x / cap))


def capped_slope(form: RowForm, x: jax.Array, v: jax.Array) -> jax.Array:
    """v times the derivative of the capped scores by x, 1 - tanh(x / cap)^2, written without a difference."""
    if form.cap is None:
        return v
    e = jnp.exp(-2 * jnp.abs(x.astype(v.dtype) / form.cap))
    return v * (4 * e / (1 + e) ** 2)


def split[T](operation: RowSpec, form: RowForm, operands: Sequence[T]) -> tuple[tuple[T, ...], dict[RowExtra, T]]:
    """The operands of the operation itself, and the extras by name."""
    k = len(operation.operands)
    return tuple(operands[:k]), dict(zip(form.extras, operands[k:], strict=True))


def groups(leading: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[tuple[tuple[bool, ...], int]]:
    """x's leading dimensions, where neighbours that the same extras, of these shapes, are broadcast along count as one.

    Returns:
      For each dimension, outermost first: whether each extra is broadcast along it, and how long it is.
    """
    dims = [(tuple(shape[i] == 1 for shape in shapes), size) for i, size in enumerate(leading) if size != 1]
    neighbours = itertools.groupby(dims, key=lambda dim: dim[0])
    return [(broadcast, math.prod(size for _, size in dims)) for broadcast, dims in neighbours]


def is_plain(operation: RowSpec, form: RowForm, operands: Operands) -> bool:
    """Whether nothing has to be done to the scores, and all operands and results of their shape have one dtype."""
    if operation.selects:
        return form == RowForm(form.dtype, k=form.k)
    plain = RowForm(operands[0].dtype, in_place=form.in_place, other_dtype=form.other_dtype)
    return form == plain and _has_one_dtype(operation, form, operands)


def working_dtype(operation: RowSpec, form: RowForm, operands: Operands) -> np.dtype:
    """The dtype in which `compose` calls the plain kernel: x's, if nothing is computed or converted before."""
    computed = not {*form.extras}.isdisjoint((*SCALES, RowExtra.BIAS)) or form.cap is not None
    computed = computed or not (operation.selects or _has_one_dtype(operation, form, operands))
    return accumulator(operands[0].dtype) if computed else operands[0].dtype


def row_dtypes(operation: RowSpec, operands: Operands) -> set[np.dtype]:
    """The dtypes of the operands of x's shape, extras aside."""
    return {v.dtype for kind, v in zip(operation.kinds, operands, strict=False) if kind.whole_rows}


def _has_one_dtype(operation: RowSpec, form: RowForm, operands: Operands) -> bool:
    return {form.dtype, form.dtype_of(1)} == row_dtypes(operation, operands) == {operands[0].dtype}


def no_kernel(operation: RowSpec) -> str:
    """Why an implementation does not serve an operation that it does not know."""
    return f"it has no kernel for {operation}"


def other_form(operation: RowSpec, form: RowForm, operands: Operands) -> str:
    """Why an implementation does not serve an operation in a form that its kernel does not take."""
    names = {RowExtra.LIMIT: "lengths", RowExtra.WHERE: "a mask", RowExtra.BIAS: "a bias"}
    with_what = sorted({names.get(extra, "a scale") for extra in form.extras})
    with_what += ["a soft cap"] if form.cap is not None else []
    with_what += ["elements masked by their softmax"] if form.masked else []
    with_what += ["an axis that is not the last"] if form.trailing else []
    dtypes = {form.dtype, form.dtype_of(1), *row_dtypes(operation, operands)}
    with_what += [f"dtypes {' and '.join(sorted(dtype.name for dtype in dtypes))}"] if len(dtypes) > 1 else []
    of = f" with {', '.join(with_what)}" if with_what else f" of {operands[0].dtype.name}{[*operands[0].shape]}"
    return f"its kernel for {operation} does not take rows{of}"


def valid_elements(form: RowForm, first: jax.Array, extras: Extras) -> jax.Array | None:
    """Which elements of rows are valid, given the operation's first operand; None for all."""
    conditions = [extras[RowExtra.WHERE]] if RowExtra.WHERE in extras else []
    if RowExtra.LIMIT in extras:
        conditions.append(positions(first) < extras[RowExtra.LIMIT][..., None])
    if form.masked:
        conditions.append(first != 0)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def _scaled(valid: jax.Array | None, v: jax.Array, extras: Extras, input: int) -> jax.Array:
    """v * scale, where masked elements are 0: NaN in one would make the derivative by the scale NaN."""
    if SCALES[input] not in extras:
        return v
    return _select(valid, v, 0) * extras[SCALES[input]].astype(v.dtype)[..., None]


def _select(valid: jax.Array | None, v: jax.Array, other: float) -> jax.Array:
    return v if valid is None else jnp.where(valid, v, other)
