"""Arguments of attention: what is wrong is named, with what was given and what is allowed; and jax.nn's are taken."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ATTENTION_IMPLEMENTATIONS, as_usual, on_cpu, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoft
from jaxsoft import dot_product_attention as attention
from jaxsoft import fold

Q = np.ones((2, 3, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)
V = np.ones((2, 5, 2, 6), np.float32)
STATE = fold.attention_identity((2, 3, 4), 6)
SHAPES = r"\(2, 4, 3, 5\)"


@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        (("a", K, V), TypeError, "query must be a number or an array of numbers; got 'a'"),
        ((Q, None, V), TypeError, "key must be a number or an array of numbers; got None"),
        ((Q.astype(np.complex64), K, V), TypeError, "query must hold float16, .* or float64; got dtype complex64"),
        ((Q, K, V.astype(jnp.float8_e4m3fn)), TypeError, "value must hold float16, .*; got dtype float8_e4m3fn"),
        ((Q[0, 0], K, V), ValueError, r"query must have the shape \(B, T, N, H\), or \(T, N, H\) .*got shape \(4, 8\)"),
        ((Q[None], K[None], V[None]), ValueError, r"query must have the shape .*; got shape \(1, 2, 3, 4, 8\)(\n|$)"),
        ((Q, K[0], V), ValueError, r"key must have the shape \(B, S, K, H\), or \(S, K, H\) .*got shape \(5, 2, 8\)"),
        ((Q, K, V[0]), ValueError, r"value must have the shape \(B, S, K, D\), or \(S, K, D\) .*got shape \(5, 2, 6\)"),
        ((Q, K.astype(np.float16), V), TypeError, "key must have the dtype of query, float32; got float16"),
        ((Q, K, V.astype(jnp.bfloat16)), TypeError, "value must have the dtype of query, float32; got bfloat16"),
        ((Q, K[:1], V), ValueError, r"key must have the batch and the head size of query, 2 and 8; got shape \(1, 5"),
        ((Q, K[..., :7], V), ValueError, r"key must have the batch and .* 2 and 8; got shape \(2, 5, 2, 7\)"),
        ((Q, K, V[:, :4]), ValueError, r"value must have the shape \(2, 5, 2\) and a head size; got shape \(2, 4, 2"),
        ((Q[:, :, :3], K, V), ValueError, r"query must have a multiple of the number of heads of key, 2; got 3 in"),
        ((Q[0], K[0][..., :7], V[0]), ValueError, r"key must have the head size of query, 8; got shape \(5, 2, 7\)"),
        ((Q[0], K[0], V[0][:4]), ValueError, r"value must have the shape \(5, 2\) and .*; got shape \(4, 2, 6"),
        ((Q, K[:, :, :0], V[:, :, :0]), ValueError, "query must have a multiple of the number of heads of key, 0; got"),
    ],
)
def test_bad_operands(operands, error, message):
    for f in (attention, jax.jit(attention)) if not isinstance(operands[0], str) else (attention,):
        with pytest.raises(error, match=message):
            f(*operands)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": np.ones(4, np.float32)}, ValueError, rf"bias must broadcast to .*{SHAPES}; got shape \(4,\)"),
        ({"bias": np.ones((2, 2, 3, 5), np.float32)}, ValueError, rf"bias must .*{SHAPES}; got shape \(2, 2, 3, 5\)"),
        ({"bias": np.ones(5, np.complex64)}, TypeError, "bias must hold float16, .*; got dtype complex64"),
        ({"mask": np.ones((1, 2, 4, 3, 5), bool)}, ValueError, rf"mask must .*{SHAPES}; got shape \(1, 2, 4, 3, 5\)"),
        ({"mask": np.ones(5, np.float32)}, TypeError, "mask must hold booleans or integers; got dtype float32.*bias"),
        ({"scale": "a"}, TypeError, "scale must be a real number; got 'a'"),
        ({"scale": np.ones(4)}, TypeError, r"scale must be a real number; got dtype float64 and shape \(4,\)"),
        ({"scale": 1j}, TypeError, "scale must be a real number; got 1j"),
        ({"scale": np.nan}, ValueError, "scale must be finite in float32; got nan"),
        ({"scale": 10**400}, ValueError, "scale must be finite in float32; got 1000"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got 1"),
        ({"return_residual": None}, TypeError, "return_residual must be True or False; got None"),
        ({"return_state": "yes"}, TypeError, "return_state must be True or False; got 'yes'"),
        ({"deterministic": 0}, TypeError, "deterministic must be True or False; got 0"),
        ({"dropout_rate": 0.5}, ValueError, "dropout_rate must be 0, .*; got 0.5 beside deterministic=None"),
        (
            {"dropout_rate": np.float32(0.5), "deterministic": False},
            ValueError,
            "dropout_rate must be 0, unless deterministic=True .*; got 0.5 beside deterministic=False",
        ),
        ({"dropout_rate": 1.5, "deterministic": True}, ValueError, "dropout_rate must be .* from 0 to 1 .*; got 1.5"),
        (
            {"dropout_rate": np.nan, "deterministic": True},
            ValueError,
            "dropout_rate must be .* from 0 to 1 .*; got nan",
        ),
        ({"dropout_rate": None, "deterministic": True}, TypeError, "dropout_rate must be a real number; got None"),
        ({"dropout_rate": np.ones(2)}, TypeError, r"dropout_rate must be a real number; got .*\(2,\)"),
        ({"query_seq_lengths": np.ones(3, int)}, ValueError, r"query_seq_lengths must have .*\(2,\); got shape \(3,\)"),
        ({"query_seq_lengths": np.ones(2)}, TypeError, "query_seq_lengths must hold integers; got dtype float32"),
        ({"key_value_seq_lengths": 3}, ValueError, r"key_value_seq_lengths must .* \(2,\); got shape \(\)"),
        ({"key_value_seq_lengths": np.ones(2, bool)}, TypeError, "key_value_seq_lengths must hold integers; got dtype"),
        ({"local_window_size": 1.5}, TypeError, r"local_window_size must be .* that is known .*; got 1\.5"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"local_window_size must be a number or a pair .*\(1, 2, 3\)"),
        ({"local_window_size": (-1, 2)}, ValueError, r"local_window_size must not be negative; got \(-1, 2\)"),
        ({"local_window_size": True}, TypeError, "local_window_size must be None, an integer or .*; got True"),
        (
            {"logits_soft_cap": 0},
            ValueError,
            r"logits_soft_cap must be .* positive and at most 3\.4e.* float32; got 0",
        ),
        ({"logits_soft_cap": np.inf}, ValueError, r"logits_soft_cap must be None, or positive .* float32; got inf"),
        ({"logits_soft_cap": 1e31}, ValueError, r"logits_soft_cap must be None, or positive .* float32; got 1e\+31"),
        (
            {"logits_soft_cap": np.float16(0)},
            ValueError,
            r"logits_soft_cap must be .* positive .* float32; got .*0\.0",
        ),
        ({"logits_soft_cap": 10**400}, ValueError, r"logits_soft_cap must be None, or positive .* float32; got 1000"),
        ({"logits_soft_cap": "a"}, TypeError, "logits_soft_cap must be a real number; got 'a'"),
        ({"logits_soft_cap": True}, TypeError, "logits_soft_cap must be a real number; got True"),
        ({"sinks": np.ones(2, np.float32)}, ValueError, r"sinks must have the shape \(4,\), .*; got shape \(2,\)"),
        ({"query_segment_ids": np.ones((2, 3), int)}, ValueError, "query_segment_ids and key_value_segment_ids .* one"),
        ({"query_offset": 1.5}, TypeError, "query_offset must hold integers; got dtype float32"),
        ({"query_offset": False}, TypeError, "query_offset must hold integers; got dtype bool"),
        ({"query_offset": np.ones(3, int)}, ValueError, r"query_offset must be a number or .*\(2,\); got shape \(3,\)"),
        ({"query_offset": 2**31}, ValueError, "query_offset must hold integers from -2147483648 .*; got 2147483648"),
        (
            {"key_value_seq_lengths": np.array([5, 2**32])},
            ValueError,
            r"key_value_seq_lengths must hold integers from -2147483648 to 2147483647, unless .*; got 4294967296",
        ),
        (
            {"query_segment_ids": np.full((2, 3), -(2**33)), "key_value_segment_ids": np.ones((2, 5), int)},
            ValueError,
            "query_segment_ids must hold integers from .*; got -8589934592",
        ),
        ({"query_offset": None}, TypeError, "query_offset must be a number or an array of numbers; got None"),
        ({"state": (1, 2, 3)}, TypeError, r"state must be a jaxsoft\.fold\.AttentionState; got tuple"),
        (
            {"state": STATE._replace(m=np.ones((2, 3), np.float32))},
            ValueError,
            r"state\.m must have .*\(2, 3, 4\); got",
        ),
        ({"state": STATE._replace(o=STATE.o[..., :5])}, ValueError, r"state\.o must .*\(2, 3, 4, 6\); got .*5\)"),
        ({"dtype": np.int32}, ValueError, "dtype must be None or one of float16, .*; got int32"),
        ({"implementation": "fast"}, ValueError, "implementation must be None or one of .*'cudnn'.*; got 'fast'"),
        ({"implementation": []}, ValueError, r"implementation must be None or one of .*; got \[\]"),
    ],
    ids=str,
)
def test_bad_arguments(options, error, message):
    for f in (attention, jax.jit(lambda *v: attention(*v, **options))):
        with pytest.raises(error, match=message):
            f(*(Q, K, V), **(options if f is attention else {}))


def test_segments():
    good = {"query_segment_ids": np.zeros((2, 3), int), "key_value_segment_ids": np.zeros((2, 5), int)}
    assert attention(Q, K, V, **good).shape == (2, 3, 4, 6)
    for name, shape in (("query_segment_ids", r"\(2, 3\)"), ("key_value_segment_ids", r"\(2, 5\)")):
        with pytest.raises(ValueError, match=rf"{name} must have the shape {shape}; got shape \(2, 4\)"):
            attention(Q, K, V, **good | {name: np.zeros((2, 4), int)})


# Numbers at which a dtype ends, or which differ by a multiple of what one holds.
IDS = [0, 1, -1, -2, 127, 255, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]


@pytest.mark.parametrize("x64", [False, True])
def test_segments_of_every_dtype(x64):
    """Two are the same if they are the same number, whatever the dtypes."""
    names = ("int8", "uint8", "int16", "int32", "uint32", *(("int64", "uint64") if x64 else ()))
    held = {name: [i for i in IDS if np.iinfo(name).min <= i <= np.iinfo(name).max] for name in names}
    arrays = [np.resize(np.array(ids, name), (1, len(IDS))) for name, ids in held.items()]
    q = np.zeros((1, len(IDS), 1, 8), np.float32)
    v = np.random.default_rng(0).standard_normal(q.shape, np.float32)
    with jax.enable_x64(x64):
        for queries, keys in itertools.product(arrays, repeat=2):
            same = np.array([[a == b for b in keys[0].tolist()] for a in queries[0].tolist()])
            y = attention(q, q, v, query_segment_ids=queries, key_value_segment_ids=keys)
            np.testing.assert_allclose(y, attention(q, q, v, mask=same), rtol=1e-6, err_msg=f"{queries}, {keys}")


@pytest.mark.parametrize("name", [name for name in jaxsoft.implementations() if name not in ATTENTION_IMPLEMENTATIONS])
def test_an_implementation_that_is_not_here(name):
    """It says why, and what else there is; also under jit and in the derivative."""

    def f(q):
        return attention(q, q, q, implementation=name)

    q = np.ones((2, 64, 4, 64), jnp.bfloat16)
    for call in (f, jax.jit(f), jax.grad(lambda q: f(q).sum())):
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot serve this call") as error:
            call(q)
        if name == "triton":
            assert "it has no kernels for attention" in str(error.value)
        if name == "ffi" and jaxsoft.implementations()[name] is None:
            assert "kernels for attention" in str(error.value)
        assert "implementation=None always works" in str(error.value) and "'xla'" in str(error.value)


CUDNN = {
    "mask": ({"mask": np.ones((64, 64), bool)}, "without mask"),
    "cap": ({"logits_soft_cap": 3.0}, "without a cap"),
    "window": ({"local_window_size": 3}, "without a window"),
    "residual": ({"return_residual": True}, "log-sum-exp's cotangent"),
    "dtype": ({"dtype": np.float32}, "float16 and bfloat16 of operands like these, not float32 of bfloat16"),
}


@pytest.mark.parametrize(("options", "message"), CUDNN.values(), ids=CUDNN)
def test_what_cudnn_cannot_serve(options, message):
    """Known before anything is lowered, wherever it is called."""
    q = np.ones((2, 64, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"'cudnn' cannot serve this call: .*{message}.*take such operands.*'xla'"):
        jax.eval_shape(lambda q: attention(q, q, q, implementation="cudnn", **options), q)


def test_what_the_reference_cannot_serve():
    q = jax.ShapeDtypeStruct((8, 4096, 8, 64), np.float32)
    with pytest.raises(ValueError, match=r"'reference' cannot serve this call: its scan would take \d+ numbers"):
        jax.eval_shape(lambda q: attention(q, q, q, implementation="reference"), q)


def test_numbers_of_any_kind():
    """numpy's and JAX's numbers for Python's, integers of any dtype, and numbers that reach over everything."""
    expected = attention(Q, K, V, scale=0.5, is_causal=True, local_window_size=(2, 1), logits_soft_cap=2.0)
    given = {"is_causal": np.True_, "local_window_size": [np.int8(2), np.int64(1)], "logits_soft_cap": np.float32(2)}
    scales = np.float32(0.5), np.array(0.5), jnp.float32(0.5)
    assert all(same_bits(attention(Q, K, V, scale=scale, **given), expected) for scale in scales)
    found = jax.jit(lambda q: [attention(q, K, V, scale=scale, **given) for scale in scales])(Q)
    assert all(same_bits(y, expected) for y in found)
    lengths = [np.array([2, 3], dtype) for dtype in (np.int32, np.uint8, np.int16, np.uint32)]
    outputs = [attention(Q, K, V, key_value_seq_lengths=v, query_seq_lengths=v, query_offset=v) for v in lengths]
    assert all(same_bits(outputs[0], y) for y in outputs[1:])
    plain = attention(Q, K, V)
    for far in (10**12, (2**31, None), (2**30, 2**63)):
        assert same_bits(attention(Q, K, V, local_window_size=far), plain)
    for offset in (2**31 - 1, -(2**31)):  # after all keys, and before all of them
        y = attention(Q, K, V, is_causal=True, query_offset=offset)
        np.testing.assert_allclose(y, plain if offset > 0 else np.zeros_like(plain), rtol=1e-6)
    y, lse, after = attention(Q[0], K[0], V[0], return_residual=True, return_state=True)
    assert (y.shape, lse.shape, after.o.shape) == ((3, 4, 6), (3, 4), (3, 4, 6))
    assert attention(Q[0], K[0], V[0], state=after).shape == (3, 4, 6)
    assert attention(Q.tolist(), K, V.tolist()).shape == (2, 3, 4, 6)
    for dtype in (np.float16, jnp.bfloat16, np.float32):
        assert attention(Q, K, V, dtype=dtype).dtype == dtype


def test_dropout_that_does_not_act():
    """As Flax passes it: in evaluation, and where there is none."""
    expected = attention(Q, K, V)
    for rate, deterministic in ((0, None), (0.0, False), (np.int32(0), True), (0.5, True), (np.float64(1), np.True_)):
        assert same_bits(attention(Q, K, V, dropout_rate=rate, deterministic=deterministic), expected)
    with pytest.raises(ValueError, match="dropout_rate must be 0"):
        jaxsoft.ring_attention(Q, Q, Q, axis_name="x", dropout_rate=0.1)


def test_signature():
    """jax.nn's parameters with their order, kinds and defaults, then our own, by name only."""
    ours, theirs = (list(inspect.signature(f).parameters.items()) for f in (attention, jax.nn.dot_product_attention))
    assert [(n, p.kind, p.default) for n, p in ours[: len(theirs)]] == [(n, p.kind, p.default) for n, p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for _, p in ours[len(theirs) :])


@st.composite
def arguments_of_jax(draw):
    """Query, key, value, and the other arguments that jax.nn has."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    b, t, s, k, h = (draw(st.sampled_from(sizes)) for sizes in ((1, 3), (1, 4, 7), (1, 5, 9), (1, 2), (4, 8)))
    n, no_batch = k * draw(st.sampled_from([1, 2])), b == 1 and draw(st.booleans())
    dtype = draw(st.sampled_from([np.float32, jnp.bfloat16, np.float16]))
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, h)
    operands = [rng.standard_normal(shape).astype(dtype)[0 if no_batch else slice(None)] for shape in shapes]
    options = {}

    def part(shape):
        shape = tuple(1 if draw(st.booleans()) else d for d in shape)
        return shape[draw(st.integers(0, 3 if shape[0] == 1 else 0)) :]

    if draw(st.booleans()):
        options["bias"] = rng.standard_normal(part((b, n, t, s))).astype(draw(st.sampled_from([np.float32, dtype])))
    if draw(st.booleans()):
        options["mask"] = (rng.random(part((b, n, t, s))) < 0.8) | (rng.random() < 0.3)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, -1.0, np.float32(2)]))
    if draw(st.booleans()):
        options["is_causal"] = True
    if draw(st.booleans()):
        options["local_window_size"] = draw(st.sampled_from([0, 2, (1, 3), (4, 0)]))
    if draw(st.booleans()):
        options["query_seq_lengths"] = rng.integers(0, t + 1, b).astype(np.int32)
    if draw(st.booleans()):
        options["key_value_seq_lengths"] = rng.integers(0, s + 1, b).astype(np.int32)
    return operands, options


@on_cpu
@settings(max_examples=settings.default.max_examples // 3)
@given(drawn=arguments_of_jax())
def test_any_arguments_of_jax(drawn):
    """The values, shapes and dtypes of jax.nn, but for queries to which no key counts, and f16, which it refuses."""
    operands, options = drawn
    output, lse = attention(*operands, **options, return_residual=True)
    wide = [v.astype(np.float32) for v in operands]
    with as_usual():
        of_dtype = jax.eval_shape(lambda *v: jax.nn.dot_product_attention(*v, **options), *operands)
        theirs = functools.partial(jax.nn.dot_product_attention, **options, return_residual=True)
        expected, expected_lse = jax.jit(theirs)(*wide)
    assert (output.shape, output.dtype) == (of_dtype.shape, of_dtype.dtype)
    assert (lse.shape, lse.dtype) == (expected_lse.shape, np.float32)
    some = np.isfinite(lse)
    assert not np.asarray(output)[~some].any() and np.isneginf(np.asarray(lse)[~some]).all()
    tolerance = 1e-5 if operands[0].dtype == np.float32 else 4 * float(jnp.finfo(operands[0].dtype).eps)
    np.testing.assert_allclose(np.asarray(lse)[some], np.asarray(expected_lse)[some], rtol=1e-4, atol=1e-4)
    actual, wanted = (np.asarray(v, np.float32)[some] for v in (output, expected))
    np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["dot_product_attention"])
def test_jaxs_function_replaced_by_ours(monkeypatch, name):
    """As people patch libraries: jaxsoft's function does not call what stands in the place of JAX's."""
    expected = attention(Q, K, V)
    monkeypatch.setattr(jax.nn, name, attention)
    assert same_bits(jax.nn.dot_product_attention(Q, K, V), expected)
