"""The order in which the blocks of attention's kernels run, and which of them computes what.

An item is the queries of one head that a block computes at a time. With a block for each, the hardware gives it to the
first multiprocessor that is free, and nothing overlaps the block's begin and end. With a block for each multiprocessor,
the first copies for an item are made while the item before ends; plan.py has what that brings. Which block
takes which items is then decided here, when a call is traced, as the hardware would, by the number of their tiles.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoft._attention.form import AttentionForm, Extra

from .extra_tiles import with_tiles
from .plan import ForwardPlan
from .ranges import Shape

# Up to this length, blocks of all heads that have as many tiles run together under a causal rule. On an H100 (JAX
# 0.11.2, bf16, TFLOP/s with that and without): forward, heads of 256, 574 and 547 at 4K, 639 and 644 at 16K, 625 and
# 650 at 32K, where the keys of all heads are too many for the cache; heads of 64, 476 and 461 at 16K. Backward, at 8K:
# 466 and 450 with heads of 128, 390 and 382 with 64, 378 and 367 with 256.
_LONGEST_TOGETHER = 2**14


def ordered(form: AttentionForm, axes: Mapping[str, int], length: int, arrays: Mapping[Any, Any]) -> dict[str, int]:
    """The axes of a kernel's grid in the order of blocks: the last changes first.

    Blocks of a head are together, for they read the same keys. Two kinds of calls have other orders. Under a causal
    rule, blocks with most tiles come first, of all heads, so that those that run together end together. Where entries
    of the batch share a bias or mask, which is more to read than keys are, those that read the same tiles of it are
    together.

    Args:
      form: the call's.
      axes: the sizes of the axes of the batch, the heads, and the blocks of a head, in this order.
      length: of what the blocks have.
      arrays: the extras.
    """
    batch, heads, blocks = axes
    order = [batch, heads, blocks]
    if form.right is not None and length <= _LONGEST_TOGETHER:
        order = [batch, blocks, heads]
    if axes[batch] > 1 and any(arrays[name].shape[0] == 1 for name in with_tiles(arrays)):
        order = [*order[1:], batch]
    return {name: axes[name] for name in order}


def indices(number: jax.Array, axes: Mapping[str, int]) -> dict[str, jax.Array]:
    """The index along each axis of the block, or item, of this number, where the last axis changes first."""
    found = {}
    for name, size in reversed([*axes.items()]):
        found[name] = lax.rem(number, jnp.int32(size))
        number = lax.div(number, jnp.int32(size))
    return found


# The extras by which the number of an item's tiles is not known before the call.
_UNKNOWN = {Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS, Extra.QUERY_SEGMENTS, Extra.OFFSET}
# With more items, their numbers would take more time to work out, and more memory, than they save.
_MOST_ITEMS = 2**15
# What an item costs beside its tiles, in tiles.
_ITEM_COST = 1


def schedule(
    form: AttentionForm, plan: ForwardPlan, shape: Shape, items: Mapping[str, int], blocks: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The items of each block in their order, or None where each item is to have a block of its own.

    Args:
      form, plan, shape: the call's.
      items: the axes of all items, as in `ordered`.
      blocks: how many run at a time.

    Returns:
      The numbers of the items, int32, those of one block after those of another; and where those of each block begin,
      with the number of all in the end.
    """
    sizes = tuple(items.values())
    if not plan.persistent or _UNKNOWN & {*form.extras} or not blocks < math.prod(sizes) <= _MOST_ITEMS:
        return None
    begin = np.arange(items["queries"]) * plan.block_rows
    end = shape.keys if form.right is None else np.minimum(begin + plan.block_rows + form.right, shape.keys)
    first = 0 if form.left is None else np.maximum(begin - form.left, 0)
    tiles = np.maximum(end - first, 0) / shape.key_tile + _ITEM_COST + 0 * begin
    if form.right is not None:  # the kernel begins with the last
        tiles = tiles[::-1]
    axis = list(items).index("queries")
    costs = np.broadcast_to(tiles.reshape([-1 if i == axis else 1 for i in range(len(sizes))]), sizes)
    return _assigned(tuple(costs.ravel().tolist()), blocks)


@functools.lru_cache(64)
def _assigned(costs: Sequence[float], blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The result of `schedule`: each item in turn goes to the block that is free first."""
    assigned: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0.0, block) for block in range(blocks)]
    for number, cost in enumerate(costs):
        time, block = free[0]
        assigned[block].append(number)
        heapq.heapreplace(free, (time + cost, block))
    begins = np.cumsum([0, *map(len, assigned)])
    return np.array([*itertools.chain(*assigned)], np.int32), begins.astype(np.int32)
