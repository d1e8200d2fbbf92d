"""The weighted sum of the rows' losses with its gradients, over chunks of the rows.

The derivative of a sum is known up to one factor, the cotangent of the sum, before there is a cotangent. So one pass
does all: a chunk's scores, rounded to the dtype of the products as they are with all scores in memory, are reduced to
the losses, and become their gradients in place. A second product with these gives the gradient of the chunk's hidden
states, and a third one is added to the gradient of weight. No score is computed twice, at the price of reading and
writing the gradient of weight once a chunk.

Where the gradients of all scores fit into the memory of the gradient of weight, they are kept there (see `in_place`),
which takes no longer than to read and write this gradient once a chunk of rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._core.operation import Function, is_perturbed, zero_tangent
from jaxsoft._head.chunks import Chunk, default_row_chunk, over_rows, summed_during
from jaxsoft._head.forward import folded
from jaxsoft._head.head import product, product_dtype, rounded_scores, scaled, scores
from jaxsoft._head.in_place import almost_fills, fits_in_place, padded, weight_in_place
from jaxsoft._head.loss import OPTIONS, Objective, losses_that_count, weighted
from jaxsoft._head.operation import HeadArray, HeadOperation, Shards
from jaxsoft._head.pullback import Known, gradient_of_scores, gradient_of_weights
from jaxsoft._head.reduction import SumDerivative
from jaxsoft._rows.formulas import labels_within

# The gradients that are sums over the rows; the others have a part for each row.
_SUMMED = (HeadArray.TOTAL, HeadArray.WEIGHT, HeadArray.BIAS, HeadArray.CLASS_WEIGHTS, *OPTIONS.values())


@dataclasses.dataclass(frozen=True)
class Total(HeadOperation):
    """The sum, and its gradients by some of the operands.

    Attributes:
      objective: what is summed.
      wrt: the operands whose gradients are wanted, in the order of the objective's.
    """

    objective: Objective
    wrt: tuple[HeadArray, ...] = ()
    name = "linear_loss"

    def refusal(self, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
        """A chunk's scores are written, as the gradients take their place."""
        del hidden, weight
        return "a sum of losses is taken with its gradients, by XLA's products of chunks of the rows"

    def formula(self) -> Function:
        """The sum by way of all scores."""
        return lambda *operands: (self.objective.formula(*operands),)

    def jvp(self, primals: Sequence[jax.Array], tangents: Sequence) -> tuple[Sequence, Sequence]:
        """The results, with all gradients that the derivative needs from the same pass, and their tangents.

        The gradients among the results count as constants.
        """
        given = dict(zip(self.operands, tangents, strict=True))
        perturbed = tuple(kind for kind, t in given.items() if is_perturbed(t))
        both = tuple(kind for kind in given if kind in perturbed or kind in self.wrt)
        total, *gradients = Total(self.objective, both)(*primals)
        found = dict(zip(both, gradients, strict=True))
        derivative = SumDerivative(self.objective, perturbed)
        (t,) = derivative(*primals, *(found[kind] for kind in perturbed), *(given[kind] for kind in perturbed))
        kept = [found[kind] for kind in self.wrt]
        return (total, *kept), (t, *map(zero_tangent, kept))

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """Those of the results."""
        return self.jvp(primals, tangents)[1]

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """By chunks of the classes; where there are gradients, the elements are taken one after the other."""
        if not self.wrt:
            return (jax.vmap(self.objective.by_classes, tuple(dims))(*operands),)
        return super().batch(operands, dims)

    @property
    def operands(self) -> tuple[HeadArray, ...]:
        """Those of the objective."""
        return self.objective.operands

    @property
    def results(self) -> tuple[HeadArray, ...]:
        """The sum and the gradients."""
        return (HeadArray.TOTAL, *self.wrt)

    def types(self, *operands):
        """The types of the results. That of the sum varies over the mesh axes of shard_map as what it is made of."""
        given = self.objective.named(operands)

        def like(*operands):
            x = scores(self.objective.head, self.objective.named(operands))
            return jnp.sum(jnp.max(x, axis=-1, initial=-jnp.inf))

        (total,) = jax.make_jaxpr(like)(*operands).out_avals
        return [total, *(given[kind] for kind in self.wrt)]

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device. Where they are sums over devices, all devices' are added up."""
        given, types = self.objective.named(operands), self.types(*operands)
        (width, classes), rows = given[HeadArray.WEIGHT].shape, given[HeadArray.LABEL].size
        dtype = product_dtype(*operands[:2])
        size = self.objective.chunk_size or default_row_chunk(rows, classes, dtype.itemsize)
        in_place = HeadArray.WEIGHT in self.wrt and size < rows and fits_in_place(given[HeadArray.WEIGHT], rows, dtype)
        whole = in_place and self.objective.chunk_size is None and not self.objective.head.composed
        if whole and almost_fills(given[HeadArray.WEIGHT], rows):
            return padded(functools.partial(self.on_rows, shards), self.operands, self.results, *operands)
        if whole and rows == width:
            size = rows  # all scores are computed where their gradients are kept
        kinds = list(zip(self.results, types, strict=True))
        start: dict[HeadArray, Any] = {
            kind: None if kind in _SUMMED else jax.lax.empty(t.shape, t.dtype) for kind, t in kinds
        }
        if in_place and size < rows:
            start[HeadArray.WEIGHT] = jax.lax.empty((width, classes), dtype)
        summed_later = in_place and bool(shards.classes)
        if summed_later and HeadArray.HIDDEN in start:
            start[HeadArray.HIDDEN] = jax.lax.empty((rows, width), fold.accumulator(dtype))
        several = dataclasses.replace(self.objective, sum_dtype=self.objective.sum_dtype if size < rows else None)
        step = functools.partial(dataclasses.replace(self, objective=several)._with_chunk, shards, given, in_place)
        results = over_rows(size, rows, step, tuple(start.values()))
        if in_place:  # when no chunk is in use any more
            results = jax.lax.optimization_barrier(results)
        found: dict[HeadArray, Any] = dict(zip(self.results, results, strict=True))
        if in_place:
            head = self.objective.head
            hidden = scaled(head.scale, given[HeadArray.HIDDEN].astype(dtype))
            of_weight, of_hidden = weight_in_place(
                head, shards, hidden, found[HeadArray.WEIGHT], found.get(HeadArray.HIDDEN)
            )
            found[HeadArray.WEIGHT] = of_weight
            if summed_later and of_hidden is not None:
                found[HeadArray.HIDDEN] = scaled(head.scale, of_hidden)

        def of_all_devices(kind: HeadArray, v: jax.Array | None, t) -> jax.Array:
            if v is None:  # there are no rows
                return jnp.zeros(t.shape, t.dtype)
            is_part = kind in _SUMMED and shards.rows and not (in_place and kind is HeadArray.WEIGHT)
            return (jax.lax.psum(v, shards.rows) if is_part else v).astype(t.dtype)

        return tuple(of_all_devices(kind, found[kind], t) for kind, t in kinds)

    def _with_chunk(
        self, shards: Shards, given: dict[HeadArray, jax.Array], in_place: bool, found: Sequence[Any], chunk: Chunk
    ) -> tuple[jax.Array, ...]:
        """The results after one more chunk.

        Args:
          shards: of the operands.
          given: the operands.
          in_place: whether the gradients of all scores are kept in the memory of that of weight.
          found: the results before the chunk; None for a sum before the first one.
          chunk: which rows these are.
        """
        objective, head = self.objective, self.objective.head
        dtype = product_dtype(given[HeadArray.HIDDEN], given[HeadArray.WEIGHT])
        wide, classes = fold.accumulator(dtype), given[HeadArray.WEIGHT].shape[1]
        hidden, weight = chunk.of(given[HeadArray.HIDDEN]).astype(dtype), given[HeadArray.WEIGHT].astype(dtype)
        x = rounded_scores(head, given | {HeadArray.HIDDEN: hidden})
        hidden = scaled(head.scale, hidden)
        plain = dataclasses.replace(head, scale=1.0)  # the scale is part of hidden and bias

        label, factor = chunk.of(given[HeadArray.LABEL]), chunk.of(given[HeadArray.ROW_WEIGHTS])
        here = labels_within(label, shards.first_class(classes))
        class_weights = given[HeadArray.CLASS_WEIGHTS] if head.weighted else None
        row = folded(plain, x, label, here, class_weights).of_all_classes(shards, label)

        def losses(statistics, weights, options):
            return objective.losses(label, statistics, weights, options)[0]

        label_weights = chunk.of(given[HeadArray.LABEL_WEIGHTS]) if objective.weighted else None
        loss, pull = jax.vjp(losses, row.statistics(), label_weights, objective.of_options(given))
        (of_others, of_t, of_log_odds, *of_sums), of_label_weights, of_options = pull(factor)
        of_option = {OPTIONS[name]: v for name, v in zip(objective.options.operands, of_options, strict=True)}
        known = Known(label, here, row.t, row.state, (of_others + of_log_odds, of_t - of_log_odds), of_sums[:-1])
        every = Chunk(0, classes)

        before = dict(zip(self.results, found, strict=True))

        @functools.cache
        def dx() -> jax.Array:
            return gradient_of_scores(plain, dtype, known, x, every, class_weights)

        def of_hidden() -> jax.Array:
            # Where nothing follows the product, it is rounded once.
            once = dtype if head.scale == 1 and given[HeadArray.HIDDEN].dtype == dtype and not shards.classes else wide
            return product(head, dx(), weight, (1, 1), once)

        def of_weight(dx: jax.Array) -> jax.Array:
            added = before[HeadArray.WEIGHT]
            if in_place:
                return dx if added is None else chunk.written(added, dx)
            kept = objective.sum_dtype or given[HeadArray.WEIGHT].dtype
            part = product(head, hidden, dx, (0, 0), dtype if kept == dtype else wide)
            # XLA makes one product of this, which reads what it is added to, and overwrites it.
            return part.astype(kept) if added is None else (added + part).astype(kept)

        @functools.cache
        def products() -> tuple[jax.Array, jax.Array]:
            """The chunk's part of the gradient of hidden, and that of weight with this chunk."""
            if in_place or not shards.classes:
                return of_hidden(), of_weight(dx())
            # The part is computed first, and summed over devices while the other product is computed.
            after, part = jax.lax.optimization_barrier((dx(), of_hidden()))
            return summed_during(part, shards.classes, functools.partial(of_weight, after))

        def with_chunk(kind: HeadArray) -> jax.Array:
            match kind:
                case HeadArray.TOTAL:
                    part = jnp.sum(weighted(factor, loss))
                case HeadArray.ROW_WEIGHTS:
                    part = losses_that_count(factor, loss)
                case HeadArray.LABEL_WEIGHTS:
                    part = of_label_weights
                case HeadArray.LABEL_SMOOTHING | HeadArray.Z_LOSS:
                    part = of_option[kind]
                case HeadArray.CLASS_WEIGHTS:
                    part = gradient_of_weights(plain, known, x)
                case HeadArray.BIAS:
                    part = scaled(head.scale, jnp.sum(dx(), axis=0, dtype=wide))
                case HeadArray.WEIGHT:
                    return products()[1] if HeadArray.HIDDEN in before else of_weight(dx())
                case HeadArray.HIDDEN if HeadArray.WEIGHT in before:
                    part = products()[0]
                case HeadArray.HIDDEN:
                    part = jax.lax.psum(of_hidden(), shards.classes) if shards.classes else of_hidden()
            if kind is HeadArray.HIDDEN and not (in_place and shards.classes):
                part = scaled(head.scale, part)
            if kind in _SUMMED:
                return part if before[kind] is None else before[kind] + part
            return chunk.written(before[kind], part)

        return tuple(map(with_chunk, self.results))
