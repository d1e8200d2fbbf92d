"""The loop that the kernels of a linear layer share: tiles of hidden @ weight, which stay in registers.

A block computes a tile of rows and classes at a time, and stays until there are no more. Its last warp group brings the
parts of hidden and weight to a ring in shared memory, while the others multiply what is there, each for 64 of the rows.
When a tile is done, the kernel makes of it what is wanted. The copies for the next tile are then under way.

Tiles of the same classes follow each other, for as many rows as a band has: so a part of weight is read from memory
once, and of hidden what stays in the cache is read again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._core import gpus
from jaxsoft._core.rounding import rounded

from .. import versions
from ..blocks import ROWS, WIDEST, Ring, kernel_of_blocks, roles, tiled
from .plan import HeadPlan

LOG2E = math.log2(math.e)
# exp of it is 0 in f32. What exp multiplies is taken at no less than that, as 0 * infinity is NaN.
LEAST = -200.0
WGMMA = plgpu.Layout.WGMMA
_accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class HeadScores:
    """How products become scores, and what is wanted of them.

    Attributes:
      scale: the factor of the products, and of a bias.
      cap: the scores become cap * tanh(x / cap); None leaves them as they are.
      entropy: whether the entropy is wanted.
      summed: whether the sum of all scores above -inf is wanted, and their number.
    """

    scale: float = 1.0
    cap: float | None = None
    entropy: bool = False
    summed: bool = False

    def of(self, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """The scores, and how much they grow with the scaled products where there is a cap."""
        x = products if bias is None else products + bias
        x = x if self.scale == 1 else rounded(x * self.scale)
        if self.cap is None:
            return x, None
        # The hardware's approximate tanh errs by 5e-4. Here tanh(y) = (1 - e) / (1 + e) for e = exp(-2 y), and a series
        # where 1 - e would lose digits.
        y = jnp.abs(x) * (1 / self.cap)
        e = jnp.exp2(y * (-2 * LOG2E))
        root = lax.rsqrt(1 + e)
        half = root * root
        bent = self.cap * ((1 - e) * half)
        q = y * y
        series = x * (1 + q * (-1 / 3 + q * (2 / 15 - q * (17 / 315))))
        return jnp.where(y < 0.1, series, jnp.where(x < 0, -bent, bent)), 4 * (e * half) * half


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """The part of a tile that a warp group has.

    Attributes:
      rows: its slice of the rows.
      begin: the first class of the tile.
      index: the number of the tile among those of the same rows.
    """

    rows: Any
    begin: jax.Array
    index: jax.Array


def kernel(
    name: str,
    plan: HeadPlan,
    finish: Callable[[HeadTile, Sequence[jax.Array], Any, jax.Array, Sequence[Any], Any], None],
    hidden: jax.Array,
    weight: jax.Array,
    numbers: Sequence[jax.Array],
    bias: jax.Array | None,
    results: Any,
    scratch: Any = (),
    begin: jax.Array | int = 0,
    classes: int | None = None,
) -> Any:
    """Calls a kernel that computes all tiles.

    Args:
      name: the kernel's.
      plan: how the work is cut up.
      finish: writes the results of a tile, given the numbers of its rows, a reference to the bias, its products in
        f32, references to the results, and to the scratch memory.
      hidden: (rows, width).
      weight: (width, classes).
      numbers: of all rows, in whole tiles.
      bias: of the classes; None for none.
      results: the types of the results, a sequence.
      scratch: the types of what else the kernel needs of shared memory.
      begin: the first of weight's classes, a multiple of 64.
      classes: how many there are.
    """
    dtype, (rows, width) = hidden.dtype, hidden.shape
    bias = None if bias is None else to_whole(bias, plan.classes)
    hidden = jnp.pad(hidden, ((0, -rows % ROWS), (0, 0)))  # to what copies can cut up, see `blocks`
    row_tiles, class_tiles = -(-rows // plan.block_rows), -(-(classes or weight.shape[1]) // plan.classes)
    tiles, steps = row_tiles * class_tiles, width // plan.depth
    blocks = min(gpus.multiprocessors(), tiles)

    def place(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which tile of rows and which of classes has this number."""
        of_band = jnp.int32(min(plan.band, row_tiles) * class_tiles)
        first = lax.div(number, of_band) * min(plan.band, row_tiles)
        within = lax.rem(number, of_band)
        size = jnp.minimum(row_tiles - first, min(plan.band, row_tiles))
        return first + lax.rem(within, size), lax.div(within, size)

    def body(hidden, weight, begin, numbers, bias, outs, hidden_memory, weight_memory, barriers, *more):
        ring = Ring([hidden_memory, weight_memory], plan.slots, *barriers)
        group, block = lax.axis_index("warp_group"), lax.axis_index("block")
        count = lax.div(tiles - block + (blocks - 1), jnp.int32(blocks))

        def copy() -> None:
            first = begin[0] * WIDEST

            def tile(i, _):
                row, column = place(block + i * blocks)
                rows = pl.ds(row * plan.block_rows, plan.block_rows)
                classes = pl.ds(first + column * plan.classes, plan.classes)

                def step(k, _):
                    depth = pl.ds(k * plan.depth, plan.depth)
                    ring.fill(i * steps + k, [hidden.at[rows, depth], weight.at[depth, classes]])

                lax.fori_loop(0, steps, step, None)

            lax.fori_loop(0, count, tile, None)

        def compute() -> None:
            ring.open()

            def products(i, accumulator):
                def step(k, _):
                    left, right = ring.wait(i * steps + k)
                    plgpu.wgmma(accumulator, left.at[pl.ds(group * plan.rows, plan.rows)], right)
                    plgpu.wgmma_wait(1)
                    pl.when(k > 0)(lambda: ring.free(i * steps + k - 1))

                lax.fori_loop(0, steps, step, None)
                plgpu.wgmma_wait(0)
                ring.free(i * steps + steps - 1)
                return accumulator[...]

            def tile(i, _):
                row, column = place(block + i * blocks)
                rows = pl.ds(row * plan.block_rows + group * plan.rows, plan.rows)
                here = HeadTile(rows, column * plan.classes, column)
                loaded = [of_rows(ref, here) for ref in numbers]  # they arrive while products are computed
                found = pl.run_scoped(functools.partial(products, i), _accumulator((plan.rows, plan.classes)))
                finish(here, loaded, bias, found, outs, more)

            lax.fori_loop(0, count, tile, None)
            plgpu.wait_smem_to_gmem(0)

        roles(plan.groups, compute, copy)

    call = kernel_of_blocks(
        body,
        f"head_{name}",
        plan.groups,
        {"block": blocks},
        out_type=(tuple(results),),
        scratch_types=(
            tiled((plan.slots, plan.block_rows, plan.depth), dtype),
            tiled((plan.slots, plan.depth, plan.classes), dtype),
            Ring.barrier_types(2, plan.slots, plan.groups),
            *scratch,
        ),
    )
    with jax.enable_x64(False):  # it counts in 32 bits
        (found,) = call(hidden, weight, jnp.asarray(begin, jnp.int32).reshape(1) // WIDEST, numbers, bias)
        return found


def pieces(plan: HeadPlan, tile: jax.Array) -> list[jax.Array]:
    """The parts of a tile that are worked on at a time: what is made of them needs fewer registers."""
    return [tile[:, begin : begin + plan.piece] for begin in range(0, plan.classes, plan.piece)]


def is_label(plan: HeadPlan, tile: HeadTile, label: jax.Array, piece: int) -> jax.Array:
    """Which elements of a piece of a tile are those of the labels of its rows."""
    shape = plan.rows, plan.piece
    return columns(plan) == lax.broadcast_in_dim(label - tile.begin - piece * plan.piece, shape, [0])


def columns(plan: HeadPlan) -> jax.Array:
    """The number of each element of a piece in its row."""
    return plgpu.broadcasted_iota(jnp.int32, (plan.rows, plan.piece), 1, layout=WGMMA)


def of_rows(ref: Any, tile: HeadTile) -> jax.Array:
    """Loads the numbers of a tile's rows."""
    return versions.load(ref.at[tile.rows], layout=WGMMA.reduce(1), optimized=False)


def bias_of(plan: HeadPlan, ref: Any, tile: HeadTile, piece: int) -> jax.Array:
    """The bias of a piece of a tile, for all of the piece."""
    numbers = versions.load(
        ref.at[pl.ds(tile.begin + piece * plan.piece, plan.piece)], layout=WGMMA.reduce(0), optimized=False
    )
    return lax.broadcast_in_dim(numbers, (plan.rows, plan.piece), [1])


def to_whole(numbers: jax.Array, tile: int, fill: float = 0) -> jax.Array:
    """The numbers of all rows or classes, and more for whole tiles."""
    return jnp.pad(numbers, (0, -len(numbers) % tile), constant_values=fill)
