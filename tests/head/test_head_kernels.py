"""The Pallas kernels for the scores of a linear layer: interpreted on a CPU, lowered for a GPU elsewhere, and on one.

NPROC=8 in the environment lets the interpreter run on a machine of few cores (`common.interpreted` says why).
"""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import interpreted, on_gpu, pallas_is_tested, target

from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft._core import gpus
from jaxsoft._head import kernels
from jaxsoft._rows.spec import NO_ROW
from jaxsoft.pallas_kernels.head import gradients, products, statistics
from jaxsoft.pallas_kernels.head.plan import head_plan

pytestmark = pallas_is_tested

BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
HOPPER = "NVIDIA H100 80GB HBM3"


def layer(rows, width, classes, dtype, seed=0):
    """Hidden, weight and labels of a linear layer: some are none of the classes, and some rows have none."""
    rng = np.random.default_rng([rows, width, classes, seed])
    hidden = rng.standard_normal((rows, width)).astype(dtype)
    weight = (3 * rng.standard_normal((width, classes)) / width**0.5).astype(dtype)
    label = rng.integers(0, classes, rows).astype(np.int32)
    label[1::7], label[2::5], label[3::11] = NO_ROW, classes + 3, -1
    label[0], label[-1] = classes - 1, 0
    return hidden, weight, label


def exact(scores, hidden, weight, bias, label):
    """What `statistics` gives, the slope of the scores, those but the label's, and where that is, in float64."""
    x = hidden.astype(np.float64) @ weight.astype(np.float64)
    x = scores.scale * (x if bias is None else x + bias.astype(np.float64))
    bent = np.tanh(x / scores.cap) if scores.cap else 0 * x
    z, slope = (scores.cap * bent, 1 - bent**2) if scores.cap else (x, 1 + 0 * x)
    none = (label == NO_ROW)[:, None]
    here = (np.arange(z.shape[1]) == label[:, None]) & ~none
    others = np.where(here | none, -np.inf, z)
    m = others.max(axis=1)
    e = np.exp(others - np.where(np.isfinite(m), m, 0)[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.where(e == 0, 0, e * (others - m[:, None])).sum(axis=1)
    distances = np.where(none, 0, z - np.where(np.isfinite(m), m, 0)[:, None]).sum(axis=1)
    return m, e.sum(axis=1), np.where(here, z, 0).sum(axis=1), u, distances, slope, others, here


CASES = pytest.mark.parametrize(
    ("shape", "dtype", "scores", "biased"),
    [
        ((136, 128, 320), BF16, products.HeadScores(), False),
        ((130, 64, 576), F16, products.HeadScores(-0.5, 3.0, entropy=True), True),
        ((3, 192, 64), BF16, products.HeadScores(2.0, summed=True), True),
        ((9, 64, 320), BF16, products.HeadScores(1.0, 1e30), False),
        ((9, 64, 320), BF16, products.HeadScores(1.0, 1e-30), False),
    ],
    ids=["plain", "cap and entropy", "sums of few", "large cap", "small cap"],
)


@pytest.fixture
def three_blocks(monkeypatch):
    """Has the kernels run in three blocks, so that a block has several tiles."""
    few = dataclasses.replace(gpus.H200, multiprocessors=3)
    monkeypatch.setattr(gpus, "assumed", lambda: few)


@interpreted
@CASES
def test_statistics(three_blocks, capfd, shape, dtype, scores, biased):
    check_statistics(shape, dtype, scores, biased)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@interpreted
@CASES
def test_gradients(three_blocks, capfd, shape, dtype, scores, biased):
    check_gradients(shape, dtype, scores, biased)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@on_gpu
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 64),
        (7, 192, 256),
        (64, 256, 4160),
        (127, 64, 320),
        (129, 192, 4160),
        (1000, 256, 8192),
        (300, 4096, 32000),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("cap", [None, 20.0], ids=str)
@pytest.mark.parametrize("wanted", [{}, {"entropy": True}, {"summed": True}], ids=["state", "entropy", "sums"])
def test_on_gpu(shape, dtype, cap, wanted):
    check_statistics(shape, dtype, products.HeadScores(1.0, cap, **wanted), bool(wanted))
    check_gradients(shape, dtype, products.HeadScores(0.7, cap, **wanted), bool(wanted))


def bias_of(classes):
    return np.random.default_rng(classes).standard_normal(classes).astype(np.float32)


def check_statistics(shape, dtype, scores, biased):
    hidden, weight, label = layer(*shape, dtype)
    bias = bias_of(shape[2]) if biased else None
    m, s, t, u, total, *_ = exact(scores, hidden, weight, bias, label)
    found = jax.jit(functools.partial(statistics.statistics, scores))(hidden, weight, bias, label)
    chex.assert_shape(found, (shape[0],))
    m_found, s_found, t_found, *others = (np.asarray(v, np.float64) for v in found)
    error = error_of_scores(m, shape[1])
    np.testing.assert_allclose(m_found, m, atol=error)
    shifted = s * np.exp(np.subtract(m, m_found, out=np.zeros_like(m), where=np.isfinite(m)))
    np.testing.assert_allclose(s_found, shifted, rtol=2 * error)
    np.testing.assert_allclose(t_found, t, atol=error)
    if scores.entropy:
        some = s > 0
        np.testing.assert_allclose((others.pop(0)[some] / s_found[some]), (u[some] / s[some]), atol=8 * error)
    if scores.summed:
        apart = np.subtract(m, m_found, out=np.zeros_like(m), where=np.isfinite(m))  # the distances are from m_found
        np.testing.assert_allclose(others[0], total + shape[2] * apart, rtol=1e-6, atol=error * shape[2] ** 0.5)
        np.testing.assert_array_equal(others[1], np.where(label == NO_ROW, 0, shape[2]))


def error_of_scores(m, width):
    """A bound for scores of about this size: tensor cores cut off what they add, once every 16 products."""
    return (2e-6 + width / 16 * 2.0**-24) * (1 + np.abs(m[np.isfinite(m)]).max())


def check_gradients(shape, dtype, scores, biased):
    """All gradients at once, and those of some classes."""
    hidden, weight, label = layer(*shape, dtype)
    bias = bias_of(shape[2]) if biased else None
    m, s, _, u, _, slope, others, here = exact(scores, hidden, weight, bias, label)
    rng = np.random.default_rng(0)
    g, h, k, v = rng.uniform(0.5, 2, (4, len(m))) * 2.0 ** -(np.arange(len(m)) % 4)
    v *= 1e-3
    state = [m, s, *[u] * scores.entropy]
    cotangents = [g, h, *[k] * scores.entropy, *[v] * scores.summed]
    state, cotangents = ([jnp.asarray(v, jnp.float32) for v in numbers] for numbers in (state, cotangents))

    def found(rows, begin, classes):
        part = None if bias is None else bias[begin : begin + classes]

        @jax.jit
        def f(hidden, weight, label, begin):
            here = jnp.where(label == NO_ROW, label, label - begin)
            return gradients.gradients(scores, hidden, weight, part, here, state, cotangents, rows, begin, classes)

        dx = f(hidden, weight, label, begin)
        chex.assert_shape(dx, (rows, classes))
        return np.asarray(dx, np.float64)[: shape[0]]

    s = np.where(s == 0, 1, s)[:, None]
    above = np.where(np.isfinite(others), others - np.where(np.isfinite(m), m, 0)[:, None], 0)
    p = np.where(np.isfinite(others), np.exp(above) / s, 0)
    k, v = k * scores.entropy, np.where(label == NO_ROW, 0, v * scores.summed)
    expected = np.where(here, h[:, None], p * (g[:, None] - k[:, None] * (above - u[:, None] / s))) + v[:, None]
    expected *= slope * scores.scale
    # Beside the rounding to 16 bits, each term has the error of its score, which a difference of equal ones keeps.
    terms = p * (g[:, None] + np.abs(k[:, None] * above) + np.abs(k * u)[:, None] / s) + v[:, None]
    unit, least = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
    bound = 0.51 * unit * np.abs(expected) + 4 * error_of_scores(m, shape[1]) * terms + 0.51 * least
    for rows, begin, classes in ((shape[0] + 5, 0, shape[2]), (shape[0], shape[2] // 128 * 64, 64)):
        dx, part = found(rows, begin, classes), slice(begin, begin + classes)
        assert (np.abs(dx - expected[:, part]) <= bound[:, part]).all()
        assert not dx[label == NO_ROW].any()


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 30.0, "scale": 0.5}, {"return_entropy": True}], ids=len)
def test_no_scores_in_memory(options):
    """A program for Hopper with losses of as many rows as numbers has one array of gradients, and none of scores."""
    arrays = [jax.ShapeDtypeStruct(*v) for v in (((128, 128), BF16), ((128, 8192), BF16), ((128,), np.int32))]
    f = jax.value_and_grad(
        lambda h, w, y: sum(jax.tree.map(jnp.sum, jax.tree.leaves(linear(h, w, y, **options)))), (0, 1)
    )
    with target(HOPPER):
        text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxsoft_head_statistics" in text and "jaxsoft_head_gradients" in text
    assert "xf32>" in text and "8192xf32" not in text
    assert text.count("stablehlo.dot_general") <= 3  # gradients of hidden, and of weight by whole chunks and a rest


@pytest.mark.costly
@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"rows": 1000}, True),
        ({"rows": 16}, False),
        ({"width": 100}, False),
        ({"classes": 50257}, False),
        ({"options": {"label_smoothing": 0.1, "return_entropy": True}}, False),
        ({"dtype": np.dtype(np.float32)}, False),
        ({"options": {"label_smoothing": 0.1}}, True),
        ({"options": {"chunk_size": 1024}}, False),
        ({"bias": True}, True),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, False),
    ],
    ids=str,
)
def test_which_calls_are_served(change, served):
    given = {"rows": 128, "width": 128, "classes": 8192, "dtype": BF16, "options": {}, "bias": False, "kind": HOPPER}
    given |= change
    shapes = [(given["rows"], given["width"]), (given["width"], given["classes"])]
    arrays = [jax.ShapeDtypeStruct(shape, given["dtype"]) for shape in shapes]
    bias = jnp.zeros(given["classes"], given["dtype"]) if given["bias"] else None
    f = lambda h, w: linear(h, w, jnp.zeros(given["rows"], int), bias, **given["options"])  # noqa: E731
    with target(given["kind"]):
        text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("jaxsoft_head_statistics" in text) == served


@pytest.mark.costly(1)
@pytest.mark.parametrize("rows", [128, 300], ids=["in place", "chunks"])
def test_several_platforms(rows):
    """One program for a CPU and for Hopper has the kernels for the latter."""
    shapes = [jax.ShapeDtypeStruct(*v) for v in (((rows, 128), BF16), ((128, 16448), BF16), ((rows,), np.int32))]
    f = jax.jit(jax.grad(lambda h, w, y: jnp.sum(linear(h, w, y)), (0, 1)))
    with target(HOPPER):
        assert "jaxsoft_head_gradients" in f.trace(*shapes).lower(lowering_platforms=("cpu", "cuda")).as_text()


@pytest.mark.filterwarnings("error")
def test_wide_bias():
    """A bias of f64 is one of f32 to the kernels."""
    with jax.enable_x64(True), target(HOPPER):
        shapes = [jax.ShapeDtypeStruct(*v) for v in (((64, 128), BF16), ((128, 512), BF16), ((512,), np.float64))]
        f = jax.jit(jax.grad(lambda h, w, b: jnp.sum(linear(h, w, np.zeros(64, int), b)), (0, 1, 2)))
        text = f.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(r"custom_call @mosaic_gpu.*xf64", text) and "jaxsoft_head_gradients" in text


@pytest.mark.parametrize("rows", [17, 128, 129, 700, 1100, 4096, 65536])
def test_chunks_keep_a_gpu_busy(rows):
    """Of the places that a chunk's tiles have on 132 multiprocessors, turn by turn, few are left."""
    classes = kernels.chunk_size(rows)
    plan = head_plan()
    tiles = -(-rows // plan.block_rows) * classes // plan.classes
    assert classes % plan.classes == 0 and classes >= 4096
    assert tiles >= 0.9 * 132 * -(-tiles // 132)


@on_gpu
@pytest.mark.parametrize("rows", [128, 124, 126, 300, 33], ids=str)
@pytest.mark.parametrize(
    ("options", "moving"),
    [
        ({}, (0, 1)),
        ({}, (0,)),
        ({"logits_soft_cap": 5.0, "z_loss": 0.1, "scale": 0.5}, (0, 1, 2)),
        ({"label_smoothing": 0.1}, (0, 1, 2)),
        ({"return_entropy": True}, (1, 0)),
    ],
    ids=["plain", "frozen", "cap", "smooth", "entropy"],
)
def test_as_chunks(monkeypatch, rows, options, moving):
    """Losses and gradients are those of chunks of the classes."""
    rng = np.random.default_rng(1)
    h, w, b = (rng.standard_normal(shape).astype(BF16) for shape in ((rows, 128), (128, 16448), (16448,)))
    y = rng.integers(0, 16448, rows)
    y[4], y[5], h[6] = -1, -100, np.nan

    def f(h, w, b):
        found = jax.tree.leaves(linear(h, w, y, b if 2 in moving else None, ignore_index=-100, **options))
        weights = np.where(y < 0, 0, np.linspace(1, 2, rows)).astype(np.float32)
        weights[6] = 0
        return sum(jnp.sum(jnp.where(weights > 0, weights * v, 0)) for v in found), found

    def results():
        (_, found), moved = jax.jit(jax.value_and_grad(f, moving, has_aux=True))(h, w, b)
        return [np.asarray(v, np.float64) for v in (*found, *moved)]

    ours = results()
    monkeypatch.setattr(kernels, "refusal", lambda *_: "none serves")
    jax.clear_caches()
    for a, b in zip(ours, results(), strict=True):
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        assert np.linalg.norm(a[finite] - b[finite]) <= 2e-3 * np.linalg.norm(b[finite])
