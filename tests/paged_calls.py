"""Calls of attention over pages, and of writing into pages, beside their definitions in float64.

Pages hold NaN wherever no sequence has a key: in pages that nobody has, and in slots past the lengths. Entries of the
table past the lengths are out of range or pages of others, and so may others be. Lengths may be past the table.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import attention_calls
import definitions
import numpy as np
from cases import Case

import jaxsoft


class Sizes(NamedTuple):
    """The letters of the shapes, as in the docstring of jaxsoft.paged_attention; pages of a sequence and their size."""

    b: int = 3
    t: int = 3
    n: int = 4
    k: int = 2
    h: int = 8
    d: int = 6
    number: int = 3
    size: int = 3
    pages: int = 11

    @property
    def s(self) -> int:
        """How many keys a sequence has room for."""
        return self.number * self.size


SMALL = Sizes()

# Of attention's options those that there are, and more.
MOVING = {name: v for name, v in attention_calls.MOVING.items() if name != "bias of scores"} | {
    "key scale": lambda rng, z: {"key_scale": rng.uniform(0.5, 2, z.k)},
    "value scale": lambda rng, z: {"value_scale": np.array(0.7)},
}
FIXED = {name: v for name, v in attention_calls.FIXED.items() if name not in ("key lengths", "segments")} | {
    "shared": lambda rng, z: {"shared": True},
    "out of range": lambda rng, z: {"holes": True},
    "past the table": lambda rng, z: {"past": True},
    "lengths": lambda rng, z: {"lengths": np.resize([z.s + 1, 0, z.s, 1, -1, 2**31 - 1], z.b)},
}
OPTIONS = (*MOVING, *FIXED)


def table_and_lengths(
    rng, z: Sizes, shared=False, holes=False, past=False, lengths=None
) -> tuple[np.ndarray, np.ndarray]:
    """A page table and lengths.

    Args:
      rng: what numbers are drawn from.
      z: the sizes.
      shared: whether sequences have pages in common; else there are as many as they need.
      holes: whether some entries that are used are out of range.
      past: whether the table may have no room for the last tokens of a sequence.
      lengths: of the sequences, if they are not drawn.
    """
    table = rng.integers(0, z.pages, (z.b, z.number))
    if not shared:
        table = rng.permutation(max(z.pages, table.size))[: table.size].reshape(table.shape)
        table = np.where(table < z.pages, table, -1)
    most = z.s + z.t + 2 if past else z.s
    lengths = rng.integers(1, most + 1, z.b) if lengths is None else lengths
    if holes:
        table = np.where(rng.random(table.shape) < 0.4, rng.choice([-1, -7, z.pages, 2**31 - 1], table.shape), table)
    unused = np.arange(z.number) * z.size >= lengths[:, None]
    anything = rng.choice([-1, 2**31 - 1, z.pages, *range(z.pages)], table.shape)
    return np.where(unused, anything, table).astype(np.int32), lengths.astype(np.int32)


def stale(pages: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The pages with NaN where no sequence has a key."""
    (number, size), used = pages.shape[:2], np.zeros(pages.shape[:2], bool)
    for entries, length in zip(table, lengths, strict=True):
        for j in range(min(max(length, 0), size * len(entries))):
            if 0 <= entries[j // size] < number:
                used[entries[j // size], j % size] = True
    return np.where(used[:, :, None, None], pages.astype(np.float64), np.nan).astype(pages.dtype)


def case(
    options: Sequence[str] = (),
    sizes: Sizes = SMALL,
    dtype=np.float64,
    implementation: str | None = None,
    seed: int = 0,
    of_pages=None,
) -> Case:
    """A call with these options, of which no two set one argument, as a function of its floating-point operands."""
    rng = np.random.default_rng(seed)
    z = sizes
    moving, fixed = attention_calls.arguments_of(options, rng, z, (MOVING, FIXED))
    how = {name: fixed.pop(name) for name in ("shared", "holes", "past", "lengths") if name in fixed}
    table, lengths = table_and_lengths(rng, z, **how)
    shapes = (z.pages, z.size, z.k, z.h), (z.pages, z.size, z.k, z.d)
    pages = [stale(rng.standard_normal(shape), table, lengths).astype(of_pages or dtype) for shape in shapes]
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    extra = [v.astype(dtype if name == "bias" else wide) for name, v in moving.items()]

    arguments = functools.partial(attention_calls.named_arguments, moving)

    def ours(query, key_pages, value_pages, *values):
        given = arguments(values) | fixed | {"implementation": implementation, "return_residual": True}
        return jaxsoft.paged_attention(query, key_pages, value_pages, table, lengths, **given)

    def theirs(query, key_pages, value_pages, *values):
        given = arguments(values) | fixed
        return definitions.paged_attention(query, key_pages, value_pages, table, lengths, **given)

    what = f"paged attention({', '.join(options)}), {sizes}, {implementation}"
    return Case(what, ours, theirs, [query, *pages, *extra])


def conflict(options: Sequence[str]) -> bool:
    """Whether two options set the same argument."""
    return attention_calls.conflict(options, SMALL, (MOVING, FIXED))


def writing(sizes: Sizes = SMALL, dtype=np.float64, seed: int = 0, scales: bool = False, **how) -> Case:
    """Writing the last tokens of each sequence, as a function of pages, keys and values, and perhaps their scales."""
    rng = np.random.default_rng(seed)
    z = sizes
    table, lengths = table_and_lengths(rng, z, **how)
    shapes = [(z.pages, z.size, z.k, size) for size in (z.h, z.d)] + [(z.b, z.t, z.k, size) for size in (z.h, z.d)]
    operands = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    counts = np.resize([z.t, z.t - 1, 0], z.b)
    wide = np.float64 if dtype == np.float64 else np.float32
    operands += [rng.uniform(0.5, 2, z.k).astype(wide), np.array(0.7, wide)] * scales

    def ours(*operands):
        given = dict(zip(("key_scale", "value_scale"), operands[4:], strict=False))
        return jaxsoft.write_pages(*operands[:4], table, lengths, query_seq_lengths=counts, **given)

    def theirs(*operands):
        by_heads = [np.reshape(s, (-1, 1)) if isinstance(s, np.ndarray) else s.reshape(-1, 1) for s in operands[4:]]
        given = {"scales": by_heads} if by_heads else {}
        return definitions.write_pages(*operands[:4], table, lengths, counts=counts, **given)

    return Case(f"write_pages({how}), {sizes}", ours, theirs, operands)
