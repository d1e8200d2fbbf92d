"""Blocks whose warp groups have two roles: some compute, and one more fills rings in shared memory with what they need.

`ring` has the rings.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers of a thread, which a block's warp groups share out: in all 504 or 512 a lane of warp groups."""

    compute: int
    memory: int


# By the number of warp groups that compute; one more fills the rings.
REGISTERS = {1: None, 2: Registers(compute=232, memory=40), 3: Registers(compute=160, memory=32)}


def kernel_of_blocks(
    body: Callable[..., None], name: str, warp_groups: int, grid: Mapping[str, int], interpret: Any, **types: Any
) -> Callable[..., Any]:
    """A kernel whose blocks have so many warp groups that compute, and one more.

    Args:
      body: what a block does, which calls `roles`.
      name: the kernel's, which begins with its family's.
      warp_groups: that compute.
      grid: the sizes of its axes by name, the last of which changes first.
      interpret: Pallas interpreter parameters.
      types: out_type and scratch_types, as Pallas has them.
    """
    return plgpu.kernel(
        body,
        **types,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warp_groups + 1,
        thread_name="warp_group",
        kernel_name=f"jaxsoft_{name}",
        interpret=interpret,
    )


def roles(warp_groups: int, compute: Callable[[], None], memory: Callable[[], None]) -> None:
    """Has the warp groups of a block compute, and the last one fill the rings."""
    registers, index = REGISTERS[warp_groups], lax.axis_index("warp_group")

    @pl.when(index < warp_groups)
    def _():
        if registers:
            plgpu.set_max_registers(registers.compute, action="increase")
        compute()

    @pl.when(index == warp_groups)
    def _():
        if registers:
            plgpu.set_max_registers(registers.memory, action="decrease")
        memory()
