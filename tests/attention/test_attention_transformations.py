"""Attention under JAX's transformations, two deep."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import SMALL, Sizes, case
from cases import Case
from common import precision, slow, some
from meshes import needs_devices

import jaxsoft
from jaxsoft import fold

OPTIONS = {
    "plain": [],
    "moving": ["bias of a head", "sinks", "causal"],
    "fixed": ["segments", "key lengths", "cap", "one bias"],
    "state": ["state", "scale"],
}
PAIRS = [
    ("grad", "vmap"),
    ("vmap", "grad"),
    ("vmap of the first operand", "grad"),
    ("grad", "vmap of the first operand"),
    ("grad", "grad"),
    ("grad", "jvp"),
    ("jvp", "grad"),
    ("jvp", "vmap"),
    ("vmap", "vmap of the last axis"),
    ("vmap of the last axis", "grad"),
    ("checkpoint", "grad"),
    ("map", "grad"),
]


@pytest.mark.costly(1)  # test_every_function.py has most of them without options, and test_fuzz.py with any
@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=slow if name in ("plain", "fixed") else (), id=name) for name, o in OPTIONS.items()],
)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_transformations(options, pair):
    """One after the other, against the definition."""
    with precision(np.float64):
        functools.reduce(Case.through, pair, case(options, Sizes(2, 3, 4, 4, 2, 2, 2), np.float64)).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("attends", [True, False])
def test_second_derivatives_of_a_loop(attends):
    """JAX 0.11 forgets custom derivatives of what is in the body of a loop once that has been differentiated."""
    query, key, value = case([], Sizes(1, 3, 4, 2, 1, 4, 4), np.float32).operands

    def step(carry, factor):
        y = jaxsoft.dot_product_attention(factor * carry, key, value) if attends else jaxsoft.softmax(factor * carry)
        return jnp.sin(y + carry), None

    def looped(query):
        return jnp.sum(jax.lax.scan(step, query, jnp.arange(1.0, 4.0))[0])

    def unrolled(query):
        for factor in (1.0, 2.0, 3.0):
            query, _ = step(query, factor)
        return jnp.sum(query)

    def second(f):
        squares = jax.grad(lambda query: jnp.sum(jax.grad(f)(query) ** 2))
        return squares(query), jax.jvp(jax.grad(f), (query,), (query,))[1]

    found, expected = jax.jit(lambda: (second(looped), second(unrolled)))()
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", some([(), ("grad",)], [()]), ids=str)
def test_without_compilation(names):
    """Operation by operation, and under jax.disable_jit."""
    with precision(np.float64):
        call = case(OPTIONS["moving"], Sizes(1, 3, 4, 2, 1, 2, 2), np.float64)
        call = functools.reduce(Case.through, names, call)
        call.check(run=lambda f: f)
        with jax.disable_jit():
            call.check(run=lambda f: f)


@slow  # test_export.py has it with every argument
def test_export():
    """With a batch and lengths that are not known."""
    x, kv = jax.export.symbolic_args_specs(
        (np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)), ("b, t, 4, 8", "b, s, 2, 8")
    )

    def f(q, k, v):
        return jax.vjp(functools.partial(jaxsoft.dot_product_attention, is_causal=True), q, k, v)[1](q)

    exported = jax.export.deserialize(jax.export.export(jax.jit(f))(x, kv, kv).serialize())
    query, key, value = case([], SMALL, np.float32).operands
    chex.assert_trees_all_close(exported.call(query, key, value), jax.jit(f)(query, key, value), rtol=1e-5, atol=1e-6)


def test_donation_and_shapes():
    query, key, value = case([], SMALL, np.float32).operands
    f = jaxsoft.dot_product_attention
    assert jax.eval_shape(f, query, key, value).shape == query.shape
    expected = f(query, key, value)
    chex.assert_trees_all_equal(jax.jit(f, donate_argnums=0)(jnp.asarray(query), key, value), expected)


QUERY, KEY = (np.random.default_rng(i).standard_normal((2, 8, n, 8)).astype(np.float32) for i, n in ((0, 8), (1, 8)))
LINEAR = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "mask": ({"mask": np.tri(8, k=-1, dtype=bool)}, {"key_value_seq_lengths": np.array([8, 3])}),
    "sinks": ({"sinks": np.ones(8, np.float32), "dtype": np.float16}, {}),
    "residual": ({"return_residual": True}, {}),
    "largest scores": ({"return_max_logits": True}, {}),
    "reference": ({"implementation": "reference"}, {}),
    "without key for some": ({"key_value_seq_lengths": np.array([0, 5])}, {}),
}


def attend(value, **options):
    return jaxsoft.dot_product_attention(QUERY, KEY, value, **options)


def attend_causally(value):
    return attend(value, is_causal=True)


def by_pages(pages):
    table, lengths = np.array([[0, 2], [1, 2]]), np.array([16, 11])
    keys = np.random.default_rng(2).standard_normal(pages.shape).astype(np.float32)
    return jaxsoft.paged_attention(QUERY, keys, pages, table, lengths, value_scale=0.5, is_causal=True)


def check_transpose(function, operand):
    """The transpose is the gradient of a sum, as that of a linear map does not depend on the point."""
    types = jax.eval_shape(function, operand)
    rng = np.random.default_rng(3)
    cotangents = jax.tree.map(lambda t: rng.standard_normal(t.shape).astype(t.dtype), types)
    transposed = jax.linear_transpose(function, operand)
    found, expected = jax.jit(lambda v: (transposed(v), jax.vjp(function, operand)[1](v)))(cotangents)
    for each in (found, transposed(cotangents)):
        chex.assert_trees_all_close(each, expected, rtol=1e-5, atol=1e-6)
    return transposed, cotangents


@pytest.mark.costly(1)
@pytest.mark.parametrize("name", some(LINEAR, ["mask", "sinks", "residual"]))
def test_transpose_by_value(name):
    """Attention is linear in value, so JAX transposes it as it does jax.nn's: `jax.linear_transpose`."""
    options, more = LINEAR[name]
    function = functools.partial(attend, **options, **more)
    transposed, cotangents = check_transpose(function, KEY)
    check_transpose(jax.jit(function), KEY)
    check_transpose(jax.vmap(function), np.stack([KEY, 2 * KEY]))
    with jax.disable_jit():
        check_transpose(function, KEY)
    if "implementation" not in options and set(options) <= {"is_causal"}:
        (theirs,) = jax.linear_transpose(lambda v: jax.nn.dot_product_attention(QUERY, KEY, v, **options), KEY)(
            cotangents
        )
        np.testing.assert_allclose(transposed(cotangents)[0], theirs, rtol=1e-4, atol=1e-5)

    def squares(v):
        return sum(jnp.sum(y.astype(np.float32) ** 2) for y in jax.tree.leaves(transposed(v)))

    derivatives = jax.jit(lambda v: (jax.grad(squares)(v), jax.jvp(squares, (v,), (v,))))
    chex.assert_tree_all_finite(derivatives(cotangents))


def test_transposes_of_others():
    """Of pages, of writing into these, and of states."""
    pages = np.random.default_rng(4).standard_normal((3, 8, 8, 8)).astype(np.float32)
    check_transpose(by_pages, pages)
    table, lengths = np.array([[0, 2], [1, -1]]), np.array([10, 7])
    check_transpose(lambda new: jaxsoft.write_pages(pages, 0 * pages, new, new, table, lengths)[1], KEY)
    check_transpose(lambda new: jaxsoft.write_pages(pages, new, KEY, 0 * KEY, table, lengths)[1], pages)
    scores = np.random.default_rng(5).standard_normal((4, 6)).astype(np.float32)
    check_transpose(lambda v: fold.output(fold.attention_state(scores, v)), np.ones((6, 3), np.float32))


@pytest.mark.costly(1)
@needs_devices
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_transpose_over_a_mesh(method):
    """Of `ring_attention`, outside and inside of `jax.shard_map`, and of attention whose batch is sharded."""
    mesh = jax.make_mesh((2,), ("s",))
    over = functools.partial(jaxsoft.ring_attention, axis_name="s", method=method, is_causal=True)
    spec = jax.P(None, "s")
    query, key = (jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (QUERY, KEY))
    with jax.set_mesh(mesh):
        inside = jax.shard_map(over, in_specs=spec, out_specs=spec)
        expected = jax.jit(lambda: jax.vjp(attend_causally, KEY)[1](QUERY)[0])()
        for function in (over, inside):
            transposed = jax.linear_transpose(jax.jit(lambda v, f=function: f(query, key, v)), key)
            np.testing.assert_allclose(jax.jit(transposed)(query)[0], expected, rtol=1e-4, atol=1e-5)
    query, key = (jax.device_put(x, jax.NamedSharding(mesh, jax.P("s"))) for x in (QUERY, KEY))
    by_batch = jax.linear_transpose(lambda v: jaxsoft.dot_product_attention(query, key, v, is_causal=True), key)
    np.testing.assert_allclose(jax.jit(by_batch)(query)[0], expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_linear():
    """It has no transpose, and an error says so."""
    with pytest.raises(NotImplementedError, match=r"linear in value alone, and has no transpose by \['query'\]"):
        jax.linear_transpose(lambda q: jaxsoft.dot_product_attention(q, KEY, KEY), QUERY)(QUERY)
    with pytest.raises(NotImplementedError, match="is not linear in its operands"):
        jax.linear_transpose(jaxsoft.softmax, QUERY)(QUERY)
