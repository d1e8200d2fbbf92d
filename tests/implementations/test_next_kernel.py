"""What a call writes is complete when the kernel that XLA launches next reads it.

From Hopper on, a kernel can be launched before the one before it has ended, and is to wait for that itself. XLA does so
with its own kernels (JAX 0.11.2), but the compiler may put a load of an operand before the wait. It does in the kernel
that XLA makes to merge the states of three parts of a row. So here XLA merges what three calls write, of which the last
ends right before. They end with kernels of every kind, whose blocks all run at the same time. Their operands change
places from run to run, for what was there before to be wrong. In a graph of launches (a command buffer) no kernel
overlaps another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ATTENTION_IMPLEMENTATIONS, IMPLEMENTATIONS, OPS, on_gpu, ours, served, slow

import jaxsoft

pytestmark = on_gpu
CALLS, RUNS, READ = 3, 6, 16  # and how many numbers of an array are read
# For each: a thread or a warp, a block, a cluster, the ring of a block, and parts of rows.
SHAPES = [(128, 64), (128, 1024), (256, 4096), (64, 32_768), (128, 65_536), (2, 1 << 20)]
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=() if name == "ffi" else slow)
        for name in IMPLEMENTATIONS
        if name not in (None, "xla", "reference")
    ],
)


def sums(results):
    """States of results, whose maxima are the last numbers of the first array, merged. The last result comes first."""
    arrays = [[v.reshape(-1).astype(jnp.float32) for v in jax.tree.leaves(result)] for result in results[::-1]]
    m, s = jnp.stack([of[0][-READ:] for of in arrays]), jnp.stack([of[-1][:READ] for of in arrays])
    top = jnp.max(m, axis=0)
    return top, jnp.sum(s * jnp.exp(m - top[None]), axis=0)


@jax.jit
def busy(x):
    """Takes some milliseconds, in which the host launches what is to run then without a gap."""
    return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x)


def check(f, *operands):
    """That XLA reads what the last of the calls writes, each of which has one of the values of the operands."""
    f, values = jax.jit(f), list(zip(*operands, strict=True))
    expected = [f(*given) for given in values]
    orders = [np.roll(np.arange(CALLS), run) for run in range(RUNS)]

    def read(values):
        results = [f(*values[0])]
        for given in values[1:]:
            given, results[-1] = jax.lax.optimization_barrier((given, results[-1]))  # one call after the other
            results.append(f(*given))
        return sums(results)

    read = jax.jit(read, compiler_options={"xla_gpu_enable_command_buffer": ""})
    jax.block_until_ready(read(values))
    busy(jnp.ones((2048, 2048), jnp.bfloat16))
    for found, order in [(read([values[i] for i in order]), order) for order in orders]:
        # XLA may leave out that it rounds what it reads.
        np.testing.assert_allclose(found, sums([expected[i] for i in order]), rtol=1e-2)


def normal(*shape, dtype=jnp.float32):
    """The values of an operand, each on a scale of its own."""
    x = jax.random.normal(jax.random.key(0), (CALLS, *shape), jnp.float32)
    return (x * (1 + jnp.arange(CALLS, dtype=jnp.float32)).reshape(-1, *[1] * len(shape))).astype(dtype)


def pullback(f, *operands):
    """Checks the pullback of f, of cotangents that are its results."""
    cotangents = jax.vmap(f)(*operands)
    check(lambda cotangents, *v: jax.vjp(f, *v)[1](cotangents), cotangents, *operands)


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(implementation, dtype, shape):
    """Operations, a loss, and their pullbacks."""
    x, labels = normal(*shape, dtype=dtype), jnp.arange(shape[0]) % shape[1]

    def loss(x):
        return jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, implementation=implementation)

    with served(implementation):
        for f in (*(ours(op, implementation) for op in OPS), loss):
            check(f, x)
            pullback(f, x)


@each_implementation
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        *((16, 1025, 1), (64, 1024, 2), (128, 3000, 4), (256, 20_000, 8), (512, 5000, 2), (8192, 5000, 8)),
        *((32, 50_000, 64), (128, 131_072, 64), (2, 500_000, 64), (8, 1 << 20, 256)),
    ],
)
def test_top_k(implementation, rows, n, k):
    """By warps, blocks, clusters, and parts of rows."""
    with served(implementation):
        check(lambda x: jaxsoft.top_k_softmax(x, k, implementation=implementation), normal(rows, n))


@pytest.mark.parametrize(("rows", "n"), [(128, 4096), (8, 131_072), (128, 131_072)])
def test_sampling(rows, n):
    check(lambda x: jaxsoft.random.sample(jax.random.key(1), x, top_p=0.9), normal(rows, n))


@pytest.mark.parametrize(
    "implementation", [name for name in ATTENTION_IMPLEMENTATIONS if name not in (None, "xla", "reference")]
)
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "key_heads"),
    [(16, 1, 256, 8, 8), (128, 1, 512, 8, 1), (64, 4, 256, 32, 2), (4, 1, 8192, 8, 2), (2, 512, 512, 16, 4)],
)
def test_attention(implementation, batch, queries, keys, heads, key_heads):
    """Few queries over keys in one chunk and in several, and many queries with their gradients."""

    def attend(*operands):
        return jaxsoft.dot_product_attention(*operands, implementation=implementation, return_residual=True)

    operands = [
        normal(batch, length, of, 64, dtype=jnp.bfloat16)
        for length, of in ((queries, heads), (keys, key_heads), (keys, key_heads))
    ]
    with served(implementation):
        check(attend, *operands)
        if queries > 16:
            pullback(lambda *v: attend(*v)[0], *operands)
