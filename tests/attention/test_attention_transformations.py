"""Attention under JAX's transformations, two deep."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import SMALL, Sizes, case
from cases import Case
from common import precision, slow

import jaxsoft

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


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=slow if name in ("plain", "fixed") else (), id=name) for name, o in OPTIONS.items()],
)
@pytest.mark.parametrize("first", ["vmap", "grad", "jvp"])
def test_two_transformations(options, first):
    """One after the other, against the definition."""
    with precision(np.float64):
        call = case(options, Sizes(2, 3, 4, 4, 2, 2, 2), np.float64)
        derived = [call.through(a).through(b) for a, b in PAIRS if a.startswith(first)]
        by_operands = {}
        for one in derived:
            by_operands.setdefault(tuple(v.shape for v in one.operands), []).append(one)
        for cases in by_operands.values():
            Case.together(f"{first} of {call.what}", cases).check()


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] in ("checkpoint", "map")], ids=str)
def test_others(pair):
    with precision(np.float64):
        case(OPTIONS["moving"], Sizes(2, 3, 4, 4, 2, 2, 2), np.float64).through(pair[0]).through(pair[1]).check()


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

    chex.assert_trees_all_close(second(looped), second(unrolled), rtol=1e-4, atol=1e-4)


def test_without_compilation():
    """Operation by operation, and under jax.disable_jit."""
    with precision(np.float64):
        call = case(OPTIONS["moving"], Sizes(1, 3, 4, 2, 1, 2, 2), np.float64).through("grad")
        call.check(run=lambda f: f)
        with jax.disable_jit():
            call.check(run=lambda f: f)


def test_export():
    """With a batch and lengths that are not known."""
    x, kv = jax.export.symbolic_args_specs(
        (np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)), ("b, t, 4, 8", "b, s, 2, 8")
    )

    def f(q, k, v):
        return jax.vjp(functools.partial(jaxsoft.dot_product_attention, is_causal=True), q, k, v)[1](q)

    exported = jax.export.deserialize(jax.export.export(jax.jit(f))(x, kv, kv).serialize())
    query, key, value = case([], SMALL, np.float32).operands
    chex.assert_trees_all_close(exported.call(query, key, value), f(query, key, value), rtol=1e-5, atol=1e-6)


def test_donation_and_shapes():
    query, key, value = map(jnp.asarray, case([], SMALL, np.float32).operands)
    f = jaxsoft.dot_product_attention
    assert jax.eval_shape(f, query, key, value).shape == query.shape
    expected = f(query, key, value)
    chex.assert_trees_all_equal(jax.jit(f, donate_argnums=0)(query, key, value), expected)
