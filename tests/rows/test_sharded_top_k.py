"""What devices tell each other of the k largest elements of their parts of rows, and what they make of it.

Here one device tells it all of each part in turn, by the kernels of CUDA or by operations on rows. `test_shards` and
`test_top_k` have rows that lie on several.
"""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype, needs_library, on_gpu, precision, rows, same_bits, slow
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices
from test_top_k import assert_top_k, special
from truth import Truth

from jaxsoft._core import library
from jaxsoft._rows import ffi, sharded_top_k
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.top_k import TOP_K

by_kernels_too = pytest.mark.parametrize("by", [pytest.param("kernels", marks=on_gpu), "rows"])
# Elements of a row in each part, parts, and k: fewer than k in a part; one part; and around the threads of a row.
CASES = [(1, 2, 1), (3, 5, 4), (5, 8, 33), (64, 1, 64), (33, 3, 33), (257, 2, 64), (100, 5, 7), (2000, 2, 256)]
MORE = [(64, 32, 64), (1, 300, 256), (9, 17, 16), (17, 8, 16), (128, 2, 65), (1025, 3, 1), (5001, 8, 256)]
MORE += [(70_001, 4, 100)]


def run(implementation=None):
    """Any operation on rows, within code for one device."""
    return RowOperation(TOP_K, RowForm(np.dtype(np.float32)), implementation).within


def of_candidates(x, k):
    return sharded_top_k._candidates(RowForm(x.dtype, k=k), run(), x)


def tell(by: str, part: jax.Array, k: int) -> jax.Array:
    """The message of a part, of which k elements are wanted."""
    k = min(k, part.shape[-1])
    kernel = ffi.top_k_candidates(part, k) if by == "kernels" else None  # there is none for short parts
    return kernel(part) if kernel else of_candidates(part, k)


def merge(by: str, part: jax.Array, form: RowForm, received: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the messages of all parts, which are like this one."""
    if by == "kernels":
        return ffi.top_k_of_candidates(part, form, len(received))(received)
    return sharded_top_k._merged(form, run(), part, received)


@pytest.mark.cover("by", "dtype")
@by_kernels_too
@each_dtype
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=slow) for case in MORE)], ids=str)
def test_values(by, dtype, case):
    """The bits of the largest and their indices, of all kinds of rows, and their softmax and the state."""
    if by == "kernels" and dtype == jnp.float64:
        return
    results_of = {jnp.float32: (jnp.float32, jnp.bfloat16, jnp.float16), jnp.float64: (jnp.float64,)}
    with precision(dtype):
        n, parts, k = case
        wanted = results_of.get(dtype, (dtype, jnp.float32))
        form = RowForm(np.dtype(wanted[k % len(wanted)]), k=k)
        x = np.concatenate([special((12, n * parts), dtype), rows(n * parts, dtype)[:5]])

        def f(x):
            each = jnp.split(x, parts, axis=-1)
            return merge(by, each[0], form, jnp.stack([tell(by, part, form.k) for part in each]))

        *results, m, s = jax.jit(f)(x)
        assert_top_k(x, k, results, form.dtype)
        truth = Truth.of(x)
        ordered = np.isfinite(truth.m)[:, 0]
        what = f"{k} of {parts} parts of {n}"
        np.testing.assert_array_equal(np.asarray(m)[ordered], truth.m[ordered, 0], what)
        expected = np.exp(truth.log_s)[ordered, 0]
        rtol = 1e-14 if dtype == jnp.float64 else 1e-5 if x.itemsize == 2 else 2e-6
        np.testing.assert_allclose(np.asarray(s)[ordered], expected, rtol=rtol, err_msg=what)


@by_kernels_too
def test_leading_dimensions(by):
    """Those of x are those of the results."""
    x = rows(40, np.float32, count=6).reshape(2, 3, 40)

    def f(x):
        each = jnp.split(x, 2, axis=-1)
        received = jnp.stack([tell(by, part, 5) for part in each])
        return merge(by, each[0], RowForm(x.dtype, k=5), received)

    *results, m, s = jax.jit(f)(x)
    assert m.shape == s.shape == (2, 3)
    assert_top_k(x, 5, results)


@on_gpu
@each_dtype
def test_one_layout(dtype):
    """The kernel's message has the bits of the other one, but for the last ones of sums."""
    if dtype == jnp.float64:
        return
    for n, k in ((1025, 3), (1030, 33), (5000, 64), (131_072, 256)):
        x = jnp.asarray(special((12, n), dtype)[:8])
        received, expected = tell("kernels", x, k), tell("rows", x, k)
        assert received.shape == expected.shape
        assert same_bits(received[:-8], expected[:-8])


def called(traced, platform: str) -> set[str]:
    """Which of the library's kernels for the largest elements a program calls on a platform."""
    return set(re.findall(r"custom_call @jaxsoft_(top_k\w*)\(", traced.lower(lowering_platforms=(platform,)).as_text()))


@needs_library
@needs_devices
@pytest.mark.parametrize(
    ("n", "dtype", "k", "of_p", "implementation", "kernels"),
    [
        (4000, jnp.bfloat16, 64, jnp.bfloat16, None, {"top_k_candidates", "top_k_of_candidates"}),
        (4000, jnp.float32, 256, jnp.float16, "ffi", {"top_k_candidates", "top_k_of_candidates"}),
        (2048, jnp.float32, 64, jnp.float32, None, {"top_k", "top_k_of_candidates"}),  # none tells of short parts,
        (4000, jnp.float16, 8, jnp.bfloat16, None, {"top_k", "top_k_candidates"}),  # and none writes such probabilities
        (4000, jnp.float32, 257, jnp.float32, None, set()),
        (4000, jnp.float32, 64, jnp.float32, "xla", set()),
        (4000, jnp.float64, 64, jnp.float64, None, set()),
    ],
)
def test_kernels_on_a_gpu(n, dtype, k, of_p, implementation, kernels):
    """A launch each makes the message and the results; on other platforms there is none of them."""
    with precision(dtype):
        mesh, x = mesh_of(a=2), jax.ShapeDtypeStruct((4, n), dtype)
        local = sharded_top_k.selected_over_shards(
            RowForm(np.dtype(of_p), k=k), ("a",), run(implementation), implementation in (None, "ffi")
        )
        f = jax.shard_map(local, mesh=mesh, in_specs=P(None, "a"), out_specs=P(), check_vma=False)
        traced = jax.jit(f).trace(x)
        assert called(traced, "cuda") == kernels
        assert called(traced, "cpu") <= {"top_k"}


@needs_library
def test_what_a_device_may_get():
    """Of more messages than the kernel takes, operations on rows make the results, and the message is the same."""
    part, form = jax.ShapeDtypeStruct((3, 5000), jnp.float32), RowForm(np.dtype(np.float32), k=64)
    assert ffi.top_k_of_candidates(part, form, 32) is not None
    assert ffi.top_k_of_candidates(part, form, 33) is None
    assert ffi.top_k_of_candidates(part, dataclasses.replace(form, k=1), 33) is not None
    assert ffi.top_k_candidates(part, 64) is not None
    assert ffi.top_k_candidates(jax.ShapeDtypeStruct((0, 5000), jnp.float32), 64) is None


WORKSPACE = jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)


@on_gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "k", "words", "message"),
    [
        ((3, 2000), jnp.float64, 2, 24, "scores must be F16, BF16 or F32, of a dimension or more: got F64"),
        ((3, 2000), jnp.int32, 2, 24, "scores must be F16, BF16 or F32"),
        ((3, 1024), jnp.float32, 2, 24, "scores must have rows of 1025 to 2147483647 elements"),
        ((3, 2000), jnp.float32, 257, 2319, "k must be from 1 to 256: got 257"),
        ((3, 2000), jnp.float32, 0, 6, "k must be from 1 to 256: got 0"),
        ((3, 2000), jnp.float32, 2, 23, r"candidates must be U32\(24\): got U32\(23\)"),
        ((3, 2000), jnp.bfloat16, 2, 24, r"candidates must be U32\(18\)"),
    ],
)
def test_bad_calls_that_tell(shape, dtype, k, words, message):
    with jax.enable_x64(True):
        assert library.unavailable("cuda") is None
        types = jax.ShapeDtypeStruct((words,), jnp.uint32), WORKSPACE
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: top_k_candidates: {message}"):
            call = jax.ffi.ffi_call("jaxsoft_top_k_candidates", types)
            jax.block_until_ready(call(jnp.ones(shape, dtype), k=np.int64(k)))


@on_gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"part": 1}, "a row must have 4 to 2147483647 elements: got part=1 in each of 2 parts"),
        ({"part": 2**31}, "a row must have 4 to 2147483647 elements"),
        ({"part": 3}, "candidates must have 33 words each: got U32"),
        ({"received": ((2, 41), jnp.uint32)}, "candidates must have 42 words each"),
        ({"received": ((2, 42), jnp.int32)}, "candidates must be U32, of two dimensions: got S32"),
        ({"received": ((84,), jnp.uint32)}, "candidates must be U32, of two dimensions"),
        ({"received": ((600, 42), jnp.uint32)}, "there may be 2048 candidates of a row: got 2400"),
        ({"values": ((3, 4), jnp.float64)}, "values must be F16, BF16 or F32"),
        ({"values": ((3, 300), jnp.float32)}, "values must be F16, BF16 or F32, 1 to 256 of a row"),
        ({"p": ((3, 4), jnp.int32)}, "chosen_probabilities must be as many as values, in a dtype that goes with"),
        ({"p": ((3, 5), jnp.float32)}, "chosen_probabilities must be as many as values"),
        ({"indices": ((3, 4), jnp.uint32)}, "indices must be S32, as many as values"),
        ({"m": ((4,), jnp.float32)}, "maximum and sum must be F32, one a row of values"),
        ({"s": ((3,), jnp.float16)}, "maximum and sum must be F32, one a row of values"),
    ],
)
def test_bad_calls_that_merge(change, message):
    given = {"received": ((2, 42), jnp.uint32), "values": ((3, 4), jnp.float32), "p": ((3, 4), jnp.float32)}
    given |= {"indices": ((3, 4), jnp.int32), "m": ((3,), jnp.float32), "s": ((3,), jnp.float32), "part": 7} | change
    received, part = given.pop("received"), given.pop("part")
    with jax.enable_x64(True):
        assert library.unavailable("cuda") is None
        call = jax.ffi.ffi_call("jaxsoft_top_k_of_candidates", [jax.ShapeDtypeStruct(*of) for of in given.values()])
        refused = pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: top_k_of_candidates: {message}")
        with refused if message else contextlib.nullcontext():
            jax.block_until_ready(call(jnp.ones(*received), part=np.int64(part)))
