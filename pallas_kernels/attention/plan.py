"""The sizes of tiles in the forward kernel, as data, by the generation of the GPU and the head size."""

import dataclasses

from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation

from .operands import head_size

_RESERVED_BYTES = 1536  # of a block's shared memory, which JAX's barriers and alignments take


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How the forward kernel cuts up its work.

    Attributes:
      groups: warp groups that compute, in each block.
      query_rows: queries of each of them.
      key_tile: keys of a tile.
      slots: tiles of keys, and of values, that are in shared memory at a time.
      turns: whether two warp groups take turns between products and exponentials.
      persistent: whether blocks go on from item to item (see schedule.py), where they can.
    """

    groups: int
    query_rows: int
    key_tile: int
    slots: int
    turns: bool = False
    persistent: bool = True

    @property
    def block_rows(self) -> int:
        """Queries of a block."""
        return self.groups * self.query_rows

    def shared_bytes(self, query_head: int, value_head: int) -> int:
        """Shared memory of a block, for head sizes that kernels compute with and 16-bit operands."""
        queries = 2 * self.block_rows * query_head
        output = 0 if value_head == query_head else 2 * self.block_rows * value_head
        return queries + output + 2 * self.slots * self.key_tile * (query_head + value_head) + 4 * self.block_rows

    def free_bytes(self, query_head: int, value_head: int) -> int:
        """What it leaves of a block's shared memory."""
        return gpus.assumed().shared_bytes - _RESERVED_BYTES - self.shared_bytes(query_head, value_head)


# By the larger of the two head sizes, up to which a plan serves.
# On an H100 (80 GB, JAX 0.11.2; 32K tokens of bf16, 8K long, TFLOP/s, all and causal): at 64, three warp groups 495 and
# 453 where cuDNN had 469 and 452; two of them, in a run whose times were disturbed, 454 and 393 where three had 496 and
# 466. At 128, two have 616 and 572, three with 64 keys 518 and 478, cuDNN 597 and 602.
# Beyond, two warp groups whose products and exponentials take turns; two slots are enough, since products take
# longer than copies. Accumulators of 64 x 128 scores and 64 x D outputs, and the scores as operands, leave no room for
# more in 232 registers; at 256 shared memory is what limits the tile.
# Persistent blocks, and a block for each item (1K, 8K and 32K long, each all and causal): at 64, 400 and 282, 501 and
# 456, 508 and 477, and 358 and 239, 493 and 441, 508 and 476; at 128, 532 and 406, 594 and 550, 605 and 609, and 515
# and 378, 604 and 550, 605 and 614; at 256, 511 and 430, 599 and 578, 632 and 636, and 516 and 419, 621 and 574, 642
# and 635.
FORWARD = {
    Generation.HOPPER: {
        64: ForwardPlan(groups=3, query_rows=64, key_tile=128, slots=2),
        128: ForwardPlan(groups=2, query_rows=64, key_tile=128, slots=2, turns=True),
        192: ForwardPlan(groups=2, query_rows=64, key_tile=64, slots=2, turns=True, persistent=False),
        256: ForwardPlan(groups=2, query_rows=64, key_tile=64, slots=2, turns=True, persistent=False),
    },
}

# Under a causal rule these take their place. With heads above 128, the hardware shares out the tensor cores better by
# itself (H100, JAX 0.11.2, D = 256, causal, TFLOP/s without and with turns: 1K 417 and 385, 4K 547 and 495, 16K 644 and
# 572, 32K 650 and 653; without the rule 585 and 636 at 8K).
FORWARD_CAUSAL = {
    Generation.HOPPER: {
        192: ForwardPlan(groups=2, query_rows=64, key_tile=64, slots=2),
        256: ForwardPlan(groups=2, query_rows=64, key_tile=64, slots=2),
    },
}


def forward_plan(query_head: int, value_head: int, causal: bool = False) -> ForwardPlan | None:
    """The plan for head sizes, and for whether later keys are masked; None if there is none."""
    query_head, value_head = head_size(query_head), head_size(value_head)
    generation = gpus.assumed().generation
    plans = FORWARD.get(generation, {}) | (FORWARD_CAUSAL.get(generation, {}) if causal else {})
    for largest, plan in plans.items():
        if max(query_head, value_head) <= largest:
            one = dataclasses.replace(plan, groups=1, turns=False)  # where values are the larger, above 192
            for cut in (plan, one):
                if cut.free_bytes(query_head, value_head) >= 0:
                    return cut
    return None
