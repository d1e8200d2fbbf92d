"""The queries of a call in parts, each with the keys that its limits leave: so plain JAX skips what a causal rule or a
window excludes, as kernels skip tiles. A part is a call of its own, of fewer queries and keys.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax

from jaxsoft._attention.blocks import keys_of_block
from jaxsoft._attention.form import BASE, Extra, Form

# Under a causal rule n parts compute (1 + 1 / n) / 2 of the scores, in n programs.
MOST = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """Some queries and keys of a call.

    Attributes:
      form: the part's. Its limits are shifted to where its queries and keys begin.
      queries, keys: which of the call's.
    """

    form: Form
    queries: slice
    keys: slice

    def of_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array along an axis of queries."""
        return jax.lax.slice_in_dim(x, self.queries.start, self.queries.stop, axis=axis)

    def of_keys(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array along an axis of keys, in which there may be none."""
        return jax.lax.slice_in_dim(x, self.keys.start, self.keys.stop, axis=axis)

    def of_scores(self, x: jax.Array) -> jax.Array:
        """The part of an array (..., queries, keys), each of which may have length 1 for all of them."""
        x = x if x.shape[2] == 1 else self.of_queries(x, 2)
        return x if x.shape[3] == 1 else self.of_keys(x, 3)

    def operands(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The part of the operands that a form names."""
        query, key, value = operands[:BASE]
        found = [self.of_queries(query, 1), self.of_keys(key, 1), self.of_keys(value, 1)]
        for extra, x in self.form.named(operands).items():
            if extra in (Extra.BIAS, Extra.MASK):
                x = self.of_scores(x)
            elif extra is Extra.QUERY_SEGMENTS:
                x = self.of_queries(x, 1)
            elif extra is Extra.KEY_SEGMENTS:
                x = self.of_keys(x, 1)
            elif extra in (Extra.QUERY_BEGINS, Extra.QUERY_LENGTHS):
                x = x - self.queries.start
            elif extra is Extra.KEY_LENGTHS:
                x = x - self.keys.start
            elif extra is Extra.STATE_OUTPUT:
                x = self.of_queries(x, 1)
            elif extra is Extra.STATE_LSE:
                x = self.of_queries(x, 2)
            found.append(x)
        return found


def parts(form: Form, operands: Sequence[jax.Array], platform: str | None) -> list[Part]:
    """The parts of a call; one if there are no limits, or if where they lie is not known when it is compiled."""
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    limited = (form.left is not None or form.right is not None) and Extra.OFFSET not in form.extras
    if not (limited and isinstance(queries, int) and isinstance(keys, int)):
        return [Part(form, slice(0, queries), slice(0, keys))]
    count = max(1, min(MOST, queries // keys_of_block(queries, platform)))
    borders = [queries * i // count for i in range(count + 1)]
    found = []
    for begin, end in itertools.pairwise(borders):
        first = 0 if form.left is None else min(max(begin - form.left, 0), keys)
        last = keys if form.right is None else max(min(end + form.right, keys), first)
        shift = begin - first  # from the first key of the part to the position of its first query
        left = None if form.left is None else form.left - shift
        right = None if form.right is None else form.right + shift
        limits = dataclasses.replace(form, left=left, right=right)
        found.append(Part(limits, slice(begin, end), slice(first, last)))
    return found
