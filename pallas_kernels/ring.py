"""Shared memory that one warp group fills and others read, in turn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that are filled in turn, step by step, and freed by those who read them.

    Attributes:
      buffers: references to shared memory, each with a dimension of slots in front.
      barriers: barriers of filled and of freed slots, one of each for every slot.
      slots: how many there are.
    """

    buffers: Sequence[Any]
    barriers: tuple[Any, Any]
    slots: int

    @property
    def filled(self) -> Any:
        """The barriers of filled slots."""
        return self.barriers[0]

    @property
    def freed(self) -> Any:
        """The barriers of freed slots."""
        return self.barriers[1]

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
