"""What implementation=None takes on a Hopper GPU, and cuDNN's part of a program, without a GPU: by what is lowered."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import pallas_is_tested, target

import jaxsoft
from jaxsoft._attention import choice
from jaxsoft._attention.form import STATE, AttentionForm, Extra
from jaxsoft._attention.operation import attention_operation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback
from jaxsoft._core import cudnn
from jaxsoft._core.implementations import REGISTERED
from jaxsoft.pallas_kernels.attention import forward

CUDNN = r"__cudnn\$fmhaSoftmax(?:Backward)?"


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch):
    """Without the CUDA kernels, unless `cuda_kernels` is asked for as well."""
    with_ffi(monkeypatch, lambda platform: "not here")
    for name in ("pallas", "cudnn"):
        here = dataclasses.replace(REGISTERED[name], unavailable=lambda platform: None, by_name_only=None)
        monkeypatch.setitem(REGISTERED, name, here)
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(module, "check_compute_capability", lambda capability: True)
    with target("NVIDIA H100 80GB HBM3"):
        yield


def with_ffi(monkeypatch, unavailable):
    monkeypatch.setitem(choice.KERNELS, "ffi", dataclasses.replace(choice.KERNELS["ffi"], unavailable=unavailable))


@pytest.fixture
def cuda_kernels(monkeypatch):
    with_ffi(monkeypatch, lambda platform: None)
    monkeypatch.setitem(REGISTERED, "ffi", dataclasses.replace(REGISTERED["ffi"], unavailable=lambda platform: None))


def lowered(function, shape=(2, 256, 4, 64), dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return jax.jit(function).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()


def gradients(function):
    return jax.grad(lambda *v: jnp.sum(function(*v).astype(jnp.float32)), (0, 1, 2))


def calls(text):
    """The operands and results of what cuDNN computes."""
    return re.findall(rf"custom_call @({CUDNN})\(.*? : (\(.*)", text)


@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_is_called_as_by_jax(is_causal):
    """So it takes as long. Without gradients there is no log-sum-exp."""
    ours = functools.partial(jaxsoft.dot_product_attention, is_causal=is_causal, implementation="cudnn")
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn")
    assert calls(lowered(ours)) == calls(lowered(theirs))
    found = calls(lowered(gradients(ours)))
    assert found == calls(lowered(gradients(theirs)))
    assert len(found) == 2


def test_another_version_of_jax_may_lack_it(monkeypatch):
    monkeypatch.delattr(cudnn._module(), "_dot_product_attention_bwd_cuda_lowering")
    cudnn._missing.cache_clear()
    assert "cannot use cuDNN here" in cudnn._missing()
    cudnn._missing.cache_clear()


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("length", "size", "is_causal", "forward", "gradient"),
    [
        (1024, 64, False, "pallas", "pallas"),
        (1024, 64, True, "pallas", "pallas"),
        (2048, 64, True, "pallas", "pallas"),
        (1024, 128, False, "pallas", "pallas"),
        (2048, 128, False, "cudnn", "cudnn"),
        (2048, 64, False, "pallas", "cudnn"),
        (4096, 128, False, "cudnn", "cudnn"),
        (4096, 128, True, "pallas", "cudnn"),
        (8192, 96, False, "pallas", "pallas"),
        (512, 256, False, "pallas", "pallas"),
        (1024, 256, False, "cudnn", "pallas"),
        (2048, 256, False, "cudnn", "pallas"),
        (4096, 256, True, "pallas", "pallas"),
        (8192, 256, True, "pallas", "cudnn"),
        (16384, 256, True, "cudnn", "cudnn"),
    ],
)
def test_the_faster_is_taken(length, size, is_causal, forward, gradient):
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=is_causal)
    shape = 1, length, 2, size
    text = lowered(attend, shape)
    assert ("mosaic_gpu" in text, bool(calls(text))) == (forward == "pallas", forward == "cudnn")
    text = lowered(functools.partial(attend, return_residual=True), shape)
    assert "mosaic_gpu" in text and not calls(text)
    assert "Backward" not in str(calls(lowered(gradients(attend), shape)))
    anyhow = gradients(functools.partial(attend, deterministic=False))
    assert ("Backward" in str(calls(lowered(anyhow, shape)))) == (gradient == "cudnn")


@pytest.mark.costly(1)  # test_where_cudnn_s_gradients_may_be_nan has the other
@pytest.mark.parametrize("deterministic", [False, True])
def test_rest_of_output(deterministic):
    """It takes time, and cuDNN's gradients do not read it."""
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=True, deterministic=deterministic)
    (forward, *_) = re.findall(r"custom_call @mosaic_gpu.* -> (.*)", lowered(gradients(attend), (1, 4096, 2, 128)))
    assert forward.count("x128xbf16") == 1 + deterministic


@pytest.mark.costly(1)
@pytest.mark.parametrize(("queries", "keys"), [(1, 4096), (4096, 512)])
@pytest.mark.parametrize("size", [64, 256])
def test_other_numbers_of_queries(queries, keys, size):
    """They were not measured, so cuDNN comes first where it serves the call."""
    query, key = (jax.ShapeDtypeStruct((1, n, 2, size), jnp.bfloat16) for n in (queries, keys))

    def found(function):
        traced = jax.jit(function).trace(query, key, key)
        return calls(traced.lower(lowering_platforms=("cuda",)).as_text())

    assert len(found(jaxsoft.dot_product_attention)) == 1
    assert not found(gradients(jaxsoft.dot_product_attention))
    assert len(found(gradients(functools.partial(jaxsoft.dot_product_attention, deterministic=False)))) == 2


def text_of(function, queries, keys, size=128):
    """A function of query, key and value, as it is lowered."""
    query, key = (jax.ShapeDtypeStruct((1, n, 2, size), jnp.bfloat16) for n in (queries, keys))
    return jax.jit(function).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()


HALVES = [(64, 64), (8256, 8256), (4096, 192)]


@pytest.mark.costly(1)
@pytest.mark.parametrize(("queries", "keys"), HALVES)
def test_where_cudnn_s_gradients_may_be_nan(queries, keys):
    """By default others give them, and the output, so that it has its residual. cuDNN says why it does not."""
    attend = functools.partial(jaxsoft.dot_product_attention, deterministic=False)
    by_name = functools.partial(attend, implementation="cudnn")
    assert len(calls(text_of(by_name, queries, keys))) == 1
    text = text_of(gradients(attend), queries, keys)
    assert not calls(text)
    (forward, *_) = re.findall(r"custom_call @mosaic_gpu.* -> (.*)", text)
    assert forward.count("x128xbf16") == 2
    for derivative in (gradients(by_name), lambda q, k, v: jax.jvp(by_name, (q, k, v), (q, k, v))):
        with pytest.raises(ValueError, match=rf"64 keys more than .* 128; got {keys} keys\. .*'pallas', 'xla'"):
            text_of(derivative, queries, keys)


@pytest.mark.costly(1)
@pytest.mark.parametrize("length", [4095, 4032, 4128])
def test_where_cudnn_s_gradients_are_right(length):
    """Other numbers of keys, and any of queries."""
    attend = functools.partial(jaxsoft.dot_product_attention, deterministic=False)
    found = calls(text_of(gradients(attend), length, length))
    assert ("Backward" in str(found)) == (length % 128 != 64)
    assert "Backward" in str(calls(text_of(gradients(attend), 4032, 4096)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_for_so_many_keys_on_other_gpus(is_causal):
    """They have cuDNN's kernels and XLA's alone, with whatever bits are asked for."""
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=is_causal, deterministic=False)
    with target("NVIDIA B200"):
        for length, expected in ((192, 0), (256, 2)):
            text = text_of(gradients(attend), length, length)
            assert (len(calls(text)), "mosaic_gpu" in text) == (expected, False)
        assert len(calls(text_of(attend, 192, 192))) == 1


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [{"local_window_size": (3, 4)}, {}, {"is_causal": True}], ids=str)
def test_with_x64(options):
    """Kernels count in 32 bits, whatever JAX does."""
    with jax.enable_x64(True):
        text = lowered(gradients(functools.partial(jaxsoft.dot_product_attention, implementation="pallas", **options)))
    assert text.count("custom_call @mosaic_gpu") == 3


def test_bias_of_f64():
    """Its gradient has its dtype, whatever kernels count in."""
    with jax.enable_x64(True):
        x, bias = (
            jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, 4, 1, 256), np.float64),
        )
        attend = jax.grad(lambda b, x: jnp.sum(jaxsoft.dot_product_attention(x, x, x, b).astype(jnp.float32)))
        traced = jax.jit(attend).trace(bias, x)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.costly
@pytest.mark.parametrize("shape", ["b, 256, 4, 64", "2, t, 4, 64", "2, 256, n, 64", "2, 256, 4, h"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_symbolic_shapes(shape, deterministic):
    """Kernels are made for one shape."""
    attend = functools.partial(jaxsoft.dot_product_attention, scale=0.1, deterministic=deterministic)
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.bfloat16)
    for function in (attend, gradients(attend)):
        text = jax.export.export(jax.jit(function), platforms=("cpu", "cuda"))(x, x, x).mlir_module()
        assert "mosaic_gpu" not in text and not calls(text)


def test_another_gpu():
    """Those of attention are Hopper's kernels, which may have fewer multiprocessors than the largest."""
    with target("NVIDIA B200"):
        assert "mosaic_gpu" not in lowered(jaxsoft.dot_product_attention)


def test_multiprocessors(monkeypatch):
    """Blocks are persistent for the multiprocessors of the GPU that is lowered for."""
    found = []
    monkeypatch.setattr(forward, "schedule", lambda *of_call: found.append(of_call[-1]))
    with target("NVIDIA H100 PCIe", 114):
        lowered(functools.partial(jaxsoft.dot_product_attention, implementation="pallas"))
    assert found == [114]


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({"logits_soft_cap": 3.0}, jnp.bfloat16, "mosaic_gpu"),
        ({"logits_soft_cap": 1e4}, jnp.bfloat16, "stablehlo.tanh"),
        ({}, jnp.float32, "stablehlo.exponential"),
    ],
    ids=["cap", "large cap", "float32"],
)
def test_what_cudnn_does_not_serve(options, dtype, expected):
    text = lowered(functools.partial(jaxsoft.dot_product_attention, **options), dtype=dtype)
    assert expected in text
    assert not calls(text)


def targets(function, *shapes, dtype=jnp.bfloat16):
    """The CUDA kernels that a function of arrays calls."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @jaxsoft_(\w*attention\w*)", text)


CACHE = (2, 4096, 2, 64)


@pytest.mark.costly
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(
    ("queries", "options", "expected"),
    [
        (1, {}, ["attention_decode"]),
        (16, {"key_value_seq_lengths": np.array([4096, 5])}, ["attention_decode"]),
        (32, {}, ["attention_decode"]),
        (33, {}, []),
        (33, {"mask": np.ones((33, 4096), bool)}, []),
        (1, {"mask": np.ones((1, 4096), bool), "bias": np.ones((1, 8, 1, 4096), np.float32)}, ["attention_decode"]),
        (1, {"logits_soft_cap": 2000.0}, []),
        (1, {"scale": -1.0}, []),
    ],
    ids=str,
)
def test_few_queries(queries, options, expected):
    """They go to the kernel that is made for them. The four query heads of each key head count together."""
    attend = functools.partial(jaxsoft.dot_product_attention, **options)
    assert targets(attend, (2, queries, 8, 64), CACHE, CACHE) == expected


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("queries", "keys", "few"), [(1, 1, True), (4, 64, True), (4, 63, False), (64, 64, False)])
def test_short_sequences(queries, keys, few):
    """As many keys as queries are no cache."""
    attend = functools.partial(jaxsoft.dot_product_attention, implementation="ffi")
    expected = ["attention_decode" if few else "attention_forward"]
    assert targets(attend, (2, queries, 2, 64), (2, keys, 2, 64), (2, keys, 2, 64)) == expected


@pytest.mark.costly
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("x64", [False, True])
def test_pages(dtype, x64):
    """Of many queries they are gathered for the kernel of keys and values in one piece."""

    def attend(query, size=32, **options):
        pages = jnp.zeros((9, size, 2, 64), dtype)
        table, lengths = np.zeros((2, 4), np.int32), np.array([100, 7], np.int32)
        return jaxsoft.paged_attention(query, pages, pages, table, lengths, logits_soft_cap=3.0, **options)

    few, many = (2, 64, 8, 64), (2, 65, 8, 64)
    with jax.enable_x64(x64):
        assert targets(attend, few) == ["paged_attention"]
        assert targets(attend, many) == ["attention_forward"]
        odd = functools.partial(attend, size=33)
        assert (targets(odd, few), targets(odd, many)) == ([], ["attention_forward"])
        masked = functools.partial(attend, mask=np.ones((65, 128), bool))
        assert targets(masked, many) == []
        with pytest.raises(ValueError, match=r"up to 256 queries of a key head, so pages are gathered, and .* no mask"):
            targets(functools.partial(masked, implementation="ffi"), many)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (3, 4)}], ids=str)
@pytest.mark.parametrize("x64", [False, True])
def test_many_queries_by_cuda(options, x64):
    """By name. The kernel for gradients gives all three of them."""
    shape = 2, 256, 4, 64
    attend = functools.partial(jaxsoft.dot_product_attention, implementation="ffi", **options)
    with jax.enable_x64(x64):
        assert targets(attend, *[shape] * 3) == ["attention_forward"]
        assert targets(gradients(attend), *[shape] * 3) == ["attention_forward", "attention_backward"]
        of_key = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v).astype(jnp.float32)), 1)
        assert targets(of_key, *[shape] * 3) == ["attention_forward", "attention_backward"]


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(
    ("shape", "dtype", "options", "reason"),
    [
        ((1, 64, 2, 64), jnp.float32, {}, "float16 or in bfloat16, not float32"),
        ((1, 64, 2, 12), jnp.bfloat16, {}, "multiples of 8 up to 256; got 12 and 12"),
        ((1, 64, 2, 264), jnp.bfloat16, {}, "multiples of 8 up to 256; got 264 and 264"),
        (
            (1, 512, 2, 64),
            jnp.bfloat16,
            {"mask": np.ones((512, 512), bool)},
            "more than 256 of a key head, takes no mask",
        ),
        ((1, 64, 2, 64), jnp.bfloat16, {"logits_soft_cap": 1e4}, "a soft cap up to 1000; got 10000"),
        ((1, 64, 2, 64), jnp.bfloat16, {"scale": 0.0}, "a scale from 1e-30"),
        ((1, 64, 2, 64), jnp.bfloat16, {"dtype": jnp.float16}, "return bfloat16 or float32 here, not float16"),
        ((2**12, 1, 2**11, 8), jnp.bfloat16, {}, "fewer than 2.30 queries of all heads"),
    ],
    ids=str,
)
def test_what_the_cuda_kernels_refuse(shape, dtype, options, reason):
    attend = functools.partial(jaxsoft.dot_product_attention, implementation="ffi", **options)
    with pytest.raises(ValueError, match=f"implementation='ffi' cannot serve this call: .*{reason}"):
        lowered(attend, shape, dtype)


@pytest.mark.usefixtures("cuda_kernels")
def test_so_many_keys_go_elsewhere():
    attend = functools.partial(jaxsoft.dot_product_attention, implementation="ffi")
    query, cache = (1, 1, 1, 8), (1, 2**30 - 1, 1, 8)
    assert targets(attend, query, cache, cache) == ["attention_decode"]
    with pytest.raises(ValueError, match=r"fewer than 2\^30 keys of a sequence; got 1073741824"):
        targets(attend, query, *[(1, 2**30, 1, 8)] * 2)


@pytest.mark.usefixtures("cuda_kernels")
def test_a_bias_of_few_queries_has_its_gradient_elsewhere():
    """The forward pass is served, and by name the gradient says why it is not."""
    bias = np.ones((1, 1, 1, 64), np.float32)
    attend = functools.partial(jaxsoft.dot_product_attention, bias=bias, implementation="ffi")
    assert targets(attend, *[(1, 4, 2, 64), (1, 64, 2, 64), (1, 64, 2, 64)]) == ["attention_decode"]
    with pytest.raises(ValueError, match="its kernel for gradients of attention takes no bias"):
        lowered(gradients(attend), (1, 64, 2, 64))
    assert "mosaic_gpu" in lowered(
        gradients(functools.partial(jaxsoft.dot_product_attention, bias=bias)), (1, 64, 2, 64)
    )


def test_the_kernels_for_attention_are_hopper_s(monkeypatch):
    """Whatever GPU row operations run on."""
    from jaxsoft._attention import ffi
    from jaxsoft._core import library

    assert "for NVIDIA GPUs" in ffi.unavailable("cpu")
    monkeypatch.setattr(library, "operations", lambda platform: frozenset())
    assert "need sm_90a" in ffi.unavailable("cuda")
    monkeypatch.setattr(library, "operations", lambda platform: frozenset({"attention_forward"}))
    assert ffi.unavailable("cuda") is None
    with target("NVIDIA B200"):
        assert "for Hopper" in ffi.unavailable("cuda")


@pytest.mark.costly(1)
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("length", "size", "forward", "backward"),
    [
        (2048, 64, (True, True), True),
        (1024, 64, (True, False), True),
        (256, 64, (False, False), False),
        (2048, 96, (True, True), True),
        (1024, 96, (False, False), True),
        (8192, 128, (True, True), True),
        (512, 128, (True, True), True),
        (256, 128, (False, False), False),
        (2048, 256, (True, True), True),
        (1024, 256, (True, False), True),
        (256, 256, (False, False), False),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_fastest_with_the_cuda_kernels(length, size, forward, backward, deterministic, is_causal):
    """Forward and backward are chosen apart, and without a causal rule and with one."""
    shapes, forward = [(1, length, 2, size)] * 3, forward[is_causal]
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=is_causal, deterministic=deterministic)
    assert ("attention_forward" in targets(attend, *shapes)) == forward
    found = targets(gradients(attend), *shapes)
    assert ("attention_forward" in found, "attention_backward" in found) == (forward, backward)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("length", "asked"), [(8192, True), (8192, False), (32768, True), (32768, False)])
def test_gradients_in_any_order(length, asked):
    """The CUDA kernel adds in any order where that is allowed, and faster."""
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=True, deterministic=asked)
    (backward,) = re.findall(r"@jaxsoft_attention_backward.*", lowered(gradients(attend), (1, length, 2, 256)))
    assert re.findall(r"deterministic = (\w+)", backward) == [str(asked or length == 8192).lower()]


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("length", [512, 8192])
def test_values_of_another_size(length):
    """Many queries, and gradients, go to the CUDA kernels, and few queries elsewhere."""
    shapes = [(1, length, 2, 192)] * 2 + [(1, length, 2, 128)]
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=True)
    assert targets(attend, *shapes) == ["attention_forward"]
    assert targets(gradients(attend), *shapes) == ["attention_forward", "attention_backward"]
    named = functools.partial(jaxsoft.dot_product_attention, implementation="ffi")
    assert targets(named, (1, 1, 2, 192), *shapes[1:]) == ["attention_forward"]
    with pytest.raises(
        ValueError, match="its kernel for attention of pages takes head sizes that are equal; got 192 an"
    ):
        given = {"page_table": np.zeros((1, 1), np.int32), "key_value_seq_lengths": np.array([64])}
        paged = functools.partial(jaxsoft.paged_attention, **given, implementation="ffi")
        targets(paged, (1, 1, 2, 192), (1, 64, 2, 192), (1, 64, 2, 128))


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("options", [{"dtype": jnp.float32}, {"return_state": True}], ids=["dtype", "state"])
def test_values_of_another_size_in_f32(options):
    shapes = [(1, 512, 2, 192)] * 2 + [(1, 512, 2, 128)]
    attend = functools.partial(jaxsoft.dot_product_attention, is_causal=True, **options)
    assert targets(lambda *v: attend(*v), *shapes) == ["attention_forward"]


@pytest.mark.usefixtures("cuda_kernels")
def test_one_array_of_segments():
    """Where queries and keys have the same segments, each query has its own key, and its cotangent is not masked."""
    ids, others = np.repeat([[0, 1]], 256, axis=1), np.repeat([[0, 1]], 256, axis=1)
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)

    def masked(keys, **options):
        given = {"query_segment_ids": ids, "key_value_segment_ids": keys, "is_causal": True} | options
        attend = functools.partial(jaxsoft.dot_product_attention, **given)
        text = jax.jit(gradients(attend)).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        return "stablehlo.select" in text and "tensor<1x512x2x64xi1>" in text

    assert masked(others) and not masked(ids)
    assert masked(ids, query_seq_lengths=np.array([300]))


def of_blocks(implementation, queries, keys, dtype, size=128):
    """The custom calls of a block of keys that goes on from others, and of its gradients, which are added to others;
    each with the places of the results that take the memory of operands.
    """
    like = jax.ShapeDtypeStruct
    query, key = (like((1, n, heads, size), jnp.bfloat16) for n, heads in ((queries, 8), (keys, 2)))
    output, lse, count = like(query.shape, np.float32), like((1, 8, queries), np.float32), like((1,), np.int32)
    extras = (Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS, Extra.OFFSET)
    forward = AttentionForward(
        AttentionForm(np.dtype(dtype), 0.1, right=0, extras=(*extras, *STATE), rounded=dtype != np.float32)
    )
    names = "query", "key", "value"
    pullback = AttentionPullback(
        AttentionForm(np.dtype(jnp.bfloat16), 0.1, right=0, extras=extras), names, True, ("query", "value")
    )
    found = []
    for operation, operands in (
        (forward, (query, key, key, count, count, count, output, lse)),
        (
            pullback,
            (query, key, key, count, count, count, query, lse, lse, lse, query, output, like(key.shape, np.float32)),
        ),
    ):
        run = functools.partial(attention_operation, operation, implementation)
        text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        aliased = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d)\]", text)
        found.append(
            (re.findall(r"custom_call @(?:jaxsoft_)?(attention_\w+|mosaic_gpu)", text), list(map(int, aliased)))
        )
    return found


@pytest.mark.costly
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(
    ("implementation", "queries", "keys", "dtype", "forward", "backward"),
    [
        (None, 1024, 1024, np.float32, (["attention_forward"], [0, 1]), (["attention_backward"], [0, 2])),
        (None, 1024, 1024, jnp.bfloat16, (["attention_forward"], [1]), (["attention_backward"], [0, 2])),
        # A kernel that knows nothing of other blocks has the rest around it.
        pytest.param(
            None, 256, 256, jnp.bfloat16, (["mosaic_gpu"], []), (["mosaic_gpu"] * 2, []), marks=pallas_is_tested
        ),
        ("ffi", 2, 4096, np.float32, (["attention_decode"], []), (["attention_backward"], [0, 2])),
        pytest.param(
            "pallas", 1024, 1024, np.float32, (["mosaic_gpu"], []), (["mosaic_gpu"] * 2, []), marks=pallas_is_tested
        ),
        ("xla", 1024, 1024, np.float32, ([], []), ([], [])),
    ],
)
def test_blocks_of_keys(implementation, queries, keys, dtype, forward, backward):
    assert of_blocks(implementation, queries, keys, dtype) == [forward, backward]


def test_a_state_where_no_kernel_serves():
    """cuDNN has no output in f32, and without other kernels XLA serves all."""
    assert of_blocks(None, 1024, 1024, np.float32, size=20) == [([], []), ([], [])]
    with pytest.raises(ValueError, match=r"'cudnn' cannot serve this call: .*float32 of bfloat16"):
        of_blocks("cudnn", 1024, 1024, np.float32)


def test_explained(cuda_kernels):
    """Which kernel serves a call, how it cuts up its work, and why those before it do not."""
    x, bias = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, 1, 2048), jnp.bfloat16)
    by_ffi = jaxsoft.explain(gradients(jaxsoft.dot_product_attention), x, x, x).choices
    assert [choice.implementation for choice in by_ffi] == ["ffi", "ffi"]
    assert [choice.kernel.split(":")[0] for choice in by_ffi] == ["attention_forward", "attention_backward"]
    forward, backward = jaxsoft.explain(gradients(jaxsoft.dot_product_attention), x, x, x, bias).choices
    assert forward.kernel.startswith("jaxsoft_attention: 192 queries a block")
    assert "takes no bias" in forward.reasons["ffi"]
    assert "jaxsoft_attention_key_value_gradients: 128 keys a block" in backward.kernel
    decode = jaxsoft.explain(jaxsoft.dot_product_attention, jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16), x, x)
    assert decode.choices[0].kernel.startswith("decode_few_rows: ")


def test_largest_scores(cuda_kernels):
    """By the CUDA kernel for many queries, of few queries too, and else by XLA. Their gradients are as without them."""
    attend = functools.partial(jaxsoft.dot_product_attention, return_max_logits=True)
    x, one = (jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16) for length in (256, 1))
    total = gradients(lambda *v: attend(*v)[0])
    forward, backward = jaxsoft.explain(total, x, x, x).choices
    assert (forward.implementation, backward.implementation) == ("ffi", "pallas")
    assert forward.kernel.startswith("attention_forward: ")
    assert forward.reasons == {"pallas": "its kernels do not give the largest scores"}
    (of_few,) = jaxsoft.explain(attend, one, x, x).choices
    assert of_few.implementation == "ffi" and of_few.kernel.startswith("attention_forward: ")
    (by_xla,) = jaxsoft.explain(attend, x, x, x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)).choices
    assert by_xla.implementation == "xla"
    assert "attention of many queries, which alone gives the largest scores, takes no bias" in by_xla.reasons["ffi"]
    assert by_xla.reasons["cudnn"] == "it is used for calls without bias"


def test_several_implementations(cuda_kernels):
    """One of those that are accepted serves the call, or an error says why none does."""
    attend = functools.partial(jaxsoft.dot_product_attention, implementation=("cudnn", "pallas"))
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    assert {choice.implementation for choice in jaxsoft.explain(attend, x, x, x).choices} <= {"cudnn", "pallas"}
    with pytest.raises(ValueError, match=r"cudnn: .* without a cap; pallas: .* soft cap .*'xla'"):
        jaxsoft.explain(functools.partial(attend, logits_soft_cap=3e3), x, x, x)
