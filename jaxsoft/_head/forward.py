"""The forward pass: scores are folded into a few numbers a row, a chunk of the classes at a time.

On a GPU a kernel may keep the scores in registers instead (see `kernels`). For calls that it does not serve: where the
gradient of weight will be computed, its memory is free until then, and has room for the scores of many rows. So a GPU
takes chunks of the rows there, with all classes in each: products are larger, and no part of weight is copied.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxsoft import fold
from jaxsoft._core.mesh import Axes, exchanged
from jaxsoft._core.operation import Function
from jaxsoft._head import kernels
from jaxsoft._head.chunks import Chunk, chunk_size, over_chunks, over_rows, row_chunk_within
from jaxsoft._head.head import Head, composed_sums, formula, product_dtype, scores
from jaxsoft._head.operation import HeadArray, HeadOperation, Shards
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.formulas import labels_within, nan_where
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.entropy import entropy_of, products_from
from jaxsoft._rows.operations.labels import beside_label
from jaxsoft._rows.spec import NO_ROW


class Folded(NamedTuple):
    """What is known of each row after some classes.

    Attributes:
      state: of the scores but the label's.
      products: the sum for the entropy of these scores' softmax, where that is wanted, else None; see
        `jaxsoft._rows.operations.entropy`.
      t: the label's score, 0 if it is none of these classes'.
      sums: those of `head.formula`, but of distances from another number.
      ref: that number, of which reference(ref) is meant; None without sums.
    """

    state: fold.State
    products: jax.Array | None
    t: jax.Array
    sums: list[jax.Array]
    ref: jax.Array | None

    def joined(self, other: "Folded") -> "Folded":
        """What is known after these classes and others."""
        state = fold.combine(self.state, other.state)
        products = None
        if self.products is not None:
            products = self.products_from(state.m) + other.products_from(state.m)
        ref = self.ref
        if ref is not None and other.ref is not None:
            ref = jnp.where(self.sums[-1] == 0, other.ref, ref)
        sums = [a + b for a, b in zip(self.sums_from(ref), other.sums_from(ref), strict=True)]
        return Folded(state, products, self.t + other.t, sums, ref)

    def products_from(self, m: jax.Array) -> jax.Array:
        """The products relative to the maximum of more classes."""
        assert self.products is not None
        return products_from(m, self.state, self.products)

    def sums_from(self, ref: jax.Array | None) -> list[jax.Array]:
        """The sums of distances from another number of each row."""
        if self.ref is None or ref is None:
            return self.sums
        total, mass, *more = self.sums
        return [total + mass * (fold.reference(self.ref) - fold.reference(ref)), mass, *more]

    def of_all_classes(self, shards: Shards, label: jax.Array) -> "Folded":
        """What is known of all devices' classes, given that of this one's. A label out of range has the score NaN."""
        found = self._over(shards.classes) if shards.classes else self
        return found._replace(t=nan_where(label == -1, found.t))

    def _over(self, axes: Axes) -> "Folded":
        """What is known of the classes of all devices along axes of a mesh."""
        numbers, tree = jax.tree.flatten(self._replace(sums=self.sums_from(self.state.m), ref=None))

        def of_maxima(m: jax.Array, *others: jax.Array) -> list[jax.Array]:
            return [m]

        def of_sums(maxima: Sequence[jax.Array], *numbers: jax.Array) -> list[jax.Array]:
            part = jax.tree.unflatten(tree, numbers)
            if self.ref is not None:
                part = part._replace(ref=part.state.m)
            s = part.state.s * fold.weight(part.state.m, *maxima)
            products = None if part.products is None else part.products_from(*maxima)
            return jax.tree.leaves((s, products, part.t, part.sums_from(*maxima)))

        (m,), sums = exchanged(axes, numbers, of_maxima, of_sums)
        return jax.tree.unflatten(tree, [m, *sums])._replace(ref=None if self.ref is None else m)

    def statistics(self) -> tuple[jax.Array, ...]:
        """The results of `head.formula`, of all classes."""
        others, log_odds = beside_label(self.state, self.t)
        entropy = () if self.products is None else (entropy_of(*self.state, self.products),)
        return others, self.t, log_odds, *entropy, *self.sums_from(self.t)

    def residuals(self, head: Head) -> tuple[jax.Array, ...]:
        """Those of the head, of all classes."""
        of_label = (self.t,) if head.weighted else ()
        return *of_label, *self.state, *(() if self.products is None else (self.products,))


def folded(head: Head, x: jax.Array, label: jax.Array, here: jax.Array, weights: jax.Array | None) -> Folded:
    """What rows of some classes' scores are folded into.

    Args:
      head: which layer.
      x: the scores before the cap.
      label: of each row.
      here: the index of each row's label among these classes.
      weights: of these classes, where the sums are weighted.
    """
    found = (here >= 0) & (here < x.shape[-1])
    of_sums = head.summed and not head.composed and x.shape[-1] > 0
    # The sums are of distances from the label's score. Where that is elsewhere, the first class stands in for it.
    stands_in = ~found & (here != NO_ROW)
    index = jnp.where(stands_in, 0, here) if of_sums else here
    form = RowForm(fold.accumulator(x.dtype), cap=head.cap)
    m, s, t, *rest = RowOperation(head.function.forward, form).on_device(x, index)
    state = fold.State(m, s)
    if of_sums:
        whole = fold.combine(state, fold.from_lse(t))
        state = fold.State(*(jnp.where(stands_in, a, b) for a, b in zip(whole, state, strict=True)))
    products = rest.pop() if head.entropy else None
    ref = t if head.summed else None
    if head.composed:
        ref = jnp.where(found, t, m)
        rest = composed_sums(head, x, label, fold.reference(ref), weights)
    return Folded(state, products, jnp.where(found, t, 0), rest, ref)


@dataclasses.dataclass(frozen=True)
class HeadForward(HeadOperation):
    """The results of `head.formula`, and what the pullback needs if it may be called.

    Attributes:
      head: which layer.
      residual: whether `head.residuals` are results as well, and the scores if they are to be kept.
      before_weight: whether the gradient of weight may be computed next.
    """

    head: Head
    residual: bool
    before_weight: bool = False

    name = "linear_statistics"
    kernel = "statistics"

    @property
    def keep(self) -> bool:
        """Whether the scores are kept."""
        return self.residual and not self.head.recompute

    @property
    def operands(self) -> tuple[HeadArray, ...]:
        """The parameters and the labels."""
        return (*self.head.parameters, HeadArray.LABEL)

    @property
    def results(self) -> tuple[HeadArray, ...]:
        """The statistics, the residuals, and the scores if they are kept."""
        residuals = self.head.residuals if self.residual else ()
        return *self.head.statistics, *residuals, *(HeadArray.SCORES,) * self.keep

    def refusal(self, hidden: jax.core.ShapedArray, weight: jax.core.ShapedArray) -> str | None:
        """As `kernels` says it."""
        return kernels.refusal(self.head, hidden.update(dtype=product_dtype(hidden, weight)), weight)

    def formula(self) -> Function:
        """By way of all scores, without what is for the pullback."""
        return functools.partial(formula, self.head)

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """Those of the formula. What is for the pullback counts as constant."""
        found = super().tangents(primals, tangents)
        types = self.types(*map(jax.typeof, primals))
        return *found, *(SymbolicZero(t.to_tangent_aval()) for t in types[len(found) :])

    def types(self, *operands):
        """The types of the results. They vary over the mesh axes of shard_map as what is computed of the scores."""

        def like(*operands):
            x = scores(self.head, self.head.named(operands))
            statistic = jnp.max(x, axis=-1, initial=-jnp.inf)
            kept = x.astype(product_dtype(*operands[:2]))
            return [kept if kind is HeadArray.SCORES else statistic for kind in self.results]

        return jax.make_jaxpr(like)(*operands).out_avals

    def on_rows(self, shards: Shards, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results on one device. Where classes are sharded, all devices' are combined."""
        head, parameters, label = self.head, self.head.named(operands), operands[-1]
        dtype = product_dtype(*operands[:2])
        wide, classes = fold.accumulator(dtype), operands[1].shape[1]
        parameters[HeadArray.HIDDEN] = parameters[HeadArray.HIDDEN].astype(dtype)
        index = labels_within(label, shards.first_class(classes))
        zero = jnp.zeros(label.shape, wide)
        products = zero if head.entropy else None
        start = Folded(
            fold.identity(label.shape, wide), products, zero, [zero for _ in head.sums], zero if head.summed else None
        )
        kept = jax.lax.empty((label.size, classes), dtype) if self.keep else None

        def with_rows(found: Folded, chunk: Chunk) -> Folded:
            x = scores(head, parameters | {HeadArray.HIDDEN: chunk.of(parameters[HeadArray.HIDDEN])})
            part = folded(head, x, chunk.of(label), chunk.of(index), None)
            return jax.tree.map(chunk.written, found, part)

        def with_classes(carry: tuple[Folded, jax.Array | None], chunk: Chunk) -> tuple[Folded, jax.Array | None]:
            found, kept = carry
            x, here = scores(head, chunk.layer(parameters)), labels_within(index, chunk.begin)
            weights = chunk.of(parameters[HeadArray.CLASS_WEIGHTS]) if head.weighted else None
            found = found.joined(folded(head, x, label, here, weights))
            return found, None if kept is None else chunk.written(kept, x)

        def by_classes() -> tuple[Folded, jax.Array | None]:
            return over_chunks(chunk_size(head, label.size), classes, with_classes, (start, kept))

        def in_registers() -> Folded:
            m, s, t, *rest = kernels.statistics(head, parameters, index)
            products = rest.pop(0) if head.entropy else None
            return Folded(fold.State(m, s), products, t, rest, m if head.summed else None)

        on_gpu = None
        if self.refusal(jax.typeof(operands[0]), jax.typeof(operands[1])) is None:
            on_gpu = in_registers
        elif rows := self._row_chunk(operands[1], label.size, dtype):
            on_gpu = functools.partial(over_rows, rows, label.size, with_rows, start)
        if on_gpu:
            found = jax.lax.platform_dependent(cuda=on_gpu, default=lambda: by_classes()[0])
        else:
            found, kept = by_classes()
        found = found.of_all_classes(shards, label)
        residuals = found.residuals(head) if self.residual else ()
        return *found.statistics(), *residuals, *([] if kept is None else [kept])

    def _row_chunk(self, weight: jax.Array, rows: int, dtype: jnp.dtype) -> int | None:
        """How many rows are taken at a time, with all classes; None to take all rows, and chunks of the classes."""
        if not self.before_weight or self.keep or self.head.composed or self.head.chunk_size is not None:
            return None
        if weight.dtype != dtype:  # each chunk would convert all of weight
            return None
        return row_chunk_within(weight, rows, fold.accumulator(dtype).itemsize)
