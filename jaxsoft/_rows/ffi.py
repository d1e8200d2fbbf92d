"""`implementation="ffi"`: the C++ and CUDA kernels for rows of ffi/, called through the JAX FFI."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core import library
from jaxsoft._core.operation import Function
from jaxsoft._rows.forms import Operands, RowForm, RowKernels, groups, is_plain, result_types, row_dtypes, split
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.spec import Reduction, RowExtra, RowSpec

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_F32 = np.dtype(jnp.float32)
# The limits of the kernels: of k, and of the groups of leading dimensions along which extras are broadcast differently.
_MOST_K = 256
_MOST_GROUPS = 4
# kShortPart and kMostReceived in ffi/cuda/rows/top_k/tuning.h: a part of a row that has candidates has more elements,
# and so many of these a device may get from all together.
_SHORT_PART, _MOST_RECEIVED = 1024, 2048

# The workspace, in bytes. On a GPU it holds the states of the parts of a long row, or a counter from which blocks take
# their next work. Rows of at least _LONG_ROW bytes may be too long for a cluster of blocks: then it holds the states of
# the parts of all rows, for which 1/512 of the memory of the rows is enough.
_WORKSPACE = 1 << 17
_LONG_ROW = 1 << 20
# For the k largest elements, the workspace holds those of each part as words of _WORD bytes, and the part's state in
# _PART_STATE bytes. All rows together have up to _PARTS parts.
_PARTS = 1024
_WORD, _PART_STATE = 8, 16


def unsupported(operands: Operands) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype = operands[0].dtype
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16, float32 and float64, not {dtype.name}"
    return None


def kernel(operation: RowSpec, form: RowForm, platform: str, operands: Operands) -> Function | None:
    """The kernel for an operation in this form, or None where the kernels have to be composed."""
    if operation.name not in library.operations(platform):
        return None
    if operation.selects and (form.k > _MOST_K or (platform == "cuda" and operands[0].dtype == jnp.float64)):
        return None
    if not is_plain(operation, form, operands) and not _takes(operation, form, operands):
        return None
    if not _go_together(form.dtype, operands[0].dtype):
        return None

    # In the CUDA kernels that reduce nothing, a thread writes only where it alone has read before. On a CPU the last
    # vector of a row overlaps the one before it, so in place it would read elements that are already written.
    in_place = form.in_place and platform == "cuda" and operation.reduces is Reduction.NOTHING
    aliases = {0: 0} if in_place and form.dtype == operands[0].dtype else None

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        types = result_types(operation, form, operands[0])
        beside = [] if operation.reduces is Reduction.NOTHING else [workspace(operands[0], form.k, form.trailing)]
        target = jax.ffi.ffi_call(f"jaxsoft_{operation.name}", (*types, *beside), input_output_aliases=aliases)
        return tuple(target(*operands, **attributes(form))[: len(types)])

    return call


def workspace(x: jax.Array, k: int = 0, trailing: int = 0) -> jax.ShapeDtypeStruct:
    """The workspace that kernels get for rows like those of x, or to find k elements of each.

    Where the shape is not known, it is the smallest one, which suffices for rows of any shape.
    """
    known = x.ndim > 0 and all(isinstance(d, int) for d in x.shape)
    if k:
        size = _PARTS * (_WORD * k + _PART_STATE)
    elif known and not trailing and x.shape[-1] * x.dtype.itemsize >= _LONG_ROW:
        size = max(_WORKSPACE, math.prod(x.shape) * x.dtype.itemsize // 512)
    else:
        size = _WORKSPACE
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def top_k_candidates(x: jax.Array, k: int) -> Callable[[jax.Array], jax.Array] | None:
    """The CUDA kernel for the candidates of a device for the k largest elements, of its part x of rows; or None."""
    if not _has_candidates(x, k) or x.shape[-1] <= _SHORT_PART:
        return None
    # On words of 32 bits: two of three arrays of k elements have x's dtype, and the state is of two numbers.
    words = math.prod(x.shape[:-1]) * (k * (2 * x.dtype.itemsize // 4 + 1) + 2)
    types = jax.ShapeDtypeStruct((words,), jnp.uint32), workspace(x, k)
    call = jax.ffi.ffi_call("jaxsoft_top_k_candidates", types)
    return lambda x: call(x, k=np.int64(k))[0]


def top_k_of_candidates(x: jax.Array, form: RowForm, parts: int) -> Callable[[jax.Array], tuple[jax.Array, ...]] | None:
    """The CUDA kernel that makes the results of top_k of the candidates of all devices; or None.

    Args:
      x: the part of one device.
      form: of the results.
      parts: how many devices there are.
    """
    n = x.shape[-1]
    if (
        not _has_candidates(x, form.k)
        or parts * min(form.k, n) > _MOST_RECEIVED
        or not _go_together(form.dtype, x.dtype)
    ):
        return None
    call = jax.ffi.ffi_call("jaxsoft_top_k_of_candidates", result_types(TOP_K, form, x))
    return lambda candidates: tuple(call(candidates, part=np.int64(n)))


def _has_candidates(x: jax.Array, k: int) -> bool:
    known = library.find("cuda") is not None and "top_k_candidates" in library.operations("cuda")
    return known and x.size > 0 and x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32) and k <= _MOST_K


def _go_together(result: np.dtype, dtype: np.dtype) -> bool:
    """Whether the kernels write results of one dtype from operands of the other."""
    return result == dtype or {result, dtype} in ({_F32, np.dtype(t)} for t in (jnp.float16, jnp.bfloat16))


def _takes(operation: RowSpec, form: RowForm, operands: Operands) -> bool:
    """Whether the kernels take a form that is not plain."""
    dtype = operands[0].dtype
    _, extras = split(operation, form, operands)
    if row_dtypes(operation, operands) != {dtype}:
        return False
    if form.trailing and not operation.any_axis:
        return False
    if (form.masked and not operation.may_be_masked) or (form.cap is not None and not operation.may_be_capped):
        return False
    if not {*extras} <= {*operation.extras}:
        return False
    if RowExtra.BIAS in extras and extras[RowExtra.BIAS].dtype != dtype:
        return False
    return len(groups(operands[0].shape[:-1], [v.shape for v in extras.values()])) <= _MOST_GROUPS


def attributes(form: RowForm) -> dict[str, object]:
    """The attributes of a call."""
    return {
        "extras": "".join(extra.value for extra in form.extras),
        "trailing": np.int64(form.trailing),
        "masked": np.bool_(form.masked),
        "cap": np.float64(form.cap or 0),
    }


KERNELS = RowKernels(kernel, unsupported, composed=True)
