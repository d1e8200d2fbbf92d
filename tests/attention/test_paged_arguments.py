"""Arguments of attention over pages and of writing into these: what is wrong is named, with what was given and what is
allowed.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import PAGED_IMPLEMENTATIONS, same_bits

import jaxsoft
from jaxsoft import fold, paged_attention, write_pages

Q = np.ones((2, 3, 4, 8), np.float32)
K = np.ones((7, 5, 2, 8), np.float32)
V = np.ones((7, 5, 2, 6), np.float32)
TABLE, LENGTHS = np.zeros((2, 3), np.int32), np.array([11, 4], np.int32)
ALL = (Q, K, V, TABLE, LENGTHS)
SHAPES = r"\(2, 4, 3, 15\)"


def named(x):
    """The message, of the parameters of a test."""
    return x if isinstance(x, str) else ""


def with_(i, x, given=ALL):
    return tuple(x if i == j else v for j, v in enumerate(given))


@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        (with_(0, "a"), TypeError, "query must be a number or an array of numbers; got 'a'"),
        (with_(0, Q[0]), ValueError, r"query must have the shape \(B, T, N, H\); got shape \(3, 4, 8\)"),
        (with_(0, Q.astype(np.complex64)), TypeError, "query must hold float16, .*; got dtype complex64"),
        (with_(0, Q[:, :, :3]), ValueError, r"query must have a multiple of .* heads of key_pages, 2; got 3 in shape"),
        (with_(1, None), TypeError, "key_pages must be a number or an array of numbers; got None"),
        (with_(1, K[0]), ValueError, r"key_pages must have the shape \(P, page size, K, H\); got shape \(5, 2, 8\)"),
        (with_(1, K[:, :0]), ValueError, r"key_pages must have room for a key .*; got shape \(7, 0, 2, 8\)"),
        (with_(1, K.astype(np.int8)), TypeError, "key_pages must hold float16, .* or float8_e5m2; got dtype int8"),
        (
            (Q, K.astype(np.float16), V.astype(np.float16), TABLE, LENGTHS),
            TypeError,
            "key_pages must have the dtype of query, float32, or be of float8_e4m3fn or .*; got float16",
        ),
        (with_(1, K[..., :7]), ValueError, r"key_pages must have the head size of query, 8; got shape \(7, 5, 2, 7\)"),
        (with_(2, V[..., 0]), ValueError, r"value_pages must have the shape \(P, page size, K, D\); got shape \(7, 5"),
        (with_(2, V[:6]), ValueError, r"value_pages must have the shape \(7, 5, 2\) and a head size; got shape \(6, 5"),
        (
            with_(2, V.astype(jnp.float8_e5m2)),
            TypeError,
            "value_pages must have .* of key_pages, float32; got",
        ),
        (with_(3, TABLE[0]), ValueError, r"page_table must have the shape \(2, pages of a .*\); got shape \(3,\)"),
        (with_(3, TABLE[:1]), ValueError, r"page_table must have the shape \(2, pages of a .*\); got shape \(1, 3\)"),
        (with_(3, TABLE * 1.0), TypeError, "page_table must hold integers; got dtype float"),
        (
            with_(3, TABLE.astype(np.int64) + 2**40),
            ValueError,
            "page_table must hold .*; got 1099511627776",
        ),
        (with_(4, LENGTHS[:1]), ValueError, r"key_value_seq_lengths must have the shape \(2,\); got shape \(1,\)"),
        (with_(4, 3), ValueError, r"key_value_seq_lengths must have the shape \(2,\); got shape \(\)"),
        (with_(4, LENGTHS * 0.5), TypeError, "key_value_seq_lengths must hold integers; got dtype float"),
    ],
    ids=named,
)
def test_bad_operands(operands, error, message):
    for f in (paged_attention, jax.jit(paged_attention)) if not isinstance(operands[0], str) else (paged_attention,):
        if f is paged_attention or all(isinstance(x, np.ndarray) and x.dtype != np.int64 for x in operands):
            with pytest.raises(error, match=message):
                f(*operands)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": np.ones(4, np.float32)}, ValueError, rf"bias must broadcast to .*{SHAPES}; got shape \(4,\)"),
        ({"mask": np.ones((2, 1, 3, 5), bool)}, ValueError, rf"mask must .*{SHAPES}; got shape \(2, 1, 3, 5\)"),
        ({"mask": np.ones(15, np.float32)}, TypeError, "mask must hold booleans or integers; got dtype float32.*bias"),
        ({"scale": "a"}, TypeError, "scale must be a real number; got 'a'"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got 1"),
        ({"return_residual": None}, TypeError, "return_residual must be True or False; got None"),
        ({"query_seq_lengths": np.ones(3, int)}, ValueError, r"query_seq_lengths must have .*\(2,\); got shape \(3,\)"),
        ({"query_seq_lengths": np.ones(2)}, TypeError, "query_seq_lengths must hold integers; got dtype float32"),
        ({"query_offset": np.ones(3, int)}, ValueError, r"query_offset must be None or .*\(2,\); got shape \(3,\)"),
        ({"query_offset": 1.5}, TypeError, "query_offset must hold integers; got dtype float32"),
        ({"local_window_size": (-1, 2)}, ValueError, r"local_window_size must not be negative; got \(-1, 2\)"),
        ({"logits_soft_cap": 0}, ValueError, "logits_soft_cap must be None, or positive .*; got 0"),
        ({"sinks": np.ones(2, np.float32)}, ValueError, r"sinks must have the shape \(4,\), .*; got shape \(2,\)"),
        (
            {"key_scale": np.ones(4)},
            ValueError,
            r"key_scale must be a number or .*\(2,\); got shape \(4,\)",
        ),
        ({"value_scale": np.ones((1, 2))}, ValueError, r"value_scale must be .*\(2,\); got shape \(1, 2\)"),
        ({"value_scale": 1j}, TypeError, "value_scale must hold float16, .*; got dtype complex64"),
        ({"state": (1, 2, 3)}, TypeError, r"state must be a jaxsoft\.fold\.AttentionState; got tuple"),
        (
            {"state": fold.attention_identity((2, 3, 4), 5)},
            ValueError,
            r"state\.o must have the shape \(2, 3, 4, 6\); got shape \(2, 3, 4, 5\)",
        ),
        ({"dtype": np.int32}, ValueError, "dtype must be None or one of float16, .*; got int32"),
        ({"implementation": "fast"}, ValueError, "implementation must be None or one of .*; got 'fast'"),
        (
            {"implementation": "pallas"},
            ValueError,
            "'pallas' cannot serve this call: .* values in pages.*'xla'",
        ),
        ({"implementation": "cudnn"}, ValueError, "'cudnn' cannot serve this call: .* values in pages.*'xla'"),
    ],
    ids=named,
)
def test_bad_arguments(options, error, message):
    for f in (paged_attention, jax.jit(lambda *v: paged_attention(*v, **options))):
        with pytest.raises(error, match=message):
            f(*ALL, **(options if f is paged_attention else {}))


NEW = (K, V, np.ones((2, 3, 2, 8), np.float32), np.ones((2, 3, 2, 6), np.float32), TABLE, LENGTHS)


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"),
    [
        (with_(0, K[0], NEW), {}, ValueError, r"key_pages must have the shape \(P, page size, K, H\); got shape"),
        (
            with_(2, NEW[2][0], NEW),
            {},
            ValueError,
            r"key must have the shape \(B, T, 2, 8\), as .*; got shape \(3",
        ),
        (
            with_(2, NEW[2][..., :7], NEW),
            {},
            ValueError,
            r"key must have the shape \(B, T, 2, 8\), as .*2, 7\)",
        ),
        (
            with_(3, NEW[3][:, :2], NEW),
            {},
            ValueError,
            r"value must have the shape \(2, 3, 2, 6\), as .*\(2, 2",
        ),
        (with_(3, NEW[3].astype(np.complex64), NEW), {}, TypeError, "value must hold float16, .*; got dtype complex64"),
        (with_(4, TABLE[:1], NEW), {}, ValueError, r"page_table must have the shape \(2, .*; got shape \(1, 3\)"),
        (with_(5, 3, NEW), {}, ValueError, r"key_value_seq_lengths must have the shape \(2,\); got shape \(\)"),
        (NEW, {"query_seq_lengths": 1}, ValueError, r"query_seq_lengths must have the shape \(2,\); got shape \(\)"),
        (
            NEW,
            {"query_offset": np.ones(3, int)},
            ValueError,
            r"query_offset must be None or .*\(2,\); got shape \(3,\)",
        ),
        (NEW, {"key_scale": np.ones(3)}, ValueError, r"key_scale must be a number or .*\(2,\); got shape \(3,\)"),
        (NEW, {"value_scale": "b"}, ValueError, "value_scale must be a number or an array of numbers; got 'b'"),
    ],
    ids=named,
)
def test_bad_arguments_of_writing(operands, options, error, message):
    with pytest.raises(error, match=message):
        write_pages(*operands, **options)


def test_signature():
    """Attention's arguments have attention's names, order and defaults, where both have them."""
    ours, theirs = (inspect.signature(f).parameters for f in (paged_attention, jaxsoft.dot_product_attention))
    own = ("query_offset", "key_value_seq_lengths")  # of which one is None, and the other always there
    common = [name for name in theirs if name in ours and name not in own]
    assert common == [name for name in ours if name in theirs and name not in own]
    assert {ours[name].default == theirs[name].default for name in common} == {True}
    missing = {*theirs} - {*ours}
    assert missing == {
        *("key", "value", "query_segment_ids", "key_value_segment_ids"),
        *("return_max_logits", "deterministic", "dropout_rate"),
    }


def test_numbers_of_any_kind():
    """numpy's and JAX's numbers for Python's; lists; integers as queries and pages become f32."""
    expected = paged_attention(*ALL, key_scale=2, value_scale=0.5, query_offset=3, is_causal=True)
    for scale in (np.float32(0.5), np.array([0.5, 0.5]), jnp.float32(0.5), [0.5, 0.5]):
        given = {"value_scale": scale, "is_causal": np.True_, "query_offset": np.int8(3)}
        assert same_bits(paged_attention(*ALL, key_scale=np.int32(2), **given), expected)
    given = Q.astype(int), K, V, TABLE.tolist(), LENGTHS.tolist()
    assert same_bits(paged_attention(*given), paged_attention(*ALL))
    assert paged_attention(*ALL, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    y, lse, state = paged_attention(*ALL, return_residual=True, return_state=True)
    assert (y.shape, lse.shape, state.o.shape) == ((2, 3, 4, 6), (2, 3, 4), (2, 3, 4, 6))


@pytest.mark.parametrize("name", [name for name in ("ffi", "triton") if name not in PAGED_IMPLEMENTATIONS])
def test_an_implementation_that_is_not_here(name):
    for f in (paged_attention, jax.jit(paged_attention, static_argnames="implementation")):
        with pytest.raises(ValueError, match=rf"implementation='{name}' cannot serve this call: \S.*'xla'"):
            f(*ALL, implementation=name)


def test_the_last_queries():
    """Without an offset the queries are the last tokens of their sequence, of those that count."""
    counts = np.array([2, 3], np.int32)
    for given, offset in (({}, LENGTHS - 3), ({"query_seq_lengths": counts}, LENGTHS - counts)):
        y = paged_attention(*ALL, is_causal=True, **given, return_residual=True)
        e = paged_attention(*ALL, is_causal=True, **given, query_offset=offset, return_residual=True)
        assert same_bits(y, e)
    lse = paged_attention(*ALL, is_causal=True, query_seq_lengths=counts, return_residual=True)[1]
    keys = np.exp(lse - np.sqrt(8))[:, :, 0]  # all scores are alike, so that is how many count
    np.testing.assert_allclose(keys, [[10, 11, 0], [2, 3, 4]], rtol=1e-4)
