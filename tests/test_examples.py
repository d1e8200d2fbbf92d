"""The models of `examples`, for a moment: with jaxsoft as with jax.nn, and with a cache as without.

They run as a user's program does, under JAX's usual promotion of dtypes and in its default 32 bits.
"""

import contextlib
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

language_model = pytest.importorskip("language_model")  # which needs flax, matplotlib, optax and tqdm
generate = pytest.importorskip("generate")

TEXT = np.random.default_rng(0).integers(0, 50, 1000, dtype=np.int32)


@pytest.fixture(autouse=True)
def usual():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.default_matmul_precision("float32"))
        yield


@pytest.mark.parametrize("dtype", language_model.TOLERANCES)
def test_losses(dtype):
    losses = language_model.optax.softmax_cross_entropy_with_integer_labels
    functions = {"jaxsoft": language_model.jaxsoft_attention, "jax.nn": language_model.jax_nn_attention}
    runs = {name: language_model.Run(50, function, losses, 3, dtype) for name, function in functions.items()}
    language_model.train(runs, TEXT, 3, batch=2, context=24)
    ours, theirs = (run.losses for run in runs.values())
    np.testing.assert_allclose(ours, theirs, rtol=language_model.TOLERANCES[dtype][0])


def test_cache():
    """The most probable text is the same with the cache of keys and values as without."""
    run = language_model.Run(50, language_model.jaxsoft_attention, None, 2)
    prompts = TEXT[:24].reshape(3, 8)
    cached = language_model.generate(run.model, prompts, jax.random.key(0), 9, generate.most_probable)
    np.testing.assert_array_equal(cached, generate.recompute(run.model, prompts, 9))
