"""The pullback over chunks of the classes, with the scores of a chunk computed again or kept from the forward pass.

A chunk's scores become their gradients. Two products with these give the gradient of the chunk's weights, which is
written in its place, and the chunk's share of the gradient of the hidden states, which is added up.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._head.chunks import Chunk, chunk_size, over_chunks
from jaxsoft._head.head import Head, Parameters, capped, product, product_dtype, scaled, scores
from jaxsoft._head.operation import Kind, Operation, Shards
from jaxsoft._head.waiting import may_wait, weight_from
from jaxsoft._rows.forms import Form, capped_slope
from jaxsoft._rows.formulas import labels_within
from jaxsoft._rows.primitive import kernel


class Known(NamedTuple):
    """What is known of each row when its scores are to become their gradients.

    Attributes:
      label: of each row, among all classes.
      local: the index of the label among the classes of this device.
      state: of the scores but the label's, (m, s); and where the entropy is wanted the sum for that of their softmax.
      cotangents: of others, of the label's score, and where it is wanted of the entropy.
      sums: the cotangents of the sums but the number of scores.
    """

    label: jax.Array
    local: jax.Array
    state: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, ...]
    sums: list[jax.Array]

    def of_label(self, chunk: Chunk, scale: float = 1.0) -> tuple[jax.Array, ...]:
        """The operands of the rows' pullback for a chunk, but for the scores and the cotangents of sums."""
        cotangents = (scaled(scale, v) for v in self.cotangents)
        return labels_within(self.local, chunk.begin), *self.state, *cotangents


@dataclasses.dataclass(frozen=True)
class Pullback(Operation):
    """The transpose of the derivative of `head.formula` along some of the parameters.

    Attributes:
      head: which layer.
      moving: the parameters whose gradients are wanted, in the order of the head's.
    """

    head: Head
    moving: tuple[Kind, ...]

    @property
    def residuals(self) -> tuple[Kind, ...]:
        """The operands but the cotangents: the parameters, the labels, some statistics, and the scores if kept."""
        kept = () if self.head.recompute else (Kind.SCORES,)
        return (*self.head.parameters, Kind.LABEL, *(Kind.STATISTIC,) * (1 + self.head.entropy), *kept)

    def of_statistics(self, statistics: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Those of the statistics that are residuals: others, and the entropy of the scores but the label's."""
        return statistics[0], *statistics[3 : 3 + self.head.entropy]

    @property
    def operands(self) -> tuple[Kind, ...]:
        """The residuals and the cotangents."""
        return self.residuals + self.head.cotangents

    @property
    def results(self) -> tuple[Kind, ...]:
        """The gradients."""
        return self.moving

    def types(self, *operands):
        """The types of the gradients, which are those of the parameters."""
        return [self.head.named(operands)[kind] for kind in self.moving]

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients on one device. Where they are sums over devices, all devices' are added up."""
        head, parameters = self.head, self.head.named(operands)
        label, others, *rest = operands[len(head.parameters) : len(self.residuals)]
        entropy, kept = rest[: head.entropy], rest[head.entropy :]
        cotangents = operands[len(self.residuals) :]
        cotangents, sums = cotangents[: 2 + head.entropy], list(cotangents[2 + head.entropy :])
        dtype, classes = product_dtype(*operands[:2]), operands[1].shape[1]
        parameters[Kind.HIDDEN] = parameters[Kind.HIDDEN].astype(dtype)
        state = *fold.from_lse(others), *(-h for h in entropy)  # the entropy is log(s) minus the sum over s, and s = 1
        given = set(self.moving)
        late = {Kind.HIDDEN, Kind.WEIGHT} <= given and may_wait(operands[1], label.size, dtype)
        late = late and chunk_size(head, label.size) < classes
        rows = Known(label, labels_within(label, shards.first_class(classes)), state, tuple(cotangents), sums)

        def step(gradients: tuple[jax.Array, ...], chunk: Chunk) -> tuple[jax.Array, ...]:
            x = chunk.of(kept[0]) if kept else scores(head, chunk.layer(parameters))
            return self._with_chunk(gradients, parameters, rows, x, chunk, late)

        types = self.types(*operands)
        gradients = over_chunks(chunk_size(head, label.size), classes, step, self._start(dtype, types, late))
        if late:
            found = dict(zip(self.moving, gradients, strict=True))
            dx, hidden, weight = found[Kind.WEIGHT], parameters[Kind.HIDDEN], parameters[Kind.WEIGHT].astype(dtype)
            once = dtype if types[0].dtype == dtype and not shards.classes else fold.accumulator(dtype)
            found[Kind.HIDDEN] = product(head, dx[: label.size], weight, (1, 1), once)
            # The barrier lets dx be overwritten only when it has been read, or XLA might copy it.
            dx, found[Kind.HIDDEN] = jax.lax.optimization_barrier((dx, found[Kind.HIDDEN]))
            found[Kind.WEIGHT] = weight_from(head, hidden, dx)
            gradients = tuple(found.values())

        def of_all_devices(kind: Kind, gradient: jax.Array, dtype: jnp.dtype) -> jax.Array:
            axes = shards.classes if kind is Kind.HIDDEN else shards.rows
            return (jax.lax.psum(gradient, axes) if axes else gradient).astype(dtype)

        given = zip(self.moving, gradients, types, strict=True)
        return tuple(of_all_devices(kind, gradient, t.dtype) for kind, gradient, t in given)

    def _start(self, dtype, types, late) -> tuple[jax.Array, ...]:
        """The gradients before the first chunk: that of hidden is a sum, and the others are overwritten."""
        return tuple(
            jnp.zeros(t.shape, fold.accumulator(dtype)) if kind is Kind.HIDDEN and not late else jax.lax.empty(t.shape, t.dtype)
            for kind, t in zip(self.moving, types, strict=True)
        )

    def _with_chunk(
        self, given: tuple[jax.Array, ...], parameters: Parameters, rows: Known, x: jax.Array, chunk: Chunk, late
    ) -> tuple[jax.Array, ...]:
        """The gradients after one more chunk, given those before it and the scores x of the chunk."""
        gradients = dict(zip(self.moving, given, strict=True))
        hidden, weight = parameters[Kind.HIDDEN], parameters[Kind.WEIGHT]
        dtype = product_dtype(hidden, weight)
        wide, dot = fold.accumulator(dtype), functools.partial(jax.lax.dot_general, precision=self.head.precision)
        weights = chunk.of(parameters[Kind.CLASS_WEIGHTS]) if self.head.weighted else None
        dx = gradient_of_scores(self.head, dtype, rows, x, chunk, weights, fused=late)
        if Kind.CLASS_WEIGHTS in gradients:
            by_weights = gradient_of_weights(self.head, rows, x)
            gradients[Kind.CLASS_WEIGHTS] = chunk.written(gradients[Kind.CLASS_WEIGHTS], by_weights)
        if late:
            gradients[Kind.WEIGHT] = chunk.written(gradients[Kind.WEIGHT], dx)
        if Kind.HIDDEN in gradients and not late:
            by_classes = chunk.of(weight).astype(dtype)
            gradients[Kind.HIDDEN] += dot(dx, by_classes, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        if Kind.WEIGHT in gradients and not late:
            once = dtype if gradients[Kind.WEIGHT].dtype == dtype else wide  # so that it is rounded once
            dw = dot(hidden, dx, (((0,), (0,)), ((), ())), preferred_element_type=once)
            gradients[Kind.WEIGHT] = chunk.written(gradients[Kind.WEIGHT], dw)
        if Kind.BIAS in gradients:
            gradients[Kind.BIAS] = chunk.written(gradients[Kind.BIAS], jnp.sum(dx, axis=0, dtype=wide))
        return tuple(gradients.values())


def gradient_of_scores(
    head: Head,
    dtype: jnp.dtype,
    rows: Known,
    x: jax.Array,
    chunk: Chunk,
    weights: jax.Array | None,
    fused: bool = False,
) -> jax.Array:
    """The gradient by a chunk's hidden @ weight + bias, which may be written where the scores are.

    Args:
      head: which layer.
      dtype: of the result.
      rows: what is known of them.
      x: the chunk's scores before the cap.
      chunk: which classes these are.
      weights: theirs, where the sums are weighted.
    """
    if not head.composed:
        form = Form(dtype, cap=head.cap, in_place=x.dtype == dtype and not fused)
        operands = *rows.of_label(chunk, head.scale), *(scaled(head.scale, v) for v in rows.sums)
        (dx,) = kernel(head.function.pullback, form, "xla" if fused else None, x, *operands)
        return dx
    wide, of_total = fold.accumulator(dtype), rows.sums[0][:, None]
    z, summed = capped(head, x, rows.label)
    # A kernel would need the scores in f32, and in memory.
    (dz,) = kernel(head.function.pullback, Form(wide), "xla", z, *rows.of_label(chunk))
    dz = dz + jnp.where(summed, of_total if weights is None else of_total * weights[None], 0)
    return scaled(head.scale, capped_slope(Form(wide, cap=head.cap), x, dz)).astype(dtype)


def gradient_of_weights(head: Head, rows: Known, x: jax.Array) -> jax.Array:
    """The gradient by the class weights of a chunk, given its scores x before the cap, where the sums are weighted."""
    of_total, of_mass = (g[:, None] for g in rows.sums)
    z, summed = capped(head, x, rows.label)
    return jnp.sum(jnp.where(summed, of_total * jnp.where(summed, z, 0) + of_mass, 0), axis=0)
