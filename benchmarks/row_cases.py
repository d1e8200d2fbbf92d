"""What is measured: every case as data, and the bytes that it must move.

A case is one function of jaxsoft (or jax.nn's of that name), forward or backward, over one axis of one array:

  rows    many rows, of every length: 1 GiB of input on a GPU
  short   rows of less than a kilobyte
  odd     lengths that fit no vector, each beside the nearest multiple of 64
  few     too few rows to fill a GPU by themselves, as in a chain of dependent calls inside one compiled function
  masked  attention scores with a mask, a bias or the causal rule, and temperatures
  axis    an axis that is not the last

What is counted: an array that is as large as x, each time it must be read or written; masks, biases and scales once, in
the shape that they are given in, however often they are broadcast; and the numbers a row that pass from the forward to
the backward pass. Of a causal row only what counts is read, but all of it is written.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp

OPS = ("softmax", "log_softmax", "logsumexp")
DIRECTIONS = ("forward", "backward")

# Arrays as large as x that are read and written, and numbers a row of the result's dtype and of f32.
_MOVES = {
    ("softmax", "forward"): (1, 1, 0, 0),  # x -> y
    ("softmax", "backward"): (2, 1, 0, 0),  # y, g -> dx
    ("log_softmax", "forward"): (1, 1, 0, 0),  # x -> y
    ("log_softmax", "backward"): (2, 1, 0, 2),  # x, g, and the maximum and sum of a row -> dx
    ("logsumexp", "forward"): (1, 0, 1, 0),  # x -> one number a row
    ("logsumexp", "backward"): (1, 1, 1, 2),  # x, g a row, and the maximum and sum of a row -> dx
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
      where: the shape of a mask, if there is one.
      bias: the shape of a bias, in x's dtype.
      scale: a number, or the shape of an array of f32.
      chain: how many calls follow one another in one compiled function; 0 where Python makes every call.
      implementations: what to compare. "jaxsoft" is its own choice of a kernel, another name but jax.nn's a named one.
        Those that are not available are left out.
    """

    group: str
    op: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    axis: int = -1
    where: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    scale: float | tuple[int, ...] | None = None
    causal: bool = False
    chain: int = 0
    implementations: tuple[str, ...] = ("jaxsoft", "jax.nn")

    @property
    def n(self) -> int:
        """The length of a row."""
        return self.shape[self.axis]

    @property
    def rows(self) -> int:
        """How many rows."""
        return math.prod(self.shape) // self.n

    @property
    def bytes(self) -> int:
        """The fewest bytes that the call can read and write."""
        size = jnp.dtype(self.dtype).itemsize
        counted = math.prod(self.shape)
        if self.causal:
            queries, n = self.shape[-2:]
            counted = math.prod(self.shape[:-2]) * sum(min(i + 1, n) for i in range(queries))
        reads, writes, of_dtype, of_f32 = _MOVES[self.op, self.direction]
        moved = (reads * counted + writes * math.prod(self.shape)) * size + self.rows * (of_dtype * size + of_f32 * 4)
        if isinstance(self.scale, tuple):
            moved += math.prod(self.scale) * 4
        if (self.op, self.direction) != ("softmax", "backward"):  # its y says what was masked
            moved += math.prod(self.where) if self.where else 0
            moved += math.prod(self.bias) * size if self.bias else 0
        return moved

    @property
    def extras(self) -> str:
        """What comes beside x, in words."""
        words = ["causal"] if self.causal else []
        if self.where:
            words.append(f"where {'x'.join(map(str, self.where))}")
        if self.bias:
            words.append(f"bias {'x'.join(map(str, self.bias))}")
        if self.scale is not None:
            words.append("a scale a row" if isinstance(self.scale, tuple) else "scale")
        if self.axis != -1:
            words.append(f"axis {self.axis}")
        return ", ".join(words)

    def __str__(self) -> str:
        """In one line."""
        words = [f"{self.op} {self.direction}", self.dtype, "x".join(map(str, self.shape)), self.extras]
        return " ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of each group a machine gets. Lengths in elements."""

    bytes: int  # of x, in the groups that do not name their shapes
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    rows_others: tuple[int, ...]  # of log_softmax and logsumexp
    rows_f32: tuple[int, ...]  # more lengths, of softmax forward in f32 alone
    short: tuple[int, ...]
    odd: tuple[int, ...]
    few: tuple[tuple[int, ...], tuple[int, ...]]  # how many rows, and how long
    few_chain: tuple[int, int]  # how many calls in a chain, up to 16 MiB and above
    scores: tuple[int, int, int, int]  # attention scores (batch, head, query, key)
    causal: tuple[int, int, int, int]
    vocabulary: tuple[int, int]
    axis: tuple[tuple[int, int, int], ...]


def _powers(first: int, last: int, step: int = 1) -> tuple[int, ...]:
    return tuple(2**k for k in range(first, last + 1, step))


GPU = Size(
    bytes=2**30,
    dtypes=("float32", "bfloat16", "float16"),
    rows=tuple(sorted((*_powers(9, 20), 49152))),
    rows_others=tuple(sorted((*_powers(9, 20), 49152))),
    rows_f32=(2**22, 2**24, 2**26),
    short=(8, 16, 32, 64, 100, 128, 200, 256),
    odd=(1000, 1023, 4097, 32003, 50257, 128257, 151937, 262145),
    few=(_powers(0, 6), (32000, 128256, 131072, 262144, 2**20)),
    few_chain=(64, 8),
    scores=(8, 16, 2048, 2048),
    causal=(8, 16, 4096, 4096),
    vocabulary=(2048, 131072),
    axis=((256, 4096, 256), (64, 1000, 1000), (4096, 64, 512), (64, 1000, 1002), (64, 999, 1001)),
)
GPU_QUICK = dataclasses.replace(
    GPU,
    bytes=2**28,
    dtypes=("float32", "bfloat16"),
    rows=(1024, 8192, 32768, 131072, 2**20),
    rows_others=(1024, 131072),
    rows_f32=(),
    short=(32, 128),
    odd=(1023, 50257),
    few=((1, 8), (128256,)),
    scores=(2, 16, 2048, 2048),
    causal=(2, 16, 2048, 2048),
    vocabulary=(512, 131072),
    axis=((64, 4096, 256),),
)
CPU = Size(
    bytes=2**26,
    dtypes=("float32", "bfloat16"),
    rows=(1024, 32768, 131072, 2**20),
    rows_others=(1024, 131072),
    rows_f32=(),
    short=(10, 32, 128),
    odd=(50257,),
    few=((1, 16), (32000, 131072)),
    few_chain=(8, 8),
    scores=(2, 8, 1024, 1024),
    causal=(2, 8, 1024, 1024),
    vocabulary=(64, 131072),
    axis=((16, 4096, 256), (16, 1000, 1000)),
)
CPU_QUICK = dataclasses.replace(
    CPU,
    bytes=2**23,
    rows=(1024, 131072),
    rows_others=(131072,),
    short=(128,),
    odd=(1023,),
    few=((1, 8), (32000,)),
    scores=(1, 8, 512, 512),
    causal=(1, 8, 512, 512),
    vocabulary=(16, 131072),
    axis=((4, 1000, 256),),
)


def _matrix(size: Size, dtype: str, n: int) -> tuple[int, int]:
    return max(1, size.bytes // (n * jnp.dtype(dtype).itemsize)), n


def _beside(case: Case, *names: str) -> Case:
    """The case with named implementations, too, for two dtypes that stand for all."""
    if case.dtype == "float16":
        return case
    return dataclasses.replace(case, implementations=(*case.implementations, *names))


def rows(size: Size) -> Iterator[Case]:
    """Every operation, in both directions."""
    for op in OPS:
        lengths = size.rows if op == "softmax" else size.rows_others
        for dtype, n, direction in itertools.product(size.dtypes, lengths, DIRECTIONS):
            case = Case("rows", op, direction, dtype, _matrix(size, dtype, n))
            yield _beside(case, "pallas", "triton") if op == "softmax" else _beside(case, "pallas")
    for n in size.rows_f32:
        yield Case("rows", "softmax", "forward", "float32", _matrix(size, "float32", n))


def short(size: Size) -> Iterator[Case]:
    """Many rows for every warp."""
    for dtype, n, direction in itertools.product(size.dtypes, size.short, DIRECTIONS):
        yield _beside(Case("short", "softmax", direction, dtype, _matrix(size, dtype, n)), "pallas", "triton")


def odd(size: Size) -> Iterator[Case]:
    """Each length beside one that is easy."""
    lengths = dict.fromkeys(length for n in size.odd for length in (n, round(n / 64) * 64))
    for dtype, n, direction in itertools.product(size.dtypes, lengths, DIRECTIONS):
        yield _beside(Case("odd", "softmax", direction, dtype, _matrix(size, dtype, n)), "pallas", "triton")


def few(size: Size) -> Iterator[Case]:
    """Next-token probabilities."""
    for dtype, n, count in itertools.product(("float32", "bfloat16"), size.few[1], size.few[0]):
        large = count * n * jnp.dtype(dtype).itemsize > 2**24
        yield _beside(
            Case("few", "softmax", "forward", dtype, (count, n), chain=size.few_chain[large]), "ffi", "pallas"
        )


def masked(size: Size) -> Iterator[Case]:
    """What comes beside x. Every case is one call of jaxsoft's; jax.nn.softmax is given the scores that result."""
    batch, heads, queries, keys = size.scores
    scale = 0.125  # 1 / sqrt(depth) for 64
    for direction in DIRECTIONS:
        attention = _beside(Case("masked", "softmax", direction, "bfloat16", size.scores), "pallas")
        yield dataclasses.replace(attention, scale=scale, where=(batch, 1, queries, keys))
        yield dataclasses.replace(attention, bias=(1, heads, queries, keys))
        for dtype in ("bfloat16", "float32"):
            yield dataclasses.replace(attention, dtype=dtype, shape=size.causal, scale=scale, causal=True)
        yield dataclasses.replace(attention, shape=size.vocabulary, scale=(size.vocabulary[0], 1))


def axis(size: Size) -> Iterator[Case]:
    """The middle axis: a row's elements are not neighbours."""
    for shape, dtype, direction in itertools.product(size.axis, ("float32", "bfloat16"), DIRECTIONS):
        yield Case("axis", "softmax", direction, dtype, shape, axis=1)


GROUPS: dict[str, Callable[[Size], Iterator[Case]]] = {
    "rows": rows,
    "short": short,
    "odd": odd,
    "few": few,
    "masked": masked,
    "axis": axis,
}


def traffic() -> list[Case]:
    """The cases whose memory traffic is counted by the GPU itself, each by one implementation."""

    def case(direction: str, dtype: str, n: int, name: str = "jaxsoft", rows: int = 0) -> Case:
        shape = (rows, n) if rows else _matrix(GPU, dtype, n)
        return Case("traffic", "softmax", direction, dtype, shape, implementations=(name,))

    lengths = _powers(10, 20, 2)
    return [
        *(case("forward", "float32", n) for n in sorted((*_powers(10, 20), 49152, 2**22))),
        *(case("backward", "float32", n) for n in lengths),
        *(case("forward", "float32", n, name) for name in ("jax.nn", "triton") for n in lengths),
        *(case("forward", "float32", n, "pallas") for n in (*lengths, 2**22)),
        *(case("backward", "float32", n, "pallas") for n in lengths),
        *(case("forward", "float32", 2**20, name, 4) for name in ("ffi", "pallas")),
        *(case("forward", "bfloat16", n, name) for name in ("jaxsoft", "pallas") for n in lengths),
        *(case("backward", "bfloat16", n, name) for name in ("jaxsoft", "pallas") for n in lengths),
    ]
