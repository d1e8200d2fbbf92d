"""How the kernels of a linear layer cut up their work, and which operands they take. Nothing here imports Pallas."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation

_DTYPES = (jnp.float16, jnp.bfloat16)
_STEP = 64  # width and classes are cut up into multiples of this


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """How the work is cut up.

    Attributes:
      groups: warp groups that compute, in each block.
      rows: rows of each of them, as many as wgmma takes.
      classes: of a tile.
      depth: how much of the width is in a slot of the ring.
      slots: of the ring.
      piece: classes of the part of a tile that is worked on at a time when the products are done.
      band: how many tiles of rows are taken together.
    """

    groups: int = 2
    rows: int = 64
    classes: int = 256
    depth: int = 64
    slots: int = 4
    piece: int = 64
    band: int = 16

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return self.groups * self.rows


# By the generation. On Hopper, shared memory has room for no more. On an H200, 4096 rows of 4096 numbers and 128256
# classes in bf16, sustained, the gradients of the scores took 6.57 ms where cuBLAS had 6.33 for the products alone; the
# kernel that ends with the products took 6.67, which is the same within what a run differs from the next; bands of 8 or
# 32 tiles took 2 to 3 % longer, and three slots as long (JAX 0.11.2).
PLANS = {Generation.HOPPER: HeadPlan()}
# Where classes are taken in chunks, a chunk has at least this many tiles of them.
_LEAST_TILES = 16


def head_plan() -> HeadPlan:
    """The plan for the GPU that is lowered for; that for Hopper if none is known."""
    return PLANS.get(gpus.assumed().generation, PLANS[Generation.HOPPER])


def chunk_size(rows: int) -> int:
    """How many classes are taken at a time: the most whose tiles keep the multiprocessors busy for no more turns.

    These are at least 4096.
    """
    plan, multiprocessors = head_plan(), gpus.multiprocessors()
    row_tiles = -(-rows // plan.block_rows)
    turns = -(-row_tiles * _LEAST_TILES // multiprocessors)
    return max(_LEAST_TILES, turns * multiprocessors // row_tiles) * plan.classes


def unsupported(hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
    """None, or why the kernels cannot take these operands, or have no plan for the GPU that is lowered for."""
    if gpus.assumed().generation not in PLANS:
        return "its kernels for linear layers are for Hopper (compute capability 9.0)"
    if weight.dtype not in _DTYPES or hidden.dtype != weight.dtype:
        return f"its kernels take float16 or bfloat16, not {hidden.dtype.name} and {weight.dtype.name}"
    shape = (*hidden.shape, *weight.shape)
    if not all(isinstance(size, int) for size in shape):
        return f"its kernels are compiled for shapes that are known; got {hidden.shape} and {weight.shape}"
    if not all(shape):
        return "it has no kernel for arrays without elements"
    if any(size % _STEP for size in weight.shape):
        return f"width and classes must be multiples of {_STEP}, for bulk copies; got {weight.shape}"
    return None
