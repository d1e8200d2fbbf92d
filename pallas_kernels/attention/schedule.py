"""Which block of the forward kernel computes what, where blocks go on from item to item.

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

import numpy as np

from jaxsoft._attention.form import AttentionForm, Extra

from .plan import ForwardPlan
from .ranges import Shape

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
      items: the axes of all items, as in `order.ordered`.
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
