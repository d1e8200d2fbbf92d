"""What kernels of products of matrices are made of: tiles in shared memory, rings of slots, and blocks with two roles.

Tiles lie in shared memory as bulk tensor copies bring them and wgmma reads them: in tiles of 8 rows and one swizzle.
Copies are cut up in the same way, and JAX cuts up the whole array: a dimension must be a multiple of its tile, or lie
within one. A ring is shared memory that one warp group fills and others read, in turn. In a block some warp groups
compute, and one more fills rings with what they need.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import versions

# Interpreter parameters of Pallas, which tests set; None to compile.
INTERPRET: Any = None

ROWS = 8
WIDEST = 64  # elements of the widest swizzle, 128 bytes


def swizzle(size: int) -> int:
    """The elements of a swizzle of rows of this many elements."""
    return WIDEST if size % WIDEST == 0 else WIDEST // 2


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of this shape, in tiles."""
    item_bytes = jnp.dtype(dtype).itemsize
    row_bytes = min(2 * swizzle(shape[-1]), item_bytes * shape[-1])
    width = row_bytes // item_bytes
    tiling: Any = plgpu.TilingTransform  # mypy holds both for abstract
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((ROWS, width)), swizzling(row_bytes)))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that are filled in turn, step by step, and freed by those who read them.

    Attributes:
      buffers: references to shared memory, each with a dimension of slots in front.
      slots: how many there are.
      filled, freed: barriers of filled and of freed slots, one of each for every slot.
    """

    buffers: Sequence[Any]
    slots: int
    filled: Any
    freed: Any

    @staticmethod
    def barrier_types(buffers: int, slots: int, readers: int) -> tuple[Any, Any]:
        """The types of the barriers of a ring."""
        return (
            plgpu.Barrier(num_arrivals=buffers, num_barriers=slots),
            plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
        )

    def slot(self, step: Any) -> Any:
        """The slot of a step."""
        return lax.rem(step, jnp.int32(self.slots))

    def open(self) -> None:
        """Tells that all slots are free. To be called by every reader before the first step."""
        for slot in range(self.slots):
            plgpu.barrier_arrive(self.freed.at[slot])

    def fill(self, step: Any, sources: Sequence[Any]) -> None:
        """Waits until the slot of a step is free, and starts copies into it."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.freed.at[slot])
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.filled.at[slot])

    def wait(self, step: Any) -> list[Any]:
        """Waits until the slot of a step is filled, and returns references to what is in it."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.filled.at[slot])
        return [buffer.at[slot] for buffer in self.buffers]

    def free(self, step: Any) -> None:
        """Tells that this reader is done with the slot of a step."""
        plgpu.barrier_arrive(self.freed.at[self.slot(step)])


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers of a thread, which a block's warp groups share out: in all at most 512 a lane of warp groups."""

    compute: int
    memory: int


# By the number of warp groups that compute; one more fills the rings.
REGISTERS = {
    1: Registers(compute=240, memory=24),
    2: Registers(compute=232, memory=40),
    3: Registers(compute=160, memory=32),
}


def kernel_of_blocks(
    body: Callable[..., None],
    name: str,
    warp_groups: int,
    grid: Mapping[str, int],
    compiler_params: Mapping[str, Any] = MappingProxyType({}),
    **types: Any,
) -> Callable[..., Any]:
    """A kernel whose blocks have `warp_groups` warp groups that compute, and one more.

    Args:
      body: what a block does, which calls `roles`.
      name: the kernel's, which begins with its family's.
      warp_groups: that compute.
      grid: the sizes of its axes by name, the last of which changes first.
      compiler_params: of Pallas, beside those of all.
      types: out_type and scratch_types, as Pallas has them.
    """
    return versions.kernel(
        body,
        **types,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, **compiler_params
        ),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warp_groups + 1,
        thread_name="warp_group",
        kernel_name=f"jaxsoft_{name}",
        interpret=INTERPRET,
    )


def roles(warp_groups: int, compute: Callable[[], None], memory: Callable[[], None]) -> None:
    """Has the warp groups of a block compute, and the last one fill the rings."""
    registers, index = REGISTERS[warp_groups], lax.axis_index("warp_group")

    @pl.when(index < warp_groups)
    def _():
        plgpu.set_max_registers(registers.compute, action="increase")
        compute()

    @pl.when(index == warp_groups)
    def _():
        plgpu.set_max_registers(registers.memory, action="decrease")
        memory()
