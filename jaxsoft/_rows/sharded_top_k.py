"""The k largest elements of rows that are sharded over mesh axes: each device sends its candidates.

Each device finds those of its part and sends them to all others, with what else they need of it, and every device
makes the result of them all. CUDA has a kernel for either step (`ffi/cuda/rows/exchange.cu`), the first for parts
that are not short. Elsewhere they are operations on rows.

Candidates are a row of 32-bit words with the bits of these arrays, one after the other: the k largest elements of the
part of each row and the first k, the indices of the largest within the part, and the maximum and the sum of the part's
state. The first elements are those of a row whose softmax has no value, which is known after all parts.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._core.mesh import Axes
from jaxsoft._core.operation import Function
from jaxsoft._rows import ffi, formulas
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft.fold import accumulator, weight


def selected_over_shards(form: RowForm, axes: Axes, run: Function, by_ffi: bool) -> Function:
    """The k largest elements of rows of which each device along mesh axes has a part. Of equal ones, the first is.

    `run` and `by_ffi` are as `jaxsoft._rows.shards.on_shards` has them.
    """

    def local(x):
        local_form = dataclasses.replace(form, k=min(form.k, x.shape[-1]))
        candidates = functools.partial(_candidates, local_form, run)
        merged = functools.partial(_merged, form, run, x)
        if by_ffi:
            candidates = _on_cuda(ffi.top_k_candidates(x, local_form.k), candidates)
            merged = _on_cuda(ffi.top_k_of_candidates(x, form, jax.lax.axis_size(axes)), merged)
        return merged(jax.lax.all_gather(candidates(x), axes))

    return local


def _on_cuda(kernel, composed):
    """A function that is a kernel on CUDA, if there is one."""
    return functools.partial(jax.lax.platform_dependent, cuda=kernel, default=composed) if kernel else composed


def _candidates(form: RowForm, run: Function, x: jax.Array) -> jax.Array:
    """The candidates of the device, of its part x."""
    values, _, i, m, s = run(TOP_K, form, x)
    first = x[..., : form.k]
    return jnp.concatenate([*map(_words, (jnp.stack([values, first]), i, jnp.stack([m, s])))])


def _merged(form: RowForm, run: Function, x: jax.Array, candidates: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the candidates of all devices."""
    *rows, n = x.shape
    k = min(form.k, n)
    types = [((2, *rows, k), x.dtype), ((*rows, k), np.dtype(np.int32)), ((2, *rows), accumulator(x.dtype))]
    elements, i, states = _arrays(candidates, types)
    i += n * jax.lax.broadcasted_iota(jnp.int32, i.shape, 0)
    values, first, i = (_joined(v) for v in (elements[:, 0], elements[:, 1], i))
    maxima, sums = states[:, 0], states[:, 1]
    best, _, place, *_ = run(TOP_K, RowForm(x.dtype, k=form.k), values)
    m = jnp.max(maxima, axis=0)
    s = jnp.sum(sums * weight(maxima, m[None]), axis=0)
    ordered = formulas.has_softmax(m, s)[..., None]
    p = formulas.defined_probabilities(best, m, s)
    values = jnp.where(ordered, best, first[..., : form.k])
    i = jnp.where(ordered, formulas.at(i, place), formulas.positions(best))
    return values, p.astype(form.dtype), i, m, s


def _joined(v: jax.Array) -> jax.Array:
    """The elements of all parts of each row, given a first dimension of parts."""
    return jnp.moveaxis(v, 0, -2).reshape(*v.shape[1:-1], -1)


def _words(v: jax.Array) -> jax.Array:
    """The bits of an array, of an even number of elements if these have 16 bits, as one row of words."""
    v = v.reshape(-1, 2) if v.dtype.itemsize == 2 else v
    return jax.lax.bitcast_convert_type(v, jnp.uint32).reshape(-1)


def _arrays(candidates: jax.Array, types: Sequence[tuple[tuple[int, ...], np.dtype]]):
    """The arrays of these shapes and dtypes in the candidates, with a first dimension of devices."""
    sizes = [int(np.prod(shape)) * dtype.itemsize // 4 for shape, dtype in types]
    for words, (shape, dtype) in zip(jnp.split(candidates, np.cumsum(sizes)[:-1], axis=1), types, strict=True):
        words = words.reshape(len(words), -1, 2) if dtype.itemsize == 8 else words
        yield jax.lax.bitcast_convert_type(words, dtype).reshape(-1, *shape)
