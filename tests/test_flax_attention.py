"""jaxsoft.flax.attention_fn against Flax's functions, called by itself and by the layers of nnx and of linen."""

import functools
import inspect
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import as_usual, some

from jaxsoft.flax import attention_fn

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
LENGTH, KEYS, HEADS, SIZE = 5, 7, 4, 8
EVERY_BATCH = [(), (2,), (2, 3), (1, 3, 2)]
BATCHES = pytest.mark.parametrize("batch", EVERY_BATCH, ids=str)


@pytest.fixture(autouse=True)
def usual():
    """Flax needs JAX's default promotion, and comparisons exact products."""
    with as_usual(), jax.default_matmul_precision("highest"):
        yield


def arrays(batch, groups=HEADS, dtype=np.float32):
    """Query, key and value."""
    rng = np.random.default_rng(0)
    shapes = [(*batch, LENGTH, HEADS, SIZE), (*batch, KEYS, groups, SIZE), (*batch, KEYS, groups, SIZE)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def extras(batch):
    """Biases and masks of the shapes that broadcast to the scores', in turn."""
    rng = np.random.default_rng(1)
    shapes = [(*batch, HEADS, LENGTH, KEYS), (*batch, 1, 1, KEYS), (*(1 for _ in batch), HEADS, LENGTH, KEYS)]
    shapes += [(LENGTH, KEYS), (HEADS, 1, KEYS), (KEYS,), (*batch[:1], *(1 for _ in batch[1:]), 1, LENGTH, KEYS)]
    for i, shape in enumerate(dict.fromkeys(shapes)):
        bias = rng.standard_normal(shape).astype(np.float32)
        mask = (bias < 1) | (np.arange(shape[-1]) == 0)  # each query has a key
        yield ({"mask": mask.astype(np.float32), "bias": bias}, {"mask": mask}, {"bias": bias})[i % 3]


class Sows(nnx.Module):
    """A module that is asked to sow weights."""


def with_weights(function, *args, **options):
    """The output of a function, and the weights that an nnx module sowed."""
    y, found = nnx.capture(lambda module: function(*args, module=module, **options), nnx.Intermediate)(Sows())
    return y, found["attention_weights"][0]


def values_and_gradients(function, q, k, v, bias=None, **options):
    """The output, and the gradients by query, key, value and bias."""

    def loss(*args):
        y = function(*args, **options)
        return jnp.sum(jnp.sin(y)), y

    given = (q, k, v) if bias is None else (q, k, v, bias)
    (_, y), gradients = jax.value_and_grad(loss, range(len(given)), has_aux=True)(*given)
    return y, gradients


@pytest.mark.parametrize("batch", some(EVERY_BATCH, [(1, 3, 2)]), ids=str)
def test_any_batch(batch):
    """As Flax's own, with its gradients: bias, masks of booleans and of numbers, of all shapes that broadcast."""
    of_linen = functools.partial(nn.dot_product_attention, deterministic=True)

    @jax.jit
    def both(q, k, v, every):
        return [[values_and_gradients(f, q, k, v, **options) for options in every] for f in (attention_fn, of_linen)]

    actual, expected = both(*arrays(batch), list(extras(batch)))
    assert_trees_all_close(actual, expected, **CLOSE)


@pytest.mark.costly
@BATCHES
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_weights(batch, groups):
    """Weights that an nnx module captures, and the output beside them, with heads that share keys."""

    @jax.jit
    def results(q, k, v, every):
        for options in every:
            options["is_causal"] = "mask" not in options
        functions = attention_fn, nnx.dot_product_attention
        found = [[with_weights(f, q, k, v, **options) for options in every] for f in functions]
        return *found, [attention_fn(q, k, v, **options) for options in every]

    actual, expected, without = results(*arrays(batch, groups), list(extras(batch)))
    assert_trees_all_close(actual, expected, **CLOSE)
    assert_trees_all_close(without, [y for y, _ in expected], **CLOSE)


@pytest.mark.cover
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_dropout(batch, broadcast, groups):
    """The weights that Flax drops for the same key, and no others."""
    mask = np.arange(KEYS) != 2
    functions = attention_fn, nnx.dot_product_attention, *[nn.dot_product_attention] * (groups == HEADS)

    @jax.jit
    def results(q, k, v, rng):
        options = {"dropout_rate": 0.4, "dropout_rng": rng, "broadcast_dropout": broadcast, "mask": mask}
        found = [values_and_gradients(f, q, k, v, **options) for f in functions]
        # The identity as values shows each weight: of a single element and head, or of all.
        shown = jnp.broadcast_to(jnp.eye(KEYS)[:, None], (*batch, KEYS, groups, KEYS))
        dropped = [f(q, k, shown, **options) == 0 for f in functions[:2]]
        quiet = attention_fn(q, k, shown, deterministic=True, **options), attention_fn(q, k, shown, mask=mask)
        return found, dropped, quiet

    found, dropped, quiet = results(*arrays(batch, groups), jax.random.key(3))
    for expected in found[1:]:
        assert_trees_all_close(found[0], expected, **CLOSE)
    np.testing.assert_array_equal(*dropped)
    assert dropped[0].mean() > 0.2
    np.testing.assert_allclose(*quiet, **CLOSE)


def linen(**options):
    """Two layers of linen, with this function and with Flax's, and the parameters of both."""
    made = [nn.MultiHeadDotProductAttention(4, **options, **with_) for with_ in ({"attention_fn": attention_fn}, {})]
    x = np.random.default_rng(2).standard_normal((2, 9, 16)).astype(np.float32)
    return made, jax.jit(functools.partial(made[1].init, deterministic=True))(jax.random.key(0), x), x


@pytest.mark.costly(1)
@pytest.mark.parametrize("deterministic", [True, False])
def test_layer_of_linen(deterministic):
    """Output, gradients of the parameters and captured weights, with dropout and without."""
    layers, variables, x = linen(dropout_rate=0.3)
    mask = nn.make_causal_mask(x[..., 0])

    def run(layer):
        def loss(variables):
            options = {"mask": mask, "deterministic": deterministic, "sow_weights": True}
            options |= {"rngs": {"dropout": jax.random.key(1)}, "mutable": ["intermediates"]}
            y, found = layer.apply(variables, x, **options)
            return jnp.sum(y**2), (y, found)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)

    assert_trees_all_close(run(layers[0]), run(layers[1]), **CLOSE)


@pytest.mark.costly(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("batch", "groups"), [((2, 3), 2), ((), 4)], ids=str)
def test_layer_of_nnx(deterministic, groups, batch):
    """Output, gradients of the parameters and captured weights, with dropout and without."""
    x = np.random.default_rng(2).standard_normal((*batch, 9, 16)).astype(np.float32)

    def run(**options):
        options |= {"num_kv_heads": groups, "dropout_rate": 0.3, "decode": False, "rngs": nnx.Rngs(0)}
        layer = nnx.MultiHeadAttention(4, 16, **options)

        def seen(layer):
            return layer(x, is_causal=True, deterministic=deterministic, rngs=nnx.Rngs(1), sow_weights=True)

        @nnx.jit
        def step(layer, rngs):
            def loss(layer, rngs):
                return jnp.sum(layer(x, is_causal=True, deterministic=deterministic, rngs=rngs) ** 2)

            y, found = nnx.capture(seen, nnx.Intermediate)(layer)
            return *nnx.value_and_grad(loss)(layer, rngs), y, found["attention_weights"][0]

        return jax.tree.leaves(step(layer, nnx.Rngs(1)))

    assert_trees_all_close(run(attention_fn=attention_fn), run(), **CLOSE)


def test_decode_of_linen():
    """Token by token, over the cache of the layer: what Flax's function gives, and the causal mask of the whole."""
    layers, variables, x = linen(decode=True)
    whole = nn.MultiHeadDotProductAttention(4)
    parameters = {"params": variables["params"]}
    expected = whole.apply(parameters, x, mask=nn.make_causal_mask(x[..., 0]), deterministic=True)
    for layer in layers:
        cache, tokens = variables["cache"], []
        for t in range(x.shape[1]):
            given = parameters | {"cache": cache}
            y, updated = layer.apply(given, x[:, t : t + 1], deterministic=True, mutable=["cache"])
            cache = updated["cache"]
            tokens.append(y)
        np.testing.assert_allclose(np.concatenate(tokens, axis=1), expected, **CLOSE)


@pytest.mark.costly(1)
@pytest.mark.parametrize("batch", [(2, 3), ()], ids=str)
def test_decode_of_nnx(batch):
    """Token by token, with heads that share keys, and a mask of padding beside that of the cache."""
    x = np.random.default_rng(2).standard_normal((*batch, 6, 16)).astype(np.float32)
    layer = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, attention_fn=attention_fn, decode=True, rngs=nnx.Rngs(0))
    counts = np.arange(6) != 1
    causal = nnx.make_causal_mask(x[..., 0]).astype(bool) & counts
    expected = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, rngs=nnx.Rngs(0))(x, mask=causal, decode=False)
    layer.init_cache(x.shape)
    mask = np.broadcast_to(counts, (*batch, 1, 1, 6))
    step = nnx.jit(lambda layer, token: layer(token, mask=mask))
    tokens = [step(layer, x[..., t : t + 1, :]) for t in range(6)]
    np.testing.assert_allclose(np.concatenate(tokens, axis=-2), expected, **CLOSE)


def text(function, *args, **options):
    """The jaxpr of a call."""
    return str(jax.make_jaxpr(lambda *args: function(*args, **options))(*args))


SCORES = f"{LENGTH},{KEYS}]"


@BATCHES
def test_weights_are_computed_only_where_they_are_asked_for(batch):
    """Else there is no array of the scores' size; masks that all elements of the batch share are not repeated."""
    q, k, v = arrays(batch)
    asked = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    assert SCORES in text(attention_fn, q, k, v, **asked)
    assert SCORES not in text(attention_fn, q, k, v, deterministic=True, **asked)
    assert SCORES not in text(attention_fn, q, k, v, is_causal=True, mask=np.arange(KEYS) != 2)
    shared = np.tril(np.ones((*(1 for _ in batch), 1, LENGTH, KEYS), bool))
    sizes = re.findall(rf"bool\[([\d,]*){LENGTH},{KEYS}\]", text(attention_fn, q, k, v, mask=shared))
    assert sizes and set("".join(sizes)) <= set("1,")


def test_linen_computes_weights_only_where_they_are_kept():
    """sow_weights=True outside of `mutable=["intermediates"]` costs nothing."""
    layers, variables, x = linen()
    scores = f"{x.shape[1]},{x.shape[1]}]"

    def program(**options):
        return text(lambda x: layers[0].apply(variables, x, sow_weights=True, **options), x)

    assert scores not in program()
    assert scores in program(mutable=["intermediates"])


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("force", [True, False])
def test_16_bits(dtype, force):
    """The dtypes that linen gives, and values nearer to the exact ones than what it computes in 16 bits."""
    q, k, v = arrays((2,), dtype=dtype)
    q = q * 8
    truth = with_weights(nnx.dot_product_attention, *(x.astype(jnp.float32) for x in (q, k, v)))

    def of_linen(function):
        class Module(nn.Module):
            def __call__(self, *args):
                return function(*args, module=self, force_fp32_for_softmax=force, deterministic=True)

        y, found = Module().apply({}, q, k, v, mutable=["intermediates"])
        return y, found["intermediates"]["attention_weights"][0]

    results = {"ours": of_linen(attention_fn), "theirs": of_linen(nn.dot_product_attention)}
    for i, expected in enumerate(truth):
        ours, theirs = results["ours"][i], results["theirs"][i]
        assert ours.dtype == theirs.dtype == (jnp.float32 if force else dtype)
        errors = [jnp.max(jnp.abs(x.astype(jnp.float32) - expected)) for x in (ours, theirs)]
        assert errors[0] < errors[1]
    without = attention_fn(q, k, v, force_fp32_for_softmax=force)
    assert without.dtype == results["ours"][0].dtype
    np.testing.assert_allclose(without.astype(jnp.float32), truth[0], atol=jnp.finfo(dtype).eps * 4)


def test_products_of_16_bits_stay_in_range():
    """Scores that are beyond f16 before they are scaled, also by functions that give f16."""
    q = jnp.full((1, 2, 1, 64), 40.0, jnp.float16)
    q = q.at[:, 1].set(-40.0)
    expected = np.eye(2, dtype=np.float16)
    for how in ({}, {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}):
        y, weights = with_weights(attention_fn, q, q, q, **how)
        np.testing.assert_array_equal(weights[0, 0], expected)
        np.testing.assert_array_equal(y, q)


def test_a_query_without_keys():
    """Gets 0, and so are its weights and gradients, with weights and without; Flax gives it the mean of the values."""
    q, k, v = arrays((2,))
    mask = np.ones((2, 1, LENGTH, KEYS), bool)
    mask[1, :, 3] = False
    y, weights = with_weights(attention_fn, q, k, v, mask=mask)
    for output in (y, attention_fn(q, k, v, mask=mask)):
        assert not jnp.any(output[1, 3]) and jnp.all(output[0] != 0)
    assert not jnp.any(weights[1, :, 3])
    gradient = jax.grad(lambda q: jnp.sum(with_weights(attention_fn, q, k, v, mask=mask)[0] ** 2))(q)
    assert not jnp.any(gradient[1, 3]) and jnp.all(jnp.isfinite(gradient))


def test_complex():
    """Which linen takes: by the weights, as jax.nn computes them."""
    q, k, v = (x + 0.5j * x[..., ::-1] for x in arrays((2,)))
    expected = nn.dot_product_attention(q, k, v, deterministic=True)
    np.testing.assert_allclose(attention_fn(q, k, v), expected, **CLOSE)


def test_products_by_other_functions():
    """What computes the products is called for both of them, and beside it no precision may be given."""
    q, k, v = arrays((2,))
    expected = nn.dot_product_attention(q, k, v, deterministic=True)
    calls = []

    def einsum(*args):
        calls.append(args[0])
        return jnp.einsum(*args)

    def dot_general(*args, **options):
        calls.append("dot_general")
        return jax.lax.dot_general(*args, **options)

    both = {"qk_attn_weights_einsum": einsum, "attn_weights_value_einsum": einsum}
    for how in (both, {"einsum_dot_general": dot_general}):
        np.testing.assert_allclose(attention_fn(q, k, v, **how), expected, **CLOSE)
    assert calls == ["...qhd,...khd->...hqk", "...hqk,...khd->...qhd", "dot_general", "dot_general"]
    for more in ({"precision": "high"}, {"einsum_dot_general": dot_general}):
        with pytest.raises(ValueError, match="precision and einsum_dot_general must be None beside"):
            attention_fn(q, k, v, **both, **more)
    with pytest.raises(ValueError, match="must be given together"):
        attention_fn(q, k, v, qk_attn_weights_einsum=einsum)


def test_precision():
    """In the forms in which JAX takes it, with weights and without."""
    q, k, v = arrays((2,))
    highest = [jax.lax.Precision.HIGHEST, "highest", "float32", ("default", "highest")]
    for given in highest:
        assert "precision='float32'" in (found := text(attention_fn, q, k, v, precision=given)) or "'highest'" in found
        dropped = text(attention_fn, q, k, v, precision=given, dropout_rate=0.5, dropout_rng=jax.random.key(0))
        assert dropped.count("HIGHEST") >= 2
    assert "precision='default'" in text(attention_fn, q, k, v, precision=jax.lax.Precision.DEFAULT)
    preset = jax.lax.DotAlgorithmPreset.F32_F32_F32  # has no such name, so the weights are computed
    np.testing.assert_allclose(attention_fn(q, k, v, precision=preset), attention_fn(q, k, v), **CLOSE)


def test_dtypes():
    """What arrays become: the dtype that is given, that to which they promote, or what a function of nnx makes them."""
    q, k, v = arrays((2,))
    assert attention_fn(q, k.astype(jnp.bfloat16), v).dtype == jnp.float32
    assert attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    whole = [jnp.asarray(x * 4, jnp.int32) for x in (q, k, v)]
    np.testing.assert_allclose(attention_fn(*whole), nn.dot_product_attention(*whole, deterministic=True), **CLOSE)
    with pytest.raises(ValueError, match="dtype must be None or one of floating-point or complex numbers; got int32"):
        attention_fn(q, k, v, dtype=jnp.int32)

    def twice(arrays, dtype):
        assert dtype is None
        return tuple(2 * x for x in arrays)

    np.testing.assert_allclose(attention_fn(q, k, v, promote_dtype=twice), attention_fn(2 * q, 2 * k, 2 * v), **CLOSE)


def test_strict_promotion():
    """All that it computes says which dtypes it converts."""
    q, k, v = arrays((2, 3), 2, jnp.bfloat16)
    bias, mask = jnp.ones((HEADS, LENGTH, KEYS)), jnp.tril(jnp.ones((2, 1, 1, LENGTH, KEYS)))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for force in (False, True):
            how = {"force_fp32_for_softmax": force, "bias": bias, "mask": mask}
            drops = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
            for more in ({}, drops, drops | {"einsum_dot_general": jax.lax.dot_general}):
                y = jax.eval_shape(lambda q, k, v, given=how | more: attention_fn(q, k, v, **given), q, k, v)
                assert y.shape == q.shape and y.dtype == (jnp.float32 if force else jnp.bfloat16)


def test_vmap():
    """Over a dimension in the middle, with a mask that is not mapped."""
    q, k, v = arrays((2, 3))
    mask = np.arange(KEYS) != 2
    mapped = jax.vmap(lambda q, k, v: attention_fn(q, k, v, mask=mask), in_axes=1, out_axes=1)(q, k, v)
    np.testing.assert_allclose(mapped, attention_fn(q, k, v, mask=mask), **CLOSE)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 5, 4, 8), (7, 4, 8), (7, 4, 8)], {}, r"must have the same rank, at least 3; got shapes \(2, 5, 4, 8\), "),
        ([(4, 8), (4, 8), (4, 8)], {}, "must have the same rank, at least 3"),
        ([(2, 5, 4, 8), (3, 7, 4, 8), (3, 7, 4, 8)], {}, "must have the same batch dims"),
        ([(2, 5, 4, 8), (2, 7, 4, 9), (2, 7, 4, 8)], {}, "query and key depths must match"),
        ([(2, 5, 4, 8), (2, 7, 4, 8), (2, 6, 4, 8)], {}, "key and value lengths must match"),
        ([(2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 2, 8)], {}, "key and value must have the same number of heads"),
        ([(2, 5, 4, 8), (2, 7, 3, 8), (2, 7, 3, 8)], {}, "heads of query must be a multiple of that of key"),
        (None, {"mask": np.ones((3, 1, 5, 7))}, r"mask must broadcast to the shape of the scores, \(2, 4, 5, 7\)"),
        (None, {"bias": np.ones((1, 2, 1, 5, 7))}, r"bias must broadcast to the shape of the scores, \(2, 4, 5, 7\)"),
        (None, {"dropout_rate": 1.0}, r"dropout_rate must be in the range \[0, 1\); got 1.0"),
        (None, {"dropout_rate": float("nan"), "deterministic": True}, r"dropout_rate must be in the range"),
        (None, {"dropout_rate": 0.5}, "dropout_rng is required where dropout acts; got None beside dropout_rate=0.5"),
    ],
)
def test_errors(shapes, options, message):
    given = arrays((2,)) if shapes is None else [jnp.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        attention_fn(*given, **options)


@pytest.mark.parametrize("theirs", [nnx.dot_product_attention, nn.dot_product_attention], ids=["nnx", "linen"])
def test_the_arguments_are_those_of_flax(theirs):
    """All of both functions, by the same places as far as these have them, and with the same defaults."""
    ours, expected = (inspect.signature(f).parameters for f in (attention_fn, theirs))
    assert not expected.keys() - ours.keys()
    by_place = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == [*expected][: len(by_place)]
    defaults = {name: p.default for name, p in expected.items() if name != "promote_dtype"}
    assert {name: ours[name].default for name in defaults} == defaults


def test_it_is_imported_only_if_asked_for():
    code = (
        "import sys, jaxsoft; print('jaxsoft.flax' in sys.modules); import jaxsoft.flax; print('flax' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
