"""The CUDA kernel that draws a token from each row of logits, as an operation that vmap and a mesh can split.

It takes all filters at once (`ffi/cuda/rows/sample.cu`). There is none for other platforms, nor in other languages:
`jaxsoft._ops.sampling` draws from the same distribution by operations on rows. Under vmap a mapped dimension is more
rows. Rows that lie on several devices stay there. Of a row whose tokens do, the devices exchange the k largest, and the
whole row where top-k leaves all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._core import library
from jaxsoft._core.mesh import Axes, axes_of, can_partition, if_even, on_one_device, refined
from jaxsoft._core.partitioning import partitionable
from jaxsoft._core.primitives import compiled, primitive
from jaxsoft._rows.forms import Form
from jaxsoft._rows.messages import selected_over_shards
from jaxsoft._rows.primitive import OneDevice

type Draw = Callable[..., tuple[jax.Array, ...]]

_NAME = "sample"
# How many tokens a row may have: kLongestSampled in ffi/cuda/rows/sample.cuh.
_LONGEST = 1 << 22
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# More rows than this are left to operations on rows if they are at most so long. However short a row is, a block of the
# kernel takes some microseconds for it, and an H200 runs 264 blocks at once. Operations on rows read a row once, but
# many times where top-p is of all tokens. Measured on an H200 with 8192 and 65536 rows of bf16 (November 2026): without
# top-p, or with top-k 50, operations on rows take .1 to .7 of the kernel's time at 256 to 16384 tokens, the longest
# that were measured. With top-p of all, they take .5 of it at 256 tokens, .8 to 2.1 times at 1024, and 1.1 to 9 times
# at 2048 and more.
_MANY_ROWS, _SHORT_ROW, _SHORT_ROW_WITH_TOP_P = 4096, 16384, 512


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What is drawn.

    Attributes:
      k: of top-k; None for all tokens.
      composed: (k, uniform, logits, temperature, top_p, min_p) -> the same in plain JAX, for platforms without the
        kernel.
    """

    k: int | None
    composed: Draw


def may_take(x: jax.Array, top_p_of_all: bool) -> bool:
    """Whether there may be a kernel for logits x on a GPU, and a mesh may partition it here.

    Args:
      x: the logits.
      top_p_of_all: whether there is a top-p, and it is of all tokens, as without top-k.
    """
    if x.dtype not in _DTYPES or x.shape[-1] > _LONGEST or not can_partition() or library.find("cuda") is None:
        return False
    known = [d for d in x.shape if isinstance(d, int)]
    many = len(known) == x.ndim and math.prod(known[:-1]) > _MANY_ROWS
    return 0 not in known and not (many and x.shape[-1] <= (_SHORT_ROW_WITH_TOP_P if top_p_of_all else _SHORT_ROW))


def draw(sampler: Sampler, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The tokens (...), in int32, and their probabilities.

    The operands are random numbers from 0 to 1 (..., 2), logits (..., n), and temperature, top_p and min_p, each of
    which is one number a row (...) or one for all rows ().
    """
    return _batched(sampler)(*operands)


@functools.cache
def _batched(sampler: Sampler) -> Draw:
    """The operation with a rule for vmap."""
    function = custom_vmap(_partitioned(sampler))

    @function.def_vmap
    def vmap(size, batched, *operands):
        uniform, x, *options = zip(operands, batched, strict=True)
        rows = operands[0].shape[int(batched[0]) : -1]

        def mapped(v, is_batched, shape):
            v = v if is_batched else v[None]
            return jnp.broadcast_to(jnp.expand_dims(v, range(v.ndim, 1 + len(shape))), (size, *shape))

        # A number for all rows remains one, unless it is another one for each mapped call.
        given = (v if v.ndim == 0 else mapped(v, is_batched, rows) for v, is_batched in options)
        return function(mapped(*uniform, (*rows, 2)), mapped(*x, (*rows, x[0].shape[-1])), *given), (True, True)

    return function


@functools.cache
def _partitioned(sampler: Sampler) -> Draw:
    """The operation as a function that a mesh may partition."""

    def partition(mesh, operands, results):
        del results
        x, mesh = operands[1], refined(mesh, operands[1])
        *rows, tokens = axes_of(x, mesh)
        tokens = if_even(tokens, x.shape[-1], mesh) if sampler.k else ()

        def sharding(*axes: Axes):
            return NamedSharding(mesh, PartitionSpec(*(names or None for names in axes)))

        by_row = sharding(*rows)
        local = functools.partial(_bind, sampler)
        if sampler.k and tokens:
            local = functools.partial(_draw_from_parts, sampler, sampler.k, tokens)
        return (
            mesh,
            on_one_device(local),
            (by_row, by_row),
            (sharding(*rows, ()), sharding(*rows, tokens), *(by_row if v.ndim else sharding() for v in operands[2:])),
        )

    def rule(mesh, operand_types, result_types):
        del mesh, result_types
        rows = [f"r{i}" for i in range(len(operand_types[0].shape) - 1)]
        operands = ([*rows, "two"], [*rows, "n"], *(rows[: len(v.shape)] for v in operand_types[2:]))
        named = " -> ".join(", ".join(map(" ".join, side)) for side in (operands, (rows, rows)))
        return named, {"need_replication_factors": ("two",) if sampler.k else ("two", "n")}

    return partitionable(functools.partial(_bind, sampler), partition, rule, sampler)


def _draw_from_parts(sampler: Sampler, k: int, axes: Axes, uniform, x, *options):
    """Draws from the k largest of rows whose tokens lie over these axes of a mesh."""
    largest = selected_over_shards(Form(x.dtype, k=k), axes, OneDevice(None))
    values, _, indices, m, s = largest(x)
    undefined = ~(jnp.isfinite(m) & jnp.isfinite(s))
    # The draw goes by the order of the tokens, as in whole rows.
    indices, values = jax.lax.sort((indices, values), num_keys=1)
    values = jnp.where(undefined[..., None], jnp.nan, values)
    token, probability = _bind(sampler, uniform, values, *options)
    return jnp.take_along_axis(indices, token[..., None], axis=-1)[..., 0], probability


def _bind(sampler: Sampler, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_sample_p().bind(*operands, sampler=sampler))


@functools.cache
def _sample_p():
    made = primitive("jaxsoft_sample", _impl, _abstract_eval)
    mlir.register_lowering(made, functools.partial(_lower, "other"))
    mlir.register_lowering(made, functools.partial(_lower, "cuda"), platform="cuda")
    return made


@functools.partial(compiled, static_argnames="sampler")
def _impl(*operands, sampler):
    return _sample_p().bind(*operands, sampler=sampler)


def _abstract_eval(*operands, sampler):
    """The types are those of numbers that depend on all operands, sharding and mesh axes included."""
    del sampler

    def any_number(uniform, x, *options):
        p = sum((v.astype(uniform.dtype) for v in (jnp.max(x, axis=-1), *options)), uniform[..., 0])
        return p.astype(jnp.int32), p

    return jax.make_jaxpr(any_number)(*operands).out_avals


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, sampler: Sampler):
    has_kernel = platform == "cuda" and _NAME in library.operations(platform)
    function = functools.partial(_call, sampler) if has_kernel else functools.partial(sampler.composed, sampler.k)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _call(sampler: Sampler, uniform: jax.Array, x: jax.Array, *options: jax.Array) -> Sequence[jax.Array]:
    rows, n = x.shape[:-1], x.shape[-1]
    types = (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32))
    k = n if sampler.k is None else min(sampler.k, n)
    return jax.ffi.ffi_call(f"jaxsoft_{_NAME}", types)(x, uniform, *options, k=np.int64(k))
