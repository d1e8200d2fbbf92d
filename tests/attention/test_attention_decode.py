"""Few queries of each sequence over many keys, by the CUDA kernel for that, against the definition in float64.

A sequence's keys are cut into chunks, and groups of queries of one key head are computed together. So the lengths here
are around the borders of both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import FIXED, MOVING, Sizes, case, check_rows, conflict
from common import ATTENTION_IMPLEMENTATIONS, same_bits, slow

import jaxsoft
from jaxsoft import fold

pytestmark = pytest.mark.skipif("ffi" not in ATTENTION_IMPLEMENTATIONS, reason="no CUDA kernels for attention")
DECODE = Sizes(b=3, t=1, s=700, n=8, k=2, h=64, d=64)
attend = functools.partial(jaxsoft.dot_product_attention, implementation="ffi")


def check(options, sizes=DECODE, dtype=jnp.bfloat16, seed=0):
    """The output and the log-sum-exp of a call with these options, relative to the norm of each query's output."""
    check_rows(case(options, sizes, dtype, "ffi", seed), options, dtype)


@pytest.mark.parametrize("option", [None, *MOVING, *FIXED], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_every_option(option, queries):
    check([option] if option else [], DECODE._replace(t=queries))


@pytest.mark.parametrize(
    "options",
    [
        ("bias", "mask", "key lengths", "offsets", "sinks", "cap"),
        ("bias of -inf", "query lengths", "causal"),
        ("segments", "window", "bias of a head", "sinks"),
        ("no key", "bias"),
        ("no key", "sinks"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_options_together(options, dtype):
    assert not conflict(options)
    check(options, DECODE._replace(t=4), dtype)


@pytest.mark.costly
@pytest.mark.parametrize("size", [8, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2), (6, 2), (32, 1)])
def test_heads(size, queries, heads, key_heads):
    sizes = Sizes(b=2, t=queries, s=300, n=heads, k=key_heads, h=size, d=size)
    if queries * heads // key_heads <= 256:
        check(["key lengths"], sizes)


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 255, 257, 511, 513, 1023, 1025, 4097])
@pytest.mark.parametrize("batch", [1, 7])
def test_lengths(keys, batch):
    check([], Sizes(b=batch, t=1, s=keys, n=8, k=2, h=128, d=128))


@pytest.mark.parametrize("keys", [65536, pytest.param(2**20 + 1, marks=slow)])
def test_long_sequences(keys):
    check(["sinks"], Sizes(b=1, t=1, s=keys, n=4, k=1, h=64, d=64))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 512, 699, 700, 701])
@pytest.mark.parametrize("window", [None, (0, 0), (3, None), (200, 5), (None, 100)])
def test_lengths_of_sequences_and_windows(length, window):
    """Keys past the length are not finite here, and must not be seen; so must not be the other sequences."""
    rng = np.random.default_rng(length)
    query, key, value = (
        rng.standard_normal((2, n, heads, 64)).astype(jnp.bfloat16) for n, heads in ((2, 8), (700, 2), (700, 2))
    )
    lengths = np.array([length, 300], np.int32)
    offset = np.maximum(lengths - 2, 0).astype(np.int32)
    call = functools.partial(
        attend, key_value_seq_lengths=lengths, query_offset=offset, local_window_size=window, return_residual=True
    )
    output, lse = call(query, key, value)
    expected = jaxsoft.dot_product_attention(
        *(x.astype(np.float32) for x in (query, key, value)),
        key_value_seq_lengths=lengths,
        query_offset=offset,
        local_window_size=window,
        return_residual=True,
        implementation="xla",
    )
    np.testing.assert_allclose(np.asarray(output).astype(np.float32), expected[0], atol=2e-2)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4)
    for b, n in enumerate(lengths):
        key[b, n:], value[b, n:] = np.nan, np.inf
    assert same_bits(call(query, key, value), (output, lse))
    alone = jax.tree.map(lambda x: x[:1], (query, key, value))
    assert np.isfinite(np.asarray(output).astype(np.float32)).all()
    first = attend(*alone, key_value_seq_lengths=lengths[:1], query_offset=offset[:1], local_window_size=window)
    np.testing.assert_allclose(
        np.asarray(first).astype(np.float32), np.asarray(output[:1]).astype(np.float32), atol=2e-2
    )


def test_a_sequence_does_not_depend_on_the_others():
    """On neither their values nor their lengths."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((4, n, heads, 128)).astype(jnp.bfloat16) for n, heads in ((1, 8), (3000, 2), (3000, 2))
    )
    lengths = np.array([3000, 17, 0, 1234], np.int32)
    found = attend(query, key, value, key_value_seq_lengths=lengths)
    for other in ([3000, 3000, 3000, 3000], [3000, 1, 2, 3], [3000, 0, 0, 0]):
        changed = [np.concatenate([x[:1], 2 * x[1:]]) for x in (query, key, value)]
        again = attend(*changed, key_value_seq_lengths=np.array(other, np.int32))
        assert same_bits(again[:1], found[:1])


def test_same_bits_on_every_run():
    """Whichever part is the last to arrive."""
    call = case(["key lengths"], Sizes(b=5, t=2, s=5000, n=8, k=2, h=128, d=128), jnp.bfloat16, "ffi")
    run = jax.jit(call.ours)
    first = run(*call.operands)
    for _ in range(30):
        assert same_bits(run(*call.operands), first)


def test_many_calls_in_one_program():
    """Of several shapes, each with a workspace of its own, also where XLA runs them as a CUDA graph."""
    calls = [
        case([], Sizes(b=b, t=t, s=s, n=8, k=2, h=64, d=64), jnp.bfloat16, "ffi", seed=i)
        for i, (b, t, s) in enumerate([(1, 1, 4000), (3, 2, 500), (2, 1, 33), (1, 16, 2000)])
    ]
    one_by_one = [jax.jit(call.ours)(*call.operands) for call in calls]
    together = jax.jit(lambda operands: [call.ours(*v) for call, v in zip(calls, operands, strict=True)])
    operands = [call.operands for call in calls]
    for _ in range(5):
        assert same_bits(together(operands), one_by_one)


@pytest.mark.parametrize("what", ["ties", "one large", "infinite", "huge", "nan"])
def test_special_values(what):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, n, 4, 64)).astype(np.float32) for n in (1, 600, 600))
    if what == "ties":
        key[:] = key[:, :1]
    elif what == "one large":
        key[:, 333] = 50 * query[:, 0]
    elif what == "infinite":
        value[:, 100, 0] = np.inf
    elif what == "huge":
        query *= 1e4
    else:
        value[:, 200, 1] = np.nan
    narrow = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    found = np.asarray(attend(*narrow)).astype(np.float32)
    wide = [x.astype(np.float32) for x in narrow]
    expected = np.asarray(jaxsoft.dot_product_attention(*wide, implementation="xla"))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_state():
    """Attention over two parts of the keys, and from a state."""
    call = case([], DECODE, jnp.bfloat16)
    query, key, value = call.operands
    whole = attend(query, key, value, return_state=True)
    _, state = attend(query, key[:, :333], value[:, :333], return_state=True)
    y, state = attend(query, key[:, 333:], value[:, 333:], state=state, return_state=True)
    np.testing.assert_allclose(np.asarray(y).astype(np.float32), np.asarray(whole[0]).astype(np.float32), atol=1e-2)
    np.testing.assert_allclose(fold.lse(state), fold.lse(whole[1]), atol=1e-5)


def test_scores_that_are_all_very_low():
    """The log-sum-exp in f32 does not tell one key from hundreds, and its residual does: parts have their weights."""
    query, key = np.ones((2, 3, 4, 64), jnp.bfloat16), np.zeros((2, 700, 2, 64), jnp.bfloat16)
    value = np.broadcast_to(np.arange(700)[:, None, None] < 300, key.shape).astype(jnp.bfloat16)
    bias = np.full((1, 1, 1, 1), -1e9, np.float32)
    _, state = attend(query, key[:, :300], value[:, :300], bias=bias, return_state=True)
    y = attend(query, key[:, 300:], value[:, 300:], bias=bias, state=state, dtype=jnp.float32)
    np.testing.assert_allclose(y, 3 / 7, rtol=1e-4)


def test_vmap():
    """Over queries, keys and lengths; also where only the queries are mapped."""
    call = case([], DECODE, jnp.bfloat16)
    operands = [np.stack([x, x[::-1]]) for x in call.operands]
    lengths = np.array([[700, 5, 0], [1, 2, 699]], np.int32)

    def f(query, key, value, lengths):
        return attend(query, key, value, key_value_seq_lengths=lengths, return_residual=True)

    for axes in ((0, 0, 0, 0), (0, None, None, None), (0, 0, 0, None)):
        given = [x if axis == 0 else x[0] for x, axis in zip((*operands, lengths), axes, strict=True)]
        found = jax.vmap(f, axes)(*given)
        for i in range(2):
            one = f(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            for a, b in zip(found, one, strict=True):
                a, b = (np.asarray(x).astype(np.float32) for x in (a[i], b))
                np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)


def test_gradients():
    """Of few queries too."""
    sizes = Sizes(b=2, t=4, s=300, n=8, k=2, h=64, d=64)
    call = case(["causal", "sinks", "key lengths"], sizes, jnp.bfloat16, "ffi")
    call.through("grad").check()


@pytest.mark.parametrize("option", ["bias", "mask"])
def test_many_queries_with_a_bias_are_refused(option):
    call = case([option], Sizes(b=1, t=300, s=300, n=2, k=2, h=64, d=64), jnp.bfloat16, "ffi")
    with pytest.raises(ValueError, match=f"more than 256 of a key head, takes no {option}"):
        call.ours(*call.operands)
