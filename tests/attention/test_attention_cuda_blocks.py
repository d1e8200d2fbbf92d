"""Blocks of keys by the CUDA kernels: the state that they fold in, and gradients that they add to others.

The lengths are around the borders of tiles, which limits exclude and cut.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_ffi_calls import ARRAYS, ATTRIBUTES, F32
from attention_in_blocks import Blocks, errors
from common import ATTENTION_IMPLEMENTATIONS, same_bits
from truth import wide

import jaxsoft
from jaxsoft import fold
from jaxsoft._attention.form import STATE, AttentionForm, Extra
from jaxsoft._attention.operation import attention_operation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback

pytestmark = pytest.mark.skipif("ffi" not in ATTENTION_IMPLEMENTATIONS, reason="no CUDA kernels for attention")
HEADS = [(64,), (96,), (128,), (192,), (192, 128), (80, 200), (256,)]  # of keys, and of values if these differ
ALLOWED = {jnp.bfloat16: 8e-3, jnp.float16: 1.5e-3}


def check(call, dtype):
    """Blocks of keys, against one call in float64; and again, for the same bits."""
    results, delta, gradients = call.expected()
    for last in (None, dtype):
        forward = call.forward("ffi", last)
        found = forward()
        of_output, of_lse = errors(found[:2], results[:2])
        assert of_lse <= 1e-5
        assert of_output <= ALLOWED[dtype]
        assert same_bits(forward(), found)
    arrays = [jnp.asarray(x, np.float32) for x in (*results[1:], delta)]
    backward = call.gradients("ffi")
    of_gradients = backward(*arrays)
    assert max(errors(of_gradients, gradients)) <= ALLOWED[dtype]
    assert same_bits(backward(*arrays), of_gradients)


@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize(
    ("options", "of_form"),
    [
        ((), {}),
        (("offset",), {"right": 0}),
        (("lengths", "offset"), {"left": 200, "right": 30}),
        (("lengths",), {"cap": 1.5}),
    ],
    ids=str,
)
def test_options(options, of_form, sizes):
    check(Blocks.make((2, 640, 640, 8, 2, *sizes), jnp.bfloat16, options, (256, 512), **of_form), jnp.bfloat16)


@pytest.mark.parametrize("sizes", HEADS)
def test_first_queries(sizes):
    """From which query on queries count, as in a zigzag ring; with more work than multiprocessors take at once."""
    check(Blocks.make((3, 700, 300, 16, 4, *sizes), jnp.bfloat16, ("begins",), (128,)), jnp.bfloat16)


@pytest.mark.parametrize("sizes", [(64,), (128,), (192, 128), (256,)])
@pytest.mark.parametrize(("t", "s", "borders"), [(193, 301, (1, 150)), (65, 200, (64, 129)), (1, 300, (100, 200))])
def test_lengths(t, s, borders, sizes):
    check(Blocks.make((2, t, s, 4, 2, *sizes), jnp.float16, ("lengths",), borders), jnp.float16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_better_than_merging_what_is_rounded(dtype):
    """Where outputs of blocks in 16 bits are merged, each is rounded."""
    call = Blocks.make((1, 640, 640, 8, 2, 128), dtype, (), (64, 128, 192, 256, 320, 384, 448, 512, 576))
    (output, lse, _), *_ = call.expected()
    query, key, value, _ = call.arrays
    merged = jnp.zeros(query.shape, dtype), jnp.full((1, 640, 8), -jnp.inf)
    for begin, end in itertools.pairwise(call.borders):
        block = jaxsoft.dot_product_attention(
            query, key[:, begin:end], value[:, begin:end], implementation="ffi", return_residual=True
        )
        merged = fold.update_output(*merged, *block)
    found = call.forward("ffi")()
    (of_blocks,), (of_merged,) = errors(found[:1], (output,)), errors(merged[:1], (output,))
    assert of_blocks < 0.8 * of_merged
    np.testing.assert_allclose(found[1], lse, rtol=1e-5)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_what_is_added_is_what_is_there(size):
    """A block without keys leaves all as it is, to the bit; and the identity before it gives the block's own bits."""
    rng = np.random.default_rng(0)
    query, key, value, cotangent = (
        jnp.asarray(rng.standard_normal((2, n, h, size)), jnp.bfloat16)
        for n, h in ((300, 4), (200, 2), (200, 2), (300, 4))
    )
    output = jnp.asarray(rng.standard_normal(query.shape), F32)
    lse = jnp.asarray(rng.standard_normal((2, 4, 300)), F32)
    none = jnp.zeros(2, np.int32)
    form = AttentionForm(np.dtype(np.float32), 0.1, extras=(Extra.KEY_LENGTHS, *STATE))
    run = functools.partial(attention_operation, AttentionForward(form), "ffi", query, key, value)
    assert same_bits(jax.jit(run)(none, output, lse)[:2], (output, lse))
    within = AttentionForward(AttentionForm(np.dtype(np.float32), 0.1, extras=(Extra.KEY_LENGTHS,)))
    alone = attention_operation(within, "ffi", query, key, value, none + 150)
    empty = jnp.full_like(output, np.nan), jnp.full_like(lse, -np.inf)
    assert same_bits(run(none + 150, *empty)[:2], alone[:2])
    assert not wide(run(none, *empty)[0]).any()

    sums = [jnp.asarray(rng.standard_normal(x.shape), F32) for x in (query, key, value)]
    names = "query", "key", "value"
    pullback = AttentionPullback(
        AttentionForm(np.dtype(jnp.bfloat16), 0.1, extras=(Extra.KEY_LENGTHS,)), names, True, names
    )
    known = query, *alone[1:], jnp.zeros_like(lse), cotangent
    gradients = functools.partial(attention_operation, pullback, "ffi", query, key, value)
    assert same_bits(list(jax.jit(gradients)(none, *known, *sums)), sums)
    added = gradients(none + 150, *known, *sums)
    own = attention_operation(
        AttentionPullback(pullback.form, names, True), "ffi", query, key, value, none + 150, *known
    )
    assert same_bits(list(added), [a + b for a, b in zip(own, sums, strict=True)])
    narrow = attention_operation(AttentionPullback(pullback.form, names), "ffi", query, key, value, none + 150, *known)
    assert same_bits(list(narrow), [x.astype(jnp.bfloat16) for x in own])


def test_operands_that_are_not_where_the_results_are():
    """As another caller may have it: without aliases, operands stay as they are."""
    rng = np.random.default_rng(0)
    names = ("query", "key", "value", "state_output", "state_lse")
    sums = ("query_sum", "key_sum", "value_sum")
    given = {
        name: jnp.asarray(rng.standard_normal(ARRAYS[name][0]), ARRAYS[name][1])
        for name in (*names, *sums, "lse", "delta", "cotangent")
    }
    workspace = jax.ShapeDtypeStruct((2**20,), jnp.uint8)

    def run(target, operands, results, aliases):
        like = [jax.ShapeDtypeStruct(given[name].shape, F32) for name in results]
        extras = ",".join(name for name in operands if "state" in name or "sum" in name)
        call = jax.ffi.ffi_call(f"jaxsoft_{target}", [*like, workspace], input_output_aliases=aliases)
        return jax.jit(lambda *v: call(*v, **ATTRIBUTES | {"extras": extras})[:-1])(*(given[n] for n in operands))

    apart = run("attention_forward", names, ("query", "lse"), {})
    assert same_bits(run("attention_forward", names, ("query", "lse"), {3: 0, 4: 1}), apart)
    operands = (*names[:3], *sums, "lse", "delta", "cotangent")
    apart = run("attention_backward", operands, names[:3], {})
    assert same_bits(run("attention_backward", operands, names[:3], {3: 0, 4: 1, 5: 2}), apart)
