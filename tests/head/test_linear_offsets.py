"""A number in common to all logits of a row, as a bias may add it: losses and gradients are those without it.

All logits are multiples of the spacing of float32 beside the offset, so that it holds them exactly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices
from test_linear_cross_entropy import assert_close, on_a_gpu, stored
from truth import in_float64, wide

from jaxsoft import linear_softmax_cross_entropy as linear

ROWS, WIDTH, CLASSES = 8, 6, 40
LABELS = np.array([0, CLASSES - 1, 7, 3, -100, 20, 21, 9], np.int32)
SMOOTH = {"ignore_index": -100, "label_smoothing": 0.1}
EVERY = SMOOTH | {"return_lse": True, "return_entropy": True}
each_offset = pytest.mark.parametrize("offset", [1e5, pytest.param(1e6, marks=slow), -1e9], ids=str)


def layer(offset, dtype=np.float32):
    """Hidden states, weight, bias and class weights of a layer with many equal logits."""
    rng = np.random.default_rng(5)
    unit = np.spacing(np.float32(2 * abs(offset)))
    hidden = rng.integers(0, 2, (ROWS, WIDTH)).astype(dtype)
    weight = (unit * rng.integers(-1, 2, (WIDTH, CLASSES))).astype(dtype)
    bias = (np.round(offset / unit) * unit + unit * rng.integers(0, 2, CLASSES)).astype(np.float32)
    return hidden, weight, bias, rng.uniform(0.2, 2, CLASSES).astype(np.float32)


def total(f, weighted, options, labels=LABELS):
    """A sum of all results, with another factor for each."""

    def scalar(hidden, weight, bias, class_weights):
        given = {"class_weights": class_weights} if weighted else {}
        found = jax.tree.leaves(f(hidden, weight, labels, bias, **given, **options))
        terms = [jnp.where(jnp.isfinite(v), v, 0) for v in found]
        factors = 1 + jnp.arange(ROWS, dtype=jnp.int32)
        return sum(jnp.sum((factors + i).astype(v.dtype) * v) if v.ndim else v for i, v in enumerate(terms)), found

    return scalar


def both(f, weighted, options):
    return jax.value_and_grad(total(f, weighted, options), (0, 1, 2, 3), has_aux=True)


def check(ours, weighted, options, operands, reduction=None):
    """Results and gradients beside those of the same logits in float64."""

    def theirs(*v, **given):
        found = stored(*v, **given)
        return jnp.sum(found) / float(np.sum(LABELS >= 0)) if reduction == "mean" else found

    (_, actual), gradients = jax.jit(both(ours, weighted, options))(*operands)
    (_, expected), exact = in_float64(both(theirs, weighted, options), *operands)
    for a, e in zip((*actual, *gradients), (*expected, *exact), strict=True):
        assert_close(a, e, 1e-5)


@pytest.mark.costly(1)
@each_offset
@pytest.mark.parametrize(
    ("options", "weighted", "chunk_size", "recompute"),
    [
        (EVERY, False, 7, True),
        ({"ignore_index": -100}, False, 7, True),
        (SMOOTH, False, 16, True),
        (SMOOTH, True, 7, False),
        pytest.param(EVERY, True, 1, True, marks=slow),
        pytest.param({"ignore_index": -100, "return_entropy": True}, True, None, False, marks=slow),
    ],
)
def test_by_classes(offset, options, weighted, chunk_size, recompute):
    ours = functools.partial(linear, chunk_size=chunk_size, recompute=recompute)
    check(ours, weighted, options, layer(offset))


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [{"scale": -0.5}, {"z_loss": 0.01}], ids=str)
def test_other_options(options):
    """A factor of all logits, and a term that is large beside the others."""
    hidden, weight, bias, class_weights = layer(1e5)

    def theirs(hidden, weight, labels, bias, scale=1, **given):
        return stored(scale * hidden, weight, labels, scale * bias, **given)

    operands = hidden, weight, bias, class_weights
    _, gradients = jax.jit(both(functools.partial(linear, chunk_size=7), False, options))(*operands)
    _, exact = in_float64(both(theirs, False, options), *operands)
    for a, e in zip(gradients, exact, strict=True):
        assert_close(a, e, 1e-5)


@pytest.mark.costly(1)
@each_offset
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "class weights"])
def test_by_rows(offset, weighted):
    check(functools.partial(linear, reduction="mean", chunk_size=3), weighted, SMOOTH, layer(offset), "mean")


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_on_the_way_of_a_gpu(patched, dtype):
    """With chunks of rows forward, where there are no kernels. Products of 16 bits are f32, and a bias may be."""
    on_a_gpu(patched)
    hidden, weight, bias, class_weights = layer(-1e9, dtype)
    (_, losses), gradients = jax.jit(both(linear, False, SMOOTH))(hidden, weight, bias, class_weights)
    (_, expected), exact = in_float64(both(stored, False, SMOOTH), hidden, weight, bias, class_weights)
    assert_close(losses, expected, 1e-5)
    assert_close(gradients, exact, 1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: lambda *v: jax.jvp(f, v, tuple(jnp.cos(x) for x in v))[1],
        lambda f: jax.grad(lambda *v: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, (0, 2))(*v)), (0, 2)),
    ],
    ids=["forward mode", "second"],
)
def test_other_derivatives(derivative):
    operands = layer(1e6)
    ours = functools.partial(linear, chunk_size=7)
    f, g = (derivative(lambda *v, f=f: total(f, True, SMOOTH)(*v)[0]) for f in (ours, stored))
    assert_close(jax.jit(f)(*operands), in_float64(g, *operands), 1e-4)


def test_vmap():
    """Of rows with an offset each, which are more rows, and of layers."""
    hidden, weight, bias, class_weights = layer(1e9)
    biases = np.stack([bias, bias - np.float32(2**30)])
    f = both(functools.partial(linear, chunk_size=7), True, SMOOTH)
    (_, losses), gradients = jax.jit(jax.vmap(f, (None, None, 0, None)))(hidden, weight, biases, class_weights)
    each = [(hidden, weight, bias, class_weights) for bias in biases]
    expected = in_float64(lambda: [both(stored, True, SMOOTH)(*map(wide, operands)) for operands in each])
    for i, ((_, those), exact) in enumerate(expected):
        assert_close(jax.tree.map(lambda v, i=i: np.asarray(v)[i], (losses, gradients)), (those, exact), 1e-5)


@needs_devices
@pytest.mark.parametrize(
    "spec", [(P(), P(None, "b")), pytest.param((P("a"), P(None, "b")), marks=slow)], ids=["classes", "both"]
)
@pytest.mark.parametrize("options", [SMOOTH, pytest.param(EVERY, marks=slow)], ids=["losses", "every result"])
def test_over_a_mesh(spec, options):
    """Where classes are sharded, one device has the label, and each another maximum."""
    operands = layer(-1e9)
    mesh = mesh_of(AxisType.Auto)
    specs = (*spec, P(spec[1][1]), P())
    given = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(operands, specs, strict=True)]
    with jax.set_mesh(mesh):
        (_, found), gradients = jax.jit(both(functools.partial(linear, chunk_size=3), True, options))(*given)
    (_, expected), exact = in_float64(both(stored, True, options), *operands)
    assert_close((found, gradients), (expected, exact), 1e-5)
