"""The models of `examples`, for a moment: with jaxsoft as with jax.nn, over a mesh as on one device, with a cache as
without, and served as alone.

They run as a user's program does, under JAX's usual promotion of dtypes and in its default 32 bits.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import pytest
from common import some
from jax.sharding import AxisType
from meshes import DEVICES, collectives

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

language_model = pytest.importorskip("language_model")  # which needs flax, matplotlib, optax and tqdm
generate = pytest.importorskip("generate")
serve = pytest.importorskip("serve")
scheduler = pytest.importorskip("scheduler")
mesh = pytest.importorskip("mesh")

TEXT = np.random.default_rng(0).integers(0, 50, 1000, dtype=np.int32)


@pytest.fixture(autouse=True)
def usual():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.default_matmul_precision("float32"))
        yield


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", language_model.TOLERANCES)
def test_losses(dtype):
    losses = language_model.optax.softmax_cross_entropy_with_integer_labels
    functions = {"jaxsoft": language_model.jaxsoft_attention, "jax.nn": language_model.jax_nn_attention}
    runs = {name: language_model.Run(50, function, losses, 3, dtype) for name, function in functions.items()}
    language_model.train(runs, TEXT, 3, batch=2, context=24)
    ours, theirs = (run.losses for run in runs.values())
    np.testing.assert_allclose(ours, theirs, rtol=language_model.TOLERANCES[dtype][0])


def run_over(devices):
    """A few steps over a mesh, or where that is None on one device."""
    run = mesh.Run(devices, mesh.Shape(vocabulary=52, layers=1, width=16, hidden=24, heads=4, key_heads=2, size=8))
    mesh.train({"run": run}, TEXT, 3, batch=4, context=24)
    return run


losses_on_one_device = functools.cache(lambda: run_over(None).losses)


@pytest.mark.parametrize("sizes", some([(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2)], [(2, 2, 2)]), ids=str)
def test_over_a_mesh(sizes):
    """The loss of each step is that of one device, weights stay where they lie, and keys go from device to device."""
    if np.prod(sizes) > DEVICES:
        pytest.skip("too few devices")
    devices = jax.make_mesh(sizes, mesh.AXES, axis_types=(AxisType.Auto,) * 3)
    run = run_over(devices)
    np.testing.assert_allclose(run.losses, losses_on_one_device(), rtol=1e-6)
    assert run.model.readout.kernel[...].addressable_shards[0].data.shape == (16, 52 // sizes[1])
    assert run.model.blocks[0].up.kernel[...].sharding.is_fully_replicated

    with jax.set_mesh(devices):
        batch = mesh.batch_of(devices, TEXT[: 4 * 25].reshape(4, 25))
        program = mesh.train_step.lower(run.model, run.optimizer, batch, devices, "float32").compile()
    moved = [(name, int(np.prod(shape))) for name, shape in collectives(program.compiled)]
    keys = 4 * 24 * 2 * 8 // (sizes[0] * sizes[2])  # of a device, in numbers
    # Keys and values go to all others forward, and backward to all but the one that has them already; the gradients by
    # them come back. None are gathered.
    sent = sum(numbers for name, numbers in moved if name == "collective-permute")
    others = sizes[2] - 1
    assert sent == 2 * keys * (others + max(others - 1, 0) + others)
    assert all(numbers < keys for name, numbers in moved if name in ("all-gather", "all-to-all"))


def test_cache():
    """The most probable text is the same with the cache of keys and values as without."""
    run = language_model.Run(50, language_model.jaxsoft_attention, None, 2)
    prompts = TEXT[:24].reshape(3, 8)
    cached = language_model.generate(run.model, prompts, jax.random.key(0), 9, generate.most_probable)
    np.testing.assert_array_equal(cached, generate.recompute(run.model, prompts, 9))


# More requests than slots, prompts that share pages and do not end with one, chunks that are cut by the budget, and
# fewer pages than the slots could use.
SMALL = dataclasses.replace(
    serve.SETTINGS["small"], shape=serve.Shape(50, 2, 16, 16, 4, 2, 8), slots=3, chunk=4, budget=7, page_size=4,
    pages=12, requests=8, per_step=0.3, shared=9, prompts=(1, 10), lengths=(1, 9), steps=0,
)  # fmt: skip


def test_served(monkeypatch):
    """What is served at once is what each request draws alone, and the example's check finds where it is not."""
    model, requests = serve.trained(SMALL, TEXT), serve.requests_of(SMALL, TEXT)

    def mistakes(server):
        served = server.serve(requests)
        return list(serve.mistakes(model, SMALL, requests, served)), served.scheduler.reused

    assert mistakes(serve.Server(model, serve.Contiguous(SMALL.slots, SMALL.longest), SMALL)) == ([], 0)
    paged = serve.Server(model, serve.Paged(SMALL.pages, SMALL.page_size), SMALL)
    wrong, reused = mistakes(paged)
    assert not wrong and reused  # some pages were shared

    batch_of = scheduler.Scheduler._batch

    def all_in_one_page(*args):
        batch = batch_of(*args)
        return batch._replace(table=np.repeat(batch.table[:, :1], batch.table.shape[1], axis=1))

    monkeypatch.setattr(scheduler.Scheduler, "_batch", all_in_one_page)
    assert len(mistakes(paged)[0]) >= SMALL.requests // 2
    monkeypatch.undo()
    assert mistakes(paged) == ([], reused)  # whatever is left in the pages


@pytest.mark.parametrize("seed", range(20))
def test_scheduler(seed):
    """Every token of every request goes through the model once, in order, and finds those before it in its pages."""
    rng = np.random.default_rng(seed)
    slots, chunk, size = (int(n) for n in rng.integers(1, 5, 3))
    requests = [
        scheduler.Request(
            number, int(rng.integers(10)), rng.integers(0, 2, rng.integers(1, 12)), int(rng.integers(1, 6)), 0.0
        )
        for number in range(12)
    ]
    of_sequence = -(-16 // size)
    pool = scheduler.Pool(int(rng.integers(of_sequence, 3 * of_sequence)), size)
    plans = scheduler.Scheduler(requests, slots, chunk, slots + int(rng.integers(6)), pool, of_sequence)
    cache, drawn = {}, dict.fromkeys(range(12), 0)
    for step in range(1000):
        plans.admit(step)
        if not plans.busy:
            break
        batch, drawing = plans.plan()
        for slot in np.flatnonzero(batch.counts):
            number = batch.numbers[slot]
            text = [*requests[number].prompt, *[-1 - number] * drawn[number]]  # drawn tokens: those of this request
            here = np.flatnonzero(batch.slots == slot)
            assert len(here) == batch.counts[slot] <= chunk
            assert here[-1] == batch.ends[slot]
            np.testing.assert_array_equal(batch.places[here], np.arange(len(here)))
            np.testing.assert_array_equal(batch.positions[here], batch.lengths[slot] - len(here) + np.arange(len(here)))
            for token, position in zip(batch.tokens[here], batch.positions[here], strict=True):
                assert token == max(text[position], -1)
                cache[batch.table[slot, position // size], position % size] = text[: position + 1]
            for position in range(batch.lengths[slot]):
                assert cache[batch.table[slot, position // size], position % size] == text[: position + 1]
            assert (slot in drawing) == (batch.lengths[slot] == len(text))
        for number in drawing.values():
            drawn[number] += 1
    assert drawn == {request.number: request.length for request in requests}
    assert len(pool.free) == pool.pages
