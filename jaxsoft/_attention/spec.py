"""The two operations of attention, forward and pullback: what their operands and results are, for vmap and the mesh."""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention import exchange, packed, ring, xla
from jaxsoft._attention.exchange import over_heads
from jaxsoft._attention.form import BASE, DIMENSIONS, AttentionForm
from jaxsoft._attention.layouts import in_order
from jaxsoft._core.implementations import Names
from jaxsoft._core.mesh import Axes, automatically
from jaxsoft._core.operation import Function
from jaxsoft.fold import accumulator

# The operands that have the pages of all sequences.
PAGES = ("key_pages", "value_pages")
# What the forward operation always returns.
RESULTS = ("output", "lse", "lse_residual")
# Operands that always have the whole batch. The others may have length 1 there.
WHOLE = (
    *("query", "key", "value", "page_table", "state_output", "state_lse"),
    *("output", "lse", "lse_residual", "output_residual", "block", "delta", "cotangent"),
    *("query_sum", "key_sum", "value_sum"),
)


@dataclasses.dataclass(frozen=True)
class AttentionSpec(abc.ABC):
    """What an implementation computes.

    Attributes:
      form: of the call.
    """

    form: AttentionForm
    name = "attention"

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names of the results. A gradient has that of its operand."""

    def formula(self, platform: str | None = None) -> Function:
        """The operation in plain JAX, for a platform if it is known."""
        shards = self.form.shards
        if shards is not None and shards.inside:
            # To derivatives the block is a constant, and not what it was made of.
            run = lambda operation, *v: operation.formula(platform)(*v)  # noqa: E731
            return self.on_shards((shards.axis,), run, "xla", fresh=True)
        if self.form.packed:
            return packed.served(isinstance(self, AttentionPullback), self.separate.formula(platform))
        function = self.on_one_device(self.whole._plain(platform))

        def call(*operands):
            shardings = tuple(t.sharding for t in self.types(*map(jax.typeof, operands)))
            return automatically(function, shardings, *operands)

        return call

    @property
    def whole(self) -> "AttentionSpec":
        """The same operation for a sequence that is whole and in order."""
        return dataclasses.replace(self, form=self.form.whole)

    @property
    def separate(self) -> "AttentionSpec":
        """The same operation for keys and values that are not packed."""
        return dataclasses.replace(self, form=dataclasses.replace(self.form, packed=False))

    def on_one_device(self, function: Function) -> Function:
        """The operation on one device that has all of a sequence in its layout, given that for one in order."""
        if self.form.shards is None:
            return function
        return self._with_block(in_order(self.form.shards, *self._dimensions, function))

    def on_shards(self, axes: Axes, run: Function, implementation: Names, fresh: bool = False) -> Function:
        """The operation on one device that has a part of a sequence.

        Args:
          axes: the axes of the mesh over which it is sharded.
          run: (operation, *operands) -> the results of one on one device.
          implementation: of these, if it was named.
          fresh: whether no block is kept from the forward pass for the gradients.
        """
        assert self.form.shards is not None
        if fresh:
            without = dataclasses.replace(self, form=self.form.without_block)
            return self._with_block(without.on_shards(axes, run, implementation))
        if self.form.shards.method == "all_to_all":
            return over_heads(self.form.shards, axes, *self._dimensions, lambda *v: run(self.whole, *v))
        return self._by_blocks(axes, run, implementation)

    @abc.abstractmethod
    def _with_block(self, function: Function) -> Function:
        """The operation with the block that is kept for gradients, if one is, given that without."""

    @property
    def _dimensions(self) -> tuple[list[str], list[str]]:
        """The dimensions of the operands and of the results, without the block."""
        both = ([name for name in names if name != "block"] for names in (self.operands, self.results))
        operands, results = ([DIMENSIONS[name] for name in names] for names in both)
        return operands, results

    @abc.abstractmethod
    def _by_blocks(self, axes: Axes, run: Function, implementation: Names) -> Function:
        """`on_shards`, where each device attends to the keys of others with its own queries."""

    @abc.abstractmethod
    def _plain(self, platform: str | None) -> Function:
        """The formula for operands that are not sharded, or sharded as XLA likes."""

    @abc.abstractmethod
    def types(self, *operands: jax.core.ShapedArray) -> Sequence[jax.core.ShapedArray]:
        """The types of the results, given those of the operands."""


def _block(form: AttentionForm) -> tuple[str, ...]:
    """The name of the block of keys and values that is kept for gradients, if one is."""
    return ("block",) if form.shards is not None and form.shards.keeps_block else ()


@dataclasses.dataclass(frozen=True)
class AttentionForward(AttentionSpec):
    """(query, key, value, *extras) -> the output, the log-sum-exp and its residual, and if it is rounded the output's
    residual; and if the form says so the block of keys and values (2, B, S, K, H or D) that arrived last.

    Attributes:
      residual: whether the log-sum-exp is used, which is NaN if an implementation is faster without it.
    """

    residual: bool = True

    @property
    def operands(self) -> tuple[str, ...]:
        """Query, key, value and the extras."""
        return self.form.names

    @property
    def results(self) -> tuple[str, ...]:
        """The output (B, T, N, D), the log-sum-exp (B, N, T) and its residual, and then, if there are any, the largest
        scores (B, N) and the output's residual.
        """
        largest = ("max_logits",) if self.form.returns_max_logits else ()
        rounded = ("output_residual",) if self.form.rounded else ()
        return *RESULTS, *largest, *rounded, *_block(self.form)

    def _plain(self, platform: str | None) -> Function:
        """As the operation, in plain JAX."""
        return xla.forward(self.form, platform)

    def _by_blocks(self, axes: Axes, run: Function, implementation: Names) -> Function:
        """As the operation."""

        def of_form(form: AttentionForm, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return run(dataclasses.replace(self, form=form, residual=True), *operands)

        if self.form.shards.method == "ring":  # type: ignore[union-attr]
            return ring.forward(self.form, axes, of_form, implementation)
        return exchange.forward(self.form, axes, of_form)

    def _with_block(self, function: Function) -> Function:
        """As the operation. Of one device it is its own."""
        if not _block(self.form):
            return function
        return lambda *operands: (*function(*operands), packed.pack(*operands[1:BASE]))

    def types(self, *operands):
        """The types of the results, sharded as query is, over explicit axes of a mesh."""

        def like(*operands):
            query, _, value = operands[:BASE]
            rows = jnp.max(query.astype(accumulator(query.dtype)), axis=-1, initial=0)
            rows = rows + sum(jnp.sum(v.astype(rows.dtype)) for v in operands)  # varies wherever an operand does
            output = jnp.broadcast_to(rows[..., None], (*rows.shape, value.shape[-1]))
            rows = jnp.moveaxis(rows, 1, 2)
            more = [jnp.sum(rows, axis=-1)] if self.form.returns_max_logits else []
            if self.form.rounded:
                more.append(output.astype(query.dtype))
            if _block(self.form):
                more.append(packed.pack_type(*operands[1:BASE]))
            return output.astype(self.form.dtype), rows, rows, *more

        return jax.make_jaxpr(like)(*operands).out_avals


@dataclasses.dataclass(frozen=True)
class PagedAttention(AttentionForward):
    """(query, pages of keys, pages of values, *extras) -> the output, the log-sum-exp and its residual."""

    name = "paged_attention"

    @property
    def operands(self) -> tuple[str, ...]:
        """Query, the pages and the extras."""
        query, *_ = names = self.form.names
        return (query, *PAGES, *names[BASE:])


@dataclasses.dataclass(frozen=True)
class AttentionPullback(AttentionSpec):
    """(query, key, value, *extras, output, lse, lse_residual, delta, cotangent, *sums) -> gradients by some operands.

    The cotangent is that of the output, in the dtype of query, or in the accumulator's where it may be out of the
    query's range, and delta is the sum of its products with the output as it was before it was rounded, less the
    cotangent of the log-sum-exp.

    Attributes:
      wrt: the operands whose gradients are asked for, some of query, key, value and bias, in this order.
      wide: whether they are in the accumulator's dtype, and not in those of the operands.
      sums: those of query, key and value, in this order, whose gradients are added to others, which follow the
        cotangent. They are then wide.
    """

    wrt: tuple[str, ...]
    wide: bool = False
    sums: tuple[str, ...] = ()
    name = "attention_gradients"

    def __post_init__(self):
        """Checks what is asked for."""
        assert self.wide or not self.sums, "gradients that are added to others are wide"
        assert {*self.sums} <= {*self.wrt} - {"bias"}, "sums are of gradients that are asked for"

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands of the call, what is known of the results, and what gradients are added to."""
        sums = (f"{name}_sum" for name in self.sums)
        return (*self.form.names, *RESULTS, "delta", "cotangent", *_block(self.form), *sums)

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients."""
        return self.wrt

    def _plain(self, platform: str | None) -> Function:
        """As the operation, in plain JAX."""
        plain = xla.pullback(self.form, self.wrt, platform, self.wide)
        return xla.with_sums(self.wrt, self.sums, plain) if self.sums else plain

    def _by_blocks(self, axes: Axes, run: Function, implementation: Names) -> Function:
        """As the operation."""

        def of_form(form: AttentionForm, sums: tuple[str, ...], *operands: jax.Array) -> tuple[jax.Array, ...]:
            return run(dataclasses.replace(self, form=form, wide=True, sums=sums), *operands)

        if self.form.shards.method == "ring":  # type: ignore[union-attr]
            return ring.pullback(self.form, self.wrt, axes, of_form, implementation)
        return exchange.pullback(self.form, self.wrt, axes, of_form)

    def _with_block(self, function: Function) -> Function:
        """As the operation. The block comes last, and is not needed."""
        return (lambda *operands: function(*operands[:-1])) if _block(self.form) else function

    def types(self, *operands):
        """The types of the gradients, which are those of the operands, but for the dtype of wide ones."""
        wrt = [name for name in self.wrt if name != "value" or not self.form.packed]
        found = [operands[self.form.place(name)] for name in wrt]
        return [t.update(dtype=accumulator(operands[0].dtype)) for t in found] if self.wide else found
