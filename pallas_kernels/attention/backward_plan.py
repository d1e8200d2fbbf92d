"""How the backward kernels cut up their work, by the generation of the GPU and the sizes of heads: numbers that decide
how fast they are.

A warp group multiplies 64 rows at a time. What bounds the tiles is its registers (64 rows of n columns in f32 are n / 2
registers of each thread) and the shared memory of a block.
"""

import dataclasses
from collections.abc import Mapping

from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation

ROWS = 64  # of a warp group
TIME_STEP = 8  # the times of padded operands are a multiple of this, as copies of swizzled tiles need it
_RESERVED_BYTES = 1024  # of a block's shared memory, which the reductions and barriers of Pallas take


@dataclasses.dataclass(frozen=True)
class QueryPlan:
    """The kernel of the queries' gradient: each warp group has 64 queries, and all share tiles of keys.

    Attributes:
      warp_groups: that compute.
      key_tile: keys of a tile.
      key_slots, value_slots: tiles of keys and of values in shared memory.
    """

    warp_groups: int
    key_tile: int
    key_slots: int
    value_slots: int

    @property
    def block(self) -> int:
        """Queries of a block."""
        return self.warp_groups * ROWS

    def shared_bytes(self, head: int, value: int) -> int:
        """Shared memory of a block."""
        fixed = self.block * (head + value)
        return 2 * (fixed + self.key_tile * (self.key_slots * head + self.value_slots * value))


@dataclasses.dataclass(frozen=True)
class KeyValuePlan:
    """The kernel of the keys' and values' gradients: a block of keys, and tiles of queries.

    Attributes:
      warp_groups: that compute. Each has 64 keys, or two share them if they are `paired`.
      query_tile: queries of a tile.
      slots: tiles of queries and cotangents in shared memory.
      paired: whether one warp group has the values' gradient and the other the keys', which then wants two of them.
    """

    warp_groups: int
    query_tile: int
    slots: int
    paired: bool = False

    @property
    def block(self) -> int:
        """Keys of a block."""
        return ROWS if self.paired else self.warp_groups * ROWS

    def shared_bytes(self, head: int, value: int, numbers: int) -> int:
        """Shared memory of a block, with `numbers` numbers of every query."""
        tiles = 2 * (self.block + self.slots * self.query_tile) * (head + value)
        of_queries = self.slots * numbers * max(1024, 4 * self.query_tile)
        return tiles + of_queries + (4 * ROWS * self.query_tile if self.paired else 0)


@dataclasses.dataclass(frozen=True)
class BiasPlan:
    """The kernel of the bias's gradient: each warp group has 64 rows of scores.

    Attributes:
      warp_groups: that compute.
      columns: of a tile of scores.
      slots: tiles of all four operands in shared memory.
    """

    warp_groups: int
    columns: int
    slots: int

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.warp_groups * ROWS

    def shared_bytes(self, head: int, value: int) -> int:
        """Shared memory of a block."""
        return 2 * self.slots * (self.block + self.columns) * (head + value)


def shared_bytes() -> int:
    """The shared memory that the kernels may share out, of a block on the GPU that is lowered for."""
    return gpus.assumed().shared_bytes - _RESERVED_BYTES


# By the larger of both head sizes, up to so much. Chosen by registers and shared memory.
QUERY_PLANS = {
    Generation.HOPPER: {
        64: QueryPlan(warp_groups=2, key_tile=128, key_slots=3, value_slots=3),
        128: QueryPlan(warp_groups=2, key_tile=128, key_slots=2, value_slots=2),
        192: QueryPlan(warp_groups=2, key_tile=64, key_slots=2, value_slots=2),
        256: QueryPlan(warp_groups=2, key_tile=64, key_slots=2, value_slots=1),
    },
}
# By the sum of both head sizes: a thread's registers hold half of it for the results of a warp group.
KEY_VALUE_PLANS = {
    Generation.HOPPER: {
        128: KeyValuePlan(warp_groups=2, query_tile=128, slots=2),
        256: KeyValuePlan(warp_groups=2, query_tile=64, slots=3),
        512: KeyValuePlan(warp_groups=2, query_tile=64, slots=2, paired=True),
    },
}
# By the larger of both.
BIAS_PLANS = {
    Generation.HOPPER: {
        64: BiasPlan(warp_groups=2, columns=64, slots=4),
        128: BiasPlan(warp_groups=2, columns=64, slots=2),
        256: BiasPlan(warp_groups=2, columns=64, slots=1),
    },
}


def query_plan(head: int, value: int) -> QueryPlan:
    """The plan for heads of these sizes."""
    return _up_to(QUERY_PLANS, max(head, value))


def key_value_plan(head: int, value: int) -> KeyValuePlan:
    """The plan for heads of these sizes."""
    return _up_to(KEY_VALUE_PLANS, head + value)


def bias_plan(head: int, value: int) -> BiasPlan:
    """The plan for heads of these sizes."""
    return _up_to(BIAS_PLANS, max(head, value))


def _up_to[T](plans: Mapping[Generation, Mapping[int, T]], size: int) -> T:
    """The plan for the least size that is at least this, on the GPU that is lowered for."""
    of_generation = plans[gpus.assumed().generation]
    return of_generation[min(most for most in of_generation if most >= size)]
