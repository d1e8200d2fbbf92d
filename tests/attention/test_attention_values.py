"""Attention and its gradients against the definition in float64: every option, every length, special values."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import FIXED, MOVING, OPTIONS, SMALL, Sizes, case, conflict
from cases import Case
from common import ATTENTION_IMPLEMENTATIONS, as_usual, on_cpu, on_gpu, precision, same_bits, served, slow, some
from hypothesis import given, settings
from hypothesis import strategies as st
from truth import in_float64, wide

import jaxsoft
from jaxsoft._attention import blocks

each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in ("xla", "reference") else (), id=str(name))
        for name in ATTENTION_IMPLEMENTATIONS
    ],
)
each_fast_implementation = pytest.mark.parametrize(
    "implementation", [name for name in ATTENTION_IMPLEMENTATIONS if name not in ("xla", "reference")], ids=str
)


def _dtype_of(implementation: str | None) -> type:
    """One that it takes."""
    return jnp.bfloat16 if implementation in ("ffi", "pallas", "cudnn") else np.float32


def both(call: Case) -> Case:
    """The results of a call and its gradients, compiled once."""
    return Case.together(call.what, [call, call.through("grad")])


@slow  # test_every_function.py has it without options
def test_reference():
    """The definition by a scan, which XLA compiles slowly."""
    with precision(np.float64):
        both(case(["bias", "sinks", "causal"], Sizes(1, 3, 5, 2, 1, 2, 2), np.float64, "reference")).check()


@slow  # tests below have several at once, and test_attention_sharding.py and test_every_function.py others and none
@pytest.mark.parametrize("option", [None, *OPTIONS], ids=str)
@each_implementation
def test_every_option(option, implementation):
    """Output, log-sum-exp and all gradients."""
    with precision(np.float64), served(implementation):
        call = case([option] if option else [], SMALL, np.float64, implementation)
        both(call).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("t", "s", "size"), [(3, 300, 64), (127, 127, 64), (256, 100, 64), (100, 256, 64), (1152, 1152, 128)]
)
def test_output_alone(t, s, size, dtype, is_causal, deterministic):
    """Without the log-sum-exp, output and gradients may be by different implementations: cuDNN's or Pallas's."""
    call = case([], Sizes(b=1, t=t, s=s, n=4, k=2, h=size, d=size), dtype)
    cotangent = np.random.default_rng(1).standard_normal((1, t, 4, size)).astype(dtype)

    def results(attend, operands):
        def of(*operands):
            y, pullback = jax.vjp(functools.partial(attend, is_causal=is_causal), *operands)
            return y, *pullback(cotangent.astype(y.dtype))

        return [np.asarray(v).astype(np.float64) for v in jax.jit(of)(*operands)]

    found = results(functools.partial(jaxsoft.dot_product_attention, deterministic=deterministic), call.operands)
    with jax.enable_x64(True), as_usual():
        expected = results(jax.nn.dot_product_attention, [v.astype(np.float64) for v in call.operands])
    for a, e in zip(found, expected, strict=True):
        assert np.linalg.norm(a - e) <= 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(e)


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@each_fast_implementation
def test_every_dtype(dtype, implementation):
    """16 bits too, on every platform, with options that move and options that do not."""
    with served(implementation):
        call = case(["bias of a head", "sinks", "causal"], Sizes(t=40, s=40, h=32, d=32), dtype, implementation)
        both(call).check()
        output, lse = jax.eval_shape(call.ours, *call.operands)
        assert output.dtype == dtype
        assert lse.dtype == jnp.float32


ONE = Sizes(b=1, t=1, s=1, n=1, k=1)


@pytest.mark.parametrize(
    "sizes",
    some(
        [
            Sizes(n=4, k=4), Sizes(n=6, k=1), Sizes(n=6, k=3), Sizes(d=3), Sizes(h=3, d=5), ONE,
            Sizes(n=6, k=3, h=3, d=5),
        ],
        [Sizes(n=6, k=3, h=3, d=5)],
    ),
    ids=str,
)  # fmt: skip
@each_fast_implementation
def test_heads(sizes, implementation):
    """Groups of every kind, and values of another size than keys."""
    with precision(np.float64), served(implementation):
        call = case(["bias", "causal"], sizes, np.float64, implementation)
        both(call).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [np.float32, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("size", [64, 128, 256])
@each_fast_implementation
def test_bias_of_another_dtype(size, dtype, implementation):
    """With a mask of all scores, too: kernels have no room for tiles of both beside heads of 256."""
    with served(implementation):
        call = case(["bias", "mask"], Sizes(t=131, s=200, h=size, d=size), jnp.bfloat16, implementation)
        query, key, value, bias = call.operands
        both(dataclasses.replace(call, operands=[query, key, value, bias.astype(dtype)])).check()


# By plain JAX in blocks of 128 keys, by kernels in tiles of 64 to 128.
LENGTHS = [(1, 1), (17, 17), (2, 127), (65, 128), (3, 129), (127, 256), (129, 257), (5, 1000)]


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 128 keys, however few queries there are."""
    monkeypatch.setattr(blocks, "SCORES", 1)
    monkeypatch.setattr(blocks, "LEAST_ELSEWHERE", 128)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("t", "s"),
    [
        *(pytest.param(*v, marks=() if v in ((1, 1), (129, 257), (5, 1000)) else slow) for v in LENGTHS),
        pytest.param(1000, 4095, marks=slow),
        pytest.param(2, 65537, marks=slow),
    ],
)
@pytest.mark.parametrize(
    "options", [("offset",), pytest.param(("bias of a head", "mask of keys", "sinks"), marks=slow)], ids=str
)
@each_fast_implementation
@pytest.mark.usefixtures("short_blocks")
def test_lengths(t, s, options, implementation):
    """Around the borders of blocks and of tiles."""
    dtype = np.float32 if implementation is None else jnp.bfloat16
    with served(implementation):
        call = case(options, Sizes(b=2, t=t, s=s, n=2, k=1, h=32, d=32), dtype, implementation)
        both(call).check()


@on_gpu
@pytest.mark.parametrize(
    "options", [(), ("causal",), ("window", "mask of keys", "sinks"), ("bias of scores",)], ids=str
)
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_many_blocks(size, options):
    """More blocks than run at a time, which Pallas lets some do one after another."""
    with served("pallas"):
        sizes = Sizes(b=2, t=300, s=200, n=40, k=4, h=size, d=size)
        both(case(options, sizes, jnp.bfloat16, "pallas")).check()


@pytest.mark.costly(1)
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("names", [("grad", "jvp"), ("grad", "grad"), ("jvp",)], ids=str)
def test_derivatives_over_blocks(names):
    """Derivatives of every kind and of the second order, of what takes several blocks."""
    with precision(np.float64):
        call = case(["causal", "bias", "cap"], Sizes(b=1, t=3, s=257, n=2, k=1, h=4, d=4), np.float64)
        functools.reduce(Case.through, names, call).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("keys", [2, 1, 130])
@pytest.mark.usefixtures("short_blocks")
def test_parts_without_keys(keys):
    """Of the parts in which plain JAX takes the queries, some have no key in their window, and some a few."""
    size = (127, 0)
    distance = np.arange(512)[:, None] - np.arange(keys)
    mask = (distance >= 0) & (distance <= size[0])
    random = np.random.default_rng(0)

    @functools.partial(jax.jit, static_argnames="window")
    def results(operands, mask, window):
        def loss(query, key, value, bias):
            y = jaxsoft.dot_product_attention(
                query, key, value, bias, mask, local_window_size=window, implementation="xla"
            )
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, range(4), has_aux=True)(*operands)

    with precision(np.float64):
        shapes = [(1, 512, 2, 4), (1, keys, 1, 4), (1, keys, 1, 3), (1, 2, 512, keys)]
        operands = [random.standard_normal(shape) for shape in shapes]
        chex.assert_trees_all_close(results(operands, None, size), results(operands, mask, None), rtol=1e-9, atol=1e-9)


@pytest.mark.costly
@each_implementation
@pytest.mark.parametrize("empty", ["b", "t", "s", "d"])
def test_nothing(empty, implementation):
    """Arrays without elements."""
    with served(implementation):
        call = case(["sinks"], SMALL._replace(**{empty: 0}), np.float32, implementation)
        call.check()
        chex.assert_tree_all_finite(jax.grad(lambda *v: call.ours(*v)[0].sum(), (0, 1, 2))(*call.operands))


@given(
    options=st.lists(st.sampled_from(OPTIONS), unique=True, min_size=2, max_size=6).filter(lambda o: not conflict(o)),
    sizes=st.builds(
        Sizes,
        b=st.sampled_from([1, 2, 3]),
        t=st.sampled_from([1, 2, 7, 33]),
        s=st.sampled_from([1, 5, 17, 40]),
        n=st.just(4),
        k=st.sampled_from([1, 2, 4]),
        h=st.sampled_from([1, 4, 8]),
        d=st.sampled_from([1, 4, 8]),
    ),
    implementation=st.sampled_from([name for name in ATTENTION_IMPLEMENTATIONS if name != "reference"]),
)
@settings(max_examples=settings.default.max_examples // 3)
def test_combinations(options, sizes, implementation):
    """Any options at once."""
    with precision(np.float64), served(implementation):
        call = case(options, sizes, np.float64, implementation)
        both(call).check()


@given(
    options=st.lists(st.sampled_from(OPTIONS), unique=True, max_size=6).filter(lambda o: not conflict(o)),
    sizes=st.builds(
        Sizes,
        b=st.sampled_from([1, 2]),
        t=st.sampled_from([1, 60, 129, 200]),
        s=st.sampled_from([1, 64, 130, 300]),
        n=st.just(4),
        k=st.sampled_from([1, 2, 4]),
        h=st.sampled_from([32, 64, 96, 128, 256]),
        d=st.sampled_from([32, 64, 128, 256]),
    ),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16]),
    implementation=st.sampled_from([name for name in ATTENTION_IMPLEMENTATIONS if name != "reference"]),
)
@settings(max_examples=12)
@slow
def test_combinations_of_16_bits(options, sizes, dtype, implementation):
    """The same in the dtypes and at the head sizes that kernels of GPUs take."""
    with served(implementation):
        call = case(options, sizes, dtype, implementation)
        both(call).check()


@each_implementation
def test_where_no_key_counts(implementation):
    """The output is 0, the log-sum-exp -inf, and no gradient is NaN or of that query."""
    with served(implementation):
        call = case(["bias"], Sizes(h=32, d=32), _dtype_of(implementation), implementation)
        query, key, value, bias = call.operands
        mask = np.ones((2, 1, 7, 1), bool)
        mask[0, 0, 2] = mask[1, 0, 5] = False
        bias[1, :, 6] = -np.inf  # nothing but scores of -inf is the same

        def results(*v):
            return jaxsoft.dot_product_attention(*v, mask=mask, implementation=implementation, return_residual=True)

        def total(*v):
            return sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0)), dtype=np.float32) for y in results(*v))

        found = jax.jit(lambda *v: (*results(*v), *jax.grad(total, (0, 1, 2, 3))(*v)))(query, key, value, bias)
        output, lse, by_query, by_key, by_value, by_bias = map(np.asarray, found)
        chex.assert_tree_all_finite((output, by_query, by_key, by_value, by_bias))
        for b, t in ((0, 2), (1, 5), (1, 6)):
            assert not output[b, t].any() and (lse[b, t] == -np.inf).all()
            assert not by_query[b, t].any() and not by_bias[b, :, t].any()


@each_implementation
def test_infinite_cotangents(implementation):
    """Where no key counts: of a log-sum-exp that enters a loss by itself, and of the norm of an output. The gradients
    are still 0.
    """
    with served(implementation):
        query, key, value = case([], Sizes(h=32, d=32), _dtype_of(implementation), implementation).operands
        lengths = np.array([4, 0], np.int32)

        def gradients(*v):
            options = {"query_seq_lengths": lengths, "implementation": implementation, "return_residual": True}
            (output, lse), pull = jax.vjp(lambda *v: jaxsoft.dot_product_attention(*v, **options), *v)
            norms = jax.grad(lambda y: jnp.sum(jnp.linalg.norm(y.astype(np.float32), axis=-1)))(output)
            losses = jnp.square, lambda lse: jnp.exp(-lse)
            return [pull((norms, jax.grad(lambda x, loss=loss: jnp.sum(loss(x)))(lse))) for loss in losses]

        for found in jax.jit(gradients)(query, key, value):
            chex.assert_tree_all_finite(found)
            by_query = np.asarray(found[0])
            assert not by_query[0, 4:].any() and not by_query[1].any()


@each_implementation
def test_special_scores(implementation):
    """NaN and +inf make their own query NaN, and no other; huge scores are exact."""
    with served(implementation):
        call = case(["bias"], Sizes(h=32, d=32), _dtype_of(implementation), implementation)
        query, key, value, bias = call.operands
        bias = bias.astype(np.float32)
        plain = jaxsoft.dot_product_attention(query, key, value, bias, implementation=implementation)
        bias[0, 1, 2, 3], bias[1, 0, 4, 0] = np.nan, np.inf
        bias[0, 0, 6] += 1e4
        y = np.asarray(jaxsoft.dot_product_attention(query, key, value, bias, implementation=implementation))
        wrong = np.isnan(y).all(axis=-1)
        assert wrong[0, 2, 1] and wrong[1, 4, 0] and wrong.sum() == 2
        bound = 2e-3 if query.dtype == np.float32 else 2e-2
        np.testing.assert_allclose(*(v[~wrong].astype(np.float32) for v in (y, np.asarray(plain))), bound, bound)


@pytest.mark.parametrize("t", [3, 130])
@each_implementation
def test_special_sinks(t, implementation):
    """A sink of NaN or +inf makes all queries of its head NaN, as such a score would; one of -inf is none."""
    with served(implementation):
        call = case([], Sizes(t=t, s=70, h=32, d=32), _dtype_of(implementation), implementation)
        sinks = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
        attend = functools.partial(jaxsoft.dot_product_attention, implementation=implementation)
        found = jax.jit(lambda *v: (*attend(*v, sinks=sinks, return_residual=True), attend(*v)))(*call.operands)
        y, lse, plain = (np.asarray(v).astype(np.float32) for v in found)
        assert np.isnan(y[:, :, :2]).all() and np.isnan(lse[..., 0]).all()
        assert not y[:, :, 3].any()
        np.testing.assert_allclose(lse[..., 3], sinks[3], 1e-6)
        np.testing.assert_array_equal(y[:, :, 2], plain[:, :, 2])


@pytest.mark.costly(1)
@pytest.mark.parametrize("offset", [-1e4, 1e7, -1e9, float(np.finfo(np.float32).min)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@each_implementation
def test_offsets_of_all_scores(offset, dtype, implementation):
    """A number added to all scores of a query: where these are then alike, so are the weights, and the gradients right.

    The log-sum-exp of f32 cannot tell one key from nine there, neither for the gradients nor in a state.
    """
    query, key, value = case([], SMALL._replace(h=8, d=8), dtype).operands
    bias = np.full((1, 1, 7, 1), offset, np.float32)
    if abs(offset) < 1e9:
        query = (query * 1e-6).astype(dtype)  # so that the scores are alike at any offset

    def whole(query, value, bias):
        return jaxsoft.dot_product_attention(query, key, value, bias, implementation=implementation)

    def in_parts(query, value, bias):
        state = None
        for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
            y, state = jaxsoft.dot_product_attention(
                query, key[:, part], value[:, part], bias, state=state, return_state=True, implementation=implementation
            )
        return y

    def with_gradients(attend):
        def loss(*operands):
            y = attend(*operands)
            return jnp.sum(jnp.sin(y)), y

        program = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        return lambda *operands: jax.tree.map(lambda x: np.asarray(x).astype(np.float32), program(*operands))

    with served(implementation), jax.default_matmul_precision("highest"):
        at_once, part_by_part = map(with_gradients, (whole, in_parts))
        expected = at_once(np.zeros_like(query), value, np.zeros_like(bias))
        bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype == np.float32 else {"rtol": 3e-2, "atol": 1e-2}
        for results in (at_once, part_by_part):
            chex.assert_trees_all_close(results(query, value, bias), expected, **bounds)


@pytest.mark.costly(2)
@pytest.mark.parametrize("options", [(), ("causal",), ("bias",)], ids=str)
@pytest.mark.parametrize("shift", [3, 1, 0])  # the default run has the first
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@each_implementation
def test_beside_jax(options, shift, dtype, implementation):
    """The gradients of 16 bits are as near to the true ones as those of jax.nn, which keeps all weights in f32: also
    where the first key has nearly all the weight, and they are small differences.
    """
    if implementation == "cudnn":
        pytest.skip("cuDNN's gradients have the rounded output alone")
    if implementation == "ffi" and "bias" in options:
        pytest.skip("the CUDA kernel for gradients takes no bias")
    call = case(options, Sizes(t=64, s=64, n=2, k=2, h=32, d=32), dtype, implementation)
    query, key, *others = call.operands
    key[:, 0] = 1
    operands = [(query + shift).astype(dtype), key, *others]
    cotangent = np.random.default_rng(1).standard_normal((2, 64, 2, 32)).astype(dtype)

    def pulled(attend):
        return lambda *operands: jax.vjp(attend, *operands)[1](cotangent.astype(operands[0].dtype))

    def of_jax(query, key, value, bias=None):
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal="causal" in options)

    ours = jax.jit(pulled(lambda *v: call.ours(*v)[0]))(*operands)
    with as_usual():
        theirs = jax.jit(jax.vjp(of_jax, *operands)[1])(cotangent)  # under jit its forward pass would refuse f16
    true = in_float64(pulled(lambda *v: call.theirs(*v)[0]), *operands)
    for a, b, e in zip(ours, theirs, true, strict=True):
        assert np.linalg.norm(wide(a) - e) <= 2.5 * np.linalg.norm(wide(b) - e)


@pytest.mark.costly(1)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("dtype", "offset", "size"),
    [(jnp.bfloat16, 0, 1), (jnp.bfloat16, 100, 1), (jnp.float16, 100, 1), (jnp.float16, 0, 1e-4)],
    ids=str,
)
@on_cpu
def test_beside_jax_on_a_cpu(dtype, offset, size, deterministic):
    """Also where all keys have a large part in common, or cotangents are small: no gradient of a score is rounded."""
    rng = np.random.default_rng(0)
    query, key, value, cotangent = (rng.standard_normal((2, 640, 2, 32)) for _ in range(4))
    operands = [v.astype(dtype) for v in (0.3 * query, key + offset, value, size * cotangent)]

    def gradients(attend):
        return lambda *v: jax.vjp(attend, *v[:3])[1](v[3])

    ours = jax.jit(gradients(functools.partial(jaxsoft.dot_product_attention, deterministic=deterministic)))(*operands)
    with as_usual():
        pullback = jax.vjp(jax.nn.dot_product_attention, *operands[:3])[1]  # under jit it would refuse f16
        theirs = jax.jit(pullback)(operands[3])
    true = in_float64(gradients(jax.nn.dot_product_attention), *operands)
    for a, b, e in zip(ours, theirs, true, strict=True):
        assert np.linalg.norm(wide(a) - e) <= 1.5 * np.linalg.norm(wide(b) - e)


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [("bias",), (), ("causal",), ("mask of keys",)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("size", [64, 72])
@each_fast_implementation
def test_large_scores(options, dtype, size, implementation):
    """The largest one gets all the weight: on a CPU as large as f16 can make them, on a GPU 1e7."""
    call = case(options, Sizes(t=40, s=200, h=size, d=8), dtype, implementation)
    query, key, *others = call.operands
    large = 1e4 if jax.default_backend() == "cpu" else 2e3
    operands = [(query * large).astype(dtype), (key * large).astype(dtype), *others]
    with as_usual(), served(implementation), jax.default_matmul_precision("highest"):
        y, lse = jax.jit(call.ours)(*operands)
        expected, expected_lse = in_float64(call.theirs, *operands)
        np.testing.assert_allclose(wide(y), expected, rtol=1e-2, atol=1e-4)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6 * np.abs(expected_lse).max())


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [np.float32, jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("size", [64, 72])
def test_large_score(dtype, size):
    """A single one gets exactly all the weight, backward as well."""
    many, one = np.full((2, 40, 4, size), 1000, dtype), np.ones((2, 1, 2, size), dtype)

    def total(value):
        return jaxsoft.dot_product_attention(many, value * 0 + 1000, value, implementation="xla").sum()

    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(total))(one)).astype(np.float64), 80)


@pytest.mark.costly(1)
@pytest.mark.parametrize("bias", [("bias of a head",), ()], ids=["bias", "no bias"])
@each_fast_implementation
def test_same_bits(implementation, bias):
    """The output and the gradients, from run to run."""
    with served(implementation):
        call = case([*bias, "sinks", "causal"], Sizes(t=70, s=70, h=64, d=64), jnp.bfloat16, implementation)
        run = jax.jit(call.through("grad").ours)
        assert same_bits(run(*call.operands), run(*call.operands))


def test_state_in_parts():
    """Attention over keys in parts, each going on from the state of those before, is attention over all."""
    with precision(np.float64):
        call = case(["cap"], Sizes(t=5, s=12), np.float64)

        def in_parts(query, key, value):
            state = None
            for part in (slice(0, 3), slice(3, 4), slice(4, 12)):
                output, lse, state = jaxsoft.dot_product_attention(
                    query, key[:, part], value[:, part], logits_soft_cap=1.5, state=state, return_state=True,
                    return_residual=True,
                )  # fmt: skip
            return output, lse, jaxsoft.fold.output(state)

        found, (expected, expected_lse) = jax.jit(lambda *v: (in_parts(*v), call.ours(*v)))(*call.operands)
        for a, e in zip(found, (expected, expected_lse, expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-12)


def test_decoding():
    """One query after the other, over a cache, gives what all of them at once do."""
    call = case([], Sizes(t=9, s=9), np.float32)
    query, key, value = call.operands
    whole = jaxsoft.dot_product_attention(query, key, value, is_causal=True)
    step = jax.jit(
        lambda q, i: jaxsoft.dot_product_attention(
            q, key, value, query_offset=i, key_value_seq_lengths=jnp.full(2, i + 1)
        )
    )
    for i in range(9):
        np.testing.assert_allclose(step(query[:, i : i + 1], i)[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)


OF_JAX = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "lengths": {"query_seq_lengths": np.array([7, 3], np.int32), "key_value_seq_lengths": np.array([2, 9], np.int32)},
    "window": {"local_window_size": 2},
    "window of two": {"local_window_size": (3, 1), "is_causal": True},
    "bias": {"bias": np.random.default_rng(1).standard_normal((4, 7, 9)).astype(np.float32)},
    "mask": {"mask": np.arange(9)[None, None, None] < 6},
    "residual": {"return_residual": True},
}


@pytest.mark.costly
@pytest.mark.parametrize("options", OF_JAX.values(), ids=OF_JAX)
@pytest.mark.parametrize("batch", [True, False])
def test_drop_in(options, batch):
    """The function of jax.nn, with all of its arguments, in both of its forms."""
    operands = case([], SMALL, np.float32).operands
    if not batch:
        operands = [v[0] for v in operands]
        options = {name: v[:1] if "lengths" in name else v for name, v in options.items()}

    def with_gradients(f):
        def total(*v):
            return jnp.sum(jnp.sin(jax.tree.leaves(f(*v, **options))[0]))

        return jax.jit(lambda *v: (f(*v, **options), jax.grad(total, (0, 1, 2))(*v)))(*operands)

    with as_usual():
        expected = with_gradients(jax.nn.dot_product_attention)
    chex.assert_trees_all_close(with_gradients(jaxsoft.dot_product_attention), expected, rtol=1e-4, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("backward", some([False, True], [True]), ids=["value", "gradients"])
def test_no_array_of_all_scores(backward):
    """Neither forward nor backward: the memory of a compiled program is that of a block of keys."""
    x = jax.ShapeDtypeStruct((1, 8192, 1, 16), jnp.float32)

    def f(q, k, v):
        return jaxsoft.dot_product_attention(q, k, v, is_causal=True)

    def gradients(q, k, v):
        return jax.grad(lambda *x: f(*x).sum(), (0, 1, 2))(q, k, v)

    program, part = (gradients, 0.2) if backward else (f, 0.1)
    memory = jax.jit(program).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert memory < part * 4 * 8192 * 8192, memory / (4 * 8192 * 8192)


@on_gpu
def test_nothing_over_all_scores_is_copied():
    """With a bias, and a mask, of all queries and keys, but for that mask as bytes."""
    x, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096, 2, 64), (1, 2, 4096, 4096)))
    mask = jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.bool)

    def gradients(q, k, v, bias, mask):
        def f(q, k, v):
            return jaxsoft.dot_product_attention(q, k, v, bias, mask, implementation="pallas").sum()

        return jax.grad(f, (0, 1, 2))(q, k, v)

    with served("pallas"):
        memory = jax.jit(gradients).lower(x, x, x, bias, mask).compile().memory_analysis().temp_size_in_bytes
    assert memory < 1.5 * 4096 * 4096, memory / 4096**2


def test_the_definition_is_jax():
    """The definition agrees with jax.nn where they should."""
    with precision(np.float64), as_usual():
        call = case(["causal", "bias"], Sizes(n=4, k=4), np.float64)
        expected = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(*call.operands)
        np.testing.assert_allclose(in_float64(call.theirs, *call.operands)[0], expected, rtol=1e-5)
    assert {*MOVING} & {*FIXED} == set()
