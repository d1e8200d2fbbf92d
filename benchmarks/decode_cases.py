"""What benchmarks/decode.py measures: calls of attention of few queries of each sequence over many keys, as data.

A call is followed by the next one within one compiled function, as the layers of a model follow each other: the output
of one is the query of the next, and each has keys and values of its own, as many in turn as do not fit the cache.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft

CALLS = 16  # of a chain
ROTATION_BYTES = 2**28  # of the keys and values that take turns, if they are enough for that: more than the caches hold
DTYPE = "bfloat16"
SCALES = (0.5, 2.0)  # by which 8-bit keys and values are multiplied
PEERS = ("cudnn", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
      group: one of GROUPS.
      batch, queries, heads, key_heads, size: the query is (batch, queries, heads, size).
      keys: of the longest sequence.
      ragged: whether the sequences have different lengths, from all keys down to an eighth of them.
      page: how many keys a page has; 0 where keys and values lie in one piece.
      pages_dtype: of the pages.
      rotates: whether there are several keys and values that take turns.
    """

    group: str
    batch: int
    queries: int
    heads: int
    key_heads: int
    size: int
    keys: int
    ragged: bool = False
    page: int = 0
    pages_dtype: str = DTYPE
    rotates: bool = True

    def __str__(self) -> str:
        """The case in words."""
        words = [f"{self.batch}x{self.queries}x{self.heads}/{self.key_heads}x{self.size}, {self.keys} keys"]
        if self.ragged:
            words.append("ragged")
        if self.page:
            words.append(f"pages of {self.page}")
        if self.pages_dtype != DTYPE:
            words.append(self.pages_dtype)
        return ", ".join(words)

    def lengths(self) -> np.ndarray:
        """How many keys each sequence has."""
        least = self.keys // 8 if self.ragged else self.keys
        return np.linspace(self.keys, least, self.batch).astype(np.int32)

    def bytes(self) -> int:
        """Of the keys and values that count: they must be read once."""
        return 2 * int(self.lengths().sum()) * self.key_heads * self.size * jnp.dtype(self.pages_dtype).itemsize

    def copies(self) -> int:
        """How many keys and values take turns."""
        return min(CALLS, math.ceil(ROTATION_BYTES / self.bytes())) if self.rotates else 1


def implementations(case: Case) -> list[str]:
    """What is compared. Of pages, peers attend to the keys and values that are gathered from them."""
    if case.page:
        return ["cudnn", "jaxsoft", "xla"]
    return ["cudnn", "xla", "jaxsoft", "pallas"]


def operands(case: Case) -> dict[str, jax.Array | list[jax.Array]]:
    """The query, the keys and values that take turns, the lengths, and of pages the table."""
    b, t, n, k, h, s = case.batch, case.queries, case.heads, case.key_heads, case.size, case.keys
    shape = (b * (s // case.page), case.page, k, h) if case.page else (b, s, k, h)
    seeds = jax.random.split(jax.random.key(0), 1 + 2 * case.copies())

    both = [_normal(seed, shape, case.pages_dtype) for seed in seeds[1:]]
    found = {
        "query": _normal(seeds[0], (b, t, n, h), DTYPE),
        "keys": both[::2],
        "values": both[1::2],
        "lengths": jnp.asarray(case.lengths()),
    }
    if case.page:  # pages of a sequence lie anywhere
        order = np.random.default_rng(0).permutation(shape[0]).astype(np.int32)
        found["table"] = jnp.asarray(order.reshape(b, s // case.page))
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, DTYPE).astype(dtype)


def function(case: Case, name: str) -> Callable[..., jax.Array]:
    """(query, keys, values, lengths, table) -> the output, by an implementation."""

    def theirs(query, keys, values, lengths, table):
        if case.page:
            shape = (case.batch, case.keys, case.key_heads, case.size)
            keys, values = (x[table].reshape(shape).astype(DTYPE) for x in (keys, values))
        if case.pages_dtype != DTYPE:  # powers of 2
            keys, values = keys * SCALES[0], values * SCALES[1]
        given = {"key_value_seq_lengths": lengths} if case.ragged else {}
        return jax.nn.dot_product_attention(query, keys, values, implementation=name, **given)

    def ours(query, keys, values, lengths, table):
        implementation = None if name == "jaxsoft" else name
        if case.page:
            eight = case.pages_dtype != DTYPE
            scales = dict(zip(("key_scale", "value_scale"), SCALES, strict=True)) if eight else {}
            return jaxsoft.paged_attention(query, keys, values, table, lengths, implementation=implementation, **scales)
        given = {"key_value_seq_lengths": lengths} if case.ragged else {}
        return jaxsoft.dot_product_attention(query, keys, values, implementation=implementation, **given)

    peer = name == "cudnn" or (name == "xla" and not case.page)
    return theirs if peer else ours


def chain(case: Case, name: str, calls: int = CALLS) -> Callable[..., jax.Array]:
    """So many calls, each with the output of the last as its query."""
    attend = function(case, name)

    def run(arrays):
        query, table = arrays["query"], arrays.get("table")
        for i in range(calls):
            j = i % case.copies()
            query, table = jax.lax.optimization_barrier((query, table))  # else pages would be gathered once for all
            query = attend(query, arrays["keys"][j], arrays["values"][j], arrays["lengths"], table)
        return query

    return run


def error(case: Case, arrays: dict, result: jax.Array) -> float:
    """The norm of the error over that of the result, the largest of some sequences and heads, against float64."""
    errors = []
    for row, head in {(0, 0), (case.batch - 1, case.heads - 1), (case.batch // 2, case.heads // 2)}:
        length, key_head = int(case.lengths()[row]), head // (case.heads // case.key_heads)
        query, keys, values = (
            np.asarray(x).astype(np.float64)
            for x in (
                arrays["query"][row, :, head],
                _of_sequence(case, arrays, "keys", row, key_head),
                _of_sequence(case, arrays, "values", row, key_head),
            )
        )
        if case.pages_dtype != DTYPE:
            keys, values = keys * SCALES[0], values * SCALES[1]
        z = query @ keys[:length].T / math.sqrt(case.size)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        expected = p / p.sum(axis=1, keepdims=True) @ values[:length]
        found = np.asarray(result[row, :, head]).astype(np.float64)
        errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return float(np.max(errors))  # NaN if one is


def _of_sequence(case: Case, arrays: dict, name: str, row: int, head: int) -> jax.Array:
    x = arrays[name][0]
    if not case.page:
        return x[row, :, head]
    return x[arrays["table"][row], :, head].reshape(case.keys, case.size)


# (batch, heads, heads of keys, keys): caches of a GiB or so, that of one long sequence, and the longest.
LARGE = ((64, 32, 8, 4096), (8, 32, 8, 32768), (1, 32, 8, 131072), (1, 64, 8, 524288))
SMALL = ((2, 8, 2, 1024), (1, 8, 2, 4096))  # on a CPU


def _cases(
    shapes: Sequence[tuple[int, int, int, int]], group: str, queries: int = 1, size: int = 128, **more
) -> Iterator[Case]:
    for batch, heads, key_heads, keys in shapes:
        yield Case(group, batch, queries, heads, key_heads, size, keys, **more)


def one(quick: bool) -> Iterator[Case]:
    """One query of each sequence."""
    yield from _cases(LARGE[:2] if quick else LARGE, "one")


def several(quick: bool) -> Iterator[Case]:
    """Sixteen queries, as where a draft is verified."""
    yield from _cases(LARGE[:1] if quick else LARGE, "several", queries=16)


def paged(quick: bool) -> Iterator[Case]:
    """Keys and values in pages, of 16 bits and of 8."""
    for page in (64,) if quick else (16, 64, 256):
        yield from _cases(LARGE[:1] if quick else LARGE[:3], "paged", page=page)
    for dtype in () if quick else ("float8_e4m3fn", "float8_e5m2"):
        yield from _cases(LARGE[:2], "paged", page=64, pages_dtype=dtype)
    if not quick:
        yield from _cases(LARGE[:2], "paged", queries=16, page=64)


def ragged(quick: bool) -> Iterator[Case]:
    """Sequences of different lengths."""
    shapes = LARGE[:1] if quick else (*LARGE[:2], (256, 32, 8, 2048))
    yield from _cases(shapes, "ragged", ragged=True)
    yield from _cases(shapes, "ragged", ragged=True, page=64)


def short(quick: bool) -> Iterator[Case]:
    """Short caches, where what a launch takes counts."""
    for keys in (512,) if quick else (64, 512, 2048, 8192):
        yield from _cases([(batch, 32, 8, keys) for batch in ((1,) if quick else (1, 8, 32))], "short")


def heads(quick: bool) -> Iterator[Case]:
    """Other numbers and sizes of heads."""
    for n, k in ((32, 32),) if quick else ((32, 32), (64, 8), (32, 1), (128, 1)):
        yield from _cases([(16, n, k, 8192)], "heads")
    for size in () if quick else (64, 256):
        yield from _cases([(16, 32, 8, 8192)], "heads", size=size)


def on_cpu(quick: bool) -> Iterator[Case]:
    """What a CPU computes in reasonable time."""
    shapes = SMALL[:1] if quick else SMALL
    yield from _cases(shapes, "cpu", size=64)
    yield from _cases(shapes, "cpu", size=64, page=64)


def traffic() -> list[Case]:
    """The cases of which the bytes are counted that they read."""
    found = [*_cases(LARGE[:3], "one"), *_cases(LARGE[:1], "several", queries=16), *_cases(LARGE[:1], "paged", page=64)]
    return [dataclasses.replace(case, rotates=False) for case in found]


def record(case: Case) -> dict:
    """What is written of every case."""
    return {
        "group": case.group,
        "dtype": DTYPE,
        "shape": [case.batch, case.queries, case.heads, case.size],
        "key_heads": case.key_heads,
        "keys": case.keys,
        "ragged": case.ragged,
        "page": case.page,
        "pages_dtype": case.pages_dtype,
    }


GROUPS = {"one": one, "several": several, "paged": paged, "ragged": ragged, "short": short, "heads": heads}
CPU_GROUPS = {"cpu": on_cpu}
