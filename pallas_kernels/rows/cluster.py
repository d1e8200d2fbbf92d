"""Numbers that the blocks of a cluster send each other.

Every block has in its shared memory a place for each number of each block, twice, as rows take turns, and a barrier. A
block says how many bytes it expects, stores its own numbers in the places of all blocks, by stores that complete a
barrier there, and waits until its own places are full.

This is inline PTX, because what Pallas has for it does not do: a `ClusterBarrier` (JAX 0.11.2) arrives with release
semantics in its own block alone, so stores to other blocks may arrive after it, and were seen to; and a store to a
slice of a `cluster_ref` is not implemented. It is also the reason why no cluster runs in the interpreter.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .fold import State
from .plan import THREADS

_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
_NUMBER_BYTES = 4


def _ptx(text: str, constraints: str, *operands: ir.Value) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


def _constant(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


@dataclasses.dataclass(frozen=True)
class ClusterExchange:
    """How a block exchanges numbers with the others of its cluster.

    Attributes:
      blocks: the number of blocks of the cluster.
      places: a reference to shared memory, of shape (numbers, 2, blocks).
      barrier: a reference to the eight bytes of the barrier.
    """

    blocks: int
    places: Any
    barrier: Any

    @staticmethod
    def scratch(numbers: int, blocks: int) -> tuple[Any, Any]:
        """The shared memory that a block needs for it."""
        return plgpu.SMEM((numbers, 2, blocks), jnp.float32), plgpu.SMEM((2,), jnp.int32)

    def open(self) -> None:
        """Makes the barriers of all blocks ready. All threads call this before anything is sent."""

        @plgpu.inline_mgpu(arg_types=(_REF,))
        def call(ctx, barrier):
            del ctx
            first = arith.cmpi(arith.CmpIPredicate.eq, mgpu.utils.thread_idx(), _constant(0))
            _ptx("@$1 mbarrier.init.shared::cta.b64 [$0], 1;", "l,b", mgpu.utils.memref_ptr(barrier), first)
            _ptx("fence.mbarrier_init.release.cluster;", "")
            _ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")

        call(self.barrier)

    def send(self, turn: jax.Array, block: jax.Array | int, values: Sequence[jax.Array]) -> None:
        """Sends the numbers of this block to all blocks. One warp group of each block calls this."""
        blocks, number = self.blocks, len(values)

        @plgpu.inline_mgpu(arg_types=(_REF, *[_REF] * number, *[_SCALAR] * number))
        def call(ctx, barrier, *places_and_values):
            del ctx
            thread = arith.remui(mgpu.utils.thread_idx(), _constant(THREADS))
            first = arith.cmpi(arith.CmpIPredicate.eq, thread, _constant(0))
            sends = arith.cmpi(arith.CmpIPredicate.ult, thread, _constant(blocks))
            peer = arith.minui(thread, _constant(blocks - 1))
            there = functools.partial(mgpu.utils.get_cluster_ptr, cluster_block=peer, generic=False)
            here = mgpu.utils.memref_ptr(barrier)
            expected = _constant(blocks * number * _NUMBER_BYTES)
            _ptx("@$2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "l,r,b", here, expected, first)
            for place, value in zip(places_and_values[:number], places_and_values[number:], strict=True):
                _ptx(
                    "@$3 st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];",
                    "l,f,l,b",
                    there(mgpu.utils.memref_ptr(place)),
                    value.registers.item(),
                    there(here),
                    sends,
                )

        call(self.barrier, *[self.places.at[i, turn, block] for i in range(number)], *values)

    def receive(self, turn: jax.Array) -> list[State]:
        """Waits for the numbers of all blocks."""

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR))
        def wait(ctx, barrier, turn):
            del ctx
            _ptx(
                """{
            .reg .pred full;
            again:
            mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 full, [$0], $1;
            @!full bra again;
            }""",
                "l,r",
                mgpu.utils.memref_ptr(barrier),
                turn.registers.item(),
            )

        wait(self.barrier, turn)
        numbers = range(self.places.shape[0])
        return [tuple(self.places[i, turn, block] for i in numbers) for block in range(self.blocks)]
