"""Which of the kernels serves an operation, and whether one does: by its form, and its operands' shapes and dtypes."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core import devices
from jaxsoft._rows.forms import Form, is_plain
from jaxsoft._rows.formulas import take
from jaxsoft._rows.operation import NO_ROW, Extra, Operation, Rows
from jaxsoft._rows.operations.labels import LABEL_STATE, LABEL_STATE_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX

from . import arithmetic, held, split, tiled, tiling
from .extras import Extras

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def _multiprocessors() -> int:
    """Of the GPU that is here, or that is lowered for; else an H100's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu" and device.num_cores:
        return device.num_cores
    return jax.devices("cuda")[0].core_count if devices.present() else 132


def unsupported(operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype, n = operands[0].dtype, operands[0].shape[-1]
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype.name}"
    if not _known(operands):
        return f"its kernels are compiled for shapes that are known; got {operands[0].shape}"
    if held.plan(1, n, dtype.itemsize) or tiling.plan("softmax", 1, n, dtype.itemsize, 1):
        return None
    if n * dtype.itemsize <= held.MOST_BYTES:
        return f"rows must have at least 2 elements; got n={n}"
    return f"long rows must be a multiple of 16 bytes, the alignment of bulk copies; got n={n} of {dtype.name}"


def leads(operation: Operation, form: Form, operands: Sequence[jax.core.ShapedArray]) -> bool:
    """Whether these kernels are faster than all others: by measurement, softmax of few long rows, of 16 bits four, and
    cross-entropy of many."""
    x = operands[0]
    if operation not in (SOFTMAX, *_LABELLED) or x.dtype not in _DTYPES or not _known(operands):
        return False
    n, itemsize = x.shape[-1], x.dtype.itemsize
    if n * itemsize <= held.MOST_BYTES or not is_plain(operation, form, operands):
        return False
    few = x.size * itemsize <= tiling.FEW_BYTES
    return not few if operation in _LABELLED else few and (itemsize == 4 or x.size <= 4 * n)


def _known(operands: Sequence[jax.core.ShapedArray]) -> bool:
    return all(isinstance(size, int) for v in operands for size in v.shape)


def kernel(operation: Operation, form: Form, operands: Sequence[jax.core.ShapedArray]) -> Rows | None:
    """The kernel for an operation in this form, or None where it has to be composed."""
    if operation in _LABELLED and (form.cap is not None or {*form.extras} - {Extra.LIMIT, Extra.WHERE}):
        return None
    alike, names, given = unlabelled(operation, form, operands)
    if alike.name not in arithmetic.SIGNATURES or form.trailing or not _known(operands):
        return None
    *leading, n = operands[0].shape
    rows, base = math.prod(leading), len(alike.operands)
    dtypes = [v.dtype for kind, v in zip(alike.kinds, given, strict=False) if kind.is_wide]
    if any(dtype not in _DTYPES for dtype in (*dtypes, form.dtype)):
        return None
    extras = Extras.of(names, form.masked, leading, [v.shape for v in given[base:]])
    plain = _row_kernel(alike.name, rows, n, dtypes, form.dtype, extras)
    if plain is None:
        return None

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        _, _, given = unlabelled(operation, form, operands)
        own, beside = given[:base], given[base:]
        wide = [v.reshape(rows, n) for v in own if v.ndim > len(leading)]
        numbers = [v.reshape(rows) for v in own if v.ndim == len(leading)]
        others = [v.reshape(-1, n) if v.ndim > len(leading) else v.reshape(-1) for v in beside]
        others = [v.astype(jnp.uint8) if v.dtype == jnp.bool_ else v for v in others]
        with jax.enable_x64(False):  # the kernels count in 32 bits
            results = plain(*wide, *numbers, *others)
        results = tuple(y.reshape(*leading, *y.shape[1:]) for y in results)
        return (*results, label_score(*operands[:2])) if operation is LABEL_STATE else results

    return call


# The operations with labels have the arithmetic of others, and extras before those of the form: "i", the label of each
# row, and "h", the result there.
_LABELLED = {LABEL_STATE: (STATE, "i"), LABEL_STATE_VJP: (LOGSUMEXP_VJP, "ih")}


def unlabelled[T](operation: Operation, form: Form, operands: Sequence[T]) -> tuple[Operation, str, Sequence[T]]:
    """What an operation with labels is to the kernels, and the names of its extras; any other as it is."""
    names = "".join(extra.value for extra in form.extras)
    if operation not in _LABELLED:
        return operation, names, operands
    alike, label_names = _LABELLED[operation]
    x, label, *others = operands
    numbers = len(alike.operands) - 1
    return alike, label_names + names, [x, *others[:numbers], label, *others[numbers:]]


def label_score(x: jax.Array, label: jax.Array) -> jax.Array:
    """The score of each row's label, as of label_state: XLA reads it in the computation that needs it."""
    return jnp.where(label == NO_ROW, 0, take(x, label))


def _row_kernel(
    operation: str, rows: int, n: int, dtypes: Sequence[np.dtype], result: np.dtype, extras: Extras
) -> Rows | None:
    """The kernel that is fit for rows of these lengths and dtypes: `held`, `tiled` or `split`, or None."""
    size = max(dtype.itemsize for dtype in (*dtypes, result))
    together = extras.together
    if "l" in extras.names and n >= 128 * 16 // size:  # of one row a block, what is beyond its limit is not read
        together = 1
    if cut := held.plan(rows, n, size, together):
        fits = functools.partial(held.row_kernel, operation, n=n, dtype=result, plan=cut, extras=extras)
        return _padded(rows, cut.rows, fits)
    if n * size <= held.MOST_BYTES or len({*dtypes}) > 1:
        return None
    if not extras.names and not extras.masked and result == dtypes[0]:
        if parts := split.plan(operation, rows, n, size):
            return split.row_kernel(operation, rows, n, result, *parts)
    tiles = tiling.plan(operation, rows, n, dtypes[0].itemsize, _multiprocessors())
    if tiles is None:
        return None
    wide = arithmetic.SIGNATURES[operation][2]
    tiled_kernel = tiled.row_kernel(operation, rows, n, (dtypes[0], result), tiles, extras)

    def in_vectors(*operands):
        vectors = [x.reshape(-1, n // tiles.vector, tiles.vector) if x.ndim == 2 else x for x in operands]
        results = tiled_kernel(*vectors)
        return *(y.reshape(rows, n) for y in results[:wide]), *results[wide:]

    return in_vectors


def _padded(rows: int, least: int, kernel: Callable[..., Rows]) -> Rows:
    """A kernel that takes no fewer rows than a block does, for fewer."""
    if rows >= least:
        return kernel(rows=rows)

    def function(*operands):
        more = [jnp.pad(x, [(0, least - rows)] + [(0, 0)] * (x.ndim - 1)) for x in operands]
        return tuple(y[:rows] for y in kernel(rows=least)(*more))

    return function
