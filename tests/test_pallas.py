"""The Pallas kernels without a GPU: interpreted on a CPU, races detected, and lowered for a GPU that is not here.

The interpreter knows neither layouts nor the rules of asynchronous copies, which lowering checks. Neither runs the
code that a GPU runs: there, the tests of values take these kernels with the others.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import Truth, assert_last_place, assert_within, on_cpu, rows, wide
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from jaxsoft.pallas_kernels import tiled

from jaxsoft import fold, pallas_kernels
from jaxsoft._forms import Form
from jaxsoft._implementations import choose

OPERATIONS = ("softmax", "log_softmax", "state")
# Small sizes, so that short rows do what long ones do. By (rows, n), a block has: three rows in two buffers and
# tiles that overlap; one row at a time, in alternate directions; a row longer than the ring, with and without overlap.
SMALL = tiled.Tuning(tile_bytes=4096, ring_bytes=8192, resident_bytes=8192, block_bytes=20 << 10, min_blocks=1)
SHAPES = {
    jnp.float32: ((3, 600), (2, 2048), (1, 2200), (1, 4096)),
    jnp.bfloat16: ((3, 1400), (1, 6152)),
    jnp.float16: ((2, 264),),
}
EPS = 2.0**-23

each_operation = pytest.mark.parametrize("operation", OPERATIONS)
each_dtype = pytest.mark.parametrize("dtype", SHAPES, ids=lambda dtype: dtype.__name__)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """Fails a test where the interpreter reports a race: some versions of JAX raise, others print."""
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def interpreted(operation: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    kernel = tiled.row_kernel(operation, *x.shape, x.dtype, SMALL, plgpu.InterpretGPUParams(detect_races=True))
    return jax.tree.map(np.asarray, kernel(jnp.asarray(x)))


def target(kind: str):
    """Lowers for a GPU of this kind."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def operand(shape, dtype) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def plain(operation, implementation, platform, *operands):
    """What is chosen for the plain form of an operation."""
    return choose(operation, Form(operands[0].dtype), implementation, platform, operands)


def test_plans():
    """The shapes are cut up in all the ways that the kernel distinguishes."""
    plans = [tiled.plan(*shape, jnp.dtype(dtype).itemsize, SMALL) for dtype in SHAPES for shape in SHAPES[dtype]]
    overlaps = [cut.tile * cut.tiles > n for cut, (_, n) in zip(plans, sum(SHAPES.values(), ()), strict=True)]
    resident = [cut.ring == cut.tiles for cut in plans]
    assert {(True, True), (True, False), (False, True), (False, False)} <= set(zip(resident, overlaps, strict=True))
    assert {1, 2} <= {cut.buffers for cut in plans if cut.rows > cut.buffers}
    for rows_, n in ((1, 128), (10**9, 256), (3, 2**24), (1, 2**31 - 16), (5, 50264), (2**20, 4104)):
        cut = tiled.plan(rows_, n, 4, tiled.Tuning())
        assert cut.tile % cut.chunk == 0 and cut.tile <= n <= cut.tile * cut.tiles < n + cut.tile
        assert cut.buffers * cut.ring * cut.tile * 4 <= 96 << 10
        assert cut.rows == 1 or cut.ring == cut.tiles


@on_cpu
@each_operation
@each_dtype
def test_values(operation, dtype):
    for count, n in SHAPES[dtype][:: 2 if operation == "state" else 1]:
        x = rows(n, dtype, count=count)
        truth = Truth.of(x)
        m, s = truth.m[:, 0], np.exp(truth.log_s)[:, 0]
        results = interpreted(operation, x)
        chex.assert_shape(results[-1], (count, n) if operation == "softmax" else (count,))
        if operation != "softmax":
            chex.assert_type(results[-2:], [jnp.float32, jnp.float32])
            chex.assert_trees_all_equal(wide(results[-2]), m)
            assert_within(results[-1], s, 8 * EPS * s, f"s, {x.dtype} {x.shape}")
        if operation == "state":
            continue
        y, expected = results[0], truth.p if operation == "softmax" else truth.log_p
        if x.dtype.itemsize == 2:
            floor = 1e-30 if operation == "softmax" else EPS * (4 + truth.d + truth.log_s)
            assert_last_place(y, expected, 1 if operation == "softmax" else 2, floor, f"{operation}, {x.dtype}")
        elif operation == "softmax":
            assert_within(y, expected, EPS * (4 + truth.d) * np.maximum(truth.p, 1e-30), f"{x.shape}")
            assert_within(wide(y).sum(-1), np.ones(count), 1e-5, "sums")
        else:
            assert_within(y, expected, EPS * (4 + truth.d + truth.log_s), f"{x.shape}")


@on_cpu
@pytest.mark.parametrize(
    "operation, n", [("softmax", 600), ("softmax", 2200), ("log_softmax", 600), ("log_softmax", 2200), ("state", 2200)]
)
def test_special_values(operation, n):
    x = np.zeros((12, n), np.float32)
    x[0] = -np.inf
    x[1], x[1, n - 1] = -np.inf, 3
    x[2, : n // 2 + 9] = -np.inf
    x[3, 5] = np.nan
    x[4, n - 1] = np.nan
    x[5, 7] = np.inf
    x[6, n // 2], x[6, 1] = np.inf, -np.inf
    x[7, 3], x[7, n - 3] = np.inf, np.nan
    x[8], x[8, 1] = -np.inf, np.nan
    x[9] = np.linspace(-3e38, 3e38, n)
    x[10] = np.finfo(np.float32).smallest_subnormal
    x[11] = np.linspace(-200, 200, n)
    results = interpreted(operation, x)
    expected = list(plain(operation, "xla", "cpu", operand(x.shape, x.dtype))(jnp.asarray(x)))
    if operation != "softmax":  # XLA's maximum does not always see a NaN; the sum does
        expected[-2] = jnp.where(jnp.isnan(expected[-1]), jnp.nan, expected[-2])
    chex.assert_trees_all_close(results, tuple(expected), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-3, 0.7], ids=str)
@pytest.mark.parametrize("level", [0.0, -1.2], ids=str)
def test_long_sums(step, level):
    """A lane that folds 2^14 tiles, with a rising maximum or without, keeps its sum to a few roundings."""
    tiles, width = 1 << 14, 8
    x = np.full((tiles, width, 4), level, np.float32) + np.arange(tiles, dtype=np.float32)[:, None, None] * step
    x[0, 0] = max(0.0, level)

    @jax.jit
    def state(x):
        lanes, _ = jax.lax.scan(lambda lanes, tile: (tiled._accumulate(lanes, list(tile)), None), tiled._identity(4), x)
        return tiled._total(lanes)

    m, s = state(x)
    expected = np.exp(wide(x) - wide(m)).sum()
    assert m == x.max()
    assert_within(s, expected, 1e-6 * expected, "s")
    chex.assert_trees_all_close(fold.State(m, s), fold.state(x.ravel()), rtol=1e-4)


@each_operation
@each_dtype
def test_lowers_for_hopper(operation, dtype):
    with target("NVIDIA H100 80GB HBM3"):
        for shape in ((2, 3, 256), (70000, 1024), (3, 50264)):
            x = jax.ShapeDtypeStruct(shape, dtype)
            kernel = plain(operation, "pallas", "cuda", operand(shape, dtype))
            lowered = jax.jit(kernel).trace(x).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()
            results = lowered.out_info
            full, statistic = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
            expected = {"softmax": (full,), "log_softmax": (full, statistic, statistic), "state": (statistic,) * 2}
            chex.assert_trees_all_equal_shapes_and_dtypes(results, expected[operation])


@on_cpu
def test_unavailable():
    reason = pallas_kernels.unavailable
    assert "NVIDIA GPUs only" in reason("cpu")
    assert "NVIDIA GPUs only" in reason("rocm")
    assert "no NVIDIA GPU" in reason("cuda")
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090"):
        with target(kind):
            assert f"needs Hopper (compute capability 9.0) or newer; this is {kind}" in pallas_kernels.unavailable(
                "cuda"
            )
            with pytest.raises(ValueError, match="implementation='pallas' cannot serve this call: it needs Hopper"):
                plain("softmax", "pallas", "cuda", operand((2, 1024), jnp.float32))
    for kind in ("NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA B200", "NVIDIA GeForce RTX 5090"):
        with target(kind):
            assert reason("cuda") is None


@pytest.mark.parametrize(
    "n, dtype, reason",
    [
        (1024, jnp.float32, None),
        (128, jnp.float32, None),
        (1000, jnp.bfloat16, None),
        (127, jnp.float32, "at least 512 bytes"),
        (248, jnp.float16, "at least 512 bytes"),
        (1001, jnp.float32, "a multiple of 16 bytes.* n=1001 of float32"),
        (50257, jnp.bfloat16, "a multiple of 16 bytes"),
        (1028, jnp.float16, "a multiple of 16 bytes"),
        (1024, jnp.float64, "not float64"),
        (1024, jnp.int32, "not int32"),
    ],
)
def test_unsupported(n, dtype, reason):
    with jax.enable_x64(True):
        actual = pallas_kernels.unsupported([operand((3, n), dtype)])
    chex.assert_equal(actual is None, reason is None)
    if reason is not None:
        assert re.search(reason, actual)


def test_backward_falls_back():
    """Operations without a kernel here are served by the default choice."""
    with target("NVIDIA H100 80GB HBM3"):
        plain("softmax_vjp", "pallas", "cuda", *[operand((2, 1024), jnp.float32)] * 2)
