"""What benchmarks/attention.py measures: calls of attention as data, their operands, and what of their scores counts.

The scores that count are counted exactly, from the same definition that results are checked with.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import products

TOKENS = 32768  # in all, on a GPU
WIDTH = 2048  # heads times their size
MASKED_IN = 0.8  # of a boolean mask's elements are True


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention.

    Attributes:
      group: one of GROUPS.
      what: what there is beside query, key and value, in words; empty for nothing.
      dtype: of query, key and value.
      batch, length, heads, key_heads, size: the query is (batch, length, heads, size), keys and values are
        (batch, length, key_heads, size).
      values: the size of the values' heads, where it is another one.
      causal: whether the causal rule holds.
      gradients: whether the gradients are computed, too.
      extra: one of EXTRAS, or "documents".
    """

    group: str
    what: str
    dtype: str
    batch: int
    length: int
    heads: int
    key_heads: int
    size: int
    causal: bool
    gradients: bool
    extra: str = ""
    values: int | None = None

    def __str__(self) -> str:
        """The case in words."""
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        shape, rule = f"{self.batch}x{self.length}x{heads}x{self.size}", " causal" * self.causal
        return f"{shape} {self.dtype}{rule} {self.what}".strip() + f" {self.direction}"

    @property
    def direction(self) -> str:
        """The direction in words."""
        return "with gradients" if self.gradients else "forward"

    @property
    def value_size(self) -> int:
        """The size of the values' heads."""
        return self.values or self.size

    def flops(self) -> int:
        """Operations of the products over the scores that count."""
        return products(self.size, self.value_size, self.gradients) * self.heads * self.counted()

    def counted(self) -> int:
        """The scores that count of one head, over the batch. Those of a mask all do: it leaves out no whole tile."""
        rows = np.arange(self.length)
        if self.extra == "window":
            return int(self.batch * np.minimum(rows + 1, WINDOW + 1).sum())
        if self.extra == "key lengths":
            return int(self.length * _lengths(self).sum())
        # Each sequence by itself, packed or not.
        lengths = np.diff(cumulative(self)) if self.extra in PACKED else np.full(self.batch, self.length)
        return sum(n * (n + 1) // 2 if self.causal else n**2 for n in lengths.tolist())


WINDOW = 1023  # keys before a query's own position, under the causal rule
CAP = 30.0
PACKED = {"segments": 8, "documents": 16}  # how many sequences a row has
EXTRAS = {
    "key lengths": "key lengths",
    "window": f"window ({WINDOW}, 0)",
    "segments": "packed segments",
    "mask by batch": "mask (B, 1, T, S)",
    "mask": "mask (1, 1, T, S)",
    "bias": "bias (1, N, T, S)",
    "bias gradient": "bias (1, N, T, S) and its gradient",
    "alibi": "bias (1, N, 1, S)",
    "cap": "soft cap",
    "sinks": "sinks",
}


def _lengths(case: Case) -> np.ndarray:
    """From all keys down to a third of them."""
    return np.linspace(case.length, case.length / 3, case.batch).astype(np.int32)


def _borders(case: Case) -> np.ndarray:
    """Where the sequences that are packed into each row begin, but for its first: their lengths are random."""
    return np.sort(np.random.default_rng(0).integers(1, case.length, (case.batch, PACKED[case.extra] - 1)), axis=1)


def _segments(case: Case) -> np.ndarray:
    """The number of each token's sequence in its row."""
    return (np.arange(case.length)[None, :, None] >= _borders(case)[:, None]).sum(axis=2).astype(np.int32)


def cumulative(case: Case) -> np.ndarray:
    """Where each packed sequence begins among the tokens of all rows, one after the other, and where the last ends."""
    starts = np.pad(_borders(case), ((0, 0), (1, 0))) + case.length * np.arange(case.batch)[:, None]
    return np.append(starts, case.batch * case.length).astype(np.int32)


def operands(case: Case) -> dict[str, jax.Array]:
    """The arrays of a case, by the arguments of `dot_product_attention`; the cotangent; and the segments of both."""
    b, t, n, k, h, d = case.batch, case.length, case.heads, case.key_heads, case.size, case.value_size
    shapes = {"query": (b, t, n, h), "key": (b, t, k, h), "value": (b, t, k, d), "cotangent": (b, t, n, d)}
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    found = {name: _normal(key, shape, case.dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    if case.extra == "key lengths":
        found["key_value_seq_lengths"] = jnp.asarray(_lengths(case))
    elif case.extra in PACKED:
        found["segment_ids"] = jnp.asarray(_segments(case))
    elif case.extra in ("mask", "mask by batch"):
        shape = (b if case.extra == "mask by batch" else 1, 1, t, t)
        found["mask"] = jax.random.bernoulli(keys[-1], MASKED_IN, shape)
    elif case.extra in ("bias", "bias gradient"):
        found["bias"] = _normal(keys[-1], (1, n, t, t), case.dtype)
    elif case.extra == "alibi":
        slopes = 2.0 ** (-8 * (np.arange(n) + 1) / n)
        found["bias"] = jnp.asarray((slopes[:, None] * np.arange(t))[None, :, None], jnp.float32)
    elif case.extra == "sinks":
        found["sinks"] = jax.random.normal(keys[-1], (n,), jnp.float32)
    return found


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(key, shape, dtype)


def options(case: Case) -> dict[str, Any]:
    """The arguments of `dot_product_attention` that are no arrays."""
    found: dict[str, Any] = {"is_causal": case.causal}
    if case.extra == "window":
        found["local_window_size"] = (WINDOW, 0)
    if case.extra == "cap":
        found["logits_soft_cap"] = CAP
    return found


def scores(case: Case, arrays: dict[str, jax.Array], row: int, head: int, queries: np.ndarray) -> np.ndarray:
    """In float64, the scores of some queries of one head and all keys; -inf where one does not count."""
    query = np.asarray(arrays["query"][row, queries, head]).astype(np.float64)
    key = np.asarray(arrays["key"][row, :, head // (case.heads // case.key_heads)]).astype(np.float64)
    z, j = query @ key.T / math.sqrt(case.size), np.arange(case.length)
    if case.extra == "cap":
        z = CAP * np.tanh(z / CAP)
    if "bias" in arrays:
        bias = arrays["bias"][0, head]
        z = z + np.asarray(bias if case.extra == "alibi" else bias[queries]).astype(np.float64)
    counted = np.ones(z.shape, bool)
    if case.causal:
        counted &= j <= queries[:, None]
    if case.extra == "window":
        counted &= j >= queries[:, None] - WINDOW
    if case.extra == "key lengths":
        counted &= j < _lengths(case)[row]
    if case.extra in PACKED:
        segments = _segments(case)[row]
        counted &= segments[queries][:, None] == segments
    if "mask" in arrays:
        counted &= np.asarray(arrays["mask"][row % arrays["mask"].shape[0], 0, queries])
    return np.where(counted, z, -np.inf)


def _pair(case: Case) -> Iterator[Case]:
    """A case forward, and with gradients."""
    for gradients in (False, True):
        yield dataclasses.replace(case, gradients=gradients)


def _plain(group: str, dtype: str, length: int, size: int, causal: bool, tokens: int, width: int) -> Iterator[Case]:
    heads = width // size
    batch = max(1, tokens // length)
    yield from _pair(Case(group, "", dtype, batch, length, heads, heads, size, causal, False))


def by_length(quick: bool) -> Iterator[Case]:
    """All sizes of heads and all lengths, of 96 some; first those that decide most."""
    every, some = (8192, 2048, 32768, 1024, 512), (8192, 2048)
    lengths = {128: some} if quick else {128: every, 64: every, 256: every, 96: some}
    for size in lengths:
        for length, causal in itertools.product(lengths[size], (False, True)):
            yield from _plain("lengths", "bfloat16", length, size, causal, TOKENS, WIDTH)


def dtypes(quick: bool) -> Iterator[Case]:
    """The other dtypes."""
    del quick
    for dtype, causal in (("float16", False), ("float16", True), ("float32", True)):
        yield from _plain("dtypes", dtype, 8192 if dtype == "float16" else 2048, 128, causal, TOKENS, WIDTH)


def extras(quick: bool, length: int = 8192, tokens: int = TOKENS, width: int = WIDTH) -> Iterator[Case]:
    """Everything that a call may have, beside the plain call of the same rule."""
    plain = next(_plain("extras", "bfloat16", length, 128, False, tokens, width))
    causal = dataclasses.replace(plain, causal=True)
    yield from _pair(plain)
    yield from _pair(causal)
    for extra in ("window", "segments", "mask", "alibi") if quick else EXTRAS:
        base = causal if extra in ("window", "alibi") else plain
        cases = _pair(dataclasses.replace(base, extra=extra, what=EXTRAS[extra]))
        yield from (case for case in cases if case.gradients or extra != "bias gradient")
    if quick:
        return
    heads = plain.heads
    yield from _pair(dataclasses.replace(plain, key_heads=max(1, heads // 4), what="grouped queries"))
    yield from _pair(dataclasses.replace(plain, key_heads=1, what="one head of keys"))
    yield from _pair(dataclasses.replace(plain, size=96, what="head size 96"))
    yield from _pair(dataclasses.replace(plain, length=length - 1, what="ragged length"))


def training(quick: bool) -> Iterator[Case]:
    """What training uses beside heads of one size over all keys, each under the causal rule."""
    del quick
    plain = Case("training", "", "bfloat16", 2, 8192, 16, 16, 128, True, False)
    grouped = dataclasses.replace(plain, what="grouped queries", batch=4, heads=32, key_heads=8)
    documents = {"what": f"{PACKED['documents']} packed documents", "extra": "documents"}
    yield from _pair(dataclasses.replace(plain, **documents, batch=1, length=32768))
    yield from _pair(grouped)
    yield from _pair(dataclasses.replace(grouped, what=f"{grouped.what}, {EXTRAS['window']}", extra="window"))
    yield from _pair(dataclasses.replace(plain, what="head size 192, values of 128", size=192, values=128))
    for extra in ("sinks", "cap"):
        yield from _pair(dataclasses.replace(plain, what=EXTRAS[extra], extra=extra))


def on_cpu(quick: bool) -> Iterator[Case]:
    """What a CPU computes in reasonable time: (tokens, length, width) with heads of 64."""
    shapes = [(256, 128, 128)] if quick else [(1024, 128, 512), (2048, 512, 512), (2048, 2048, 512), (4096, 4096, 256)]
    for (tokens, length, width), dtype, causal in itertools.product(shapes, ("float32", "bfloat16"), (False, True)):
        yield from _plain("cpu", dtype, length, 64, causal, tokens, width)


def extras_on_cpu(quick: bool) -> Iterator[Case]:
    """The same, small."""
    yield from extras(quick, length=256 if quick else 1024, tokens=512 if quick else 2048, width=256)


def training_on_cpu(quick: bool) -> Iterator[Case]:
    """The same, small."""
    for case in training(quick):
        yield dataclasses.replace(case, batch=1, length=case.length // 32)


GROUPS = {"lengths": by_length, "training": training, "extras": extras, "dtypes": dtypes}
CPU_GROUPS = {"cpu": on_cpu, "extras": extras_on_cpu, "training": training_on_cpu}
