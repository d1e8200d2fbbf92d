"""The two operations of attention, forward and pullback: what their operands and results are, for vmap and the mesh."""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention import xla
from jaxsoft._attention.form import BASE, Form
from jaxsoft._core.mesh import automatically
from jaxsoft.fold import accumulator

# The dimensions of each operand and result, by name: a letter each, as in `jaxsoft._attention.form`. The first one is
# always the batch, but for what all sequences have in common: pages and their scales. "n" are the heads of queries, and
# "k" those of keys.
DIMENSIONS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "mask": "bnts",
    "query_segments": "bt",
    "key_segments": "bs",
    "query_lengths": "b",
    "key_lengths": "b",
    "offset": "b",
    "sinks": "bn",
    "key_pages": "pikh",
    "value_pages": "pikd",
    "page_table": "bl",
    "key_scale": "k",
    "value_scale": "k",
    "output": "btnd",
    "lse": "bnt",
    "rest": "bnt",
    "output_rest": "btnd",
    "delta": "bnt",
    "cotangent": "btnd",
}
# The operands that have the pages of all sequences.
PAGES = ("key_pages", "value_pages")
# What the forward operation returns, apart from the rest of an output that is rounded.
RESULTS = ("output", "lse", "rest")
# Operands that always have the whole batch. The others may have length 1 there.
WHOLE = ("query", "key", "value", "page_table", "output", "lse", "rest", "output_rest", "delta", "cotangent")


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """What an implementation computes.

    Attributes:
      form: of the call.
    """

    form: Form

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names of the results. A gradient has that of its operand."""

    def formula(self, platform: str | None = None) -> xla.Function:
        """The operation in plain JAX, for a platform if it is known."""
        function = self._plain(platform)

        def call(*operands):
            shardings = tuple(t.sharding for t in self.types(*map(jax.typeof, operands)))
            return automatically(function, shardings, *operands)

        return call

    @abc.abstractmethod
    def _plain(self, platform: str | None) -> xla.Function:
        """The formula for operands that are not sharded, or sharded as XLA likes."""

    @abc.abstractmethod
    def types(self, *operands: jax.core.ShapedArray) -> Sequence[jax.core.ShapedArray]:
        """The types of the results, given those of the operands."""


@dataclasses.dataclass(frozen=True)
class Forward(Operation):
    """(query, key, value, *extras) -> the output, the log-sum-exp and its rest, and if it is rounded the output's rest.

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
        """The output (B, T, N, D), the log-sum-exp (B, N, T) and its rest, and the output's rest, if it has one."""
        return (*RESULTS, "output_rest") if self.form.rounded else RESULTS

    def _plain(self, platform: str | None) -> xla.Function:
        """As the operation, in plain JAX."""
        return xla.forward(self.form, platform)

    def types(self, *operands):
        """The types of the results, sharded as query is, over explicit axes of a mesh."""

        def like(*operands):
            query, _, value = operands[:BASE]
            rows = jnp.max(query.astype(accumulator(query.dtype)), axis=-1, initial=0)
            rows = rows + sum(jnp.sum(v.astype(rows.dtype)) for v in operands)  # varies wherever an operand does
            output = jnp.broadcast_to(rows[..., None], (*rows.shape, value.shape[-1]))
            rows = jnp.moveaxis(rows, 1, 2)
            lost = [output.astype(query.dtype)] if self.form.rounded else []
            return output.astype(self.form.dtype), rows, rows, *lost

        return jax.make_jaxpr(like)(*operands).out_avals


@dataclasses.dataclass(frozen=True)
class Paged(Forward):
    """(query, pages of keys, pages of values, *extras) -> the output, the log-sum-exp and its rest."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Query, the pages and the extras."""
        query, *_ = names = self.form.names
        return (query, *PAGES, *names[BASE:])


@dataclasses.dataclass(frozen=True)
class Pullback(Operation):
    """(query, key, value, *extras, output, lse, rest, delta, cotangent) -> the gradients of some operands.

    The cotangent is that of the output, in the dtype of query, and delta is the sum of its products with the output as
    it was before it was rounded, less the cotangent of the log-sum-exp.

    Attributes:
      moving: the operands whose gradients are asked for, some of query, key, value and bias, in this order.
    """

    moving: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands of the call, and what is known of the results."""
        return (*self.form.names, *RESULTS, "delta", "cotangent")

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients."""
        return self.moving

    def _plain(self, platform: str | None) -> xla.Function:
        """As the operation, in plain JAX."""
        return xla.pullback(self.form, self.moving, platform)

    def types(self, *operands):
        """The types of the gradients, which are those of the operands."""
        return [operands[self.form.place(name)] for name in self.moving]
