"""A linear layer whose classes lie on several devices: what moves between these, exactly, and what comes of it."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_devices
from test_linear_cross_entropy import assert_close, on_a_gpu, stored
from truth import in_float64

from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft._core import mesh as exchange
from jaxsoft._head import in_place

pytestmark = needs_devices
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA combines collectives on a GPU")

ROWS, WIDTH, CLASSES = 12, 6, 80
RNG = np.random.default_rng(2)
H = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
W = RNG.standard_normal((WIDTH, CLASSES)).astype(np.float32)
B, U = RNG.standard_normal(CLASSES).astype(np.float32), RNG.uniform(0.2, 2, ROWS).astype(np.float32)
C = RNG.uniform(0.2, 2, CLASSES).astype(np.float32)
Y = RNG.integers(0, CLASSES, ROWS).astype(np.int32)
Y[1], Y[2], Y[3] = -100, 0, CLASSES - 1
EVERY = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 5.0}


def classes_over(devices):
    """A mesh whose devices share the classes."""
    return jax.make_mesh((devices,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def placed(mesh, *given):
    """Arrays with specs over a mesh."""
    return [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in given]


def moved(f, *args):
    return sorted(collectives(jax.jit(f).lower(*args).compile()))


def total(h, w, y, **options):
    return jnp.mean(linear(h, w, y, **options))


GATHER, REDUCE = "all-gather", "all-reduce"


@on_a_cpu
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=slow)])
@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 3),  # m, s and the label's score
        pytest.param({"reduction": "mean"}, 3, marks=slow),
        pytest.param({"return_entropy": True}, 4, marks=slow),
        ({"reduction": "mean", "label_smoothing": 0.1}, 5),  # the sum of the scores, and their number
    ],
    ids=["each row", "mean", "entropy", "smoothed mean"],
)
def test_what_moves(options, numbers, devices):
    """The numbers of all rows at once, and where its gradient is wanted the gradient of hidden."""
    args = placed(classes_over(devices), (H, P()), (W, P(None, "b")), (np.abs(Y), P()))

    def f(*operands):
        return jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, linear(*operands, **options)))

    gather, reduce = (GATHER, (devices, numbers, ROWS)), (REDUCE, H.shape)
    assert moved(f, *args) == [gather]
    assert moved(jax.grad(f, 1), *args) == [gather]
    assert moved(jax.grad(f, (0, 1)), *args) == [gather, reduce]


@on_a_cpu
def test_what_moves_in_chunks():
    """By rows, a chunk's numbers and its gradient of hidden, once each; that of weight is a sum over the rows' devices.

    Where gradients of scores wait for all chunks, so does the sum of those of hidden.
    """
    args = placed(classes_over(2), (H, P()), (W, P(None, "b")), (np.abs(Y), P()))
    gradients = jax.grad(functools.partial(total, reduction="mean", chunk_size=4), (0, 1))
    # The first chunk, and the loop over the others.
    assert moved(gradients, *args) == [(GATHER, (2, 3, 4))] * 2 + [(REDUCE, (4, WIDTH))] * 2
    few = [v[:WIDTH] for v in args]
    args = placed(classes_over(2), (few[0], P()), (W, P(None, "b")), (few[2], P()))
    assert moved(gradients, *args) == [(GATHER, (2, 3, 2)), (GATHER, (2, 3, 4)), (REDUCE, (WIDTH, WIDTH))]


@on_a_cpu
def test_what_moves_of_rows_and_classes():
    """The gradient of a device's classes is summed over those that have other rows."""
    args = placed(mesh_of(AxisType.Auto), (H, P("a")), (W, P(None, "b")), (np.abs(Y), P("a")))
    found = moved(jax.grad(total, (0, 1)), *args)
    assert found == [(GATHER, (4, 3, 6)), (REDUCE, (6, WIDTH)), (REDUCE, (WIDTH, 20))]


@on_a_cpu
def test_what_moves_between_many_devices(patched):
    """Two messages, which are no larger where there are more devices."""
    patched.setattr(exchange, "_FEW_DEVICES", 7)
    args = placed(classes_over(8), (H, P()), (W, P(None, "b")), (Y, P()))
    f = functools.partial(total, return_entropy=False, ignore_index=-100, z_loss=0.5)
    assert moved(f, *args) == [(REDUCE, (1, ROWS)), (REDUCE, (2, ROWS))]


def by_rows(h, w, b, c, u, y, f=linear, **options):
    """A function of the mean, with all options that it takes."""
    if f is linear:
        return jnp.sin(f(h, w, y, b, class_weights=c, row_weights=u, reduction="mean", **EVERY, **options))
    u = jnp.where(y == -100, 0, u)
    return jnp.sin(jnp.sum(u * f(h, w, y, b, class_weights=c, **EVERY)) / jnp.sum(u))


def by_classes(h, w, b, c, u, y, f=linear, **options):
    """A function of losses, logsumexps and entropies."""
    loss, lse, entropy = f(h, w, y, b, class_weights=c, return_lse=True, return_entropy=True, **EVERY, **options)
    return jnp.sum(u * (jnp.sin(loss) + jnp.where(y == -100, 0, jnp.sin(lse)) + entropy))


@slow  # the tests of each way have much of this over a mesh
@pytest.mark.parametrize("rows_too", [False, True], ids=["classes", "rows and classes"])
@pytest.mark.parametrize("f", [by_rows, by_classes])
@pytest.mark.parametrize("most", [16, 1], ids=["gathered", "summed"])
def test_options(rows_too, f, most, patched):
    """All options at once, in chunks, and all gradients."""
    patched.setattr(exchange, "_FEW_DEVICES", most)
    mesh = mesh_of(AxisType.Auto) if rows_too else classes_over(min(DEVICES, 8))
    rows, classes = P("a") if rows_too else P(), P("b")
    given = [(H, rows), (W, P(None, "b")), (B, classes), (C, classes), (U, rows), (Y, rows)]
    moving = range(5)
    actual = jax.jit(jax.value_and_grad(functools.partial(f, chunk_size=5), moving))(*placed(mesh, *given))
    expected = jax.jit(jax.value_and_grad(functools.partial(f, f=stored), moving))(*(v for v, _ in given))
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", None])
def test_numbers_that_are_traced(reduction):
    """Gradients by them are sums over the devices that share the rows, and none over those that share the classes."""

    def gradients(f):
        def total(h, w, y, *numbers):
            named = dict(zip(("label_smoothing", "z_loss", "scale"), numbers, strict=True))
            return jnp.sum(jnp.sin(f(h, w, y, reduction=reduction, ignore_index=-100, **named)))

        return jax.grad(total, (0, 1, 3, 4, 5))

    def definition(h, w, y, **options):
        return definitions.linear_cross_entropy(h, w, None, None, None, y, **options)[0]

    numbers = np.float32([0.1, 0.3, -0.7])
    args = placed(mesh_of(AxisType.Auto), (H, P("a")), (W, P(None, "b")), (Y, P("a")))
    actual = jax.jit(gradients(functools.partial(linear, chunk_size=5)))(*args, *numbers)
    assert_close(actual, in_float64(lambda h, w, *v: gradients(definition)(h, w, Y, *v), H, W, *numbers), 1e-5)


@pytest.mark.parametrize("most", [16, 1], ids=["gathered", "summed"])
def test_devices_without_a_finite_score(most, patched):
    """All classes of a device may be masked, or all of some rows, or the only score above -inf may be the label's."""
    patched.setattr(exchange, "_FEW_DEVICES", most)
    half = np.where(np.arange(CLASSES) < CLASSES // 2, -np.inf, B).astype(np.float32)
    alone = np.where(np.arange(CLASSES) == 70, B, -np.inf).astype(np.float32)
    infinite = np.where(np.arange(CLASSES) == 5, np.inf, B).astype(np.float32)
    labels = np.where(np.arange(ROWS) % 2, 70, 3).astype(np.int32)

    def f(h, w, b):
        return linear(h, w, labels, b, return_lse=True, return_entropy=True, z_loss=0.1)

    for bias in (half, alone, infinite, np.full_like(B, -np.inf)):
        args = placed(classes_over(2), (H, P()), (W, P(None, "b")), (bias, P("b")))
        assert_close(jax.jit(f)(*args), jax.jit(f)(H, W, bias), 1e-6)


@pytest.mark.cover
@pytest.mark.parametrize(
    "size", [3, pytest.param(10, marks=slow), pytest.param(5, marks=slow), pytest.param(4096, marks=slow)]
)
@pytest.mark.parametrize("reduction", ["mean", None])
@pytest.mark.parametrize("classes", [P(None, "b"), P()], ids=["sharded", "whole"])
def test_the_gradient_of_weight_is_summed_in_chunks(size, reduction, classes, patched):
    """Each device has as many rows as hidden has numbers; a chunk is summed while the next one is computed."""
    patched.setattr(in_place, "_CLASSES", size)
    patched.setattr("jaxsoft._head.total.default_row_chunk", lambda rows, classes, itemsize: 1)
    patched.setattr("jaxsoft._head.pullback.chunk_size", lambda head, rows: 4)
    on_a_gpu(patched)
    f = jax.value_and_grad(functools.partial(total, reduction=reduction), (0, 1))
    y = np.abs(Y) % CLASSES
    args = placed(mesh_of(AxisType.Auto), (H, P("a")), (W, classes), (y, P("a")))
    compiled = jax.jit(f).lower(*args).compile()
    expected = in_float64(jax.value_and_grad(lambda h, w: jnp.mean(stored(h, w, y)), (0, 1)), H, W)
    assert_close(compiled(*args), expected, 1e-5)
    local = CLASSES // 4 if classes else CLASSES
    if jax.default_backend() == "cpu":
        summed = {shape for name, shape in collectives(compiled) if name == REDUCE and shape[:1] == (WIDTH,)}
        sizes = {size, local % size or size} if size < local else {local}
        assert {shape for shape in summed if shape != (WIDTH, WIDTH)} == {(WIDTH, n) for n in sizes}
