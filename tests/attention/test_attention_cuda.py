"""Many queries, and gradients, by the CUDA kernels, against the definition in float64.

The kernels compute tiles of queries and keys, some dozens or hundreds of each, of which limits exclude some and cut
others. So the lengths here are around the borders of tiles.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import Sizes, case
from common import ATTENTION_IMPLEMENTATIONS, same_bits
from truth import in_float64, wide

import jaxsoft
from jaxsoft._attention import choice, ffi
from jaxsoft._attention.form import SEGMENTS, AttentionForm
from jaxsoft._attention.spec import AttentionForward

pytestmark = pytest.mark.skipif("ffi" not in ATTENTION_IMPLEMENTATIONS, reason="no CUDA kernels for attention")
SIZES = Sizes(b=2, t=200, s=331, n=4, k=2, h=64, d=64)
# Errors of the norm, by the dtype: of weights that are rounded, and of results that are.
ALLOWED = {jnp.bfloat16: 8e-3, jnp.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def any_order(monkeypatch):
    """Where the same bits are not asked for, blocks of keys do not wait for each other, in short sequences too."""
    monkeypatch.setattr(ffi, "_ANY_ORDER_FROM", 0)


def check(options, sizes=SIZES, dtype=jnp.bfloat16, **more):
    """The output, the log-sum-exp and the gradients by query, key and value."""
    call = case(options, sizes, dtype, "ffi", more=more)
    base, rest = call.operands[:3], call.operands[3:]
    cotangent = np.random.default_rng(1).standard_normal((sizes.b, sizes.t, sizes.n, sizes.d)).astype(dtype)

    def results(attend, base, rest, cotangent):
        (output, lse), pullback = jax.vjp(lambda *v: tuple(attend(*v, *rest))[:2], *base)
        return output, lse, *pullback((cotangent.astype(output.dtype), jnp.full_like(lse, 0.5)))

    run = jax.jit(functools.partial(results, call.ours))
    actual = run(base, rest, cotangent)
    expected = in_float64(functools.partial(results, call.theirs), base, rest, cotangent)
    for name, a, e in zip(("output", "lse", "query", "key", "value"), actual, expected, strict=True):
        a, e = wide(a), wide(e)
        finite = np.isfinite(e)
        assert (a[~finite] == e[~finite]).all(), name
        a, e = np.where(finite, a, 0), np.where(finite, e, 0)
        error, norm = np.linalg.norm(a - e), np.linalg.norm(e)
        assert error <= (1e-5 if name == "lse" else ALLOWED[dtype]) * norm + 1e-6, (name, error / norm)
    assert same_bits(run(base, rest, cotangent), actual)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("causal",),
        ("window",),
        ("wide window",),
        ("window to the left", "cap"),
        ("query lengths", "key lengths", "causal"),
        ("offset",),
        ("offsets",),
        ("sinks", "key lengths"),
        ("cap",),
        ("state",),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_options(options, dtype):
    check(options, dtype=dtype)


@pytest.mark.parametrize("causal", [(), ("causal",)], ids=["all", "causal"])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("t", "s"), [(65, 64), (80, 1), (127, 128), (128, 129), (129, 257), (191, 193), (385, 383), (70, 1000), (1000, 70)]
)
def test_lengths(t, s, size, causal):
    check(causal, Sizes(b=1, t=t, s=s, n=2, k=2, h=size, d=size))


@pytest.mark.parametrize(("size", "values"), [(64, 64), (72, 128), (128, 128), (192, 128)])
@pytest.mark.parametrize("s", [1, 130, 2047, 2048, 2049])
def test_many_blocks_without_limits(s, size, values):
    """The last product of each is started with the first of the next; up to 2048 keys tiles may be shorter."""
    check((), Sizes(b=4, t=65, s=s, n=100, k=50, h=size, d=values))


@pytest.mark.parametrize("options", [("window",), ("cap", "causal"), ("segments", "cap")], ids=str)
def test_many_blocks_with_options(options):
    """Warp groups that take turns let tiles pass that matter to others of their block, in one block after the other."""
    check(options, Sizes(b=3, t=900, s=900, n=24, k=24, h=64, d=64))


@pytest.mark.parametrize("size", [8, 40, 72, 96, 136, 192, 200, 248])
def test_head_sizes(size):
    check(("causal",), Sizes(b=1, t=150, s=150, n=2, k=1, h=size, d=size))


@pytest.mark.parametrize("t", [4, 200], ids=["few", "many"])
@pytest.mark.parametrize(
    "rules", [{}, {"right": 0}, {"right": 0, "extras": SEGMENTS}], ids=["all", "causal", "segments"]
)
@pytest.mark.parametrize(("size", "values"), [*((n, n) for n in (8, 40, 64, 72, 96, 128, 136, 192, 256)), (192, 128)])
def test_residual_of_the_output(size, values, rules, t):
    """The output in f32 is what the one in 16 bits and its residual are of."""
    dtype = jnp.float16 if size % 16 else jnp.bfloat16
    rng = np.random.default_rng(size)
    shapes = (3, t, 4, size), (3, 331, 2, size), (3, 331, 2, values)
    operands = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    if "extras" in rules:
        operands += [np.sort(rng.integers(0, 4, (3, length)).astype(np.int32)) for length in (t, 331)]
    form = AttentionForm(np.dtype(dtype), 0.1, rounded=True, **rules)

    def run(form):
        return jax.jit(choice.choose(AttentionForward(form), "ffi", "cuda", [*map(jax.typeof, operands)]).function)

    operands = [*map(jnp.asarray, operands)]
    exact = run(dataclasses.replace(form, dtype=np.dtype(np.float32), rounded=False))(*operands)[0]
    rounded, *_, residual = run(form)(*operands)
    assert same_bits(exact.astype(dtype), rounded)
    np.testing.assert_array_equal(wide(residual), wide((exact - rounded.astype(jnp.float32)).astype(dtype)))


# Sizes of heads of keys and of values. The third is that of latent attention, and the last two have values that are
# longer than keys.
@pytest.mark.parametrize(
    ("size", "values"), [(136, 72), (160, 128), (192, 128), (192, 136), (256, 8), (64, 128), (8, 200)]
)
@pytest.mark.parametrize(
    "options",
    [(), ("causal",), ("window", "sinks"), ("query lengths", "key lengths"), ("segments",), ("cap",)],
    ids=str,
)
def test_values_of_another_size(options, size, values):
    check(options, SIZES._replace(h=size, d=values))


@pytest.mark.parametrize(("t", "s"), [(1, 1), (65, 64), (127, 128), (128, 129), (385, 383), (70, 1000), (1000, 70)])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_lengths_with_values_of_another_size(t, s, dtype):
    check(("causal",), Sizes(b=1, t=t, s=s, n=4, k=2, h=192, d=128), dtype)


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 8), (6, 3), (8, 1)])
def test_groups(heads, key_heads):
    check(("causal",), Sizes(b=2, t=180, s=180, n=heads, k=key_heads, h=64, d=64))


@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(("heads", "key_heads"), [(16, 4), (24, 24)])
def test_many_blocks(heads, key_heads, size, values):
    """More of them than run at a time, some of which wait for their turn to add; of the last heads in another order."""
    check(("causal",), Sizes(b=3, t=900, s=900, n=heads, k=key_heads, h=size, d=values))


@pytest.mark.parametrize(
    "options", [("causal",), ("causal", "query lengths", "key lengths"), ("causal", "offsets")], ids=str
)
@pytest.mark.parametrize(("t", "s"), [(900, 900), (700, 1100), (1100, 700), (1025, 1023)])
def test_the_other_order_of_the_last_heads(t, s, options):
    check(options, Sizes(b=4, t=t, s=s, n=32, k=32, h=64, d=64))


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("causal",),
        ("window", "sinks"),
        ("query lengths", "key lengths"),
        ("offsets",),
        ("segments",),
        ("cap",),
    ],
    ids=str,
)
def test_largest_scores(options, size):
    """Beside the other results, whose bits stay as they are; also where all scores are negative, and in heads without a
    key, which those of the lengths have.
    """
    sizes = SIZES._replace(b=3, h=size, d=size)
    call = case(options, sizes, jnp.bfloat16, "ffi", more={"return_max_logits": True})
    without = case(options, sizes, jnp.bfloat16, "ffi")
    query, key, *others = call.operands
    for operands in (call.operands, [np.abs(query), -np.abs(key), *others]):
        *found, largest = jax.jit(call.ours)(*operands)
        assert same_bits(found, [*jax.jit(without.ours)(*operands)])
        np.testing.assert_allclose(largest, in_float64(call.theirs, *operands)[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [
        ("segments",),
        ("segments", "causal"),
        ("segments", "cap", "sinks"),
        ("segments", "state"),
        ("segments", "window"),
    ],
    ids=str,
)
def test_segments(options, size):
    check(options, SIZES._replace(h=size, d=size))


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.parametrize("cap", [0.3, 4.0, 12.0, 50.0, 1000.0])
@pytest.mark.parametrize("causal", [(), ("causal",)], ids=["all", "causal"])
def test_soft_caps(causal, cap, size):
    """That all scores are near, for which two polynomials or one are exact enough, and that all are far below."""
    check(causal, SIZES._replace(t=400, s=500, h=size, d=size), logits_soft_cap=cap)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("scale", "cap"), [(3e-7, 1000.0), (3e-8, 100.0), (1e15, 100.0), (1e-30, 1e-30), (1e30, 1e3)])
def test_soft_caps_that_no_polynomial_is_for(scale, cap, size):
    """As terms of it would not be normal numbers. All scores are those of equal keys, and large."""
    query, key = (np.full((1, n, 2, size), 60000 if scale < 1 else 2, np.float16) for n in (64, 500))
    value = np.random.default_rng(0).standard_normal(key.shape).astype(np.float16)
    given = {"scale": scale, "logits_soft_cap": cap, "implementation": "ffi", "return_residual": True}
    output, lse = jax.jit(lambda *v: jaxsoft.dot_product_attention(*v, **given))(query, key, value)
    product = size * float(query[0, 0, 0, 0]) * float(key[0, 0, 0, 0])
    np.testing.assert_allclose(lse, cap * np.tanh(product * scale / cap) + np.log(500), rtol=1e-5)
    np.testing.assert_allclose(wide(output)[0], np.broadcast_to(wide(value)[0].mean(0), output.shape[1:]), atol=2e-3)


def test_soft_caps_of_many_heads():
    """More work than multiprocessors take at once, of which some is near the cap and some is not: the same bits, in
    whichever order it comes to them.
    """
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((4, 1024, 16, 128)).astype(jnp.bfloat16) for _ in range(3))
    query = (query * rng.choice([0.2, 1, 4, 16], (4, 1, 16, 1))).astype(jnp.bfloat16)

    def attend(*v):
        given = {"is_causal": True, "logits_soft_cap": 20.0, "implementation": "ffi", "return_residual": True}
        return jaxsoft.dot_product_attention(*v, **given)

    run = jax.jit(attend)
    first = run(query, key, value)
    for _ in range(20):
        assert same_bits(run(query, key, value), first)


# Numbers of segments of 700 positions: the kernels go over what may count for blocks of 64 to 192 of them. Each of few
# documents has blocks of its own.
LAYOUTS = {
    "few documents": np.repeat([3, 9], [300, 400]),
    "few documents and padding": np.repeat([1, 2, 0], [256, 385, 59]),
    "documents": np.repeat([3, 4, 7, 9], [250, 6, 300, 144]),
    "documents and padding": np.repeat([1, 2, 3, 0], [130, 300, 128, 142]),
    "short documents": np.repeat(np.arange(100), 7),
    "the other way round": np.repeat([9, 5, -2, -7], [100, 256, 200, 144]),
    "in pieces": np.repeat([0, 1, 0, 1, 2, 0], [120, 140, 100, 60, 200, 80]),
    "shuffled": np.random.default_rng(0).integers(0, 5, 700),
    "equal remainders": np.repeat([5, 2053, 4101, -2043], [150, 200, 200, 150]),
}


def check_segments(size, limits, *pairs):
    """Output and gradients, by bits of the same call and against the definition, for numbers of segments of queries and
    of keys. Also gradients that are added in any order.
    """
    (b, t), (_, s) = (ids.shape for ids in pairs[0])
    rng = np.random.default_rng(1)
    query, cotangent = (rng.standard_normal((b, t, 4, size)).astype(jnp.bfloat16) for _ in range(2))
    key, value = (rng.standard_normal((b, s, 2, size)).astype(jnp.bfloat16) for _ in range(2))

    def results(implementation, deterministic, ids, cotangent, *operands):
        """Numbers of segments are operands, so that one program serves all pairs; float64 holds them too."""
        of_queries, of_keys = (x.astype(jnp.int32) for x in ids)

        def attend(*v):
            given = {"query_segment_ids": of_queries, "key_value_segment_ids": of_keys, "deterministic": deterministic}
            return jaxsoft.dot_product_attention(*v, **given, **limits, implementation=implementation)

        output, pullback = jax.vjp(attend, *operands)
        return output, *pullback(cotangent.astype(output.dtype))

    run, run_in_any_order = (jax.jit(functools.partial(results, "ffi", same)) for same in (True, False))
    for ids in pairs:
        given = ids, cotangent, query, key, value
        actual = run(*given)
        expected = in_float64(functools.partial(results, "xla", True), *given)
        for found in (actual, run_in_any_order(*given)):
            for name, a, e in zip(("output", "query", "key", "value"), found, expected, strict=True):
                error = np.linalg.norm(wide(a) - wide(e)) / np.linalg.norm(wide(e))
                assert error <= ALLOWED[jnp.bfloat16], (name, error)
        for _ in range(5):
            assert same_bits(run(*given), actual)


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "limits", [{}, {"is_causal": True}, {"local_window_size": (90, 30)}], ids=["all", "causal", "window"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_segments(layout, limits, size):
    """Where queries and keys have the same segments, and where they have not: then some have none to attend to."""
    numbers = LAYOUTS[layout].astype(np.int32)
    pair = np.stack([numbers, np.roll(numbers, 77)])
    check_segments(size, limits, (pair, pair), (pair, np.roll(pair[::-1], 40, axis=1)))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (np.ones(384), np.repeat([1, 2, 1], 128)),
        (np.ones(1024), np.repeat([1, -1, 1], [400, 100, 524])),
        (np.repeat([1, 2], [384, 640]), np.repeat([1, 9, 2], [384, 128, 512])),
    ],
    ids=["blocks", "ten blocks", "between documents"],
)
def test_keys_that_nobody_attends_to(queries, keys, size):
    """Between the keys of one segment, or between those of two."""
    queries, keys = (np.stack([ids, ids]).astype(np.int32) for ids in (queries, keys))
    check_segments(size, {}, (queries, keys))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_references_that_follow(causal, size):
    """Of neighbouring queries, the scores of one are all equal, and those of the other rise from tile to tile, in which
    keys come from the last to the first, by little and by more than weights can be large.
    """
    keys = 4096
    steps = np.where(np.arange(keys) // 64 % 16 == 0, 128, 16)  # of which each 64 keys have one
    rise = np.cumsum(steps.reshape(-1, 64)[::-1, 0])[::-1].repeat(64) // 16 * 16 % 4096
    key = np.zeros((1, keys, 1, size), np.float32)
    key[0, :, 0, 0], key[0, :, 0, 1] = 1, rise
    query = np.zeros((1, keys, 1, size), np.float32)
    query[0, ::2, 0, 0], query[0, 1::2, 0, 1] = 338, 1
    value = np.random.default_rng(0).standard_normal(key.shape)
    arrays = [x.astype(jnp.bfloat16) for x in (query, key, value)]

    def attend(implementation, *v):
        return jaxsoft.dot_product_attention(
            *v, scale=1.0, is_causal=causal, return_residual=True, implementation=implementation
        )

    output, lse = (wide(x) for x in jax.jit(functools.partial(attend, "ffi"))(*arrays))
    expected = in_float64(functools.partial(attend, "xla"), *arrays)
    np.testing.assert_allclose(lse, wide(expected[1]), rtol=1e-6)
    error = np.linalg.norm(output - wide(expected[0])) / np.linalg.norm(wide(expected[0]))
    assert error <= ALLOWED[jnp.bfloat16]


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_equal_keys_and_huge_scores(scale, size):
    """Their weights are equal, whichever way the scores of a tile have been computed."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 700, 2, size)) for _ in range(3))
    arrays = [x.astype(jnp.bfloat16) for x in (query * 100, np.broadcast_to(key[:, :1], key.shape), value)]
    for causal in (False, True):
        run = functools.partial(jaxsoft.dot_product_attention, scale=scale, is_causal=causal, implementation="ffi")
        count = np.arange(1, 701)[:, None, None] if causal else 700
        mean = np.cumsum(wide(arrays[2])[0], axis=0) / count if causal else wide(arrays[2])[0].mean(axis=0)
        np.testing.assert_allclose(wide(jax.jit(run)(*arrays))[0], np.broadcast_to(mean, value.shape[1:]), atol=2e-2)


@pytest.mark.parametrize("at", [10, 200, 300])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_an_infinite_score(size, at):
    rng = np.random.default_rng(0)
    query, key, value = (np.abs(rng.standard_normal((1, 200, 1, size))).astype(jnp.bfloat16) for _ in range(3))
    key = np.concatenate([key, key], axis=1)
    key[0, at, 0, 0] = np.inf
    given = (query, key, np.concatenate([value, value], axis=1))
    output, lse = jaxsoft.dot_product_attention(*given, return_residual=True, implementation="ffi")
    assert (np.asarray(lse) == np.inf).all() and np.isnan(wide(output)).all()


@pytest.mark.parametrize(("b", "t", "size"), [(2, 700, 128), (40, 300, 64), (40, 300, 128), (40, 300, 256)])
def test_without_the_same_bits(b, t, size):
    """The gradients are as near to the true ones. Of many heads, the sums of later ones are cleared while others are
    added to.
    """
    call = case(("causal",), Sizes(b=b, t=t, s=t, n=4, k=2, h=size, d=size), jnp.bfloat16)

    def gradients(deterministic, *operands):
        def total(*v):
            y = jaxsoft.dot_product_attention(*v, is_causal=True, implementation="ffi", deterministic=deterministic)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(total, (0, 1, 2))(*operands)

    for a, b in zip(*(jax.jit(gradients, static_argnums=0)(d, *call.operands) for d in (True, False)), strict=True):
        assert np.linalg.norm(wide(a) - wide(b)) <= 5e-3 * np.linalg.norm(wide(a))


@pytest.mark.parametrize("packed", [False, True], ids=["all", "packed"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_pieces_of_several_heads(size, deterministic, packed):
    """Of many short sequences a block takes several of the heads that share keys, one after the other. Of few it takes
    one, and the gradients by keys are sums of what blocks have. Where documents are packed, some keys are of none.
    """
    call = case(("causal",), Sizes(b=20, t=700, s=700, n=16, k=4, h=size, d=size), jnp.bfloat16)
    documents = np.repeat([5, 3, -1, 5, 8], [290, 70, 140, 130, 70]).astype(np.int32)
    queries = np.stack([np.roll(documents, 31 * i) for i in range(20)])
    keys = np.where(queries < 0, 9, queries)

    @jax.jit
    def gradients(queries, keys, *operands):
        given = {"is_causal": True, "implementation": "ffi", "deterministic": deterministic}
        if packed:
            given |= {"query_segment_ids": queries, "key_value_segment_ids": keys}

        def total(*v):
            return jnp.sum(jnp.sin(jaxsoft.dot_product_attention(*v, **given).astype(jnp.float32)))

        return jax.grad(total, (0, 1, 2))(*operands)

    given = queries, keys, *call.operands[:3]
    of_many, of_few = gradients(*given), gradients(*(x[-2:] for x in given))
    for a, b in zip(of_many, of_few, strict=True):
        assert np.linalg.norm(wide(a[-2:]) - wide(b)) <= 3e-3 * np.linalg.norm(wide(b))
    if packed:
        assert not any(wide(x)[keys == 9].any() for x in of_many)


def test_many_calls_in_one_program():
    """Packed and not, with gradients, one after the other: also in a CUDA graph, which XLA makes of them, each kernel
    waits for those before it.
    """
    sizes = Sizes(b=2, t=700, s=700, n=4, k=2, h=128, d=128)
    calls = [case(options, sizes, jnp.bfloat16, "ffi") for options in (("causal",), ("segments", "causal"), ("cap",))]

    def gradients(call, *operands):
        return jax.grad(lambda *v: jnp.sum(call.ours(*v)[0].astype(jnp.float32) ** 2), (0, 1, 2))(*operands)

    operands = calls[0].operands
    one_by_one = [jax.jit(functools.partial(gradients, call))(*operands) for call in calls * 2]
    graph = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
    together = jax.jit(lambda *v: [gradients(call, *v) for call in calls * 2], compiler_options=graph)
    for _ in range(5):
        assert same_bits(together(*operands), one_by_one)


@pytest.mark.parametrize("options", [("causal", "key lengths"), ()], ids=str)
@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("key_heads", [4, 16])
def test_same_bits_on_every_run(key_heads, size, values, options):
    """Whichever block is the first to add. Without limits, all begin with the same tile at the same time."""
    call = case(options, Sizes(b=4, t=600, s=800, n=16, k=key_heads, h=size, d=values), jnp.bfloat16, "ffi")
    run = jax.jit(jax.grad(lambda *v: jnp.sum(call.ours(*v)[0].astype(jnp.float32) ** 2), (0, 1, 2)))
    first = run(*call.operands)
    for _ in range(20):
        assert same_bits(run(*call.operands), first)


def test_a_sequence_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    shapes = (3, 260, 4, 64), (3, 260, 2, 64), (3, 260, 2, 64)
    arrays = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]

    @jax.jit
    def results(lengths, *arrays):
        def attend(*v):
            return jaxsoft.dot_product_attention(*v, key_value_seq_lengths=lengths, implementation="ffi")

        y, pullback = jax.vjp(attend, *arrays)
        return y, *pullback(y)

    found = results(np.array([260, 3, 100], np.int32), *arrays)
    changed = [np.concatenate([x[:1], 2 * x[1:]]) for x in arrays]
    again = results(np.array([260, 200, 0], np.int32), *changed)
    assert same_bits([v[:1] for v in again], [v[:1] for v in found])
    assert all(np.isfinite(wide(v)).all() and not wide(v[2]).any() for v in again)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_keys_that_end_early(size):
    """Many blocks of keys have nothing to do, and each sequence has the bits that it has in another place."""
    lengths = np.array([300, 2000, 0, 40, 2000, 1], np.int32)
    call = case((), Sizes(b=len(lengths), t=2000, s=2000, n=4, k=2, h=size, d=size), jnp.bfloat16)

    @jax.jit
    def gradients(lengths, *operands):
        def total(*v):
            y = jaxsoft.dot_product_attention(*v, key_value_seq_lengths=lengths, implementation="ffi")
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(total, (0, 1, 2))(*operands)

    found = gradients(lengths, *call.operands[:3])
    assert not any(wide(x[lengths == 0]).any() for x in found)
    for by in range(1, len(lengths)):
        again = gradients(np.roll(lengths, by), *(np.roll(x, by, 0) for x in call.operands[:3]))
        assert same_bits(again, [np.roll(np.asarray(x), by, 0) for x in found])


@pytest.mark.parametrize("what", ["equal keys", "one large", "huge", "infinite value"])
def test_special_values(what):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, n, 2, 64)).astype(np.float32) for n in (150, 300, 300))
    if what == "equal keys":
        key[:] = key[:, :1]
    elif what == "one large":
        key[:, 222] = 30 * query[:, 7]
    elif what == "huge":
        query *= 1e4
    else:
        value[:, 100, 0, 3] = np.inf
    narrow = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    found = jaxsoft.dot_product_attention(*narrow, is_causal=True, query_offset=150, implementation="ffi")
    given = [x.astype(np.float32) for x in narrow]
    expected = jaxsoft.dot_product_attention(*given, is_causal=True, query_offset=150, implementation="xla")
    np.testing.assert_allclose(wide(found), wide(expected), rtol=2e-2, atol=2e-2)


def test_vmap_and_jvp():
    """vmap of the gradient; and forward mode, which is the formula's."""
    call = case(("causal",), Sizes(b=2, t=70, s=70, n=4, k=2, h=64, d=64), jnp.bfloat16, "ffi")
    gradient = jax.grad(lambda *v: jnp.sum(call.ours(*v)[0].astype(jnp.float32) ** 2), (0, 1, 2))
    stacked = [np.stack([x, x[::-1]]) for x in call.operands]
    mapped = jax.jit(jax.vmap(gradient))(*stacked)
    for i in range(2):
        for a, b in zip(mapped, gradient(*(x[i] for x in stacked)), strict=True):
            np.testing.assert_allclose(wide(a[i]), wide(b), rtol=2e-2, atol=2e-2)
    operands = [jnp.asarray(x) for x in call.operands]
    tangents = jax.jit(lambda *v: jax.jvp(lambda *w: call.ours(*w)[0], v, v))(*operands)[1]
    by_formula = case(("causal",), Sizes(b=2, t=70, s=70, n=4, k=2, h=64, d=64), jnp.bfloat16, "xla")
    expected = jax.jit(lambda *v: jax.jvp(lambda *w: by_formula.ours(*w)[0], v, v))(*operands)[1]
    assert np.linalg.norm(wide(tangents) - wide(expected)) <= 2e-2 * np.linalg.norm(wide(expected))
