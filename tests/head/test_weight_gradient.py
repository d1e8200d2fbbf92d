"""The CUDA kernel for the gradient of a linear layer's weight in the place of the gradients of its scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import forget_heads, same_bits, slow, target
from test_head_kernels import HOPPER

from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft._core import gpus, library
from jaxsoft._head import ffi

needs_kernel = pytest.mark.skipif(
    "weight_gradient_in_place" not in library.operations("cuda"), reason="the kernel for Hopper was not built"
)
on_hopper = pytest.mark.skipif(
    needs_kernel.args[0] or gpus.generation() is not gpus.Generation.HOPPER, reason="checks a kernel for Hopper"
)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
# Rows, width and classes: around the 64 rows of a step, the 256 columns of a panel, and 4 steps in shared memory; more
# panels than groups; the most blocks of a group, and more than fit on a GPU.
SIZES = [(1, 256, 8), (63, 256, 248), (64, 256, 256), (65, 256, 264), (256, 256, 512), (255, 512, 34_000)]
MORE = [(257, 512, 1000), (320, 512, 2056), (512, 512, 50_264), (4095, 4096, 5000), (4096, 4096, 4104)]
MORE += [(2000, 16_384, 600), (8192, 8192, 776), (65, 17_408, 800), (300, 17_408, 248)]
sizes = pytest.mark.parametrize(
    "size", [*SIZES, *(pytest.param(size, marks=slow) for size in MORE)], ids=lambda size: "x".join(map(str, size))
)


def arrays(rows, width, classes, dtype):
    """Hidden, and gradients of scores in an array whose other rows are NaN."""
    hidden = jax.random.normal(jax.random.key(0), (rows, width), jnp.float32)
    dx = jax.random.normal(jax.random.key(1), (rows, classes), jnp.float32)
    rest = jnp.full((width - rows, classes), jnp.nan, dtype)
    return hidden.astype(dtype), jnp.concatenate([dx.astype(dtype), rest])


@on_hopper
@each_dtype
@sizes
def test_values(size, dtype):
    """The product, rounded once, but for the error of sums in f32, which matrix units round down; always its bits."""
    hidden, dx = arrays(*size, dtype)
    actual = jax.jit(ffi.weight_gradient_in_place)(hidden, dx)
    exact = np.asarray(hidden, np.float64).T @ np.asarray(dx[: len(hidden)], np.float64)
    half_place = 1.01 * float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=half_place, atol=1e-8 * len(hidden) ** 1.5)
    assert all(same_bits(jax.jit(ffi.weight_gradient_in_place)(hidden, dx), actual) for _ in range(3))


@on_hopper
@each_dtype
def test_next_to_other_work(dtype):
    """Other kernels hold multiprocessors while groups of blocks come, in a loop on the same array."""
    hidden, dx = arrays(512, 512, 8192, dtype)

    @jax.jit
    def often(hidden, dx):
        step = lambda i, dx: ffi.weight_gradient_in_place(hidden / 16, dx)  # noqa: E731
        return jax.lax.fori_loop(0, 20, step, dx)

    assert np.isfinite(np.asarray(often(hidden, dx), np.float32)).all()
    assert same_bits(often(hidden, dx), often(hidden, dx))


@on_hopper
@each_dtype
@pytest.mark.parametrize("rows", [2048, 2000, 1500])
@pytest.mark.parametrize("reduction", ["mean", None])
def test_in_the_layer(rows, reduction, dtype, patched):
    """The gradients of the layer with the kernel are those with chunks, but for the rounding of weight's."""
    width, classes, label = 2048, 120_000, jnp.arange(rows) % 1000
    h = jax.random.normal(jax.random.key(0), (rows, width), jnp.float32).astype(dtype)
    w = (jax.random.normal(jax.random.key(1), (width, classes), jnp.float32) / 16).astype(dtype)

    def gradients():
        forget_heads()
        f = lambda h, w: jnp.sum(linear(h, w, label, reduction=reduction))  # noqa: E731
        lowered = jax.jit(jax.grad(f, (0, 1))).lower(h, w)
        return "jaxsoft_weight_gradient_in_place" in lowered.as_text(), lowered.compile()(h, w)

    with_kernel, (of_h, of_w) = gradients()
    patched.setattr(ffi, "serves", lambda hidden, dx: False)
    without, (expected_h, expected_w) = gradients()
    # Without a reduction, and in f16, which is reduced later, only a few rows may be missing.
    assert (with_kernel, without) == (rows != 1500 or (reduction == "mean" and dtype == jnp.bfloat16), False)
    for actual, expected in ((of_h, expected_h), (of_w, expected_w)):
        # Sums in f32 in another order may round to the next number.
        places = {"rtol": 2 * float(jnp.finfo(dtype).eps), "atol": 1e-6}
        np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), **places)


@needs_kernel
@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"rows": 4000}, True),
        ({"width": 512, "rows": 512}, True),
        ({"classes": 50_257}, False),
        ({"width": 4224}, False),
        ({"width": 6144, "rows": 6144}, False),  # two groups of 48 blocks leave a quarter of the multiprocessors idle
        ({"rows": 4097}, False),
        ({"dtype": jnp.float32}, False),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, False),
    ],
    ids=str,
)
def test_which_calls_are_served(change, served):
    given = {"rows": 4096, "width": 4096, "classes": 50_264, "dtype": jnp.bfloat16, "kind": HOPPER}
    given |= change
    hidden, dx = (
        jax.ShapeDtypeStruct(shape, given["dtype"])
        for shape in ((given["rows"], given["width"]), (given["width"], given["classes"]))
    )
    with target(given["kind"]):
        assert ffi.serves(hidden, dx) == served


@needs_kernel
@pytest.mark.parametrize("reduction", ["mean", None])
def test_programs(reduction):
    """For Hopper the layer's program has one product for weight's gradient, in place; for a CPU it has chunks."""
    types = [jax.ShapeDtypeStruct(*v) for v in (((2048, 2048), jnp.bfloat16), ((2048, 120_000), jnp.bfloat16))]
    label = jnp.zeros(2048, int)
    f = jax.jit(jax.grad(lambda h, w: jnp.sum(linear(h, w, label, reduction=reduction)), (0, 1)))
    with target(HOPPER):
        traced = f.trace(*types)
        texts = [traced.lower(lowering_platforms=platforms).as_text() for platforms in (("cuda",), ("cpu",))]
        both = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert [text.count("@jaxsoft_weight_gradient_in_place(") for text in (*texts, both)] == [1, 0, 1]
    assert "output_operand_alias" in texts[0]


@on_hopper
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"dtype": jnp.float32}, r"hidden must be F16 or BF16, .*: got F32\(64,256\)"),
        ({"hidden": (257, 256)}, "hidden must be F16 or BF16, of 1 to width rows"),
        ({"hidden": (0, 256)}, "hidden must be F16 or BF16, of 1 to width rows"),
        ({"hidden": (64, 128), "dx": (128, 512)}, "hidden must be .* its width a multiple of 256"),
        ({"hidden": (64,)}, "hidden must be F16 or BF16"),
        ({"dx": (512, 512)}, r"gradients must have hidden's dtype and the shape \(width, classes\)"),
        ({"dx": (256, 500)}, "gradients must have .* with a number of classes that is a multiple of 8"),
        ({"dx": (256, 0)}, "gradients must have .* with a number of classes that is a multiple of 8"),
        ({"dx dtype": jnp.float16}, "gradients must have hidden's dtype"),
        ({"result": (256, 504)}, "the result must take the place of gradients"),
        ({"alias": False}, "the result must take the place of gradients"),
        ({"workspace": (10,)}, r"workspace must be U8\(32768\) or longer: got U8\(10\)"),
    ],
    ids=str,
)
def test_bad_calls(change, message):
    given = {"hidden": (64, 256), "dx": (256, 512), "dtype": jnp.bfloat16, "workspace": (1 << 20,), "alias": True}
    given |= change
    hidden = jnp.ones(given["hidden"], given["dtype"])
    dx = jnp.ones(given["dx"], given.get("dx dtype", given["dtype"]))
    result = jax.ShapeDtypeStruct(given.get("result", dx.shape), dx.dtype)
    aliases = {1: 0} if given["alias"] and result.shape == dx.shape else None
    call = functools.partial(
        jax.ffi.ffi_call(
            "jaxsoft_weight_gradient_in_place",
            (result, jax.ShapeDtypeStruct(given["workspace"], jnp.uint8)),
            input_output_aliases=aliases,
        ),
        hidden,
        dx,
    )
    if message is None:
        assert (np.asarray(call()[0], np.float32) == 64).all()
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: weight_gradient_in_place: {message}"):
        jax.block_until_ready(call())
