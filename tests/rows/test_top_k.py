"""top_k_softmax: values, probabilities, indices and their derivatives, over every implementation.

The reference is numpy in float64: a stable sort of the scores, and their softmax.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    each_dtype,
    each_dtype_in_turn,
    each_fast_implementation,
    each_implementation,
    on_cpu,
    on_gpu,
    operand,
    precision,
    pretend,
    rows,
    same_bits,
    served,
    slow,
)
from ffi_calls import call
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import MESH, collectives, each_axis_type, mesh_of, needs_devices
from truth import EPS, Truth, assert_last_place, assert_within, in_float64, wide

import jaxsoft
from jaxsoft._rows import ffi
from jaxsoft._rows import plain as plain_rows
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.top_k import TOP_K

top_k_softmax = jaxsoft.top_k_softmax


def order(x: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest, of equal ones the lowest index first; of rows without a softmax the first k."""
    m = wide(x).max(axis=-1, keepdims=True)  # NaN where the row holds one
    return np.argsort(np.where(np.isfinite(m), -wide(x), 0), axis=-1, kind="stable")[..., :k].astype(np.int32)


def assert_top_k(x: np.ndarray, k: int, results, dtype=None) -> None:
    """Values and indices are exact, and probabilities within the bounds of softmax."""
    values, p, indices = map(np.asarray, results)
    what = f"{k} of {x.dtype} {x.shape}"
    i = order(x, k)
    assert indices.dtype == np.int32 and values.dtype == x.dtype and p.dtype == (dtype or x.dtype), what
    np.testing.assert_array_equal(indices, i, what)
    assert same_bits(values, np.take_along_axis(x, i, axis=-1)), what
    truth = Truth.of(x)
    expected, d = (np.take_along_axis(v, i, axis=-1) for v in (truth.p, truth.d))
    scale = (4 + np.minimum(d, 150)) * np.maximum(expected, 1e-30)
    if p.dtype.itemsize == 2:
        return assert_last_place(p, expected, 1, EPS[2] * scale, what)
    assert_within(p, expected, EPS[x.dtype.itemsize] * scale + 1e-37, what)


def special(shape, dtype) -> np.ndarray:
    """Rows that are constant, ascending, descending, of few values, of huge ones, mostly -inf, and of zeros of both
    signs; and rows without a softmax."""
    n, rng = shape[-1], np.random.default_rng(shape[-1])
    x = rng.standard_normal((12, n)).astype(np.float32)
    line = np.linspace(-9, 9, n, dtype=np.float32)
    x[0], x[1], x[2], x[3] = 1, line, -line, np.round(x[3])
    x[4] = x[4] * 10 - 3e4
    x[5, : n // 2] = x[6, n // 3 :] = -np.inf
    x[7] = np.where(x[7] > 0, 0.0, -0.0)
    x[8, n // 2], x[9, n - 1], x[10] = np.nan, np.inf, -np.inf
    x[11, 0], x[11, n - 1] = np.inf, -np.nan
    return x.astype(dtype)


CASES = [(1, (1,)), (7, (1, 3, 7)), (33, (5,)), (100, (64, 100)), (257, (1, 255, 256, 257)), (1003, (5, 64, 300))]
CASES += [(5000, (64,)), (40_009, (5, 200))]


def each_of(ks, implementation):
    """Several numbers of elements in one program."""
    return jax.jit(lambda x: [top_k_softmax(x, k, implementation=implementation) for k in ks])


@each_implementation
@each_dtype_in_turn
def test_special_rows(implementation, dtype):
    with precision(dtype), served(implementation):
        for n, ks in CASES:
            if implementation == "reference" and n > 2000:  # scans compile slowly
                continue
            x = special((12, n), dtype)
            for k, results in zip(ks, each_of(ks, implementation)(x), strict=True):
                assert_top_k(x, k, results)


@each_fast_implementation
@each_dtype_in_turn
def test_rows(implementation, dtype):
    """Ordinary rows of many lengths: multiples of what a vector, a pack, a tile and a segment hold, and beside them."""
    with precision(dtype), served(implementation):
        for n, k in ((16, 3), (127, 5), (2048, 256), (4095, 1), (4097, 30), (65_536, 64), (70_001, 100), (150_000, 7)):
            x = rows(n, dtype)
            assert_top_k(x, k, top_k_softmax(x, k, implementation=implementation))


# Lengths around what 4 and 8 lanes, a warp, a tile and a block hold, in rows that begin anywhere; and k around what
# tells the kernels apart.
LENGTHS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 511, 512, 513]
LENGTHS += [1000, 1023, 1024, 1025, 1030, 2047, 2049, 4095, 4096, 4097, 8191, 16_383, 16_384, 16_385, 33_000]
NUMBERS = (1, 2, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 255, 256)


@pytest.mark.skipif(jaxsoft.implementations()["ffi"] is not None, reason="no C++ kernels")
@each_dtype_in_turn
@pytest.mark.parametrize("part", [pytest.param(i, marks=slow if i else ()) for i in range(4)])
def test_lengths(dtype, part):
    """Every kernel and its borders: all kinds of rows beside each other, the probabilities in each dtype in turn."""
    results_of = {jnp.float32: (jnp.float32, jnp.bfloat16, jnp.float16), jnp.float64: (jnp.float64,)}
    wanted = itertools.cycle(results_of.get(dtype, (dtype, jnp.float32)))
    with precision(dtype):
        for i, n in enumerate(LENGTHS):
            if i % 4 != part:
                continue
            x = np.concatenate([special((12, n), dtype), rows(n, dtype)[:5]])
            fitting = [k for k in NUMBERS if k <= n]
            ks = {fitting[0], fitting[-1], fitting[i % len(fitting)], fitting[i // 2 % len(fitting)], min(n, 256)}
            calls = [(k, next(wanted)) for k in sorted(ks)]
            f = jax.jit(
                lambda x, calls=calls: [top_k_softmax(x, k, dtype=of_p, implementation="ffi") for k, of_p in calls]
            )
            for (k, of_p), results in zip(calls, f(x), strict=True):
                assert_top_k(x, k, results, np.dtype(of_p))


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_many_rows(dtype):
    """Rows that take a warp each, as there are enough for all warps of the GPU, of every kind beside each other."""
    lengths = ((1023, 7), (1030, 7), (1100, 32), (2041, 8), (2047, 16), (4096, 32), (4097, 64), (9001, 128))
    for n, k in lengths:
        # A multiple of 8 rows, so that each copy of a row begins at the same place in a word of 16 bytes: sums in f32
        # may depend on it.
        kinds = rows(n, dtype)
        x = np.tile(np.concatenate([special((12, n), dtype), kinds, -1 - np.abs(kinds)]), (8, 1))
        many = jnp.tile(x, (80, 1))
        results = top_k_softmax(many, k, implementation="ffi")
        assert_top_k(x, k, [v[-len(x) :] for v in results])
        for v in results:
            assert same_bits(np.asarray(v), np.tile(np.asarray(v[: len(x)]), (80, 1)))


@pytest.mark.skipif(jaxsoft.implementations()["ffi"] is not None, reason="no C++ kernels")
def test_one_kernel():
    """A compiled call is the kernel and nothing else, in whichever dtype the probabilities are wanted."""
    for dtype, wanted in (
        (jnp.float32, None),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, None),
        (jnp.float16, jnp.float32),
    ):
        x = operand((64, 128), dtype)
        f = jax.jit(lambda x, wanted=wanted: top_k_softmax(x, 8, dtype=wanted, implementation="ffi"))
        program = f.lower(x).compile().as_text()
        assert program.count(" custom-call(") == 1, program
        assert not any(f" {other}(" in program for other in ("fusion", "copy", "convert", "call", "while")), program


@each_implementation
def test_dtypes_of_probabilities(implementation):
    """They are rounded once, from the accumulator's dtype."""
    every = (jnp.float32, jnp.float16, jnp.bfloat16)
    f = jax.jit(lambda x: [top_k_softmax(x, 7, dtype=wanted, implementation=implementation) for wanted in every])
    for dtype in every:
        x = rows(100, dtype)
        found = f(x)
        exact = np.asarray(found[0][1])
        for wanted, results in zip(every, found, strict=True):
            assert_top_k(x, 7, results, np.dtype(wanted))
            assert_trees_all_close(results[1], exact.astype(wanted), rtol=float(jnp.finfo(wanted).eps), atol=0)


@each_fast_implementation
@pytest.mark.parametrize("n", [2**20, 2**20 + 1])
def test_long_rows(implementation, n):
    with served(implementation):
        line = np.linspace(-9, 9, n, dtype=np.float32)[None]
        for x in (rows(n, np.float32, count=1), np.ones_like(line), line):
            assert_top_k(x, 64, top_k_softmax(x, 64, implementation=implementation))


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_ways(dtype):
    """Rows by clusters of blocks, by the block, and rows that are split, which begin anywhere, of any number."""
    clusters = (1, 300_007), (3, 128_256), (7, 16_403), (32, 128_256), (50, 8_200), (66, 128_255), (130, 20_001)
    for shape in (*clusters, (140, 40_001), (600, 9_999), (3000, 1000), (2, 2**22 + 1), (1, 2**23)):
        x = np.asarray(jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype))
        for k in (1, 5, 64, 256):
            assert_top_k(x, k, top_k_softmax(x, k, implementation="ffi"))
            assert_top_k(np.round(x), k, top_k_softmax(np.round(x), k, implementation="ffi"))


@pytest.mark.skipif(jaxsoft.implementations()["ffi"] is not None, reason="no C++ kernels")
@each_dtype_in_turn
def test_few_values(dtype):
    """Rows of few different values, of whose largest there are more than are wanted: those of the lowest indices are.
    Their copies are everywhere, or only where a tile, a block or a cluster's block comes late, beside larger ones."""
    rng = np.random.default_rng(0)
    shapes = (40, 128), (9, 1000), (5, 4096), (5, 4097), (2, 20_001), (3, 40_009), (1, 131_072)
    if jax.default_backend() == "gpu":  # rows by warps, by clusters of every kind, by the block, and split
        shapes += (15_000, 1100), (15_000, 4096), (3, 128_256), (66, 16_403), (250, 40_001), (2, 2**21 + 5)
    with precision(dtype):
        for count, n in shapes:
            x = rng.integers(0, 128, (max(5, min(count, 40)), n)).astype(np.float32) / 16 - 4
            x[1::5] = rng.integers(0, 3, x[1::5].shape)
            x[2::5, n // 2 :] += 1
            x[3::5] = np.where(rng.random(x[3::5].shape) < 0.5, -0.0, 0.0)
            x[4::5] = 1
            x[4::5, n - n // 3 :: 7] = 2
            x = np.roll(x, n % 5, axis=0)[:count].astype(dtype)  # not all kinds are there if rows are few
            ks = 1, 5, 8, 32, 64, min(n, 256)
            for k, results in zip(ks, each_of(ks, "ffi")(np.resize(x, (count, n))), strict=True):
                assert_top_k(x, k, [v[: len(x)] for v in results])


@each_implementation
def test_equal_probabilities_of_different_scores(implementation):
    """The larger score comes first, where top_k of the softmax cannot tell them apart."""
    x = np.array([[0.25, np.nextafter(np.float32(0.25), np.float32(1)), 0.0]], np.float32)
    values, p, indices = top_k_softmax(x, 2, implementation=implementation)
    assert p[0, 0] == p[0, 1] and indices.tolist() == [[1, 0]] and values.tolist() == x[:, [1, 0]].tolist()
    subnormal = np.array([[0, 1, 3, 2, -0.0]], np.float32) * np.float32(1e-45)
    assert top_k_softmax(subnormal, 5, implementation=implementation)[2].tolist() == [[2, 3, 1, 0, 4]]


@each_implementation
def test_axes_dtypes_and_shapes(implementation):
    x = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    axes = 0, 1, 2, -2
    options = {"dtype": jnp.bfloat16, "implementation": implementation}
    along = jax.jit(lambda x: [top_k_softmax(x, 2, axis, **options) for axis in axes])(x)
    for axis, results in zip(axes, jax.tree.map(np.asarray, along), strict=True):
        assert [v.shape[axis] for v in results] == [2, 2, 2]
        assert_top_k(np.moveaxis(x, axis, -1), 2, [np.moveaxis(v, axis, -1) for v in results], jnp.bfloat16)
    assert_top_k(x[0, 0], 7, top_k_softmax(x[0, 0], 7, implementation=implementation))
    half = x.astype(jnp.bfloat16)
    assert_top_k(half, 3, top_k_softmax(half, 3, dtype=jnp.float32, implementation=implementation), jnp.float32)
    assert [v.shape for v in top_k_softmax(x[:0], 3, implementation=implementation)] == [(0, 5, 3)] * 3
    mapped = jax.jit(jax.vmap(lambda x: top_k_softmax(x, 2, 0, implementation=implementation), 1))(x)
    mapped = map(np.asarray, mapped)
    assert_top_k(np.moveaxis(x, 0, -1), 2, [np.moveaxis(v, (0, 1, 2), (0, 2, 1)) for v in mapped])
    integers = top_k_softmax(np.int32([1, 3, 2]), 2, implementation=implementation)
    assert integers[0].dtype == jnp.float32 and integers[2].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("error", "message", "x", "k", "options"),
    [
        (ValueError, "k must be from 1 to the length of the axis, 4; got 0", np.ones((2, 4)), 0, {}),
        (ValueError, "k must be from 1 to the length of the axis, 4; got 5", np.ones((2, 4)), 5, {}),
        (ValueError, "k must be from 1 to the length of the axis, 0; got 1", np.ones((2, 0)), 1, {}),
        (TypeError, "k must be an integer that is known when the call is traced; got 2.0", np.ones((2, 4)), 2.0, {}),
        (TypeError, "axis must be an integer; got None", np.ones((2, 4)), 1, {"axis": None}),
        (TypeError, "axis must be an integer; got \\(0, 1\\)", np.ones((2, 4)), 1, {"axis": (0, 1)}),
        (ValueError, "axis must be between -2 and 1", np.ones((2, 4)), 1, {"axis": 2}),
        (
            TypeError,
            "x must hold float16, bfloat16, float32 or float64; got dtype complex64",
            np.ones(4, np.complex64),
            1,
            {},
        ),
        (ValueError, "dtype must be None or one of float16", np.ones(4), 1, {"dtype": jnp.int32}),
        (TypeError, "renormalize must be True or False; got 1", np.ones(4), 1, {"renormalize": 1}),
        (ValueError, "implementation must be None or one of", np.ones(4), 1, {"implementation": "magic"}),
    ],
)
def test_bad_arguments(error, message, x, k, options):
    with pytest.raises(error, match=message):
        top_k_softmax(x, k, **options)


def test_traced_k():
    with pytest.raises(TypeError, match="k must be an integer that is known when the call is traced"):
        jax.jit(lambda k: top_k_softmax(jnp.ones(4), k))(2)


def plain(x, k):
    """Values and probabilities in plain JAX."""
    i = jax.lax.top_k(x, k)[1]
    return tuple(jnp.take_along_axis(v, i, axis=-1) for v in (x, jax.nn.softmax(x)))


def pulled_back(f, g):
    return lambda x: jax.vjp(f, x)[1](g)[0]


@pytest.mark.costly
@each_implementation
@each_dtype
def test_gradients(implementation, dtype):
    """Reverse and forward mode, beside plain JAX in float64; a score that dominates its row keeps its digits in f32."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 50)).astype(dtype)
    x[1, 7], x[2], x[3, :20] = 9, 1, -np.inf
    wide_dtype = jaxsoft.fold.accumulator(dtype)
    g = tuple(rng.standard_normal((6, 4)).astype(t) for t in (dtype, wide_dtype))
    t = rng.standard_normal(x.shape).astype(dtype)

    def f(x):
        return top_k_softmax(x, 4, dtype=wide_dtype, implementation=implementation)[:2]

    def derivatives(f, x, g, t):
        return pulled_back(f, g)(x), jax.jvp(f, (x,), (t,))[1]

    of_plain = lambda x, g, h, t: derivatives(lambda x: plain(x, 4), x, (g, h), t)  # noqa: E731
    expected, (expected_v, expected_p) = in_float64(of_plain, x, *g, t)
    p = Truth.of(x).p
    dx = None
    with precision(dtype), served(implementation):
        dx, (dv, dp) = jax.jit(functools.partial(derivatives, f))(x, g, t)
    if dx is None:  # refused
        return
    assert dx.dtype == x.dtype and dv.dtype == x.dtype and dp.dtype == wide_dtype
    eps = EPS[x.dtype.itemsize]
    size = 16 * eps * (p * np.abs(g[1]).sum(-1, keepdims=True) * 4 + np.abs(expected))
    if x.dtype.itemsize == 2:
        info = jnp.finfo(dtype)
        size = size + 0.51 * (float(info.eps) * np.abs(expected) + float(info.smallest_subnormal))
    assert_within(dx, expected, size, "gradient")
    np.testing.assert_array_equal(wide(dv), expected_v)
    assert_within(dp, expected_p, 64 * eps * (np.abs(expected_p) + np.abs(t.astype(np.float64)).max()), "tangent")


@each_implementation
def test_renormalize(implementation):
    """The probabilities are the softmax of the values, with its derivatives, and NaN in rows without a softmax."""
    x = special((12, 40), np.float32)
    g = np.sin(np.arange(12.0 * 3, dtype=np.float32)).reshape(12, 3)

    def f(x, dtype=None):
        return top_k_softmax(x, 3, renormalize=True, dtype=dtype, implementation=implementation)

    def expected(x):
        return jax.nn.softmax(jax.lax.top_k(x, 3)[0])

    @jax.jit
    def results(x):
        others = top_k_softmax(x, 3, implementation=implementation)
        same = top_k_softmax(x, 3, renormalize=np.True_, implementation=implementation)[1]
        return f(x), others, same, expected(x), f(x, jnp.bfloat16)[1], f(x.astype(jnp.bfloat16))[1]

    (values, p, indices), others, same, p_expected, *narrow = jax.tree.map(np.asarray, results(x))
    assert same_bits(values, others[0]) and same_bits(indices, others[2])
    assert np.isnan(p[8:]).all()
    assert_trees_all_close(p[:8], p_expected[:8], rtol=1e-6)
    assert same_bits(p, same)
    assert [v.dtype for v in narrow] == [jnp.bfloat16] * 2

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(f(x) * g[1:3]))

    dx, dx_expected = jax.jit(lambda x: (gradient(lambda x: f(x)[1])(x), gradient(expected)(x)))(x[1:3])
    assert_trees_all_close(dx, dx_expected, rtol=1e-5, atol=1e-7)  # no elements are equal


@each_implementation
def test_gradients_of_values_alone(implementation):
    """1 at one element, in rows of nothing but -inf, too."""
    x = special((12, 40), np.float32)[[0, 1, 2, 3, 4, 5, 6, 7, 10]]
    f = lambda x: jnp.sum(top_k_softmax(x, 3, implementation=implementation)[0][:, 1])  # noqa: E731
    dx = np.asarray(jax.jit(jax.grad(f))(x))
    np.testing.assert_array_equal(np.argmax(dx, axis=-1), order(x, 3)[:, 1])
    assert (np.sum(dx != 0, axis=-1) == 1).all() and (np.sum(dx, axis=-1) == 1).all()


@pytest.mark.costly
@needs_devices
@each_fast_implementation
@each_axis_type
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b")), P(("a", "b")), P(None, "b")], ids=str)
def test_sharding(implementation, kind, spec):
    """Rows stay where they are; of a row that is sharded, devices move two numbers, and k values and indices each."""
    mesh, x, k = mesh_of(kind), special((12, 64), np.float32)[:8], 5
    x[1, 50], x[2], x[7] = np.inf, -np.inf, 0  # XLA's partitioner does not keep the sign of a zero
    f = jax.jit(lambda x: top_k_softmax(x, k, implementation=implementation))

    def pullback(x, g):
        return jax.vjp(lambda x: top_k_softmax(x, k, implementation=implementation)[1], x)[1](g)[0]

    g = np.sin(np.arange(8.0 * k, dtype=np.float32)).reshape(8, k)
    expected_dx = jax.jit(pullback)(x, g)
    with jax.set_mesh(mesh), served(implementation):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        cotangent = jax.device_put(g, NamedSharding(mesh, P(spec[0])))
        compiled = f.lower(sharded).compile()
        back = jax.jit(pullback).lower(sharded, cotangent).compile()
        results = compiled(sharded)
        assert_top_k(x, k, results)
        dx = back(sharded, cotangent)
        assert_trees_all_close(dx, expected_dx, rtol=1e-5, atol=1e-6)
        if implementation == "xla":  # its partitioner gathers what lax.top_k reads
            return
        assert all(v.sharding.is_equivalent_to(NamedSharding(mesh, P(spec[0])), 2) for v in results)
        assert dx.sharding.is_equivalent_to(sharded.sharding, 2)
        whole, rows_here = len(spec) == 1, sharded.sharding.shard_shape(x.shape)[0]
        for moved in (collectives(compiled), collectives(back)):
            assert [name for name, _ in moved] == ([] if whole else ["all-gather"]), moved
            assert all(np.prod(shape) <= rows_here * (3 * k + 2) * np.prod(MESH) for _, shape in moved), moved


@needs_devices
@each_fast_implementation
def test_parts_shorter_than_k(implementation):
    """Each device then has all of its part among the k largest."""
    mesh = mesh_of(jax.sharding.AxisType.Auto)
    x = special((12, 16), np.float32)
    if implementation == "xla":  # whose partitioner keeps the signs of zeros and of NaN as little, on GPUs of no zero
        x = x[:8] if jax.default_backend() == "cpu" else x[:8] + 0
        x[7] = 0
    with jax.set_mesh(mesh), served(implementation):
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, ("a", "b"))))
        ks = 1, 3, 16
        for k, results in zip(ks, each_of(ks, implementation)(sharded), strict=True):
            assert_top_k(x, k, results)


@needs_devices
@each_fast_implementation
@pytest.mark.parametrize("manual", [("a", "b"), pytest.param(("a",), marks=slow)], ids=["fully", "partially"])
def test_shard_map(implementation, manual):
    mesh, spec, x = mesh_of(jax.sharding.AxisType.Auto), P(manual), rows(100, np.float32, count=8)
    if implementation == "ffi" and len(manual) == 1:
        return  # test_sharding has it: such a mesh needs implementation=None
    with jax.set_mesh(mesh), served(implementation):

        def local(x):
            return top_k_softmax(x, 7, implementation=implementation)

        f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual)))
        assert_top_k(x, 7, f(jax.device_put(x, NamedSharding(mesh, spec))))


@on_cpu
def test_a_row_does_not_depend_on_the_others():
    x = rows(70_001, np.float32, count=9)
    every = top_k_softmax(x, 9)
    for i in range(9):
        assert same_bits(top_k_softmax(x[i], 9), [v[i] for v in every])


def test_choice(monkeypatch):
    """The kernels find up to 256, and those of CUDA none of f64; else XLA has the call."""
    pretend(monkeypatch, None)

    def chosen(implementation, platform, k, dtype):
        x = operand((4, 1000), dtype)
        return RowOperation(TOP_K, RowForm(x.dtype, k=k), implementation).choose(platform, [x]).function

    for k, dtype, platform, is_kernel in (
        (256, jnp.float32, "cpu", True),
        (256, jnp.float64, "cpu", True),
        (257, jnp.float32, "cpu", False),
        (256, jnp.bfloat16, "cuda", True),
        (257, jnp.bfloat16, "cuda", False),
        (5, jnp.float64, "cuda", False),
    ):
        x = operand((4, 1000), dtype)
        assert callable(ffi.kernel(TOP_K, RowForm(x.dtype, k=k), platform, [x])) == is_kernel
    assert chosen(None, "other", 5, jnp.float32).args == (plain_rows.BY_XLA,)
    assert chosen(None, "cpu", 300, jnp.float32).args == (plain_rows.BY_XLA,)


F32, F16, S32 = jnp.float32, jnp.float16, jnp.int32
X = jnp.ones((4, 8), F32)
R, K = ((4,), F32), ((4, 2), F32)
PROBABILITIES = "chosen_probabilities must be F32, F16 or BF16, 1 to 256 of at most 2147483647 elements of a row"
VALUES = "values must be F32, 1 to 256 of at most 2147483647 elements of a row"
INDICES = "indices must be S32, 1 to 256 of at most 2147483647 elements of a row, the same number in each result"


@pytest.mark.skipif(jaxsoft.implementations()["ffi"] is not None, reason="no C++ kernels")
@pytest.mark.parametrize(
    ("results", "message", "form"),
    [
        ([((4, 9), F32), ((4, 9), F32), ((4, 9), S32), R, R], VALUES, {}),
        ([((4, 0), F32), ((4, 0), F32), ((4, 0), S32), R, R], VALUES, {}),
        ([((3, 2), F32), ((3, 2), F32), ((3, 2), S32), R, R], VALUES, {}),
        ([((2,), F32), ((2,), F32), ((2,), S32), R, R], VALUES, {}),
        ([((4, 2), F16), ((4, 2), F32), ((4, 2), S32), R, R], VALUES, {}),
        ([K, ((4, 2), S32), ((4, 2), S32), R, R], PROBABILITIES, {}),
        ([K, ((4, 3), F32), ((4, 2), S32), R, R], PROBABILITIES, {}),
        ([K, K, ((4, 2), F32), R, R], INDICES, {}),
        ([K, K, ((4, 3), S32), R, R], INDICES, {}),
        ([K, K, ((4, 2), S32), ((3,), F32), R], "maximum must be F32, one a row", {}),
        ([K, K, ((4, 2), S32), R, ((4,), F16)], "sum must be F32, one a row", {}),
        ([K, K, ((4, 2), S32), R, R], "top_k: trailing must be 0", {"trailing": 1}),
        ([K, K, ((4, 2), S32), R, R], "extras='s' must be some of ''", {"extras": "s"}),
        ([K, K, ((4, 2), S32), R, R], "top_k: masked must be false", {"masked": True}),
    ],
)
def test_bad_buffers(results, message, form):
    operands = [X, jnp.ones(4, F32)] if form.get("extras") else [X]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call("top_k", results, *operands, **form)


@pytest.mark.skipif(jaxsoft.implementations()["ffi"] is not None, reason="no C++ kernels")
def test_buffers_that_are_too_many_for_the_kernel():
    x = jnp.ones((2, 300), F32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=VALUES):
        call("top_k", [((2, 257), F32), ((2, 257), F16), ((2, 257), S32), ((2,), F32), ((2,), F32)], x)
    results = [((2, 256), F32), ((2, 256), F16), ((2, 256), S32), ((2,), F32), ((2,), F32)]
    values, p, indices, m, s, _ = call("top_k", results, x)
    np.testing.assert_array_equal(indices, np.tile(np.arange(256), (2, 1)))
    assert (values == 1).all() and (m == 1).all() and (s == 300).all() and (p == np.float16(1 / 300)).all()
