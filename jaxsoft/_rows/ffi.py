"""`implementation="ffi"`: the C++ and CUDA kernels for rows of ffi/, called through the JAX FFI.

Their limits, workspaces and plans the library says itself (ffi/cuda/answers.cc).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core import gpus, library
from jaxsoft._core.operation import Function, Types
from jaxsoft._rows.forms import (
    Operands,
    RowForm,
    RowKernels,
    groups,
    is_plain,
    no_kernel,
    other_form,
    result_types,
    row_dtypes,
    split,
)
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.spec import Reduction, RowExtra, RowKind, RowSpec

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_F32 = np.dtype(jnp.float32)


def unsupported(operands: Operands) -> str | None:
    """None, or why the kernels cannot take these operands."""
    dtype = operands[0].dtype
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16, float32 and float64, not {dtype.name}"
    return None


def kernel(operation: RowSpec, form: RowForm, platform: str, operands: Operands) -> Function | str:
    """The kernel for an operation in this form, or why the kernels have to be composed."""
    if operation.name not in library.operations(platform):
        return f"{no_kernel(operation)} in its library for {platform}"
    if operation.selects and form.k > _most_k():
        return f"it finds up to {_most_k()} elements of a row, not {form.k}"
    if operation.selects and platform == "cuda" and operands[0].dtype == jnp.float64:
        return "its kernel for the largest elements does not take float64 on a GPU"
    if len(operation.inputs) > 1 and not _have_one_dtype(operation, form, platform, operands):
        what = other_form(operation, form, operands)
        return f"{what}: it takes arrays of one dtype, and gives results of this"
    if not is_plain(operation, form, operands) and not _takes(operation, form, operands):
        return other_form(operation, form, operands)
    if not _go_together(form.dtype, operands[0].dtype):
        return other_form(operation, form, operands)

    # In the CUDA kernels that reduce nothing, a thread writes only where it alone has read before. On a CPU the last
    # vector of a row overlaps the one before it, so in place it would read elements that are already written.
    in_place = form.in_place and platform == "cuda" and operation.reduces is Reduction.NOTHING
    aliases = {0: 0} if in_place and form.dtype == operands[0].dtype else None

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        types = result_types(operation, form, operands[0])
        beside = workspace(operation.name, operands[0], form.k, form.trailing)
        target = jax.ffi.ffi_call(f"jaxsoft_{operation.name}", (*types, *beside), input_output_aliases=aliases)
        return tuple(target(*operands, **attributes(form))[: len(types)])

    return call


def describe(operation: RowSpec, form: RowForm, platform: str, operands: Types) -> str:
    """The kernel's name on a GPU, and how it cuts up its work, in words; "" where the shape is not known."""
    x, gpu = operands[0], gpus.assumed()
    if platform != "cuda" or not all(isinstance(size, int) for size in x.shape):
        return ""
    axis = x.ndim - 1 - form.trailing
    rows, n, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    (size,) = [v.size for v in workspace(operation.name, x, form.k, form.trailing)] or [0]
    where = gpu.capability, gpu.multiprocessors, size
    if operation.selects:
        return library.text("top_k_plan", rows, n, form.k, x.dtype.itemsize, *where)
    writes = RowKind.ROW in operation.result_kinds
    itemsizes = x.dtype.itemsize, form.dtype.itemsize if writes else x.dtype.itemsize
    extras = "".join(extra.value for extra in form.extras) + "c" * (form.cap is not None) + "m" * form.masked
    return library.text("row_plan", operation.name, rows, n, inner, *itemsizes, extras, *where)


def workspace(
    operation: str, x: jax.Array | jax.core.ShapedArray, k: int = 0, trailing: int = 0
) -> list[jax.ShapeDtypeStruct]:
    """The workspace that an operation gets for rows like those of x, or to find k elements of each, if it takes one."""
    known = not trailing and all(isinstance(size, int) for size in x.shape)
    rows, n = (math.prod(x.shape[:-1]), x.shape[-1]) if known else (-1, -1)
    size = library.number("row_workspace", operation, rows, n, x.dtype.itemsize, k)
    return [jax.ShapeDtypeStruct((size,), jnp.uint8)] if size else []


def _most_k() -> int:
    return library.number("limit", "most_k")


def top_k_candidates(x: jax.Array, k: int) -> Callable[[jax.Array], jax.Array] | None:
    """The CUDA kernel for the candidates of a device for the k largest elements, of its part x of rows; or None."""
    if not _has_candidates(x, k) or x.shape[-1] <= library.number("top_k_limit", "short_part"):
        return None
    # On words of 32 bits: two of three arrays of k elements have x's dtype, and the state is of two numbers.
    words = math.prod(x.shape[:-1]) * (k * (2 * x.dtype.itemsize // 4 + 1) + 2)
    types = jax.ShapeDtypeStruct((words,), jnp.uint32), *workspace(TOP_K.name, x, k)
    call = jax.ffi.ffi_call("jaxsoft_top_k_candidates", types)
    return lambda x: call(x, k=np.int64(k))[0]


def top_k_of_candidates(x: jax.Array, form: RowForm, parts: int) -> Callable[[jax.Array], tuple[jax.Array, ...]] | None:
    """The CUDA kernel that makes the results of top_k, in this form, of the candidates of `parts` devices; or None.

    x is the part of one of them.
    """
    n = x.shape[-1]
    if not _has_candidates(x, form.k) or not _go_together(form.dtype, x.dtype):
        return None
    if parts * min(form.k, n) > library.number("top_k_limit", "most_received"):
        return None
    call = jax.ffi.ffi_call("jaxsoft_top_k_of_candidates", result_types(TOP_K, form, x))
    return lambda candidates: tuple(call(candidates, part=np.int64(n)))


def _has_candidates(x: jax.Array, k: int) -> bool:
    known = library.find("cuda") is not None and "top_k_candidates" in library.operations("cuda")
    return known and x.size > 0 and x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32) and k <= _most_k()


def _go_together(result: np.dtype, dtype: np.dtype) -> bool:
    """Whether the kernels write results of one dtype from operands of the other."""
    return result == dtype or {result, dtype} in ({_F32, np.dtype(t)} for t in (jnp.float16, jnp.bfloat16))


def _have_one_dtype(operation: RowSpec, form: RowForm, platform: str, operands: Operands) -> bool:
    """Whether all whole rows of an operation on several arrays have one dtype. On a CPU that of results may differ."""
    results = {form.dtype_of(result.input) for result in operation.results if result.kind is RowKind.ROW}
    given = row_dtypes(operation, operands)
    if platform == "cuda" or not results:
        return len(given | results) == 1
    return len(given) == len(results) == 1 and _go_together(*results, *given)


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
    return len(groups(operands[0].shape[:-1], [v.shape for v in extras.values()])) <= library.number(
        "limit", "most_groups"
    )


def attributes(form: RowForm) -> dict[str, object]:
    """The attributes of a call."""
    return {
        "extras": "".join(extra.value for extra in form.extras),
        "trailing": np.int64(form.trailing),
        "masked": np.bool_(form.masked),
        "cap": np.float64(form.cap or 0),
    }


KERNELS = RowKernels(kernel, unsupported, composed=True, describe=describe)
