"""The CUDA kernel that draws a token from each row of logits, as an operation that vmap and a mesh can split.

It takes all filters at once (`ffi/cuda/rows/sample.cu`). There is none for other platforms, nor in other languages:
`jaxsoft._ops.sampling` draws from the same distribution by operations on rows. Under vmap a mapped dimension is more
rows. Rows that lie on several devices stay there. Of a row whose tokens do, the devices exchange the k largest, and the
whole row where top-k leaves all.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._core import gpus, library
from jaxsoft._core.implementations import Choice, Names
from jaxsoft._core.mesh import Axes, axes_of, can_partition, if_even, refined
from jaxsoft._core.operation import Function, Served, Types
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.sharded_top_k import selected_over_shards

_NAME = "sample"
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# More rows than this are left to operations on rows if they are at most so long. However short a row is, a block of the
# kernel takes some microseconds for it, and an H200 runs 264 blocks at once. Operations on rows read a row once, but
# many times where top-p is of all tokens. Measured on an H200 with 8192 and 65536 rows of bf16 (November 2026): without
# top-p, or with top-k 50, operations on rows take .1 to .7 of the kernel's time at 256 to 16384 tokens, the longest
# that were measured. With top-p of all, they take .5 of it at 256 tokens, .8 to 2.1 times at 1024, and 1.1 to 9 times
# at 2048 and more.
_MANY_ROWS, _SHORT_ROW, _SHORT_ROW_WITH_TOP_P = 4096, 16384, 512


def may_take(x: jax.Array, top_p_of_all: bool) -> bool:
    """Whether there may be a kernel for logits x on a GPU, and a mesh may partition it here.

    `top_p_of_all` says that there is a top-p, and that it is of all tokens, as without top-k.
    """
    if x.dtype not in _DTYPES or not can_partition() or library.find("cuda") is None or library.unavailable("cpu"):
        return False
    if x.shape[-1] > library.number("limit", "longest_sampled"):
        return False
    known = [d for d in x.shape if isinstance(d, int)]
    many = len(known) == x.ndim and math.prod(known[:-1]) > _MANY_ROWS
    return 0 not in known and not (many and x.shape[-1] <= (_SHORT_ROW_WITH_TOP_P if top_p_of_all else _SHORT_ROW))


@dataclasses.dataclass(frozen=True)
class Sampling(Served):
    """The tokens (...), in int32, and their probabilities.

    The operands are random numbers from 0 to 1 (..., 2), logits (..., n), and temperature, top_p and min_p, each of
    which is one number a row (...) or one for all rows ().

    Attributes:
      k: of top-k; None for all tokens.
      composed: (k, uniform, logits, temperature, top_p, min_p) -> the same in plain JAX, for platforms without the
        kernel.
    """

    k: int | None
    composed: Function
    implementation: Names = None
    keeps_shardings = True
    name = "sample"

    def formula(self) -> Function:
        """By operations on rows."""
        return functools.partial(self.composed, self.k)

    def types(self, *operands):
        """The types are those of numbers that depend on all operands, sharding and mesh axes included."""

        def any_number(uniform, x, *options):
            p = sum((v.astype(uniform.dtype) for v in (jnp.max(x, axis=-1), *options)), uniform[..., 0])
            return p.astype(jnp.int32), p

        return jax.make_jaxpr(any_number)(*operands).out_avals

    def choose(self, platform: str, operands: Types) -> Choice:
        """The kernel on a GPU whose library has it."""
        if platform == "cuda" and _NAME in library.operations(platform):
            return Choice(self.name, "ffi", self._by_kernel, self._plan(operands[1]))
        reason = library.unavailable("cuda") if platform == "cuda" else "its kernel that samples is CUDA's"
        return Choice(self.name, "xla", self.formula(), reasons={"ffi": reason or "it has no kernel that samples"})

    @staticmethod
    def _plan(x: jax.core.ShapedArray) -> str:
        """The kernel's name, and how it cuts up its work, in words; "" where the shape is not known."""
        if not all(isinstance(size, int) for size in x.shape):
            return ""
        sizes, gpu = (math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize), gpus.assumed()
        return library.text("sample_plan", *sizes, gpu.capability, gpu.multiprocessors)

    def _by_kernel(self, uniform: jax.Array, x: jax.Array, *options: jax.Array) -> tuple[jax.Array, ...]:
        rows, n = x.shape[:-1], x.shape[-1]
        types = (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32))
        k = n if self.k is None else min(self.k, n)
        return tuple(jax.ffi.ffi_call(f"jaxsoft_{_NAME}", types)(x, uniform, *options, k=np.int64(k)))

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension is more rows. A number for all rows remains one, unless it is mapped."""
        uniform, x, *_ = operands
        rows = tuple(d for i, d in enumerate(uniform.shape) if i != dims[0])[:-1]
        size = next(v.shape[d] for v, d in zip(operands, dims, strict=True) if d is not None)

        def mapped(v, d, shape):
            v = v[None] if d is None else jnp.moveaxis(v, d, 0)
            return jnp.broadcast_to(jnp.expand_dims(v, range(v.ndim, 1 + len(shape))), (size, *shape))

        shapes = (*rows, 2), (*rows, x.shape[-1] if dims[1] != x.ndim - 1 else x.shape[-2])
        pairs = list(zip(operands, dims, strict=True))
        wide = [mapped(*pair, shape) for pair, shape in zip(pairs, shapes, strict=False)]
        return self(*wide, *(v if v.ndim == 0 else mapped(v, d, rows) for v, d in pairs[2:]))

    def partition(self, mesh, operands, results):
        """Rows stay on their devices. Of those whose tokens lie on several, the devices exchange the k largest."""
        del results
        x, mesh = operands[1], refined(mesh, operands[1])
        *rows, tokens = axes_of(x, mesh)
        tokens = if_even(tokens, x.shape[-1], mesh) if self.k else ()

        def sharding(*axes: Axes):
            return NamedSharding(mesh, PartitionSpec(*(names or None for names in axes)))

        by_row = sharding(*rows)
        local = functools.partial(self._from_parts, self.k, tokens) if self.k and tokens else self.on_device
        of_operands = (sharding(*rows, ()), sharding(*rows, tokens))
        return mesh, local, (by_row, by_row), (*of_operands, *(by_row if v.ndim else sharding() for v in operands[2:]))

    def rule(self, operands: Sequence, results: Sequence) -> tuple[str, dict]:
        """Rows are sharded alike."""
        del results
        rows = [f"r{i}" for i in range(len(operands[0].shape) - 1)]
        dims = ([*rows, "two"], [*rows, "n"], *(rows[: len(v.shape)] for v in operands[2:]))
        named = " -> ".join(", ".join(map(" ".join, side)) for side in (dims, (rows, rows)))
        return named, {"need_replication_factors": ("two",) if self.k else ("two", "n")}

    def _from_parts(self, k: int, axes: Axes, uniform, x, *options):
        """Draws from the k largest of rows whose tokens lie over these axes of a mesh."""
        form = RowForm(x.dtype, k=k)
        values, _, indices, m, s = selected_over_shards(form, axes, RowOperation(TOP_K, form).within, by_ffi=True)(x)
        undefined = ~(jnp.isfinite(m) & jnp.isfinite(s))
        # The draw goes by the order of the tokens, as in whole rows.
        indices, values = jax.lax.sort((indices, values), num_keys=1)
        values = jnp.where(undefined[..., None], jnp.nan, values)
        token, probability = self.on_device(uniform, values, *options)
        return jnp.take_along_axis(indices, token[..., None], axis=-1)[..., 0], probability
