"""The forward pass over chunks of the classes: each chunk's scores are folded into a few numbers a row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._core.mesh import combined
from jaxsoft._head.chunks import Chunk, forward_chunk, over_chunks
from jaxsoft._head.head import Head, product_dtype, scores, sums_of
from jaxsoft._head.operation import Kind, Operation, Shards
from jaxsoft._rows.forms import Form
from jaxsoft._rows.formulas import labels_within
from jaxsoft._rows.operations.labels import beside_label
from jaxsoft._rows.primitive import kernel


class _Folded(NamedTuple):
    """What is known of each row after some chunks.

    Attributes:
      state: of the scores but the label's.
      t: the label's score, 0 as long as no chunk had it.
      sums: those of `head.formula`.
      kept: the scores, where they are kept, else None.
    """

    state: fold.State
    t: jax.Array
    sums: list[jax.Array]
    kept: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Forward(Operation):
    """The results of `head.formula`, and the scores if they are kept.

    Attributes:
      head: which layer.
      keep: whether the scores are kept.
    """

    head: Head
    keep: bool

    @property
    def operands(self) -> tuple[Kind, ...]:
        """The parameters and the labels."""
        return (*self.head.parameters, Kind.LABEL)

    @property
    def results(self) -> tuple[Kind, ...]:
        """Others, the label's score, apart, the sums, and the scores if they are kept."""
        return *(Kind.STATISTIC,) * 3, *self.head.sums, *(Kind.SCORES,) * self.keep

    def types(self, *operands):
        """The types of the results. They vary over the mesh axes of shard_map as what is computed of the scores."""

        def like(*operands):
            x = scores(self.head, self.head.named(operands))
            statistic = jnp.max(x, axis=-1, initial=-jnp.inf)
            kept = x.astype(product_dtype(*operands[:2]))
            return [kept if kind is Kind.SCORES else statistic for kind in self.results]

        return jax.make_jaxpr(like)(*operands).out_avals

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device. Where classes are sharded, all devices' are combined."""
        head, parameters, label = self.head, self.head.named(operands), operands[-1]
        dtype = product_dtype(*operands[:2])
        wide, classes = fold.accumulator(dtype), operands[1].shape[1]
        parameters[Kind.HIDDEN] = parameters[Kind.HIDDEN].astype(dtype)
        index = labels_within(label, shards.first_class(classes))
        kept = jax.lax.empty((label.size, classes), dtype) if self.keep else None
        zero = jnp.zeros(label.shape, wide)
        start = _Folded(fold.identity(label.shape, wide), zero, [zero for _ in head.sums], kept)

        def step(folded: _Folded, chunk: Chunk) -> _Folded:
            x, here = scores(head, chunk.layer(parameters)), labels_within(index, chunk.begin)
            weights = chunk.of(parameters[Kind.CLASS_WEIGHTS]) if head.weighted else None
            state, t, sums = reduced(head, x, label, here, weights)
            return _Folded(
                fold.combine(folded.state, state),
                folded.t + t,
                [a + b for a, b in zip(folded.sums, sums, strict=True)],
                None if folded.kept is None else chunk.written(folded.kept, x),
            )

        state, t, sums, kept = over_chunks(forward_chunk(head, label.size), classes, step, start)
        state, t, sums = of_all_classes(shards, label, state, t, sums)
        others, apart = beside_label(state, t)
        return others, t, apart, *sums, *([] if kept is None else [kept])


def reduced(
    head: Head, x: jax.Array, label: jax.Array, here: jax.Array, weights: jax.Array | None
) -> tuple[fold.State, jax.Array, list[jax.Array]]:
    """What rows of some classes' scores are folded into.

    Args:
      head: which layer.
      x: the scores before the cap.
      label: of each row.
      here: the index of each row's label among these classes.
      weights: of these classes, where the sums are weighted.

    Returns:
      The state of the scores but the label's, the label's score, which is 0 where the label is another class, and the
      sums of `head.formula`.
    """
    m, s, t, *sums = kernel(head.function.forward, Form(fold.accumulator(x.dtype), cap=head.cap), None, x, here)
    found = (here >= 0) & (here < x.shape[-1])
    return fold.State(m, s), jnp.where(found, t, 0), sums_of(head, x, label, t, sums, weights)


def of_all_classes(
    shards: Shards, label: jax.Array, state: fold.State, t: jax.Array, sums: list[jax.Array]
) -> tuple[fold.State, jax.Array, list[jax.Array]]:
    """The results of `reduced` for all classes, given those for this device's. A label out of range has score NaN."""
    if shards.classes:
        state = combined(state, shards.classes)
        t, *sums = jax.lax.psum((t, *sums), shards.classes)
    return state, jnp.where(label == -1, jnp.nan, t), sums
