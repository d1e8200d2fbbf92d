"""Kernels that multiply hidden and weight and keep the scores in registers, and which calls they serve.

What a loss needs to know of the scores, or their gradients, are made of each tile of the products before anything of it
reaches memory. So nothing is rounded but the gradients, and no time goes into writing and reading scores. Pallas is
imported when a kernel is called.
"""

from collections.abc import Sequence
from typing import Any

import jax

import jaxsoft.pallas_kernels as pallas_kernels
from jaxsoft import fold
from jaxsoft._head.chunks import Chunk
from jaxsoft._head.head import Head, Parameters
from jaxsoft._head.operation import HeadArray

# With fewer rows most of a tile is empty. On an H200, 16 rows of 4096 numbers and 128256 classes in bf16 took 340 us,
# in chunks of the classes 273; 32 rows 320 and 810 (JAX 0.11.2).
_LEAST_ROWS = 17


def refusal(head: Head, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
    """None, or why the kernels do not serve a layer on a GPU.

    Args:
      head: the layer.
      hidden: in the dtype of the products.
      weight: the layer's matrix.
    """
    if head.composed:
        return (
            "its kernels for linear layers take no class weights or entropy beside label_smoothing, which counts as "
            "above 0 where it is an array"
        )
    if head.chunk_size is not None or not head.recompute:
        return "chunk_size and recompute=False are for chunks of the classes, which XLA computes"
    reason = pallas_kernels.unavailable("cuda") or pallas_kernels.BY_NAME_ONLY  # which a layer has no argument for
    if reason := reason or pallas_kernels.head_unsupported(hidden, weight):
        return reason
    if hidden.shape[0] < _LEAST_ROWS:
        return f"its tiles would be mostly empty with less than {_LEAST_ROWS} rows"
    return None


def chunk_size(rows: int) -> int:
    """How many classes are taken at a time."""
    from jaxsoft.pallas_kernels.head import plan

    return plan.chunk_size(rows)


def statistics(head: Head, parameters: Parameters, here: jax.Array) -> Sequence[jax.Array]:
    """The state (m, s) of the scores but the label's, the label's score or 0, the sum for the entropy, and `head.sums`
    of distances from reference(m).

    Args:
      head: the layer.
      parameters: its own; hidden in the dtype of the products.
      here: the index of each row's label among these classes.
    """
    from jaxsoft.pallas_kernels.head import statistics

    return statistics.statistics(_scores(head), *_layer(parameters), here)


def gradients(
    head: Head,
    parameters: Parameters,
    here: jax.Array,
    state: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    chunk: Chunk,
    rows: int,
) -> jax.Array:
    """The gradients of a chunk of the classes by hidden @ weight + bias.

    Args:
      head: the layer.
      parameters: its own; hidden in the dtype of the products.
      here: the index of each row's label among the classes of the chunk.
      state: (m, s) of all scores but the label's, and where the entropy is wanted the sum for that.
      cotangents: of the logsumexp of these scores, of the label's score, of the entropy, and of the sum of all scores.
      chunk: which classes.
      rows: how many rows the result has: those after the last of hidden may be NaN.
    """
    from jaxsoft.pallas_kernels.head import gradients

    of_chunk = {kind: chunk.of(v) if kind is HeadArray.BIAS else v for kind, v in parameters.items()}
    place = rows, chunk.begin, chunk.size
    return gradients.gradients(_scores(head), *_layer(of_chunk), here, state, cotangents, *place)


def _layer(parameters: Parameters) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Hidden, weight, and the bias in the accumulator's dtype of the products, whatever its own is."""
    hidden, weight, bias = parameters[HeadArray.HIDDEN], parameters[HeadArray.WEIGHT], parameters.get(HeadArray.BIAS)
    return hidden, weight, None if bias is None else bias.astype(fold.accumulator(hidden.dtype))


def _scores(head: Head) -> Any:
    """How products become scores, as the kernels take it."""
    from jaxsoft.pallas_kernels.head.products import HeadScores

    return HeadScores(head.scale, head.cap, head.entropy, head.summed)
