"""Attention under JAX's transformations, two deep, and over meshes: batch and heads stay where they are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import SMALL, Sizes, case
from cases import Case
from common import precision, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, needs_devices

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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
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


SPECS = {  # of query, of key and value, and of a bias (1, N, T, S)
    "batch": (P("a"), P("a"), P()),
    "heads": (P(None, None, "b"), P(None, None, "b"), P(None, "b")),
    "both": (P("a", None, "b"), P("a", None, "b"), P(None, "b")),
    "heads of queries": (P("a", None, "b"), P("a"), P(None, "b")),
    "lengths": (P(None, "a"), P(None, "b"), P(None, None, "a", "b")),
}


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=slow)], ids=str)
@pytest.mark.parametrize("groups", [8, 2, 1])
def test_mesh(groups, kind):
    """Values, gradients, and what moves between devices."""
    mesh = mesh_of(kind)
    call = case([], Sizes(8, 6, 12, 8, groups, 4, 4), np.float32)
    bias = np.random.default_rng(1).standard_normal((1, 8, 6, 12)).astype(np.float32)
    operands = (*call.operands, bias)

    def f(q, k, v, bias):
        return jaxsoft.dot_product_attention(q, k, v, bias, is_causal=True, query_offset=3)

    def gradients(*v):
        y, pullback = jax.vjp(f, *v)
        return pullback(jnp.sin(y))

    expected, by = jax.jit(f)(*operands), jax.jit(gradients)(*operands)
    heads = mesh.shape["b"]
    with jax.set_mesh(mesh):
        for name, (of_query, of_key, of_bias) in SPECS.items():
            if (of_key == P(None, None, "b") and groups % heads) or (of_key == P("a", None, "b") and groups % heads):
                continue
            specs = of_query, of_key, of_key, of_bias
            args = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(operands, specs, strict=True)]
            forward, backward = jax.jit(f).lower(*args).compile(), jax.jit(gradients).lower(*args).compile()
            chex.assert_trees_all_close(forward(*args), expected, rtol=1e-4, atol=1e-5)
            chex.assert_trees_all_close(backward(*args), by, rtol=1e-4, atol=1e-5)
            if name == "lengths":
                continue
            assert not collectives(forward), (name, collectives(forward))
            if groups % heads == 0 or "heads" not in name:
                assert {kind for kind, _ in collectives(backward)} <= {"all-reduce"}, (name, collectives(backward))


@needs_devices
def test_shard_map():
    """Batch sharded, and what is the same on all devices gets the sum of their gradients."""
    mesh = mesh_of(AxisType.Auto)
    query, key, value, bias, sinks = case(["bias of a head", "sinks"], Sizes(8, 6, 12, 4, 2, 4, 4), np.float32).operands

    def f(q, k, v, bias, sinks):
        return jaxsoft.dot_product_attention(q, k, v, bias, sinks=sinks, is_causal=True)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("a"), P("a"), P("a"), P(), P()), out_specs=P("a"))

    def gradients(f):
        return jax.jit(jax.grad(lambda *v: jnp.sum(jnp.sin(f(*v))), range(5)))(query, key, value, bias, sinks)

    chex.assert_trees_all_close(gradients(mapped), gradients(f), rtol=1e-4, atol=1e-5)
