"""The CUDA kernel that draws tokens: the token that given random numbers must give, in float64, and what is around it.

What surrounds it is tested without a GPU, too: there plain JAX takes its place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import needs_library, on_gpu, same_bits, slow
from meshes import DEVICES, MESH, collectives, each_axis_type, mesh_of, needs_devices, rows_on_a_device
from test_random import distribution
from truth import wide

from jaxsoft._core import library
from jaxsoft._ops.sampling import _draw_on_one_device
from jaxsoft._ops.sampling_kernel import Sampling
from jaxsoft.random import sample

KEY = jax.random.key(0)
KINDS = ("flat", "peaked", "equal", "rounded", "masked", "sorted", "one", "large", "narrow")
OPTIONS = [
    {"top_p": 0.9},
    {},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"top_k": 50},
    {"temperature": 0},
    {"top_p": 0.999, "min_p": 0.01},
    {"temperature": 2, "top_k": 5000, "top_p": 0.3},
    {"temperature": 0.3, "min_p": 0.05},
    {"top_p": 0.99999},
    {"top_p": 1e-7},
    {"top_k": 70_000, "top_p": 0.5},
    {"temperature": 0.5, "top_k": 100, "top_p": 0.95},  # the most that goes the short way, and one more
    {"top_k": 101, "min_p": 0.001},
]


@functools.cache
def jitted(k):
    return jax.jit(Sampling(k, _draw_on_one_device))


def kernel(k, *operands):
    """The kernel on a GPU, and elsewhere what takes its place."""
    return jitted(k)(*operands)


def row(kind: str, n: int, dtype) -> np.ndarray:
    z = np.random.default_rng(n).standard_normal(n)
    x = {
        "flat": z,
        "peaked": 6 * z,
        "equal": np.zeros(n),
        "rounded": np.round(2 * z) / 2 + 0.0,
        "masked": np.where(np.arange(n) % 3 > 0, -np.inf, z),
        "sorted": 4 * np.arange(n) / n,
        "one": np.where(np.arange(n) == n // 2, 30, z),
        "large": 1000 + z,
        "narrow": 0.01 * z,
    }[kind]
    return x.astype(dtype)


def check(x: np.ndarray, options: dict, count: int, seed: int = 0) -> None:
    """The first token at which the cumulative probability, in the order of indices, exceeds the random number.

    Rounding may decide whether one token more is left, of those at the border of top_p.
    """
    rng = np.random.default_rng(seed)
    uniform = (rng.integers(0, 2**23, (count, 2)) / 2**23).astype(np.float32)
    given = {"temperature": 1, "top_p": 1, "min_p": 0, **options}
    numbers = [np.full(count, given[name], np.float32) for name in ("temperature", "top_p", "min_p")]
    rows = np.broadcast_to(x, (count, len(x)))
    token, p = map(np.asarray, kernel(given.get("top_k"), uniform, rows, *numbers))
    exact = {name: float(np.float32(v)) if name != "top_k" else v for name, v in given.items()}
    if exact["top_p"] < 1:  # equal tokens may reach it exactly, and so they do where the product is rounded to f32
        exact["top_p"] *= 1 - 2e-7
    true = distribution(wide(x), **exact)
    until = np.cumsum(true)
    u = uniform[:, 0].astype(np.float64) + uniform[:, 1] * 2.0**-23
    assert np.all(true[token] > 0), (options, token[true[token] == 0])
    np.testing.assert_allclose(p, true[token], rtol=1e-4)
    np.testing.assert_array_less(u, until[token] + 3e-5)
    np.testing.assert_array_less(until[token] - true[token] - 3e-5, u)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 255, 256, 257, 4097, 32_000, 50_257, 128_256, pytest.param(2**20, marks=slow)])
def test_tokens(kind, n):
    """Of a row, which lies over up to 16 blocks, of some, over three, and of many, in a block each."""
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    for i, options in enumerate(OPTIONS):
        count = (1, 33, 3, 70)[(i + n) % 4] if n < 200_000 else 3
        check(row(kind, n, dtypes[(i + KINDS.index(kind)) % 3]), options, count, seed=i)


@on_gpu
@pytest.mark.parametrize("options", OPTIONS[:7], ids=str)
def test_a_row_is_drawn_as_it_is_among_others(options):
    """It lies over 16 blocks, over three or in one; with other rows before it, it begins elsewhere in memory."""
    for kind in ("flat", "peaked", "equal", "rounded"):
        x = np.stack([row(kind, 50_257, jnp.bfloat16)] * 300)
        k = options.get("top_k")
        values = [options.get("temperature", 1), options.get("top_p", 1), options.get("min_p", 0)]
        uniform = np.full((300, 2), 0.37, np.float32)
        results = [
            kernel(k, uniform[:count], x[:count], *(np.full(count, v, np.float32) for v in values))
            for count in (1, 40, 300)
        ]
        first = [np.asarray(v)[0] for v in results[0]]
        assert all(np.all(np.asarray(v) == w) for result in results for v, w in zip(result, first, strict=True))


def values(kind: str, n: int) -> np.ndarray:
    """Rows with elements that are far from the others, where these are in each of the row's parts."""
    rng = np.random.default_rng(n)
    z = rng.standard_normal(n)
    few = np.zeros(n, bool)
    few[rng.choice(n, 200, replace=False)] = True
    return {
        "above": np.where(few, 40 + z, z),
        "below": np.where(few, -1 + 0.1 * z, 0.01 * z),
        "near zero": np.where(few, 1e-5 * z, -9 + z / 2),
        "zeros": np.where(z > 0, z, np.where(np.arange(n) % 2 > 0, 0.0, -0.0)),
        "all magnitudes": np.exp(20 * rng.standard_normal(n)) * np.sign(z) / 1e9,
        "subnormal": 1e-39 * z,
        "lowest": np.where(np.arange(n) % 3 > 0, -3.3e38, z),
        "late": np.where(np.arange(n) == n - 3, 1.5, -np.inf),
        "NaN": np.where(np.arange(n) == n // 2, np.nan, z),
        "infinite": np.where(np.arange(n) == n // 3, np.inf, z),
    }[kind].astype(jnp.bfloat16)


@on_gpu
@pytest.mark.parametrize("n", [32_777, 50_257, 128_256])
@pytest.mark.parametrize(
    "kind",
    ["above", "below", "near zero", "zeros", "all magnitudes", "subnormal", "lowest", "late", "NaN", "infinite"],
)
def test_counting_values_draws_the_same(kind, n):
    """Many rows of bfloat16 are read once, and the values counted. One row is cut over 16 blocks, which never do so."""
    x = values(kind, n)
    uniform = np.random.default_rng(0).random((140, 2), np.float32)
    options = [(1, 0.9, 0), (1, 0.5, 0), (2, 0.3, 0.2), (1, 0.99999, 0), (1, 1e-7, 0), (1e-8, 0.84, 0)]
    for temperature, top_p, min_p in options:
        numbers = [np.full(140, v, np.float32) for v in (temperature, top_p, min_p)]
        many = kernel(None, uniform, np.stack([x] * 140), *numbers)
        for i in (0, 77):
            one = kernel(None, uniform[i : i + 1], x[None], *(v[:1] for v in numbers))
            for a, b in zip(many, one, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[i], np.asarray(b)[0])


@on_gpu
def test_the_same_bits():
    x = jax.random.normal(KEY, (40, 128_256), jnp.bfloat16)
    draw = jax.jit(functools.partial(sample, top_p=0.95, top_k=3000))
    first = draw(KEY, x)
    assert all(same_bits(first, draw(KEY, x)) for _ in range(20))


@on_gpu
@pytest.mark.parametrize(
    ("shapes", "dtype", "k", "message"),
    [
        ([(3, 8), (3, 2), (3,), (3,), (3,)], jnp.float64, 1, "logits must be F16, BF16 or F32: got F64"),
        ([(3, 8), (3, 3), (3,), (3,), (3,)], jnp.float32, 1, "uniform must be F32, two numbers a row"),
        ([(3, 8), (3, 2), (4,), (3,), (3,)], jnp.float32, 1, "options must be F32, one number a row"),
        ([(3, 8), (3, 2), (3,), (3,), (3,)], jnp.float32, 0, "k must be at least 1: got 0"),
        ([(3, 0), (3, 2), (3,), (3,), (3,)], jnp.float32, 1, "logits must have rows of 1 to 4194304 elements"),
    ],
)
def test_bad_calls(shapes, dtype, k, message):
    with jax.enable_x64(True):
        assert library.unavailable("cuda") is None
        types = [jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.float32)]
        operands = [jnp.ones(shape, dtype if i == 0 else jnp.float32) for i, shape in enumerate(shapes)]
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: sample: {message}"):
            jax.block_until_ready(jax.ffi.ffi_call("jaxsoft_sample", types)(*operands, k=np.int64(k)))


@needs_library
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"temperature": 0.7}], ids=str)
def test_one_call_on_a_gpu(options):
    """Whatever the filters are, one kernel draws, for mapped rows, too; and plain JAX where there is none."""

    def text(x, keys=KEY, **more):
        draw = functools.partial(sample, **options, **more)
        draw = jax.vmap(draw) if keys is not KEY else draw
        return jax.jit(draw).trace(keys, x).lower(lowering_platforms=("cuda",)).as_text()

    x = jnp.zeros((4, 3, 300), jnp.bfloat16)
    for lowered in (text(x), text(x, jax.random.split(KEY, 4)), text(x, implementation="ffi")):
        assert lowered.count("stablehlo.custom_call @jaxsoft") == 1
        assert "@jaxsoft_sample(" in lowered
    assert "@jaxsoft_sample(" not in text(x, implementation="xla")
    assert "@jaxsoft_sample(" not in text(jnp.zeros((100_000, 11)))
    with jax.enable_x64(True):
        assert "@jaxsoft_sample(" not in text(x.astype(jnp.float64))


def operands(shape, seed=0):
    rng = np.random.default_rng(seed)
    rows, n = shape[:-1], shape[-1]
    return (
        rng.random((*rows, 2), np.float32),
        rng.standard_normal((*rows, n)).astype(np.float32),
        rng.uniform(0.5, 2, rows).astype(np.float32),
        rng.uniform(0.5, 1, rows).astype(np.float32),
        np.zeros(rows, np.float32),
    )


@pytest.mark.costly(1)
@needs_devices
@each_axis_type
@pytest.mark.parametrize("k", [None, 5])
def test_sharded(k, kind):
    """Rows stay; of tokens that are sharded, the k largest of each device are gathered, or all where there is no k."""
    mesh = mesh_of(kind)
    u, x, *options = operands((4, 6, 64))
    expected = kernel(k, u, x, *options)
    with jax.set_mesh(mesh):
        for spec in (jax.P("a"), jax.P("a", None, "b"), jax.P(None, None, "b")):
            sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
            draw = jax.jit(Sampling(k, _draw_on_one_device))
            compiled = draw.lower(u, sharded, *options).compile()
            token, p = compiled(u, sharded, *options)
            np.testing.assert_array_equal(token, expected[0])
            np.testing.assert_allclose(p, expected[1], rtol=1e-6)
            gathered = max([np.prod(shape) for name, shape in collectives(compiled) if name == "all-gather"], default=0)
            if len(spec) == 1:
                assert not collectives(compiled)
            elif DEVICES >= 4:
                numbers = MESH[1] * (3 * k + 2) if k else 64
                assert gathered == rows_on_a_device(mesh, spec, x.shape) * numbers
    masked = x.copy()
    masked[0, 0, 3] = np.nan
    with jax.set_mesh(mesh):
        sharded = jax.device_put(masked, jax.sharding.NamedSharding(mesh, jax.P(None, None, "b")))
        p = kernel(k, u, sharded, *options)[1]
        np.testing.assert_array_equal(np.isnan(p), np.arange(24).reshape(4, 6) == 0)


def test_vmap():
    u, x, *options = operands((4, 6, 64))
    expected = kernel(5, u, x, *options)
    mapped = jax.vmap(jax.vmap(functools.partial(kernel, 5), (1, 1, 0, 0, 0)), (0, 2, 0, 0, 0))
    token, p = mapped(u.transpose(0, 2, 1), x.transpose(2, 1, 0), *options)
    np.testing.assert_array_equal(token, expected[0])
    np.testing.assert_allclose(p, expected[1], rtol=1e-6)
    one = jax.vmap(lambda u: kernel(None, u, x[0], *(v[0] for v in options)))(u)
    np.testing.assert_array_equal(one[0][0], kernel(None, u[0], x[0], *(v[0] for v in options))[0])


def test_one_number_for_all_rows():
    """It is as that number for each row; mapped, it is one for the rows of each mapped call."""
    u, x, *_ = operands((4, 6, 64))
    numbers = np.float32(0.8), np.float32(0.7), np.float32(0.01)
    expected = kernel(None, u, x, *(np.full(x.shape[:-1], v) for v in numbers))
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(kernel(None, u, x, *numbers), expected)
    same(jax.vmap(functools.partial(kernel, None), (0, 0, None, None, None))(u, x, *numbers), expected)
    each = np.linspace(0.5, 1.5, 4, dtype=np.float32)
    filled = np.broadcast_to(each[:, None], x.shape[:-1])
    expected = kernel(None, u, x, filled, np.full(x.shape[:-1], numbers[1]), np.full(x.shape[:-1], numbers[2]))
    same(jax.vmap(functools.partial(kernel, None), (0, 0, 0, None, None))(u, x, each, *numbers[1:]), expected)
    by_row = np.broadcast_to(each[0], (6,))
    expected = kernel(None, np.stack([u[0]] * 4), np.stack([x[0]] * 4), filled, filled[:, :1] + 0 * filled, 0 * filled)
    one = jax.vmap(lambda t, p: kernel(None, u[0], x[0], t, p, 0 * by_row))(each, each)
    same(one, expected)


@needs_library
def test_one_number_takes_no_launch():
    """Beside the random numbers there is nothing that fills an array, whether the numbers are known or traced."""

    def text(*options):
        draw = jax.jit(lambda x, *numbers: sample(KEY, x, **dict(zip(("temperature", "top_p"), numbers, strict=False))))
        return draw.trace(jnp.zeros((4, 300), jnp.bfloat16), *options).lower(lowering_platforms=("cuda",)).as_text()

    for lowered in (text(), text(0.7), text(0.7, 0.9), text(jnp.float32(0.7), jnp.float32(0.9))):
        call = next(line for line in lowered.splitlines() if "@jaxsoft_sample(" in line)
        assert call.count("tensor<f32>") == 3


@needs_devices
@pytest.mark.parametrize("k", [pytest.param(None, marks=slow), 5])
def test_sharded_rows_with_one_number(k):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    u, x, *_ = operands((4, 64))
    numbers = np.float32(0.8), np.float32(0.7), np.float32(0)
    for spec in (jax.P("a"), jax.P(None, "a")):
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        compiled = jitted(k).lower(u, sharded, *numbers).compile()
        np.testing.assert_array_equal(compiled(u, sharded, *numbers)[0], kernel(k, u, x, *numbers)[0])
        assert spec != jax.P("a") or not collectives(compiled)
