"""Ten thousand calls of mixed shapes from several threads, each of which must give the bits that it gave at first.

    python tests/stress.py [CALLS] [attention]

They are of the operations on rows, or of attention by its CUDA kernels, also over pages. Every function holds enough
operations to become a CUDA graph, which is then replayed, at other addresses too. Shapes are shared out to all GPUs.
Not a test of pytest's: on a GPU it finds what one call at a time does not, and takes some minutes.
"""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft

THREADS = 8
FUNCTIONS = 60
LAST = 20  # queries of a sequence that come last
PAGE = 16  # keys of a page


@jax.jit
def bits(tree: object) -> jax.Array:
    """A checksum of all bits of a pytree's arrays."""
    total = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        word = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32).ravel()
        total = total * 31 + jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1))
    return total


@jax.jit
def every_operation(x: jax.Array, g: jax.Array) -> list[jax.Array]:
    """Functions of rows, and their gradients."""
    results = []
    for f, scale in ((jaxsoft.softmax, None), (jaxsoft.softmax, 1.5), (jaxsoft.log_softmax, 1.5)):
        y, pull = jax.vjp(lambda x, f=f, scale=scale: f(x, scale=scale), x)
        results += [y, *pull(g)]
    lse, pull = jax.vjp(lambda x: jaxsoft.logsumexp(x, axis=-1), x)
    divergence, pull_both = jax.vjp(jaxsoft.softmax_kl_divergence, x, g)
    return [*results, lse, *pull(lse), divergence, *pull_both(divergence), jaxsoft.softmax(x, axis=0)]


@jax.jit
def attention(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> list[jax.Array]:
    """Attention of all queries with its gradients, and of the last ones of each sequence, also over pages."""

    def attend(*arrays, **options):
        return jaxsoft.dot_product_attention(*arrays, implementation="ffi", **options)

    y, pull = jax.vjp(lambda *v: attend(*v, key_value_seq_lengths=lengths), query, key, value)
    z, pull_causal = jax.vjp(lambda *v: attend(*v, is_causal=True), query, key, value)
    results = [y, *pull(y), z, *pull_causal(z)]
    if key.shape != value.shape:  # which the kernels for few queries do not take
        return results
    one = attend(query[:, -1:], key, value, key_value_seq_lengths=lengths, return_residual=True)
    several = attend(query[:, -LAST:], key, value, key_value_seq_lengths=lengths)
    results += [*one, attend(one[0], key, value), several]
    for dtype in (query.dtype, jnp.float8_e4m3fn):
        results += over_pages(query, key, value, lengths, dtype)
    return results


def over_pages(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, dtype: jnp.dtype
) -> list[jax.Array]:
    """Attention of one query and of several over pages of a dtype, which are written first, some of them twice."""
    batch, length = key.shape[:2]
    number = -(-length // PAGE)
    pages = [jnp.zeros((batch * number, PAGE, *x.shape[2:]), dtype) for x in (key, value)]
    table = jnp.arange(batch * number, dtype=jnp.int32)[::-1].reshape(batch, number)
    everywhere = jnp.full(batch, length, jnp.int32)
    pages = jaxsoft.write_pages(*pages, key, value, table, everywhere)
    pages = jaxsoft.write_pages(*pages, value[:, :LAST], key[:, :LAST], table, lengths)
    return [
        jaxsoft.paged_attention(queries, *pages, table, lengths, is_causal=True, implementation="ffi")
        for queries in (query[:, -1:], query[:, -LAST:])
    ]


def rows(rng: np.random.Generator, i: int) -> tuple[jax.Array, ...]:
    """Operands of `every_operation`."""
    n = int(2 ** rng.uniform(1, 20)) + int(rng.integers(0, 2))
    count = max(1, min(int(2 ** rng.uniform(0, 10)), 2**22 // n))
    dtype = (jnp.float32, jnp.bfloat16, jnp.float16)[i % 3]
    return tuple(jax.random.normal(jax.random.key(2 * i + k), (count, n), dtype) for k in range(2))


def sequences(rng: np.random.Generator, i: int) -> tuple[jax.Array, ...]:
    """Operands of `attention`."""
    length = int(2 ** rng.uniform(1, 12)) + int(rng.integers(0, 2))
    batch = max(1, min(int(2 ** rng.uniform(0, 4)), 2**12 // length))
    size, values = ((64, 64), (128, 128), (192, 128), (256, 256))[i % 4]
    dtype = (jnp.bfloat16, jnp.float16)[i // 4 % 2]
    shapes = [(batch, length, 8, size), (batch, length, 2, size), (batch, length, 2, values)]
    keys = jax.random.split(jax.random.key(i), 3)
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    return *arrays, jnp.asarray(rng.integers(0, length + 1, batch), jnp.int32)


def watched[T](results: Iterable[T], what: str, number: int) -> Iterator[T]:
    """The results, with how many there are so far written to stderr at each tenth of them."""
    for i, result in enumerate(results, 1):
        if i * 10 // number > (i - 1) * 10 // number:
            print(f"{i} of {number} {what}", file=sys.stderr, flush=True)
        yield result


def main() -> None:
    """Runs the calls; ends with an error if bits differ."""
    calls = next((int(word) for word in sys.argv[1:] if word.isdecimal()), 10_000)
    function, operands = (attention, sequences) if "attention" in sys.argv[1:] else (every_operation, rows)
    rng = np.random.default_rng(0)
    devices, inputs = jax.devices(), []
    for i in range(FUNCTIONS):
        inputs.append(jax.device_put(operands(rng, i), devices[i % len(devices)]))

    def checksum(i: int) -> int:
        return int(bits(function(*inputs[i])))

    with ThreadPoolExecutor() as pool:  # programs compile in parallel
        first = list(watched(pool.map(checksum, range(FUNCTIONS)), "programs compiled", FUNCTIONS))

    def call(i: int) -> str | None:
        x = inputs[i][0]
        now = checksum(i)
        return None if now == first[i] else f"{x.dtype}{x.shape}: {now:08x}, not {first[i]:08x}"

    with ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(call, rng.integers(0, FUNCTIONS, calls))
        wrong = [w for w in watched(done, "calls", calls) if w]
    if wrong:
        sys.exit(f"{len(wrong)} of {calls} calls gave other bits than before: " + "; ".join(sorted(set(wrong))[:10]))
    print(f"{calls} calls of {FUNCTIONS} shapes, {THREADS} threads, {len(devices)} devices: the same bits each time")


if __name__ == "__main__":
    main()
