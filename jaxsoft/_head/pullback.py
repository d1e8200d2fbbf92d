"""The pullback over chunks of the classes, with the scores of a chunk computed again or kept from the forward pass.

A chunk's scores become their gradients, which a kernel may make while the scores are in registers (see `kernels`). Two
products with these give the gradient of the chunk's weights, which is written in its place, and the chunk's share of
the gradient of the hidden states, which is added up. Where there are as many rows as hidden has numbers, or with a
kernel a few less, the gradients of the scores fit into the memory of that of weight, and are kept there (see
`in_place`), but on a CPU: that of the hidden states is then one product, and needs no sum in the accumulator's dtype.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._core.operation import Function
from jaxsoft._head import kernels
from jaxsoft._head.chunks import Chunk, InParts, chunk_size, over_chunks
from jaxsoft._head.forward import folded
from jaxsoft._head.head import Head, Parameters, capped, product, product_dtype, scaled, scores
from jaxsoft._head.in_place import almost_fills, fits_in_place, weight_in_place
from jaxsoft._head.operation import HeadArray, HeadOperation, Shards
from jaxsoft._rows.forms import RowForm, capped_slope
from jaxsoft._rows.formulas import labels_within
from jaxsoft._rows.operation import RowOperation


class Known(NamedTuple):
    """What is known of each row when its scores are to become their gradients.

    Attributes:
      label: of each row, among all classes.
      local: the index of the label among the classes of this device.
      t: the label's score, where the sums are weighted, else None.
      state: of the scores but the label's, (m, s); and where the entropy is wanted the sum for that of their softmax.
      cotangents: of others, of the label's score, and where it is wanted of the entropy.
      sums: the cotangents of the sums but the number of scores.
    """

    label: jax.Array
    local: jax.Array
    t: jax.Array | None
    state: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, ...]
    sums: list[jax.Array]

    def of_label(self, chunk: Chunk, scale: float = 1.0) -> tuple[jax.Array, ...]:
        """The operands of the rows' pullback for a chunk, but for the scores and the cotangents of sums."""
        cotangents = (scaled(scale, v) for v in self.cotangents)
        return labels_within(self.local, chunk.begin), *self.state, *cotangents


@dataclasses.dataclass(frozen=True)
class HeadPullback(HeadOperation):
    """The transpose of the derivative of `head.formula` along some of the parameters.

    Attributes:
      head: which layer.
      wrt: the parameters whose gradients are wanted, in the order of the head's.
    """

    head: Head
    wrt: tuple[HeadArray, ...]
    name = "linear_gradients"
    kernel = "gradients"

    def refusal(self, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
        """As `kernels` says it."""
        return kernels.refusal(self.head, hidden.update(dtype=product_dtype(hidden, weight)), weight)

    def formula(self) -> Function:
        """There is none: what is differentiated again is the derivative (see `derivative`), and not its transpose."""
        raise NotImplementedError

    @property
    def residuals(self) -> tuple[HeadArray, ...]:
        """The operands but the cotangents: the parameters, the labels, those of the head, and the scores if kept."""
        kept = () if self.head.recompute else (HeadArray.SCORES,)
        return (*self.head.parameters, HeadArray.LABEL, *self.head.residuals, *kept)

    @property
    def operands(self) -> tuple[HeadArray, ...]:
        """The residuals and the cotangents."""
        return self.residuals + self.head.cotangents

    @property
    def results(self) -> tuple[HeadArray, ...]:
        """The gradients."""
        return self.wrt

    def types(self, *operands):
        """The types of the gradients, which are those of the parameters."""
        return [self.head.named(operands)[kind] for kind in self.wrt]

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients on one device. Where they are sums over devices, all devices' are added up."""
        (rows, width), classes = operands[0].shape, operands[1].shape[1]
        dtype = product_dtype(*operands[:2])
        fits = {HeadArray.HIDDEN, HeadArray.WEIGHT} <= set(self.wrt) and fits_in_place(operands[1], rows, dtype)
        in_place = fits and rows == width and chunk_size(self.head, rows) < classes
        gradients = functools.partial(self._gradients, shards)
        ways = {"default": functools.partial(gradients, in_place, False)}
        if in_place and self.head.recompute:
            # On a CPU it took 5 to 12 % longer in place, for 256 rows of 256 numbers and 32000 classes.
            ways["cpu"] = functools.partial(gradients, False, False)
        if self.refusal(jax.typeof(operands[0]), jax.typeof(operands[1])) is None:
            whole = fits and (rows == width or almost_fills(operands[1], rows))
            ways["cuda"] = functools.partial(gradients, whole, True)
        return jax.lax.platform_dependent(*operands, **ways) if len(ways) > 1 else ways["default"](*operands)

    def _gradients(
        self, shards: Shards, in_place: bool, in_registers: bool, *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """`on_rows`.

        Args:
          shards: of the operands.
          in_place: whether the gradients of all scores are kept in the memory of that of weight.
          in_registers: whether a kernel keeps the scores there.
          operands: all of them.
        """
        head, parameters = self.head, self.head.named(operands)
        label, *rest = operands[len(head.parameters) : len(self.residuals)]
        t = rest.pop(0) if head.weighted else None
        state, kept = rest[: 2 + head.entropy], rest[2 + head.entropy :]
        cotangents = operands[len(self.residuals) :]
        cotangents, sums = cotangents[: 2 + head.entropy], list(cotangents[2 + head.entropy :])
        dtype, classes = product_dtype(*operands[:2]), operands[1].shape[1]
        parameters[HeadArray.HIDDEN] = parameters[HeadArray.HIDDEN].astype(dtype)
        here = labels_within(label, shards.first_class(classes))
        if kept and dtype != fold.accumulator(dtype):
            # The probabilities of rounded scores add up to 1 relative to the state of these.
            found = folded(head, kept[0], label, here, parameters.get(HeadArray.CLASS_WEIGHTS))
            found = found.of_all_classes(shards, label)
            state = [*found.state, *([] if found.products is None else [found.products])]
        rows = Known(label, here, t, tuple(state), tuple(cotangents), sums)
        size, types = chunk_size(head, label.size), dict(zip(self.wrt, self.types(*operands), strict=True))
        if in_place and (in_registers or (kept and not head.composed)):
            size = classes  # the gradients of scores are written where these are kept, or are made in one call
        elif in_registers:
            size = kernels.chunk_size(label.size)

        def step(gradients: tuple[Any, ...], chunk: Chunk) -> tuple[Any, ...]:
            x = None
            if not in_registers:
                x = chunk.of(kept[0]) if kept else scores(head, chunk.layer(parameters))
            return self._with_chunk(shards, gradients, parameters, rows, in_place, x, chunk)

        def start(kind: HeadArray, t) -> Any:
            if kind is HeadArray.WEIGHT and shards.rows and not in_place:
                return InParts(jax.lax.empty(t.shape, t.dtype))
            if kind is not HeadArray.HIDDEN:
                return jax.lax.empty(t.shape, t.dtype)
            return None if in_place else jnp.zeros(t.shape, fold.accumulator(dtype))  # it is a sum, or comes last

        gradients, first = tuple(start(kind, t) for kind, t in types.items()), 0
        if classes and any(isinstance(v, InParts) for v in gradients):
            first = min(size, classes)
            gradients = step(gradients, Chunk(0, first))
        gradients = over_chunks(size, classes, step, gradients, first)
        by_kind: dict[HeadArray, Any] = dict(zip(self.wrt, gradients, strict=True))
        if in_place:
            once = dtype if types[HeadArray.HIDDEN].dtype == dtype and not shards.classes else fold.accumulator(dtype)
            dx, hidden, weight = by_kind[HeadArray.WEIGHT], parameters[HeadArray.HIDDEN], parameters[HeadArray.WEIGHT]
            # The barrier lets dx be overwritten only when it has been read.
            dx, of_hidden = jax.lax.optimization_barrier((dx, product(head, dx, weight, (1, 1), once)))
            of_weight, of_hidden = weight_in_place(head, shards, hidden, dx, of_hidden[: len(hidden)])
            by_kind |= {HeadArray.HIDDEN: of_hidden, HeadArray.WEIGHT: of_weight}

        def of_all_devices(kind: HeadArray, gradient: Any, dtype: jnp.dtype) -> jax.Array:
            axes = shards.classes if kind is HeadArray.HIDDEN else shards.rows
            if isinstance(gradient, InParts):
                return gradient.whole(axes)
            is_part = axes and not (in_place and kind in (HeadArray.HIDDEN, HeadArray.WEIGHT))
            return (jax.lax.psum(gradient, axes) if is_part else gradient).astype(dtype)

        return tuple(of_all_devices(kind, gradient, types[kind].dtype) for kind, gradient in by_kind.items())

    def _with_chunk(
        self,
        shards: Shards,
        given: Sequence[Any],
        parameters: Parameters,
        rows: Known,
        in_place: bool,
        x: jax.Array | None,
        chunk: Chunk,
    ) -> tuple[Any, ...]:
        """The gradients after one more chunk.

        Args:
          shards: of the operands.
          given: those before it.
          parameters: of the head.
          rows: what is known of them.
          in_place: whether the gradients of all scores are kept in the memory of that of weight.
          x: the scores of the chunk; None if a kernel is to keep them in registers.
          chunk: which classes these are.
        """
        hidden, weight = parameters[HeadArray.HIDDEN], parameters[HeadArray.WEIGHT]
        dtype = product_dtype(hidden, weight)
        wide = fold.accumulator(dtype)
        if x is None:
            cotangents = *rows.cotangents, *rows.sums
            count = len(weight) if in_place else len(hidden)
            here = labels_within(rows.local, chunk.begin)
            dx = kernels.gradients(self.head, parameters, here, rows.state, cotangents, chunk, count)
        else:
            weights = chunk.of(parameters[HeadArray.CLASS_WEIGHTS]) if self.head.weighted else None
            one_chunk = in_place and chunk.size == weight.shape[1]
            dx = gradient_of_scores(self.head, dtype, rows, x, chunk, weights, fused=in_place and not one_chunk)

        def of_weight(kept: jnp.dtype) -> jax.Array:
            return product(self.head, hidden, dx, (0, 0), dtype if kept == dtype else wide)

        def with_chunk(kind: HeadArray, before: Any) -> Any:
            match kind:
                case HeadArray.HIDDEN if in_place:
                    return before
                case HeadArray.HIDDEN:
                    return before + product(self.head, dx, chunk.of(weight).astype(dtype), (1, 1), wide)
                case HeadArray.WEIGHT if in_place:
                    part = dx
                case HeadArray.WEIGHT if isinstance(before, InParts):
                    return before.followed(shards.rows, chunk, lambda: of_weight(before.array.dtype))
                case HeadArray.WEIGHT:
                    part = of_weight(before.dtype)
                case HeadArray.BIAS:
                    part = jnp.sum(dx[: len(hidden)], axis=0, dtype=wide)
                case HeadArray.CLASS_WEIGHTS:
                    assert x is not None, "weighted sums are composed"
                    part = gradient_of_weights(self.head, rows, x)
            return chunk.written(before, part)

        return tuple(map(with_chunk, self.wrt, given))


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
      fused: whether XLA is to compute it where it is used, instead of a kernel.
    """
    if not head.composed:
        form = RowForm(dtype, cap=head.cap, in_place=x.dtype == dtype and not fused)
        operands = *rows.of_label(chunk, head.scale), *(scaled(head.scale, v) for v in rows.sums)
        (dx,) = RowOperation(head.function.pullback, form, "xla" if fused else None).on_device(x, *operands)
        return dx
    wide, of_total = fold.accumulator(dtype), rows.sums[0][:, None]
    z, summed = capped(head, x, rows.label)
    # A kernel would need the scores in f32, and in memory.
    (dz,) = RowOperation(head.function.pullback, RowForm(wide), "xla").on_device(z, *rows.of_label(chunk))
    dz = dz + jnp.where(summed, of_total if weights is None else of_total * weights[None], 0)
    return scaled(head.scale, capped_slope(RowForm(wide, cap=head.cap), x, dz)).astype(dtype)


def gradient_of_weights(head: Head, rows: Known, x: jax.Array) -> jax.Array:
    """The gradient by the class weights of a chunk, given its scores x before the cap, where the sums are weighted."""
    of_total, of_mass = (g[:, None] for g in rows.sums)
    assert rows.t is not None
    z, summed = capped(head, x, rows.label)
    distance = jnp.where(summed, z, 0) - fold.reference(rows.t)[:, None]
    return jnp.sum(jnp.where(summed, of_total * distance + of_mass, 0), axis=0)
