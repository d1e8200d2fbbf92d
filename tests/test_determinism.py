"""The same input gives the same bits; and a row's bits do not depend on the rows around it."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import IMPLEMENTATIONS, each_fast_implementation, each_op, on_gpu, ours, rows, same_bits, served, slow

each_kernel = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=() if name else slow, id=str(name))
        for name in IMPLEMENTATIONS
        if name not in ("xla", "reference")
    ],
)
LENGTHS = (33, 104, 1000, 2040, 2049, 200_000)


def both(op, implementation):
    """The value, and the pullback of a cotangent that is fixed for each row."""

    @jax.jit
    def f(x):
        y, pull = jax.vjp(ours(op, implementation), x)
        return y, pull(jnp.cos(3 * x[..., 0] if op == "logsumexp" else 3 * x).astype(y.dtype))[0]

    return f


@each_op
@each_fast_implementation
def test_run_to_run(op, implementation):
    for dtype in (jnp.float32, jnp.bfloat16):
        for n in LENGTHS[2::2]:
            x = rows(n, dtype)
            with served(implementation):
                f = both(op, implementation)
                first = f(x)
                assert all(same_bits(first, f(x)) for _ in range(5)), (op, dtype, n)


# A GPU has a strategy for each: warps, blocks, clusters for few rows and for many, the grid.
STRATEGIES = [(70, 100), (40, 1001), (20, 4096), (5, 20_001), (300, 50_257), (70, 131_072), (13, 1_000_003)]


@pytest.mark.costly(1)
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@each_op
@pytest.mark.parametrize("shapes", [[(3, 100), (3, 1001)], pytest.param(STRATEGIES, marks=on_gpu)], ids=["few", "all"])
def test_on_every_device(op, shapes):
    """On every device, from a thread each at the same time: the same bits, of rows and of columns."""

    def run(device, x):
        f = both(op, None)
        every = jax.jit(lambda every: [(f(x), ours(op, axis=0)(x)) for x in every])
        return jax.device_get(every(jax.device_put(x, device)))

    for count, n in shapes:
        x = [rows(n, dtype, count=count) for dtype in (jnp.float32, jnp.bfloat16)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first, *others = pool.map(run, jax.devices(), [x] * len(jax.devices()))
        assert all(same_bits(first, other) for other in others), (op, count, n)


@pytest.mark.costly(1)
@each_op
@each_kernel
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_a_row_by_itself(op, implementation, dtype):
    """Alone, among few rows or many, first or last, beside NaN and scores whose exp is inf: the same bits.

    Few long rows are cut and shared out to threads, many are not: on a CPU a row is cut alike in both. On a GPU this
    holds for rows of less than 8 KB, that all begin at a multiple of 16 bytes.
    """
    gpu = jax.default_backend() != "cpu"
    for n in LENGTHS:
        size = n * dtype.dtype.itemsize
        if gpu and (size >= 8192 or size % 16 != 0):
            continue
        with served(implementation):
            f = both(op, implementation)
            row = rows(n, dtype, count=1)
            places, given = {2: 0, 3: 2, 7: 3, 70: 69}, []
            for count, place in places.items():
                x = rows(n, dtype, seed=count, count=count)
                x[place - 1], x[place - 2] = np.nan, 200
                x[place] = row[0]
                given.append(x)
            alone, *among = jax.jit(lambda every: [f(x) for x in every])([row, *given])  # noqa: B023
            alone = jax.tree.map(lambda v: np.asarray(v)[0], alone)
            for (count, place), found in zip(places.items(), among, strict=True):
                found = jax.tree.map(lambda v, place=place: np.asarray(v)[place], found)
                assert same_bits(alone, found), (op, n, count, place)


@each_op
@each_kernel
def test_leading_dimensions_and_vmap(op, implementation):
    """However the leading dimensions are cut, rows are rows."""
    x = rows(2304, jnp.float32, count=12)
    with served(implementation):
        f = both(op, implementation)
        flat = jax.tree.map(np.asarray, f(x))
        for shape in ((3, 4), (2, 1, 6)):
            folded = [np.asarray(v) for v in f(x.reshape(*shape, -1))]
            assert same_bits(flat, tuple(v.reshape(12, *v.shape[len(shape) :]) for v in folded))
        assert same_bits(flat, jax.tree.map(np.asarray, jax.vmap(f)(x)))
