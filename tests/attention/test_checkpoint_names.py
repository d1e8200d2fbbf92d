"""What gradients of attention keep has a name: where a policy of `jax.checkpoint` saves it, nothing is computed twice.

Operations are counted in the jaxpr of the gradient, where dead ones are gone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import precision
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices

import jaxsoft
from jaxsoft._attention.operation import AttentionOperation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback

NAME = "jaxsoft_attention"
save_only = jax.checkpoint_policies.save_only_these_names
POLICIES = {
    "nothing": (None, 2),
    "another name": (save_only("another"), 2),
    "the name": (save_only(NAME), 1),
    "the name and products": (
        jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable, save_only("another", NAME)
        ),
        1,
    ),
}


def equations(function, *operands):
    """The equations of a function's jaxpr, with those of inner jaxprs, but for what an operation of attention holds."""

    def of(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            whole = isinstance(eqn.params.get("operation"), AttentionOperation)
            inner = [] if whole else list(eqn.params.values())
            for value in jax.tree.leaves(inner, is_leaf=lambda v: hasattr(v, "eqns")):
                value = getattr(value, "jaxpr", value)
                yield from of(value) if hasattr(value, "eqns") else ()

    return list(of(jax.make_jaxpr(function)(*operands).jaxpr))


def counts(function, *operands):
    """How many forward passes and how many pullbacks a function has."""
    found = [eqn.params.get("operation") for eqn in equations(function, *operands)]
    found = [type(operation.operation) for operation in found if isinstance(operation, AttentionOperation)]
    return found.count(AttentionForward), found.count(AttentionPullback)


def grouped(q):
    return jaxsoft.dot_product_attention(q, q[:, :, :2], q[:, :, 2:], is_causal=True)


def with_lse(q):
    y, lse = jaxsoft.dot_product_attention(q, q, q, sinks=jnp.zeros(4), return_residual=True)
    return y * jnp.tanh(lse)[..., None].astype(y.dtype)


def in_pages(q):
    pages = q.reshape(4, 4, 4, 8)
    table, lengths = jnp.array([[0, 1], [2, 3]]), jnp.array([8, 7])
    return jaxsoft.paged_attention(q, pages, pages, table, lengths, is_causal=True)


def gradient(attend, policy, checkpointed=True):
    """The gradient of two blocks that attend, each of them under `jax.checkpoint`, by the tokens and the weights."""

    def block(x, w):
        y = attend(jnp.einsum("btd,dnh->btnh", jnp.sin(x), w))
        return x + jnp.einsum("btnh,dnh->btd", jnp.sin(y), w)

    block = jax.checkpoint(block, policy=policy) if checkpointed else block
    return jax.grad(lambda x, w: jnp.sum(block(block(x, w), w).astype(jnp.float32) ** 2), (0, 1))


def operands(dtype=jnp.float32):
    """The tokens and the weights."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape) / 2, dtype) for shape in ((2, 8, 16), (16, 4, 8))]


@pytest.mark.costly(3)
@pytest.mark.parametrize("attend", [grouped, with_lse, in_pages])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_a_saved_name_spares_the_forward_pass(attend, dtype):
    """Two forward passes for each block under jax.checkpoint, and one where the name is saved."""
    given = operands(dtype)
    assert counts(gradient(attend, None, checkpointed=False), *given) == (2, 2)
    for policy, passes in POLICIES.values():
        assert counts(gradient(attend, policy), *given) == (2 * passes, 2)


@pytest.mark.parametrize("place", ["device", "host"])
def test_offloaded(place):
    """The policy that moves what is named to the host, beside the one that saves it on the device."""
    saved, moved = ([NAME], []) if place == "device" else ([], [NAME])
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=moved,
        offload_src="device",
        offload_dst="pinned_host",
    )
    given = operands(jnp.bfloat16)
    assert counts(gradient(grouped, policy), *given) == (2, 2)
    moves = [eqn for eqn in equations(gradient(grouped, policy), *given) if eqn.primitive.name == "device_put"]
    # The output, what its rounding took, the log-sum-exp and its residual, of each block, there and back.
    assert sum(len(eqn.outvars) for eqn in moves) == (16 if moved else 0)


@pytest.mark.costly(3)
@needs_devices
@pytest.mark.parametrize("inside", [True, False], ids=["inside shard_map", "under jit"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_ring(inside, method):
    """Of ring_attention as well, the keys and values that arrived last included."""
    mesh, along = mesh_of(s=2), P(None, "s")

    def attend(q):
        return jaxsoft.ring_attention(q, q, q, axis_name="s", method=method, is_causal=True)

    if inside:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=along, out_specs=along)
    with jax.set_mesh(mesh):
        given = operands()
        for policy, passes in POLICIES.values():
            assert counts(gradient(attend, policy), *given) == (2 * passes, 2)


def test_the_values_are_the_same():
    """The gradient and its derivative in forward mode, of blocks whose name is saved and of blocks without a policy."""
    with precision(np.float64):
        given = operands(jnp.float64)

        def along(*how):
            return jax.jit(lambda *given: jax.jvp(gradient(grouped, *how), given, given))(*given)

        assert_trees_all_close(along(save_only(NAME)), along(None, False), rtol=1e-9, atol=1e-9)


def test_without_a_policy_nothing_is_left_of_the_name():
    """It is not there without gradients, and a program with them does nothing for it."""
    q = jnp.ones((2, 8, 4, 8))
    assert NAME not in str(jax.make_jaxpr(grouped)(q))
    by_q = jax.grad(lambda q: jnp.sum(grouped(q)))
    assert str(jax.make_jaxpr(by_q)(q)).count(f"name[name={NAME}]") == 3
    assert NAME not in jax.jit(by_q).lower(q).as_text()
