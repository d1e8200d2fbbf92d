"""Numbers that the blocks of a cluster send each other: into shared memory, by stores that complete a barrier there.

Every block has a mailbox: a place for each number of each block, twice, as rows take turns, and a barrier. A block says
how many bytes it expects, stores its own numbers in all mailboxes, and waits until its own is full.

This is inline PTX, because what Pallas has for it does not do: a `ClusterBarrier` (JAX 0.11.2) arrives with release
semantics in its own block alone, so stores to other blocks may arrive after it, and was seen to; and a store to a slice
of a `cluster_ref` is not implemented. It is also the reason why no cluster runs in the interpreter.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from . import arithmetic

_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def _ptx(text: str, constraints: str, *operands: ir.Value) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


def _constant(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def open_mailbox(mailbox: Any) -> None:
    """Makes the barriers of all blocks ready. For all threads, before anything is sent."""

    @plgpu.inline_mgpu(arg_types=(_REF,))
    def call(ctx, barrier):
        del ctx
        first = arith.cmpi(arith.CmpIPredicate.eq, mgpu.utils.thread_idx(), _constant(0))
        _ptx("@$1 mbarrier.init.shared::cta.b64 [$0], 1;", "l,b", mgpu.utils.memref_ptr(barrier), first)
        _ptx("fence.mbarrier_init.release.cluster;", "")
        _ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")

    call(mailbox[1])


def send(blocks: int, turn: jax.Array, block: jax.Array | int, mailbox: Any, values: Sequence[jax.Array]) -> None:
    """Sends this block's numbers to all blocks. For one warpgroup of each block."""
    places, barrier = mailbox

    @plgpu.inline_mgpu(arg_types=(_REF, *[_REF] * len(values), *[_SCALAR] * len(values)))
    def call(ctx, barrier, *places_and_values):
        del ctx
        thread = arith.remui(mgpu.utils.thread_idx(), _constant(128))
        first = arith.cmpi(arith.CmpIPredicate.eq, thread, _constant(0))
        sends = arith.cmpi(arith.CmpIPredicate.ult, thread, _constant(blocks))
        peer = arith.minui(thread, _constant(blocks - 1))
        there = functools.partial(mgpu.utils.get_cluster_ptr, cluster_block=peer, generic=False)
        here = mgpu.utils.memref_ptr(barrier)
        expected = _constant(blocks * len(values) * 4)
        _ptx("@$2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "l,r,b", here, expected, first)
        for place, value in zip(places_and_values[: len(values)], places_and_values[len(values) :], strict=True):
            _ptx(
                "@$3 st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];",
                "l,f,l,b",
                there(mgpu.utils.memref_ptr(place)),
                value.registers.item(),
                there(here),
                sends,
            )

    call(barrier, *[places.at[i, turn, block] for i in range(len(values))], *values)


def receive(blocks: int, turn: jax.Array, mailbox: Any) -> arithmetic.Lanes:
    """Waits for the numbers of all blocks, and combines them."""
    places, barrier = mailbox

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

    wait(barrier, turn)
    return arithmetic.total_of(
        [tuple(places[i, turn, block] for i in range(places.shape[0])) for block in range(blocks)]
    )
