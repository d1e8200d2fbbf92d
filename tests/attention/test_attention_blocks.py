"""Attention that goes on from the state of other keys, and gradients that are added to others.

Blocks of keys, one after the other, give what one call over all keys gives, whatever serves them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_blocks import THREE, Blocks, errors
from common import ATTENTION_IMPLEMENTATIONS, on_cpu, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices
from truth import wide

import jaxsoft
from jaxsoft import fold
from jaxsoft._attention.derivative import attention
from jaxsoft._attention.form import STATE, AttentionForm, Extra
from jaxsoft._attention.operation import attention_operation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback
from jaxsoft._core import operation

SIZES = 2, 6, 19, 4, 2, 8
BORDERS = 7, 14
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in ("xla", "reference") else (), id=str(name))
        for name in ATTENTION_IMPLEMENTATIONS
    ],
)
each_option = pytest.mark.parametrize(
    ("options", "of_form"),
    [
        (("offset", "lengths"), {"left": 5, "right": 1}),
        ((), {}),
        (("lengths",), {}),
        (("offset",), {"right": 0}),
        ((), {"cap": 1.5}),
    ],
    ids=str,
)


def dtype_for(implementation):
    """Kernels that have a name compute in 16 bits."""
    return jnp.bfloat16 if implementation in ("ffi", "pallas", "cudnn") else np.float32


def allowed(dtype):
    return {"float64": 1e-14, "float32": 2e-6}.get(np.dtype(dtype).name, 1e-2)


@pytest.mark.costly(1)
@each_option
@each_implementation
def test_blocks_give_what_one_call_gives(implementation, options, of_form):
    dtype = dtype_for(implementation)
    call = Blocks.make(SIZES, dtype, options, BORDERS, **of_form)
    with served(implementation):
        results, delta, gradients = call.expected()
        found = call.forward(implementation)()
        assert {x.dtype for x in found} == {np.dtype(np.float32)}
        assert max(errors(found[:2], results[:2])) <= allowed(dtype)
        arrays = [jnp.asarray(x, np.float32) for x in (*results[1:], delta)]
        found = call.gradients(implementation)(*arrays)
        assert {x.dtype for x in found} == {np.dtype(np.float32)}
        assert max(errors(found, gradients)) <= 2 * allowed(dtype)


@on_cpu
@pytest.mark.parametrize("implementation", ["xla", pytest.param("reference", marks=slow)])
def test_in_float64(implementation):
    with jax.enable_x64(True):
        call = Blocks.make(SIZES, np.float64, ("offset", "lengths"), BORDERS, right=0)
        results, delta, gradients = call.expected()
        assert max(errors(call.forward(implementation)()[:2], results[:2])) <= 1e-14
        found = call.gradients(implementation)(*map(jnp.asarray, (*results[1:], delta)))
        assert max(errors(found, gradients)) <= 1e-14


@on_cpu
def test_parts_of_queries():
    """Under a causal rule plain JAX takes the queries in parts, and each has its part of the state.

    No query of the first part sees a key of the last block.
    """
    call = Blocks.make((1, 300, 450, 2, 2, 8), np.float32, (), (150, 310), right=150)
    results, *_ = call.expected(differentiated=False)
    query, key, value, _ = call.arrays
    output, lse = np.zeros(query.shape, np.float32), np.full((1, 2, 300), -np.inf, np.float32)
    for begin, end in ((0, 150), (150, 310), (310, 450)):
        form = dataclasses.replace(call.form, extras=STATE, right=150 - begin)
        given = query, key[:, begin:end], value[:, begin:end], output, lse
        output, lse, _ = attention_operation(AttentionForward(form), "xla", *map(jnp.asarray, given))
    assert max(errors((output, lse), results[:2])) <= 2e-6


@each_implementation
def test_a_rounded_output_has_its_rest(implementation):
    """What blocks lose is lost once, where the last one is rounded."""
    call = Blocks.make((2, 70, 130, 4, 2, 64), jnp.bfloat16, ("lengths",), (60,))
    with served(implementation):
        output, lse, *_ = call.forward(implementation)()
        rounded, same_lse, _, rest = call.forward(implementation, jnp.bfloat16)()
        assert rounded.dtype == rest.dtype == jnp.bfloat16
        np.testing.assert_array_equal(lse, same_lse)
        # Each may be computed by another kernel.
        np.testing.assert_allclose(wide(rounded) + wide(rest), output, rtol=1e-4, atol=1e-6)


# The output and the log-sum-exp before, those of a block with or without keys, and what becomes of them.
NAN, INF = np.nan, np.inf


@pytest.mark.costly
@pytest.mark.parametrize("counts", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize(
    ("before", "lse"),
    [(3.0, 0.5), (3.0, -INF), (NAN, -INF), (NAN, 0.5), (3.0, NAN), (3.0, 1e4), (3.0, -1e4), (2.0, INF)],
)
@each_implementation
def test_special_states(implementation, before, lse, counts):
    """The guards of the fold: -inf is the identity whatever the output is, and NaN spreads. All values are 1."""
    dtype = dtype_for(implementation)
    query, key = np.zeros((1, 3, 2, 64), dtype), np.zeros((1, 40, 2, 64), dtype)
    lengths = np.array([40 if counts else 0], np.int32)
    states = np.full((1, 3, 2, 64), before, np.float32), np.full((1, 2, 3), lse, np.float32)
    for last in (np.float32, dtype):
        form = AttentionForm(np.dtype(last), 1.0, extras=(Extra.KEY_LENGTHS, *STATE), rounded=last == jnp.bfloat16)
        with served(implementation):
            output, total, *_ = attention_operation(
                AttentionForward(form),
                implementation,
                *map(jnp.asarray, (query, key, np.ones_like(key), lengths, *states)),
            )
            with np.errstate(invalid="ignore"):
                own = np.log(40) if counts else -np.inf
                expected = np.logaddexp(own, lse)
                share = np.exp(lse - expected) if np.isfinite(expected) else 0.0 if expected < 0 else NAN
            of_output = (0 if not counts else 1 - share) + (0 if share == 0 else share * before)
            np.testing.assert_allclose(total, np.full_like(states[1], expected), rtol=1e-5)
            np.testing.assert_allclose(
                np.asarray(output, np.float32),
                np.full_like(states[0], of_output),
                rtol=1e-5 if last == np.float32 else 1e-2,
            )


@each_implementation
def test_vmap(implementation):
    """A mapped dimension joins the batch, also where only the state or only a sum has it."""
    dtype = dtype_for(implementation)
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal(shape).astype(dtype) for shape in ((2, 5, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64))
    )
    output, lse = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 5, 4, 64), (3, 2, 4, 5)))
    delta = rng.standard_normal((2, 4, 5)).astype(np.float32)
    sums = [rng.standard_normal((3, *x.shape)).astype(np.float32) for x in (query, key, value)]
    forward = AttentionForward(AttentionForm(np.dtype(np.float32), 0.1, extras=STATE))
    pullback = AttentionPullback(AttentionForm(np.dtype(dtype), 0.1), THREE, True, THREE)

    def states(output, lse):
        return attention_operation(forward, implementation, query, key, value, output, lse)

    def gradients(*sums):
        given = query, key, value, query, lse[0], jnp.zeros_like(lse[0]), delta, query
        return attention_operation(pullback, implementation, *given, *sums)

    with served(implementation):
        for function, operands in ((states, (output, lse)), (gradients, sums)):
            mapped = jax.jit(jax.vmap(function))(*operands)
            one_by_one = [function(*(x[i] for x in operands)) for i in range(3)]
            for found, *each in zip(mapped, *one_by_one, strict=True):
                np.testing.assert_allclose(found, np.stack(each), rtol=1e-4, atol=1e-4)


@pytest.mark.costly
@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("opaque", [True, False])
def test_over_a_mesh(opaque, key_heads, kind, monkeypatch):
    """The state and sums stay with the batch and the heads. A sum that several devices share is added once."""
    monkeypatch.setattr(operation, "is_opaque", lambda implementation: opaque)
    rng = np.random.default_rng(0)
    of_query, of_key, of_row = (4, 6, 8, 8), (4, 10, key_heads, 8), (4, 8, 6)
    shapes = [of_query, of_key, of_key, of_query, of_query, of_row, of_row, of_query, of_key, of_key]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    forward = AttentionForward(AttentionForm(np.dtype(np.float32), 0.1, extras=STATE))
    pullback = AttentionPullback(AttentionForm(np.dtype(np.float32), 0.1), THREE, True, THREE)

    def both(query, key, value, cotangent, output, lse, delta, *sums):
        results = attention_operation(forward, "xla", query, key, value, output, lse)
        return *results, *attention_operation(pullback, "xla", query, key, value, *results, delta, cotangent, *sums)

    expected = jax.jit(both)(*arrays)
    with jax.set_mesh(mesh_of(kind)):
        mesh = jax.sharding.get_mesh()
        of_heads = "b" if key_heads % mesh.shape["b"] == 0 else None
        specs = {of_query: P("a", None, "b"), of_key: P("a", None, of_heads), of_row: P("a", "b")}
        put = [jax.device_put(x, NamedSharding(mesh, specs[x.shape])) for x in arrays]
        found = jax.jit(both)(*put)
        for a, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
        assert found[0].sharding.is_equivalent_to(put[0].sharding, 4)


def test_a_state_is_not_differentiated():
    """It would be a mistake, and zeros would hide it."""
    form = AttentionForm(np.dtype(np.float32), 0.1, extras=STATE)
    given = (
        jnp.ones((1, 2, 2, 8)),
        jnp.ones((1, 3, 2, 8)),
        jnp.ones((1, 3, 2, 8)),
        jnp.ones((1, 2, 2, 8)),
        jnp.ones((1, 2, 2)),
    )
    with pytest.raises(AssertionError, match="as a whole"):
        jax.grad(lambda *v: jnp.sum(attention(form, None)(*v)[0]))(*given)


@pytest.mark.parametrize(
    "changed", [{"sums": ("query",)}, {"wide": True, "sums": ("bias",)}, {"wide": True, "sums": ("value",)}]
)
def test_sums_are_of_wide_gradients_that_are_asked_for(changed):
    with pytest.raises(AssertionError):
        AttentionPullback(AttentionForm(np.dtype(np.float32), 0.1), ("query", "bias"), **changed)


def test_the_state_is_that_of_the_fold():
    """As jaxsoft.fold combines the outputs of two calls."""
    call = Blocks.make(SIZES, np.float32, (), (7,))

    @jax.jit
    def folded(query, key, value, _):
        (a, lse_a), (b, lse_b) = (
            jaxsoft.dot_product_attention(query, key[:, k], value[:, k], return_residual=True)
            for k in (slice(0, 7), slice(7, 19))
        )
        return fold.update_output(a, lse_a, b, lse_b)

    output, lse = map(np.asarray, folded(*call.arrays))
    found = call.forward(None)()
    np.testing.assert_allclose(found[0], output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], np.moveaxis(lse, 1, 2), rtol=1e-5, atol=1e-6)
