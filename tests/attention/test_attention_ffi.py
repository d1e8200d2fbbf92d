"""The handlers of the CUDA kernels for attention: buffers that do not fit are an error and never a crash."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_ffi_calls import BF16, F32, I32, PAGE, B, H, K, N, S, T, call
from common import ATTENTION_IMPLEMENTATIONS, needs_library

from jaxsoft._attention import ffi
from jaxsoft._core import library

here = pytest.mark.skipif("ffi" not in ATTENTION_IMPLEMENTATIONS, reason="no CUDA kernels for attention")

THREE = ("query", "key", "value")
BASE = {
    "attention_forward": (THREE, ("output", "lse")),
    "attention_decode": (THREE, ("output", "lse")),
    "paged_attention": (("query", "key_pages", "value_pages", "page_table"), ("output", "lse")),
    "attention_backward": ((*THREE, "lse", "delta", "cotangent"), THREE),
    "attention_forward_of_block": (("query", "block"), ("output", "lse")),
    "attention_backward_of_block": (("query", "block", "lse", "delta", "cotangent"), ("query", "block")),
}
FORWARD, DECODE, PAGED, BACKWARD, OF_BLOCK, BACKWARD_OF_BLOCK = BASE
F16, F8 = jnp.float16, jnp.float8_e4m3fn


def specification(target: ffi.Target) -> str:
    """The line that a library has for a target."""
    operands, results, extras, more = (
        ",".join(names) for names in ((*target.operands, *target.after), target.results, target.extras, target.more)
    )
    return f"{target.name}({operands})->({results}) extras={extras} results={more}"


@needs_library
def test_the_library_has_the_targets():
    lines = library.specification(ctypes.CDLL(str(library.find("cuda"))))
    if not any(line.startswith("attention") for line in lines):
        pytest.skip("the library is not for Hopper")
    assert [line for line in lines if "attention" in line] == [specification(target) for target in ffi.TARGETS]


@here
@pytest.mark.parametrize(
    ("target", "changed", "message"),
    [
        (FORWARD, {"query": ((B, T, N, H), F32)}, r"query must be F16 or BF16 of shape \(B,T,N,H\): got F32\(2,3,4,64"),
        (FORWARD, {"query": ((B, T, N), BF16)}, r"query must be F16 or BF16 of shape \(B,T,N,H\): got BF16\(2,3,4\)"),
        (FORWARD, {"key": ((B, S, K, H), F16)}, r"key must be BF16 of shape \(2,S,K,64\): got F16.* beside query BF16"),
        (FORWARD, {"key": ((1, S, K, H), BF16)}, r"key must be BF16 of shape \(2,S,K,64\): got BF16\(1,40,2,64\)"),
        (FORWARD, {"key": ((B, S, K, 32), BF16)}, r"key must be BF16 of shape \(2,S,K,64\)"),
        (FORWARD, {"key": ((B, S, 0, H), BF16)}, r"key must have elements: got BF16\(2,40,0,64\)"),
        (DECODE, {"query": ((B, 0, N, H), BF16)}, r"query must have elements"),
        (OF_BLOCK, {"block": ((3, B, S, K, H), BF16)}, r"block must be BF16 of shape \(.*\): got BF16\(3,2,40,2,64\)"),
        (OF_BLOCK, {"block": ((2, B, S, K, 32), BF16)}, r"block must be BF16 of shape \(E,2,S,K,64\)"),
        (OF_BLOCK, {"output*": ((B, T, N, 32), BF16)}, r"output must be BF16 or F32 of shape \(2,3,4,64\)"),
        (BACKWARD_OF_BLOCK, {"block*": ((2, B, S, K, H), F32)}, "gradients must have one dtype"),
        (BACKWARD_OF_BLOCK, {"block*": ((1, B, S, K, H), BF16)}, r"block must be BF16 or F32 of shape \(2,2,40,2,64\)"),
        (
            FORWARD,
            {"value": ((B, S + 1, K, H), BF16)},
            r"value must be BF16 of shape \(2,40,2,D\): got BF16\(2,41,2,64",
        ),
        (
            FORWARD,
            {"query": ((B, T, 5, H), BF16)},
            "the heads of query must be a multiple of those of keys: got 5 and 2",
        ),
        (DECODE, {"value": ((B, S, K, 32), BF16)}, "head sizes must be equal, .* got 64 and 32"),
        (FORWARD, {"value": ((B, S, K, 32), BF16)}, r"output must be BF16 or F32 of shape \(2,3,4,32\)"),
        (FORWARD, {"value": ((B, S, K, 36), BF16)}, "head sizes must be multiples of 8 up to 256: got 64 and 36"),
        (BACKWARD, {"value": ((B, S, K, 32), BF16)}, r"cotangent must be BF16 of shape \(2,3,4,32\)"),
        (DECODE, {"output*": ((B, T, N, H), F16)}, r"output must be BF16 or F32 of shape \(2,3,4,64\)"),
        (DECODE, {"output*": ((B, T, N, 32), BF16)}, r"output must be BF16 or F32 of shape \(2,3,4,64\)"),
        (DECODE, {"lse*": ((B, T, N), F32)}, r"lse must be F32 of shape \(2,4,3\): got F32\(2,3,4\)"),
        (DECODE, {"workspace*": ((16, 16), jnp.uint8)}, r"workspace must be U8 of shape \(W\): got U8\(16,16\)"),
        (DECODE, {"workspace*": ((16,), F32)}, r"workspace must be U8"),
        (
            PAGED,
            {"key_pages": ((7, PAGE, K, H), F16)},
            r"key_pages must be BF16, F8E4M3FN or F8E5M2 of shape \(P,G,K,6",
        ),
        (PAGED, {"key_pages": ((7, PAGE, K, H), F8)}, r"value_pages must be F8E4M3FN of shape \(7,16,2,D\)"),
        (PAGED, {"value_pages": ((8, PAGE, K, H), BF16)}, r"value_pages must be BF16 of shape \(7,16,2,D\)"),
        (PAGED, {"page_table": ((1, 3), I32)}, r"page_table must be S32 of shape \(2,C\): got S32\(1,3\)"),
        (PAGED, {"page_table": ((B, 3), jnp.uint32)}, r"page_table must be S32"),
        (PAGED, {"page_table": ((B, 2**30 // PAGE), I32)}, "queries and keys .* fewer than 1073741824: got 10737"),
        (BACKWARD, {"lse": ((B, T, N), F32)}, r"lse must be F32 of shape \(2,4,3\)"),
        (BACKWARD, {"delta": ((B, N, T), BF16)}, r"delta must be F32 of shape \(2,4,3\)"),
        (BACKWARD, {"cotangent": ((B, T, N, H), F32)}, r"cotangent must be BF16 of shape \(2,3,4,64\)"),
        (BACKWARD, {"key*": ((B, S, N, H), BF16)}, r"key must be BF16 or F32 of shape \(2,40,2,64\): got BF16"),
    ],
)
def test_bad_buffers(target, changed, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {target}: {message}"):
        call(target, *BASE[target], changed)


@here
def test_bad_largest_scores():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"max_logits must be F32 of shape \(2,4\): got F32\(2,3\)"):
        changed = {"max_logits*": ((B, T), F32)}
        call(FORWARD, THREE, (*BASE[FORWARD][1], "max_logits"), changed, results="max_logits")


@here
@pytest.mark.parametrize("page", [8, 24, 512])
def test_bad_pages(page):
    changed = {name: ((2, page, K, H), BF16) for name in ("key_pages", "value_pages")}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"pages must have a power of 2 of keys, .*: got {page}"):
        call(PAGED, *BASE[PAGED], changed)


@here
@pytest.mark.parametrize("size", [4, 12, 264])
def test_bad_sizes(size):
    changed = {
        name: (((B, T, N, size) if name in ("query", "output*") else (B, S, K, size)), BF16)
        for name in (*THREE, "output*")
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"multiples of 8 up to 256: got {size} and {size}"):
        call(FORWARD, *BASE[FORWARD], changed)


@here
def test_bad_sizes_of_pages_in_8_bits():
    pages = {name: ((7, PAGE, K, 72), F8) for name in ("key_pages", "value_pages")}
    changed = {"query": ((B, T, N, 72), BF16), "output*": ((B, T, N, 72), BF16)} | pages
    with pytest.raises(jax.errors.JaxRuntimeError, match="pages in 8 bits must be multiples of 16: got 72"):
        call(PAGED, *BASE[PAGED], changed)


@here
@pytest.mark.parametrize(
    ("extra", "shape", "dtype", "message"),
    [
        (
            "bias",
            (B, N, T),
            F32,
            r"bias must be F16, BF16 or F32 of shape \(2 or 1,4 or 1,3 or 1,40 or 1\): got F32\(2,4,3",
        ),
        ("bias", (B, K, T, S), F32, "bias must be"),
        ("bias", (B, N, T, S), I32, "bias must be"),
        ("mask", (B, N, T, S), jnp.uint8, r"mask must be PRED"),
        ("mask", (B, N, 2, S), np.bool_, r"mask must be PRED"),
        ("query_lengths", (3,), I32, r"query_lengths must be S32 of shape \(2 or 1\): got S32\(3\)"),
        ("key_lengths", (B,), jnp.uint32, "key_lengths must be S32"),
        ("offset", (), I32, "offset must be S32"),
        ("sinks", (N,), F32, r"sinks must be F32 of shape \(2 or 1,4 or 1\)"),
        ("sinks", (B, N), BF16, "sinks must be F32"),
    ],
)
def test_bad_extras(extra, shape, dtype, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {DECODE}: {message}"):
        call(DECODE, (*THREE, extra), BASE[DECODE][1], {extra: (shape, dtype)}, extras=extra)


@here
@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes", "message"),
    [
        (
            FORWARD,
            ("query", "key"),
            ("output", "lse"),
            {},
            r"number of operands: got 2 instead of \(query, key, value\)",
        ),
        (FORWARD, THREE, ("output",), {}, r"number of results: got 2 instead of \(output, lse, workspace\)"),
        (FORWARD, (*THREE, "sinks"), ("output", "lse"), {}, "number of operands: got 4"),
        (FORWARD, THREE, ("output", "lse"), {"extras": "sinks"}, "number of operands: got 3 instead of .*sinks"),
        (FORWARD, (*THREE, "mask"), ("output", "lse"), {"extras": "mask"}, "extras='mask' must be some of 'query_seg"),
        (DECODE, THREE, ("output", "lse"), {"extras": "sinks,offset"}, "extras='sinks,offset' must be some of"),
        (DECODE, THREE, ("output", "lse"), {"extras": "offset,"}, "extras='offset,' must be some of"),
        (DECODE, THREE, ("output", "lse"), {"extras": "offset,offset"}, "extras='offset,offset' must be some of"),
        (DECODE, THREE, ("output", "lse"), {"extras": "off"}, "extras='off' must be some of"),
        (DECODE, (*THREE, "query_segments"), ("output", "lse"), {"extras": "query_segments"}, "must be given together"),
        (
            FORWARD,
            THREE,
            ("output", "lse"),
            {"results": "lse_residual"},
            "results='lse_residual' must be some of 'max_logits,output_residual'",
        ),
        (
            DECODE,
            THREE,
            ("output", "lse", "lse_residual"),
            {"results": "lse_residual"},
            "lse_residual only beside a bias",
        ),
        (BACKWARD, BASE[BACKWARD][0], THREE, {"results": "lse"}, "results='lse' must be some of ''"),
        (FORWARD, THREE, ("output", "lse"), {"scale": np.float64(0)}, "scale must be from 1e-30 to 1e30: got 0"),
        (FORWARD, THREE, ("output", "lse"), {"scale": np.float64("nan")}, "scale must be from 1e-30 to 1e30: got nan"),
        (FORWARD, THREE, ("output", "lse"), {"cap": np.float64(-1)}, "cap must be from 0 to 1000: got -1"),
        (FORWARD, THREE, ("output", "lse"), {"cap": np.float64("nan")}, "cap must be from 0 to 1000: got nan"),
        (FORWARD, THREE, ("output", "lse"), {"left": np.int64(-2)}, "left and right must be from -1 to .*: got -2"),
        (FORWARD, THREE, ("output", "lse"), {"right": np.int64(2**40)}, "left and right must be from -1 to"),
    ],
)
def test_bad_calls(target, operands, results, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {target}: .*{message}"):
        call(target, operands, results, **attributes)


STATE = ("state_output", "state_lse")


@here
@pytest.mark.parametrize(
    ("extra", "shape", "dtype", "message"),
    [
        ("state_output", (B, T, N, H), BF16, r"state_output must be F32 of shape \(2,3,4,64\): got BF16"),
        ("state_output", (1, T, N, H), F32, r"state_output must be F32 of shape \(2,3,4,64\): got F32\(1,3"),
        ("state_output", (B, T, N, 32), F32, "state_output must be F32"),
        ("state_lse", (B, T, N), F32, r"state_lse must be F32 of shape \(2,4,3\)"),
        ("state_lse", (B, 1, T), F32, "state_lse must be F32"),
    ],
)
def test_bad_states(extra, shape, dtype, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {FORWARD}: {message}"):
        call(FORWARD, (*THREE, *STATE), BASE[FORWARD][1], {extra: (shape, dtype)}, extras=",".join(STATE))


@here
@pytest.mark.parametrize("extra", STATE)
def test_half_a_state(extra):
    with pytest.raises(jax.errors.JaxRuntimeError, match="state_output and state_lse must be given together"):
        call(FORWARD, (*THREE, extra), BASE[FORWARD][1], extras=extra)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be some of"):
        call(DECODE, (*THREE, *STATE), BASE[DECODE][1], extras=",".join(STATE))


WIDE = {f"{name}*": ((B, T, N, H) if name == "query" else (B, S, K, H), F32) for name in THREE}


@here
@pytest.mark.parametrize(
    ("extra", "changed", "message"),
    [
        ("", {"query*": WIDE["query*"]}, r"gradients must have one dtype: got F32\(2,3,4,64\) and BF16\(2,40,2,64\)"),
        ("", {"value*": WIDE["value*"]}, "gradients must have one dtype: got BF16.* and F32"),
        ("", WIDE | {"key*": ((B, S, K, H), F16)}, "key must be BF16 or F32 of shape"),
        ("query_sum", {}, "there is a query_sum only where gradients are in F32: got BF16"),
        ("query_sum", WIDE | {"query_sum": ((B, T, N, H), BF16)}, "query_sum must be F32 of shape"),
        ("key_sum", WIDE | {"key_sum": ((B, S, N, H), F32)}, r"key_sum must be F32 of shape \(2,40,2,64\)"),
        ("value_sum", WIDE | {"value_sum": ((1, S, K, H), F32)}, r"value_sum must be F32 of shape \(2,40,2,64\)"),
        ("value_sum,key_sum", WIDE, "extras='value_sum,key_sum' must be some of"),
    ],
)
def test_bad_sums(extra, changed, message):
    operands = (*THREE, *filter(None, extra.split(",")), "lse", "delta", "cotangent")
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {BACKWARD}: {message}"):
        call(BACKWARD, operands, THREE, changed, extras=extra)


@here
@pytest.mark.parametrize("target", BASE)
def test_a_workspace_that_is_too_small(target):
    operands, results = BASE[target]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft_{target}: invalid argument"):
        call(target, operands, results)
