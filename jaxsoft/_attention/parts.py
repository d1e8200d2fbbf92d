"""The queries of a call in parts, each with the keys that its limits leave: so plain JAX skips what a causal rule or a
window excludes, as kernels skip tiles. A part is a call of its own, of fewer queries and keys.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax

from jaxsoft._attention.blocks import keys_of_block
from jaxsoft._attention.form import DIMENSIONS, INDICES, AttentionForm, Extra
from jaxsoft._attention.masks import Band

# Under a causal rule n parts compute (1 + 1 / n) / 2 of the scores, in n programs.
MOST = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """Some queries and keys of a call.

    Attributes:
      form: the part's. Its limits are shifted to where its queries and keys begin.
      queries, keys: which of the call's.
    """

    form: AttentionForm
    queries: slice
    keys: slice

    def places(self, shape: Sequence[int], dims: str) -> tuple[slice, ...]:
        """Where the part lies in an array whose dimensions have these letters. Those of scores may have length 1."""
        cut, of_scores = {"t": self.queries, "s": self.keys}, "t" in dims and "s" in dims
        return tuple(
            slice(None) if letter not in cut or (of_scores and size == 1) else cut[letter]
            for letter, size in zip(dims, shape, strict=True)
        )

    def of(self, x: jax.Array, dims: str) -> jax.Array:
        """The part of an array whose dimensions have these letters."""
        for axis, place in enumerate(self.places(x.shape, dims)):
            if place != slice(None):
                x = jax.lax.slice_in_dim(x, place.start, place.stop, axis=axis)
        return x

    def operands(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The part of the operands that a form names."""
        found = []
        for name, x in zip(self.form.names, operands, strict=False):
            begin = {"t": self.queries.start, "s": self.keys.start}.get(INDICES.get(name, ""))
            found.append(self.of(x, DIMENSIONS[name]) if begin is None else x - begin)
        return found


def parts(form: AttentionForm, operands: Sequence[jax.Array], platform: str | None) -> list[Part]:
    """The parts of a call; one if there are no limits, or if where they lie is not known when it is compiled."""
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    band = Band(form.left, form.right)
    if not (band.limits and Extra.OFFSET not in form.extras and isinstance(queries, int) and isinstance(keys, int)):
        return [Part(form, slice(0, queries), slice(0, keys))]
    count = max(1, min(MOST, queries // keys_of_block(queries, platform)))
    borders = [queries * i // count for i in range(count + 1)]
    found = []
    for begin, end in itertools.pairwise(borders):
        first, last = band.key_range(begin, end - begin)
        first = 0 if first is None else min(max(first, 0), keys)
        last = keys if last is None else max(min(last, keys), first)
        of_part = band.part(begin, first)
        limits = dataclasses.replace(form, left=of_part.left, right=of_part.right)
        found.append(Part(limits, slice(begin, end), slice(first, last)))
    return found
