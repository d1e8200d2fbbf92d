"""The order in which the blocks of attention's kernels run, and which of them has a number."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoft._attention.form import AttentionForm

from .extra_tiles import with_tiles

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
