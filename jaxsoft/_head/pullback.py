"""The pullback over chunks of the classes, with the scores of a chunk computed again or kept from the forward pass.

A chunk's scores become their gradients. Two products with these give the gradient of the chunk's weights, which is
written in its place, and the chunk's share of the gradient of the hidden states, which is added up.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._head.chunks import Chunk, over_chunks
from jaxsoft._head.head import Head, Parameters, capped, product_dtype
from jaxsoft._head.operation import Kind, Operation, Shards
from jaxsoft._rows.forms import Form, capped_slope
from jaxsoft._rows.formulas import labels_within
from jaxsoft._rows.operations.labels import LABEL_STATE_VJP
from jaxsoft._rows.primitive import kernel


class _Rows(NamedTuple):
    """What is known of each row.

    Attributes:
      label: of each row, among all classes.
      local: the index of the label among the classes of this device.
      state: of the scores but the label's, (m, s).
      g: the cotangent of others.
      h: the cotangent of the label's score.
      sums: the cotangents of the sums but the number of scores.
    """

    label: jax.Array
    local: jax.Array
    state: fold.State
    g: jax.Array
    h: jax.Array
    sums: list[jax.Array]

    def of_label(self, chunk: Chunk) -> tuple[jax.Array, ...]:
        """The operands of the rows' pullback for a chunk, but for the scores and the cotangents of sums."""
        return labels_within(self.local, chunk.begin), *self.state, self.g, self.h


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
        """The operands but the cotangents: the parameters, the labels, others, and the scores if they were kept."""
        kept = () if self.head.recompute else (Kind.SCORES,)
        return (*self.head.parameters, Kind.LABEL, Kind.STATISTIC, *kept)

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
        label, others, *kept = operands[len(head.parameters) : len(self.residuals)]
        g, h, *sums = operands[len(self.residuals) :]
        dtype, classes = product_dtype(*operands[:2]), operands[1].shape[1]
        parameters[Kind.HIDDEN] = parameters[Kind.HIDDEN].astype(dtype)
        state = fold.from_lse(others)
        rows = _Rows(label, labels_within(label, shards.first_class(classes)), state, g, h, sums)

        def step(gradients: tuple[jax.Array, ...], chunk: Chunk) -> tuple[jax.Array, ...]:
            x = chunk.of(kept[0]) if kept else chunk.scores(head, parameters)
            return self._with_chunk(gradients, parameters, rows, x, chunk)

        types = self.types(*operands)
        gradients = over_chunks(head, label.size, classes, step, self._start(dtype, types))

        def of_all_devices(kind: Kind, gradient: jax.Array, dtype: jnp.dtype) -> jax.Array:
            axes = shards.classes if kind is Kind.HIDDEN else shards.rows
            return (jax.lax.psum(gradient, axes) if axes else gradient).astype(dtype)

        given = zip(self.moving, gradients, types, strict=True)
        return tuple(of_all_devices(kind, gradient, t.dtype) for kind, gradient, t in given)

    def _start(self, dtype, types) -> tuple[jax.Array, ...]:
        """The gradients before the first chunk: that of hidden is a sum, and the others are overwritten."""
        return tuple(
            jnp.zeros(t.shape, fold.accumulator(dtype)) if kind is Kind.HIDDEN else jax.lax.empty(t.shape, t.dtype)
            for kind, t in zip(self.moving, types, strict=True)
        )

    def _with_chunk(
        self, given: tuple[jax.Array, ...], parameters: Parameters, rows: _Rows, x: jax.Array, chunk: Chunk
    ) -> tuple[jax.Array, ...]:
        """The gradients after one more chunk, given those before it and the scores x of the chunk."""
        gradients = dict(zip(self.moving, given, strict=True))
        hidden, weight = parameters[Kind.HIDDEN], parameters[Kind.WEIGHT]
        dtype = product_dtype(hidden, weight)
        wide, dot = fold.accumulator(dtype), functools.partial(jax.lax.dot_general, precision=self.head.precision)
        if self.head.weighted:
            dx, by_weights = self._weighted(parameters, rows, x, chunk)
            if by_weights is not None:
                gradients[Kind.CLASS_WEIGHTS] = chunk.written(gradients[Kind.CLASS_WEIGHTS], by_weights)
        else:
            pullback, form = self.head.function.pullback, Form(dtype, cap=self.head.cap)
            (dx,) = kernel(pullback, form, None, x, *rows.of_label(chunk), *rows.sums)
        if Kind.HIDDEN in gradients:
            by_classes = chunk.of(weight).astype(dtype)
            gradients[Kind.HIDDEN] += dot(dx, by_classes, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        if Kind.WEIGHT in gradients:
            once = dtype if gradients[Kind.WEIGHT].dtype == dtype else wide  # so that it is rounded once
            dw = dot(hidden, dx, (((0,), (0,)), ((), ())), preferred_element_type=once)
            gradients[Kind.WEIGHT] = chunk.written(gradients[Kind.WEIGHT], dw)
        if Kind.BIAS in gradients:
            gradients[Kind.BIAS] = chunk.written(gradients[Kind.BIAS], jnp.sum(dx, axis=0, dtype=wide))
        return tuple(gradients.values())

    def _weighted(
        self, parameters: Parameters, rows: _Rows, x: jax.Array, chunk: Chunk
    ) -> tuple[jax.Array, jax.Array | None]:
        """The gradients by a chunk's scores x and, if wanted, by its class weights, where the sums are weighted."""
        dtype = product_dtype(parameters[Kind.HIDDEN], parameters[Kind.WEIGHT])
        head, wide, of_label = self.head, fold.accumulator(dtype), rows.of_label(chunk)
        of_total, of_mass = (g[:, None] for g in rows.sums)
        z, summed = capped(head, x, rows.label)
        (dz,) = kernel(LABEL_STATE_VJP, Form(wide), None, z, *of_label)
        dz = dz + jnp.where(summed, of_total * chunk.of(parameters[Kind.CLASS_WEIGHTS])[None], 0)
        dx = capped_slope(Form(wide, cap=head.cap), x, dz).astype(dtype)
        if Kind.CLASS_WEIGHTS not in self.moving:
            return dx, None
        return dx, jnp.sum(jnp.where(summed, of_total * jnp.where(summed, z, 0) + of_mass, 0), axis=0)
