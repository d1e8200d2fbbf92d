"""The largest score of each head: its values against the definition in float64, that it is a constant to derivatives,
and which implementations give it.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import SMALL, Sizes, case
from cases import Case
from common import ATTENTION_IMPLEMENTATIONS, DTYPES, precision, served, slow, target
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import MESH, collectives, mesh_of, needs_devices
from truth import in_float64, wide

import jaxsoft

ASKED = {"return_max_logits": True}
SERVED_BY = (None, "ffi", "xla", "reference")
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in ("xla", "reference") else (), id=str(name))
        for name in ATTENTION_IMPLEMENTATIONS
        if name in SERVED_BY
    ],
)
OPTIONS = {
    "plain": [],
    "causal": ["causal", "bias of a head"],
    "window": ["wide window", "sinks"],
    "lengths": ["query lengths", "key lengths", "bias of scores"],
    "segments": ["segments", "cap", "bias of a query"],
    "mask": ["mask", "scale"],
    "state": ["state", "mask of keys", "offsets"],
    "of -inf": ["bias of -inf", "sinks"],
    "no key": ["no key", "sinks"],
}
attend = functools.partial(jaxsoft.dot_product_attention, **ASKED)


def asked(options, sizes=SMALL, dtype=np.float64, implementation=None) -> Case:
    """A call whose results are the output, the log-sum-exp and the largest scores."""
    return case(options, sizes, dtype, implementation, more=ASKED)


def dtype_for(implementation):
    """One that it takes."""
    return jnp.bfloat16 if implementation == "ffi" else np.float32


def test_reference():
    with precision(np.float64):
        call = asked(["bias", "sinks", "causal"], Sizes(1, 3, 5, 2, 1, 2, 2), np.float64, "reference")
        Case.together(call.what, [call, call.through("grad"), call.through("jvp")]).check()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_implementation
def test_values(options, implementation):
    with precision(np.float64), served(implementation):
        asked(options, SMALL._replace(b=3), implementation=implementation).check()


@pytest.mark.costly(number=2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_implementation
def test_values_and_gradients(options, implementation):
    """With what derivatives there are of the other results, in both modes, and maps of them."""
    with precision(np.float64), served(implementation):
        call = asked(options, SMALL._replace(b=3), implementation=implementation)
        mapped = call.through("vmap of the last axis")
        Case.together(call.what, [call, call.through("grad"), call.through("jvp")]).check()
        Case.together(mapped.what, [mapped, mapped.through("grad")]).check()


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["causal"], OPTIONS["window"]], ids=str)
def test_blocks_and_parts(options):
    """Of several blocks of keys, and of parts of the queries."""
    asked(options, Sizes(t=600, s=700, h=16, d=8), np.float32).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@each_implementation
def test_dtypes(dtype, implementation):
    """Scores are in f32, or f64, so that the largest one is as exact."""
    with precision(dtype), served(implementation):
        call = asked(["causal"], Sizes(t=70, s=70, h=32, d=32), dtype, implementation)
        y, lse, largest = jax.jit(call.ours)(*call.operands)
        assert y.dtype == dtype and largest.dtype == lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        expected = in_float64(call.theirs, *call.operands)[2]
        np.testing.assert_allclose(wide(largest), expected, rtol={8: 1e-12, 4: 1e-5}.get(y.dtype.itemsize, 1e-4))


@each_implementation
def test_exact_scores(implementation):
    """One of each sign, and of the last query or key: rows and keys that only pad tiles do not count as 0."""
    with served(implementation):
        dtype = dtype_for(implementation)
        rng = np.random.default_rng(0)
        query = -np.abs(rng.integers(1, 9, (2, 67, 3, 8))).astype(dtype)
        key = np.abs(rng.integers(1, 9, (2, 131, 3, 8))).astype(dtype)
        query[0, 66, 1] = -query[0, 66, 1]
        key[1, 130, 2] = -key[1, 130, 2]
        scores = np.einsum("btnh,bsnh->bnts", wide(query), wide(key)) / 4
        _, largest = jax.jit(functools.partial(attend, scale=0.25, implementation=implementation))(query, key, key)
        # The CUDA kernel has it as a power of 2 of the largest weight.
        np.testing.assert_allclose(largest, scores.max((2, 3)), rtol=1e-6 if implementation == "ffi" else 0)
        assert (np.asarray(largest) < 0).sum() == 4


@each_implementation
def test_where_nothing_counts(implementation):
    """-inf for a head of nothing else, and no gradient is NaN."""
    with served(implementation):
        dtype = dtype_for(implementation)
        query, key, value = case([], Sizes(t=70, s=70, h=32, d=32), dtype, implementation).operands
        lengths = np.array([0, 5], np.int32)

        def total(*v):
            y, largest = attend(*v, key_value_seq_lengths=lengths, implementation=implementation)
            return jnp.sum(y.astype(np.float32)) + jnp.sum(jnp.exp(largest)), largest

        (_, largest), found = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(query, key, value)
        assert (np.asarray(largest)[0] == -np.inf).all() and np.isfinite(largest[1]).all()
        chex.assert_tree_all_finite(found)


@pytest.mark.parametrize("shape", [(2, 0, 4, 8), (2, 3, 4, 8)], ids=str)
def test_no_queries_or_no_keys(shape):
    q, k = np.ones(shape, np.float32), np.ones((2, 0 if shape[1] else 3, 2, 8), np.float32)
    np.testing.assert_array_equal(attend(q, k, k)[1], np.full((2, 4), -np.inf, np.float32))


@each_implementation
def test_special_values(implementation):
    """A NaN among the scores of a head is its largest one, and so is a sink of which the output is NaN."""
    with served(implementation):
        dtype = dtype_for(implementation)
        query, key, value = case([], Sizes(t=70, s=70, n=4, k=4, h=32, d=32), dtype, implementation).operands
        run = jax.jit(functools.partial(attend, implementation=implementation))
        plain = np.asarray(run(query, key, value)[1])
        sinks = np.array([np.nan, np.inf, -np.inf, 50], np.float32)
        found = np.asarray(run(query, key, value, sinks=sinks)[1])
        assert np.isnan(found[:, 0]).all() and (found[:, 1] == np.inf).all()
        np.testing.assert_array_equal(found[:, 2:], plain[:, 2:])
        query[1, 3, 2, 0] = np.nan
        found = np.asarray(run(query, key, value)[1])
        assert np.isnan(found[1, 2]) and np.isnan(found).sum() == 1
        np.testing.assert_array_equal(found[~np.isnan(found)], plain[~np.isnan(found)])
        query[1, 3, 2, 0] = -np.inf  # of which the products with keys of both signs are infinite
        assert run(query, key, value)[1][1, 2] == np.inf


@each_implementation
def test_gradients_stay_as_they_are(implementation):
    """The bits of the others do not depend on whether it is asked for, and nothing comes of its cotangent."""
    with served(implementation):
        dtype = dtype_for(implementation)
        operands = case([], Sizes(t=70, s=70, h=32, d=32), dtype, implementation).operands
        given = {"is_causal": True, "implementation": implementation}

        def loss(*v):
            y, largest = attend(*v, **given)
            return jnp.sum(jnp.sin(y.astype(np.float32))) + jnp.sum(largest**2), largest

        def without(*v):
            return jnp.sum(jnp.sin(jaxsoft.dot_product_attention(*v, **given).astype(np.float32)))

        (_, largest), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*operands)
        chex.assert_trees_all_equal(found, jax.jit(jax.grad(without, (0, 1, 2)))(*operands))
        chex.assert_trees_all_equal(largest, jax.jit(lambda *v: attend(*v, **given)[1])(*operands))
        policy = jax.checkpoint_policies.save_only_these_names("jaxsoft_attention")
        for of_policy in (None, policy):
            again = jax.jit(jax.grad(jax.checkpoint(loss, policy=of_policy), (0, 1, 2), has_aux=True))
            chex.assert_trees_all_close(again(*operands), (found, largest), rtol=1e-2, atol=1e-2)


def test_tangents_are_zero():
    """Forward, of every order, where nothing counts, and in a loop, which is differentiated by the formula."""
    query, key, value = case([], SMALL, np.float32).operands
    lengths = np.array([0, 5], np.int32)

    def largest(query):
        return attend(query, key, value, key_value_seq_lengths=lengths)[1]

    def looped(query):
        return jax.lax.scan(lambda x, _: (x * 2, largest(x)), query, None, 3)[1]

    for f in (largest, looped):
        for function in (f, lambda q, f=f: jax.jvp(f, (q,), (q,))[1]):
            tangent = jax.jit(lambda q, function=function: jax.jvp(function, (q,), (q,))[1])(query)
            np.testing.assert_array_equal(tangent, np.zeros_like(tangent))
        gradient = jax.grad(lambda q, f=f: jnp.sum(jnp.where(jnp.isfinite(f(q)), f(q), 0)))(query)
        np.testing.assert_array_equal(gradient, np.zeros_like(query))


def test_order_of_results():
    """After the output, the log-sum-exp and the state, and without a batch where there is none."""
    query, key, value = case([], SMALL, np.float32).operands
    y, lse, state, largest = attend(query, key, value, return_residual=True, return_state=True)
    assert (lse.shape, state.m.shape, largest.shape) == ((2, 7, 4), (2, 7, 4), (2, 4))
    for one in (attend(query[0], key[0], value[0]), attend(query[0], key[0], value[0], return_state=True)):
        assert one[0].shape == y.shape[1:]
        np.testing.assert_allclose(one[-1], largest[0], rtol=1e-6)
    # Of the keys of the call alone.
    _, after = attend(query, key[:, :3], value[:, :3], state=state)
    np.testing.assert_array_equal(after, attend(query, key[:, :3], value[:, :3])[1])
    assert all(x is not None for x in jax.tree.leaves(state))
    assert isinstance(jaxsoft.dot_product_attention(query, key, value, return_max_logits=False), jax.Array)


def test_clipping():
    """QK-Clip: heads whose largest score is above a threshold get smaller weights, and then are below it."""
    x = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
    weights = 3 * np.random.default_rng(1).standard_normal((2, 16, 4, 8)).astype(np.float32)
    threshold = 20.0

    def loss(weights):
        query, key = (jnp.einsum("btx,xnh->btnh", x, w) for w in weights)
        y, largest = attend(query, key, key)
        return jnp.mean(y**2), jnp.max(largest, axis=0)

    (_, largest), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    assert (largest > threshold).all() and np.isfinite(gradient).all()
    factors = np.sqrt(threshold / np.asarray(largest))
    np.testing.assert_allclose(loss(weights * factors[:, None])[1], threshold, rtol=1e-5)


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("k", [8, pytest.param(2, marks=slow), pytest.param(1, marks=slow)])
@pytest.mark.parametrize("implementation", [None, *({"ffi"} & {*ATTENTION_IMPLEMENTATIONS})])
def test_sharded_batch_and_heads(k, implementation, kind):
    """Nothing moves, and the largest scores lie as the batch and the heads do."""
    sizes = Sizes(b=4, t=6, s=10, n=8, k=k, h=32, d=32)
    call = asked(["sinks"], sizes, dtype_for(implementation), implementation)
    with jax.set_mesh(mesh_of(kind)), served(implementation):
        mesh = jax.sharding.get_mesh()
        keys = P("a", None, "b" if k == 8 else None)
        specs = [P("a", None, "b"), keys, keys, P("b")]
        operands = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(call.operands, specs, strict=True)]
        compiled = jax.jit(call.ours).lower(*operands).compile()
        assert collectives(compiled) == []
        found = compiled(*operands)
        assert found[2].sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)
        call.check(lambda _: lambda *_: found)
        call.through("grad").check(lambda f: lambda *_: jax.jit(f)(*operands))


@needs_devices
@pytest.mark.parametrize(
    "specs", [(P("a", "b"), P("a")), (P(None, "a"), P(None, "b")), (P(), P(None, ("a", "b")))], ids=str
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_sharded_queries_and_keys(specs, implementation):
    """It is the largest of all of them."""
    call = asked(["causal"], Sizes(b=2, t=16, s=16, h=4, d=4), np.float32, implementation)
    with jax.set_mesh(mesh_of()):
        mesh = jax.sharding.get_mesh()
        of_each = (specs[0], specs[1], specs[1])
        operands = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(call.operands, of_each, strict=True)]
        call.check(lambda f: lambda *_: jax.jit(f)(*operands))


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_shard_map(kind):
    """Of a device's own queries, so those of all devices are combined by a maximum, which has no derivative."""
    call = asked(["sinks"], Sizes(b=MESH[0], t=16, s=10, h=4, d=4), np.float32)
    specs = (P("a", "b"), P("a"), P("a"), P())

    def ours(*v):
        y, lse, largest = call.ours(*v)
        return y, lse, jax.lax.pmax(largest, "b")

    with jax.set_mesh(mesh_of(kind)):
        mesh = jax.sharding.get_mesh()
        mapped = jax.shard_map(ours, in_specs=specs, out_specs=(P("a", "b"), P("a", "b"), P("a")))
        operands = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(call.operands, specs, strict=True)]
        inside = dataclasses.replace(call, ours=mapped)
        for one in (inside, inside.through("grad")):
            one.check(lambda f: lambda *_: jax.jit(f)(*operands))


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_wrong_arguments(value):
    q = np.ones((2, 3, 4, 8), np.float32)
    with pytest.raises(TypeError, match=f"return_max_logits must be True or False; got {value!r}"):
        jaxsoft.dot_product_attention(q, q, q, return_max_logits=value)


def test_others_cannot():
    q = np.ones((2, 64, 4, 64), jnp.bfloat16)
    for name, reason in (("pallas", "its kernels do not give the largest scores"), ("cudnn", "does not give the larg")):
        with target("NVIDIA H100 80GB HBM3"), pytest.raises(ValueError, match=rf"'{name}' cannot .*{reason}.*'xla'"):
            jax.eval_shape(functools.partial(attend, implementation=name), q, q, q)
