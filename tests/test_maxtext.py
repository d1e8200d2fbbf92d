"""The functions of the guide for MaxText, beside what MaxText computes for the same arguments, written out here.

As of August 2026: `AttentionOp.apply_attention_dot` with its mask and sinks, and `max_utils.cross_entropy_with_logits`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import as_usual
from test_documents import ROOT, blocks

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def guide():
    """What the page defines."""
    names: dict = {}
    with as_usual(), jax.enable_x64(False):
        for code, _ in blocks(ROOT / "docs/guide/maxtext.md"):
            exec(code, names)
    return names


def attention(query, key, value, segments, sinks, window, cap):
    """By a mask, with the sinks as scores of one more key."""
    batch, length, heads, _ = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, length, groups, heads // groups, -1)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key).reshape(batch, heads, length, length)
    if cap is not None:
        scores = jnp.tanh(scores / cap) * cap
    row, col = np.arange(length)[:, None], np.arange(length)
    mask = col <= row
    if window is not None:
        mask = mask & (col > row - window)
    if segments is not None:
        mask = mask & ((segments[:, :, None] == segments[:, None]) & (segments[:, None] >= 0))[:, None]
    scores = jnp.where(mask, scores, -0.7 * np.finfo(np.float32).max)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (batch, heads, length, 1))], axis=-1)
    weights = jax.nn.softmax(scores)[..., :length].reshape(batch, groups, heads // groups, length, length)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, length, heads, -1)


@pytest.mark.costly
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("segments", [True, False])
def test_attention(guide, window, cap, sinks, segments):
    """With the gradients by query, key, value and sinks. Of queries in negative segments nothing is asked."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    moving = {"sinks": jnp.asarray(rng.standard_normal(4), jnp.float32)} if sinks else {}
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 7, -1, -1]], np.int32) if segments else None
    counts = (ids >= 0)[..., None, None] if segments else True

    def results(function):
        def loss(q, k, v, moving):
            y = jnp.where(counts, function(q, k, v, moving), 0)
            return jnp.sum(jnp.sin(y)), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, moving)
        return y, gradients

    with as_usual(), jax.default_matmul_precision("highest"), jax.enable_x64(False):
        actual = results(lambda q, k, v, m: guide["attend"](q, k, v, ids, m.get("sinks"), window, cap))
        expected = results(lambda q, k, v, m: attention(q, k, v, ids, m.get("sinks"), window, cap))
        assert_trees_all_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(guide, z_loss):
    """The losses, the z-losses, and the gradients by the logits of any cotangents of both."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((2, 5, 33)) * 4, jnp.float32)
    targets = jax.nn.one_hot(rng.integers(0, 33, (2, 5)), 33)
    targets = targets.at[1, 3:].set(0)  # padding: its targets are no distribution

    def theirs(logits, targets, z_loss):
        lse = jax.scipy.special.logsumexp(logits, axis=-1)
        z = z_loss * lse**2
        loss = -jnp.sum(targets * (logits - lse[..., None]), axis=-1) + z
        return loss, jax.lax.stop_gradient(z)  # MaxText's derivative leaves out the cotangent of what is for logging

    def results(function):
        found, pullback = jax.vjp(lambda logits: function(logits, targets, z_loss), logits)
        return found, pullback(tuple(jnp.cos(y + i) for i, y in enumerate(found)))

    with as_usual(), jax.enable_x64(False):
        ours = results(guide["cross_entropy_with_logits"])
        assert_trees_all_close(ours, results(theirs), **CLOSE)
