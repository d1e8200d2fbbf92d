"""Ten thousand calls of mixed shapes from several threads, each of which must give the bits that it gave at first.

    python tests/stress.py [CALLS]

Every function holds enough operations to become a CUDA graph, which is then replayed, at other addresses too. Shapes
are shared out to all GPUs. Not a test of pytest's: on a GPU it finds what one call at a time does not, and takes some
minutes.
"""

import concurrent.futures
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft

THREADS = 8
FUNCTIONS = 60


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
    """All three functions, and their gradients."""
    results = []
    for f, scale in ((jaxsoft.softmax, None), (jaxsoft.softmax, 1.5), (jaxsoft.log_softmax, 1.5)):
        y, pull = jax.vjp(lambda x, f=f, scale=scale: f(x, scale=scale), x)
        results += [y, *pull(g)]
    lse, pull = jax.vjp(lambda x: jaxsoft.logsumexp(x, axis=-1), x)
    return [*results, lse, *pull(lse), jaxsoft.softmax(x, axis=0)]


def main() -> None:
    """Runs the calls; ends with an error at the first bits that differ."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rng = np.random.default_rng(0)
    devices, inputs = jax.devices(), []
    for i in range(FUNCTIONS):
        n = int(2 ** rng.uniform(1, 20)) + int(rng.integers(0, 2))
        rows = max(1, min(int(2 ** rng.uniform(0, 10)), 2**22 // n))
        dtype = (jnp.float32, jnp.bfloat16, jnp.float16)[i % 3]
        x, g = (jax.random.normal(jax.random.key(2 * i + k), (rows, n), dtype) for k in range(2))
        inputs.append(jax.device_put((x, g), devices[i % len(devices)]))
    first = [int(bits(every_operation(*v))) for v in inputs]

    def call(i: int) -> str | None:
        x, g = inputs[i]
        now = int(bits(every_operation(x, g)))
        return None if now == first[i] else f"{x.dtype}{x.shape}: {now:08x}, not {first[i]:08x}"

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        wrong = [w for w in pool.map(call, rng.integers(0, FUNCTIONS, calls)) if w]
    if wrong:
        sys.exit(f"{len(wrong)} of {calls} calls gave other bits than before: " + "; ".join(sorted(set(wrong))[:10]))
    print(f"{calls} calls of {FUNCTIONS} shapes, {THREADS} threads, {len(devices)} devices: the same bits each time")


if __name__ == "__main__":
    main()
