"""The weighted sum of the rows' losses with its gradients, over chunks of the rows.

The derivative of a sum is known up to one factor, the cotangent of the sum, before there is a cotangent. So one pass
does all: a chunk's scores, rounded to the dtype of the products as they are with all scores in memory, are reduced to
the losses, and become their gradients in place. A second product with these gives the gradient of the chunk's hidden
states, and a third one is added to the gradient of weight. No score is computed twice, at the price of reading and
writing the gradient of weight once a chunk.

Where there are no more rows than hidden has numbers, the gradients of all scores fit into the memory of the gradient of
weight. Then they wait there (see `waiting`), which takes no longer than to read and write this gradient once a chunk of
rows. With as many rows as numbers, or a few less, all scores are computed there, in one chunk.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._head.chunks import Chunk, default_row_chunk, over_rows
from jaxsoft._head.exchange import summed_during
from jaxsoft._head.forward import folded
from jaxsoft._head.head import product, product_dtype, rounded_scores, scaled, scores
from jaxsoft._head.loss import Objective, losses_that_count, weighted
from jaxsoft._head.operation import Kind, Operation, Shards
from jaxsoft._head.pullback import Known, gradient_of_scores, gradient_of_weights
from jaxsoft._head.waiting import few_are_missing, filled, may_wait, weight_from
from jaxsoft._rows.formulas import labels_within

# The gradients that are sums over the rows; the others have a part for each row.
_SUMMED = (Kind.TOTAL, Kind.WEIGHT, Kind.BIAS, Kind.CLASS_WEIGHTS)


@dataclasses.dataclass(frozen=True)
class Total(Operation):
    """The sum, and its gradients by some of the operands.

    Attributes:
      objective: what is summed.
      moving: the operands whose gradients are wanted, in the order of the objective's.
    """

    objective: Objective
    moving: tuple[Kind, ...] = ()

    @property
    def operands(self) -> tuple[Kind, ...]:
        """Those of the objective."""
        return self.objective.operands

    @property
    def results(self) -> tuple[Kind, ...]:
        """The sum and the gradients."""
        return (Kind.TOTAL, *self.moving)

    def types(self, *operands):
        """The types of the results. That of the sum varies over the mesh axes of shard_map as what it is made of."""
        given = self.objective.named(operands)

        def like(*operands):
            x = scores(self.objective.head, self.objective.named(operands))
            return jnp.sum(jnp.max(x, axis=-1, initial=-jnp.inf))

        (total,) = jax.make_jaxpr(like)(*operands).out_avals
        return [total, *(given[kind] for kind in self.moving)]

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device. Where they are sums over devices, all devices' are added up."""
        given, types = self.objective.named(operands), self.types(*operands)
        (width, classes), rows = given[Kind.WEIGHT].shape, given[Kind.LABEL].size
        dtype = product_dtype(*operands[:2])
        size = self.objective.chunk_size or default_row_chunk(rows, classes, dtype.itemsize)
        waits = Kind.WEIGHT in self.moving and size < rows and may_wait(given[Kind.WEIGHT], rows, dtype)
        whole = waits and self.objective.chunk_size is None and not self.objective.head.composed
        if whole and few_are_missing(given[Kind.WEIGHT], rows):
            return filled(functools.partial(self.on_rows, shards), self.operands, self.results, *operands)
        if whole and rows == width:
            size = rows  # all scores are computed where their gradients wait
        kinds = list(zip(self.results, types, strict=True))
        start: dict[Kind, Any] = {
            kind: None if kind in _SUMMED else jax.lax.empty(t.shape, t.dtype) for kind, t in kinds
        }
        if waits and size < rows:
            start[Kind.WEIGHT] = jax.lax.empty((width, classes), dtype)
        summed_later = waits and bool(shards.classes)
        if summed_later and Kind.HIDDEN in start:
            start[Kind.HIDDEN] = jax.lax.empty((rows, width), fold.accumulator(dtype))
        several = dataclasses.replace(self.objective, sum_dtype=self.objective.sum_dtype if size < rows else None)
        step = functools.partial(dataclasses.replace(self, objective=several)._with_chunk, shards, given, waits)
        results = over_rows(size, rows, step, tuple(start.values()))
        if waits:  # when no chunk is in use any more
            results = jax.lax.optimization_barrier(results)
        found: dict[Kind, Any] = dict(zip(self.results, results, strict=True))
        if waits:
            head = self.objective.head
            hidden = scaled(head.scale, given[Kind.HIDDEN].astype(dtype))
            of_weight, of_hidden = weight_from(head, shards, hidden, found[Kind.WEIGHT], found.get(Kind.HIDDEN))
            found[Kind.WEIGHT] = of_weight
            if summed_later and of_hidden is not None:
                found[Kind.HIDDEN] = scaled(head.scale, of_hidden)

        def of_all_devices(kind: Kind, v: jax.Array | None, t) -> jax.Array:
            if v is None:  # there are no rows
                return jnp.zeros(t.shape, t.dtype)
            is_part = kind in _SUMMED and shards.rows and not (waits and kind is Kind.WEIGHT)
            return (jax.lax.psum(v, shards.rows) if is_part else v).astype(t.dtype)

        return tuple(of_all_devices(kind, found[kind], t) for kind, t in kinds)

    def _with_chunk(
        self, shards: Shards, given: dict[Kind, jax.Array], waits: bool, found: Sequence[Any], chunk: Chunk
    ) -> tuple[jax.Array, ...]:
        """The results after one more chunk.

        Args:
          shards: of the operands.
          given: the operands.
          waits: whether the gradient of weight waits for all chunks, and the gradients of the scores are kept there.
          found: the results before the chunk; None for a sum before the first one.
          chunk: which rows these are.
        """
        objective, head = self.objective, self.objective.head
        dtype = product_dtype(given[Kind.HIDDEN], given[Kind.WEIGHT])
        wide, classes = fold.accumulator(dtype), given[Kind.WEIGHT].shape[1]
        hidden, weight = chunk.of(given[Kind.HIDDEN]).astype(dtype), given[Kind.WEIGHT].astype(dtype)
        x = rounded_scores(head, given | {Kind.HIDDEN: hidden})
        hidden = scaled(head.scale, hidden)
        plain = dataclasses.replace(head, scale=1.0)  # the scale is part of hidden and bias

        label, factor = chunk.of(given[Kind.LABEL]), chunk.of(given[Kind.ROW_WEIGHTS])
        here = labels_within(label, shards.first_class(classes))
        class_weights = given[Kind.CLASS_WEIGHTS] if head.weighted else None
        row = folded(plain, x, label, here, class_weights).of_all_classes(shards, label)

        def losses(statistics, weights):
            return objective.losses(label, statistics, weights)[0]

        label_weights = chunk.of(given[Kind.LABEL_WEIGHTS]) if objective.weighted else None
        loss, pull = jax.vjp(losses, row.statistics(), label_weights)
        (of_others, of_t, of_apart, *of_sums), of_label_weights = pull(factor)
        known = Known(label, here, row.t, row.state, (of_others + of_apart, of_t - of_apart), of_sums[:-1])
        every = Chunk(0, classes)

        before = dict(zip(self.results, found, strict=True))

        @functools.cache
        def dx() -> jax.Array:
            return gradient_of_scores(plain, dtype, known, x, every, class_weights)

        def of_hidden() -> jax.Array:
            # Where nothing follows the product, it is rounded once.
            once = dtype if head.scale == 1 and given[Kind.HIDDEN].dtype == dtype and not shards.classes else wide
            return product(head, dx(), weight, (1, 1), once)

        def of_weight(dx: jax.Array) -> jax.Array:
            added = before[Kind.WEIGHT]
            if waits:
                return dx if added is None else chunk.written(added, dx)
            kept = objective.sum_dtype or given[Kind.WEIGHT].dtype
            part = product(head, hidden, dx, (0, 0), dtype if kept == dtype else wide)
            # XLA makes one product of this, which reads what it is added to, and overwrites it.
            return part.astype(kept) if added is None else (added + part).astype(kept)

        @functools.cache
        def products() -> tuple[jax.Array, jax.Array]:
            """The chunk's part of the gradient of hidden, and that of weight with this chunk."""
            if waits or not shards.classes:
                return of_hidden(), of_weight(dx())
            # The part is computed first, and summed over devices while the other product is computed.
            after, part = jax.lax.optimization_barrier((dx(), of_hidden()))
            return summed_during(part, shards.classes, functools.partial(of_weight, after))

        def with_chunk(kind: Kind) -> jax.Array:
            match kind:
                case Kind.TOTAL:
                    part = jnp.sum(weighted(factor, loss))
                case Kind.ROW_WEIGHTS:
                    part = losses_that_count(factor, loss)
                case Kind.LABEL_WEIGHTS:
                    part = of_label_weights
                case Kind.CLASS_WEIGHTS:
                    part = gradient_of_weights(plain, known, x)
                case Kind.BIAS:
                    part = scaled(head.scale, jnp.sum(dx(), axis=0, dtype=wide))
                case Kind.WEIGHT:
                    return products()[1] if Kind.HIDDEN in before else of_weight(dx())
                case Kind.HIDDEN if Kind.WEIGHT in before:
                    part = products()[0]
                case Kind.HIDDEN:
                    part = jax.lax.psum(of_hidden(), shards.classes) if shards.classes else of_hidden()
            if kind is Kind.HIDDEN and not (waits and shards.classes):
                part = scaled(head.scale, part)
            if kind in _SUMMED:
                return part if before[kind] is None else before[kind] + part
            return chunk.written(before[kind], part)

        return tuple(map(with_chunk, self.results))
