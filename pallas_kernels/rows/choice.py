"""Which of the kernels serves an operation, and whether one does: by its form, and its operands' shapes and dtypes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.operation import Function, Types
from jaxsoft._rows.forms import RowForm, is_plain, no_kernel, other_form
from jaxsoft._rows.formulas import take
from jaxsoft._rows.operations.labels import LABEL_STATE, LABEL_STATE_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft._rows.spec import NO_ROW, RowExtra, RowSpec

from . import operations, plan, register_rows, sizes, split, tiled
from .extras import Extras, LabelExtra, Name
from .plan import RegisterPlan, SplitPlan, TiledPlan

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# What the operations with labels are to the kernels: others, with extras before those of the form.
_LABELLED: dict[RowSpec, tuple[RowSpec, tuple[Name, ...]]] = {
    LABEL_STATE: (STATE, (LabelExtra.LABEL,)),
    LABEL_STATE_VJP: (LOGSUMEXP_VJP, (LabelExtra.LABEL, LabelExtra.RESULT)),
}


def unsupported(operands: Types) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype, n = operands[0].dtype, operands[0].shape[-1]
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype.name}"
    if not _known(operands):
        return f"its kernels are compiled for shapes that are known; got {operands[0].shape}"
    of_gpu = sizes.target()
    if plan.register_rows(of_gpu.registers, 1, n, dtype.itemsize) or plan.tiled(of_gpu, SOFTMAX, 1, n, dtype.itemsize):
        return None
    if n * dtype.itemsize <= of_gpu.registers.row_bytes:
        return f"rows must have at least 2 elements; got n={n}"
    return f"long rows must be a multiple of 16 bytes, the alignment of bulk copies; got n={n} of {dtype.name}"


def is_fastest(operation: RowSpec, form: RowForm, operands: Types) -> bool:
    """Whether these kernels are faster than all others, as the sizes of the GPU say."""
    x = operands[0]
    if operation not in (SOFTMAX, *_LABELLED) or x.dtype not in _DTYPES or not _known(operands):
        return False
    of_gpu, n, itemsize = sizes.target(), x.shape[-1], x.dtype.itemsize
    if n * itemsize <= of_gpu.registers.row_bytes or not is_plain(operation, form, operands):
        return False
    few = x.size * itemsize <= of_gpu.few.bytes
    if operation in _LABELLED:
        return not few
    return few and x.size <= of_gpu.softmax_rows[itemsize] * n


def _known(operands: Types) -> bool:
    return all(isinstance(size, int) for v in operands for size in v.shape)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that a kernel takes as it is.

    Attributes:
      operation: what the kernel computes: without labels, but for extras.
      rows, n: the number of rows, and their length.
      dtypes: those of the operands with whole rows.
      result: the dtype of results with whole rows.
      extras: what comes beside the rows.
      plan: how rows are cut up.
    """

    operation: RowSpec
    rows: int
    n: int
    dtypes: Sequence[np.dtype]
    result: np.dtype
    extras: Extras
    plan: RegisterPlan | SplitPlan | TiledPlan

    @staticmethod
    def of(operation: RowSpec, form: RowForm, operands: Types) -> "_Call | None":
        """The call of an operation in this form, or None where it has to be composed."""
        if form.cap is not None or (operation in _LABELLED and {*form.extras} - {RowExtra.LIMIT, RowExtra.WHERE}):
            return None
        alike, names, given = unlabelled(operation, form, operands)
        if alike not in operations.KERNELS or form.trailing or not _known(operands):
            return None
        *leading, n = operands[0].shape
        rows, own = math.prod(leading), len(alike.operands)
        dtypes = [v.dtype for kind, v in zip(alike.kinds, given, strict=False) if kind.whole_rows]
        if any(dtype not in _DTYPES for dtype in (*dtypes, form.dtype)):
            return None
        extras = Extras.of(names, form.masked, leading, [v.shape for v in given[own:]])
        cut = _plan(alike, rows, n, dtypes, form.dtype, extras)
        return _Call(alike, rows, n, dtypes, form.dtype, extras, cut) if cut else None

    def kernel(self) -> Function:
        """The kernel, of operands of shape (rows, n) and (rows,), and of extras."""
        operation, rows, n, cut = self.operation, self.rows, self.n, self.plan
        if isinstance(cut, SplitPlan):
            return split.row_kernel(operation, rows, n, self.result, cut)
        if isinstance(cut, TiledPlan):
            dtypes = self.dtypes[0], self.result
            return _in_vectors(tiled.row_kernel(operation, rows, n, dtypes, cut, self.extras), cut.vector)
        fits = functools.partial(
            register_rows.row_kernel, operation, n=n, dtype=self.result, plan=cut, extras=self.extras
        )
        return _padded(rows, cut.rows, fits)


def kernel(operation: RowSpec, form: RowForm, operands: Types) -> Function | str:
    """The kernel for an operation in this form, or why it has to be composed."""
    found = _Call.of(operation, form, operands)
    if found is None:
        known = operation in operations.KERNELS or operation in _LABELLED
        return other_form(operation, form, operands) if known else no_kernel(operation)
    *leading, n = operands[0].shape
    rows, own, plain = found.rows, len(found.operation.operands), found.kernel()

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        _, _, given = unlabelled(operation, form, operands)
        wide = [v.reshape(rows, n) for v in given[:own] if v.ndim > len(leading)]
        numbers = [v.reshape(rows) for v in given[:own] if v.ndim == len(leading)]
        others = [v.reshape(-1, n) if v.ndim > len(leading) else v.reshape(-1) for v in given[own:]]
        others = [v.astype(jnp.uint8) if v.dtype == jnp.bool_ else v for v in others]
        with jax.enable_x64(False):  # the kernels count in 32 bits
            results = plain(*wide, *numbers, *others)
        results = tuple(y.reshape(*leading, *y.shape[1:]) for y in results)
        return (*results, label_score(*operands[:2])) if operation is LABEL_STATE else results

    return call


def describe(operation: RowSpec, form: RowForm, operands: Types) -> str:
    """The kernel's name, and how it cuts up its work, in words."""
    found = _Call.of(operation, form, operands)
    assert found
    return f"jaxsoft_{found.operation.name}_{found.plan.words}"


def unlabelled[T](
    operation: RowSpec, form: RowForm, operands: Sequence[T]
) -> tuple[RowSpec, tuple[Name, ...], Sequence[T]]:
    """The operation, its extras and its operands as the kernels take them: without labels, but for extras."""
    if operation not in _LABELLED:
        return operation, form.extras, operands
    alike, of_label = _LABELLED[operation]
    x, label, *others = operands
    numbers = len(alike.operands) - 1
    return alike, (*of_label, *form.extras), [x, *others[:numbers], label, *others[numbers:]]


def label_score(x: jax.Array, label: jax.Array) -> jax.Array:
    """The score of each row's label, as label_state has it. XLA reads it in the computation that needs it."""
    return jnp.where(label == NO_ROW, 0, take(x, label))


def _plan(
    operation: RowSpec, rows: int, n: int, dtypes: Sequence[np.dtype], result: np.dtype, extras: Extras
) -> RegisterPlan | SplitPlan | TiledPlan | None:
    """How the kernel that is fit for rows of these lengths and dtypes cuts them up; None if there is none."""
    of_gpu, itemsize = sizes.target(), max(dtype.itemsize for dtype in (*dtypes, result))
    together = extras.together
    if RowExtra.LIMIT in extras.names and n >= plan.THREADS * plan.VECTOR_BYTES // itemsize:
        together = 1  # where a block has one row, what is beyond its limit is not read
    if in_registers := plan.register_rows(of_gpu.registers, rows, n, itemsize, together):
        return in_registers
    if n * itemsize <= of_gpu.registers.row_bytes or len({*dtypes}) > 1:
        return None
    if not extras.names and not extras.masked and result == dtypes[0]:
        if in_parts := plan.split(of_gpu, operation, rows, n, itemsize):
            return in_parts
    return plan.tiled(of_gpu, operation, rows, n, dtypes[0].itemsize)


def _in_vectors(kernel: Function, vector: int) -> Function:
    """Makes a kernel that takes rows as vectors take them as they are."""

    def function(*operands):
        vectors = [x.reshape(len(x), -1, vector) if x.ndim == 2 else x for x in operands]
        return tuple(y.reshape(len(y), -1) if y.ndim == 3 else y for y in kernel(*vectors))

    return function


def _padded(rows: int, least: int, kernel: Callable[..., Function]) -> Function:
    """The kernel for this number of rows, which are padded if a block takes more."""
    if rows >= least:
        return kernel(rows=rows)

    def function(*operands):
        more = [jnp.pad(x, [(0, least - rows)] + [(0, 0)] * (x.ndim - 1)) for x in operands]
        return tuple(y[:rows] for y in kernel(rows=least)(*more))

    return function
