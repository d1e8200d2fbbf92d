"""Cross-entropy of a linear layer: what float64 gives with all logits in memory, in chunks, and over meshes."""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import as_usual, needs_little_memory, precision, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of
from truth import in_float64, wide

import jaxsoft
from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft._head import chunks, kernels

ROWS, WIDTH, CLASSES = 6, 8, 33
RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((2, 3, WIDTH)).astype(np.float32)
WEIGHT = RNG.standard_normal((WIDTH, CLASSES)).astype(np.float32)
BIAS = RNG.standard_normal(CLASSES).astype(np.float32)
LABELS = np.array([[0, CLASSES - 1, 7], [3, -100, 20]], np.int32)
CLASS_WEIGHTS = RNG.uniform(0.2, 2, CLASSES).astype(np.float32)
FACTORS = np.arange(1.0, ROWS + 1, dtype=np.float32).reshape(LABELS.shape)
SMOOTH = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 5.0}

each_choice = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])


def stored(hidden, weight, labels, bias=None, **options):
    """The same with all logits in memory."""
    with as_usual():
        logits = hidden @ weight if bias is None else hidden @ weight + bias
    return jaxsoft.softmax_cross_entropy_with_integer_labels(logits, labels, implementation="xla", **options)


def with_gradients(f, labels, class_weights, **options):
    """f's losses, logsumexps, and the gradients of sum(FACTORS * losses + logsumexps) by all that has one."""

    def total(operands):
        given = {"class_weights": operands[3]} if class_weights else {}
        loss, lse = f(*operands[:2], labels, operands[2], **options, **given, return_lse=True)
        return jnp.sum(FACTORS[: loss.shape[0]].astype(loss.dtype) * loss + jnp.where(jnp.isfinite(lse), lse, 0)), (
            loss,
            lse,
        )

    return lambda *operands: jax.value_and_grad(total, has_aux=True)(operands)


def assert_close(actual, expected, tolerance):
    """Arrays agree within a tolerance of the largest number of each; infinities and NaN are in the same places."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = wide(a), wide(e)
        assert a.shape == e.shape
        size = np.abs(e, where=np.isfinite(e), out=np.zeros(e.shape)).max(initial=1e-6)
        with np.errstate(invalid="ignore"):
            ok = (np.abs(a - e) <= tolerance * size) | (a == e) | (np.isnan(a) & np.isnan(e))
        assert ok.all(), (np.abs(a - e).max() / size, a, e)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("options", "class_weights", "chunk_size", "recompute"),
    [
        ({"ignore_index": -100}, False, 7, True),
        ({"ignore_index": -100, "label_smoothing": 0.1}, False, 16, True),
        (SMOOTH, True, 8, True),
        (SMOOTH, True, 5, False),
        pytest.param(SMOOTH, False, 11, False, marks=slow),
        pytest.param({"ignore_index": 3, "z_loss": 0.1}, True, 1, False, marks=slow),
        pytest.param({"ignore_index": -100, "label_smoothing": 1.0}, True, None, True, marks=slow),
        pytest.param({"ignore_index": -100, "logits_soft_cap": 1.0}, True, 32, True, marks=slow),
    ],
)
@pytest.mark.parametrize("width", [WIDTH, ROWS], ids=["fewer rows than width", "as many"])
def test_options(options, class_weights, chunk_size, recompute, width):
    """Losses, logsumexps and all gradients, beside float64."""
    labels = LABELS if options["ignore_index"] == -100 else np.abs(LABELS) % CLASSES
    operands = HIDDEN[..., :width], WEIGHT[:width], BIAS, CLASS_WEIGHTS
    ours = functools.partial(linear, chunk_size=chunk_size, recompute=recompute)
    actual = jax.jit(with_gradients(ours, labels, class_weights, **options))(*operands)
    assert_close(actual, in_float64(with_gradients(stored, labels, class_weights, **options), *operands), 2e-6)
    ignored = labels == options["ignore_index"]
    assert not np.asarray(actual[0][1][0])[ignored].any() and not np.asarray(actual[1][0])[ignored].any()


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float64, jnp.float64),
        (jnp.bfloat16, jnp.float32),
        pytest.param(jnp.float16, jnp.float16, marks=slow),
        pytest.param(jnp.float32, jnp.bfloat16, marks=slow),
    ],
    ids=lambda dtype: dtype.__name__,
)
@pytest.mark.parametrize("width", [WIDTH, ROWS], ids=["fewer rows than width", "as many"])
@each_choice
def test_dtypes(dtype, weight_dtype, recompute, width):
    """Each gradient has its operand's dtype and is rounded once; with kept logits, these are rounded too."""
    mixed = as_usual() if dtype != weight_dtype else contextlib.nullcontext()
    with precision(dtype), mixed:
        hidden, weight = HIDDEN[..., :width], WEIGHT[:width]
        operands = hidden.astype(dtype), weight.astype(weight_dtype), BIAS.astype(weight_dtype), None
        f = functools.partial(linear, chunk_size=9, recompute=recompute)
        (_, (loss, lse)), gradients = jax.jit(with_gradients(f, LABELS, False, ignore_index=-100))(*operands)
        product = jnp.promote_types(dtype, weight_dtype)
        chex.assert_type((loss, lse), jaxsoft.fold.accumulator(product))
        chex.assert_type(gradients[:3], [v.dtype for v in operands[:3]])
    expected = in_float64(with_gradients(stored, LABELS, False, ignore_index=-100), *operands)
    exact = 1e-14 if dtype == jnp.float64 else 2e-6
    assert_close((loss, lse), expected[0][1], exact)
    unit = exact + 2 * float(max(jnp.finfo(v.dtype).eps for v in operands[:3]))
    assert_close(gradients, expected[1], unit if recompute or product.itemsize > 2 else 8 * unit)


def on_a_gpu(monkeypatch):
    """Makes every device go through the chunks that a GPU takes, which are of two rows in the forward pass."""
    for name in ("_LEAST_WITHIN", "_TILE"):
        monkeypatch.setattr(chunks, name, 2)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *v, default, cpu=None, cuda=None: (cuda or default)(*v))


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("options", "rows"),
    [({"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 5.0}, 8), ({}, 8), ({}, 7), ({}, 2)],
)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)], ids=["f32", "bf16"])
def test_chunks_of_a_gpu(options, rows, entropy, dtype, monkeypatch):
    """Scores in the memory of the gradient of weight: of rows in the forward pass, and gradients of all that wait."""
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunks, "_OF_WEIGHT", 1 / dtype(0).dtype.itemsize)
    h, w, b = (RNG.standard_normal(s).astype(dtype) for s in ((rows, 8), (8, 3200), (3200,)))
    y = np.array([3199, -100, 0, 7, 1600, 2047, 2048, 5])[:rows]

    def gradients(f):
        def total(h, w, b):
            loss, lse, *more = f(h, w, y, b, return_lse=True, return_entropy=entropy, ignore_index=-100, **options)
            seen = jnp.where(y == -100, 0, lse)
            return jnp.sum(jnp.sin(loss) + jnp.cos(seen) + sum(jnp.sin(v) for v in more)), (loss, *more)

        return lambda *operands: jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*operands)

    lowered = jax.jit(gradients(linear)).lower(h, w, b)
    by_rows = not (options and entropy)  # sums beside the entropy are composed
    assert ("tensor<2x3200xf32>" in lowered.as_text()) == by_rows
    actual, expected = lowered.compile()(h, w, b), in_float64(gradients(stored), h, w, b)
    assert_close(actual[0][1], expected[0][1], 3e-6)
    assert_close(actual[1], expected[1], 1e-5 if dtype == jnp.float32 else 6 * float(jnp.finfo(dtype).eps))


def test_no_chunk_of_a_cpu_waits():
    """There all scores would only be read and written more often."""
    h, w = np.ones((64, 64), np.float32), np.ones((64, 2**15), np.float32)
    f = jax.jit(jax.grad(lambda h, w: jnp.sum(linear(h, w, np.zeros(64, int))), (0, 1)))
    traced = f.trace(h, w)
    whole = re.compile(r"dot_general.*tensor<64x32768xf32>, tensor<64x32768xf32>")
    assert whole.search(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert not whole.search(traced.lower(lowering_platforms=("cpu",)).as_text())


@pytest.mark.cover
@pytest.mark.parametrize("classes", [2048, 2050])
@pytest.mark.parametrize("chunk_size", [None, 300])
def test_rows_of_a_gpu_are_taken_where_that_costs_no_memory(monkeypatch, classes, chunk_size):
    """Not without a gradient of weight, nor where XLA would copy weight to align its rows, or classes are counted.

    That is where no kernel keeps the scores in registers.
    """
    monkeypatch.setattr(kernels, "refusal", lambda *_: "none serves")
    h, w = np.ones((2048, 2048), jnp.bfloat16), np.ones((2048, classes), jnp.bfloat16)

    def of_rows(f):
        text = jax.jit(f).trace(h, w).lower(lowering_platforms=("cuda",)).as_text()
        return bool(re.search(rf"dot_general.*-> tensor<512x{classes}xf32>", text))

    f = lambda h, w: jnp.sum(linear(h, w, np.zeros(2048, int), chunk_size=chunk_size))  # noqa: E731
    assert of_rows(jax.grad(f, (0, 1))) == of_rows(jax.grad(f, 1)) == (chunk_size is None and classes == 2048)
    assert not of_rows(f) and not of_rows(jax.grad(f))
    h = h.astype(jnp.float32)  # each chunk would convert all of weight
    with jax.numpy_dtype_promotion("standard"):
        assert not of_rows(jax.grad(f, (0, 1)))


@pytest.mark.costly(1)
@pytest.mark.parametrize("width", [64, 96], ids=["as many rows as width", "fewer"])
@pytest.mark.parametrize("entropy", [False, True])
def test_kept_logits_are_as_exact_as_stored_ones(entropy, width):
    """Their rounding moves the logsumexp, too: gradients follow the probabilities of the rounded logits."""
    rows, classes = 64, 3000
    h = RNG.standard_normal((rows, width)).astype(jnp.bfloat16)
    w = (RNG.standard_normal((width, classes)) * 5 / width**0.5).astype(jnp.bfloat16)
    y = RNG.integers(0, classes, rows)

    def gradients(f, **options):
        def total(h, w):
            loss, *more = f(h, w, y, return_entropy=entropy, **options) if entropy else (f(h, w, y, **options),)
            return jnp.sum(loss) + sum(jnp.sum(v) for v in more)

        return jax.grad(total, (0, 1))

    expected = in_float64(gradients(stored), h, w)

    def errors(f, **options):
        found = jax.jit(gradients(f, **options))(h, w)
        return np.array([np.linalg.norm(wide(a) - e) / np.linalg.norm(e) for a, e in zip(found, expected, strict=True)])

    of_stored = errors(stored)
    assert (errors(linear, chunk_size=512, recompute=False) < 1.2 * of_stored).all()
    assert (errors(linear, chunk_size=512) < of_stored).all()


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("classes", "chunk_size"), [(31, 30), (1, None), (1, 1), (2, 1), (31, 31), (31, 32), (31, None)]
)
def test_chunks(classes, chunk_size):
    """One class, chunks of one, and a last chunk of one."""
    weight, labels = WEIGHT[:, :classes], LABELS % classes

    def f(function, **options):
        return lambda h, w: jax.value_and_grad(lambda h, w: jnp.sum(function(h, w, labels, **options)), (0, 1))(h, w)

    actual = jax.jit(f(linear, chunk_size=chunk_size))(HIDDEN, weight)
    assert_close(actual, in_float64(f(stored), HIDDEN, weight), 2e-6)


def test_one_row_and_none():
    """hidden of one dimension, no rows, and rows of no numbers."""
    one = HIDDEN[0, 0], WEIGHT, LABELS[0, 0]
    assert_close(linear(*one), in_float64(lambda: stored(wide(one[0]), wide(WEIGHT), one[2])), 2e-6)
    nothing = linear(HIDDEN[:, :0], WEIGHT, LABELS[:, :0])
    assert nothing.shape == (2, 0) and nothing.dtype == jnp.float32
    for bias, labels in ((None, np.abs(LABELS)), (BIAS, np.abs(LABELS) % CLASSES)):
        f = lambda w, b, g: jnp.sum(jnp.sin(g(HIDDEN[..., :0], w, labels, b)))  # noqa: E731,B023
        given = WEIGHT[:0], bias if bias is not None else np.zeros(CLASSES, np.float32)
        both = jax.jit(lambda *v: [jax.value_and_grad(f, (0, 1))(*v, g) for g in (linear, stored)])  # noqa: B023
        assert_close(*both(*given), 2e-6)


@each_choice
def test_certainty(recompute):
    """Where a label is nearly certain, loss and gradient have all their digits: -log(p) is far below an ulp of 1."""
    apart = np.array([20.0, 40.0, 60.0])
    hidden, weight = np.eye(3, dtype=np.float32), np.zeros((3, 5), np.float32)
    weight[:, 2] = apart
    f = functools.partial(linear, labels=np.full(3, 2), chunk_size=2, recompute=recompute)

    @jax.jit
    def both(hidden, weight):
        loss, pull = jax.vjp(f, hidden, weight)
        return loss, pull(jnp.ones(3, jnp.float32))[1]

    loss, dw = both(hidden, weight)
    np.testing.assert_allclose(loss, 4 * np.exp(-apart), rtol=1e-5)
    np.testing.assert_allclose(dw[:, 2], -4 * np.exp(-apart), rtol=1e-5)
    np.testing.assert_allclose(dw[:, 3], np.exp(-apart), rtol=1e-5)


@pytest.mark.costly(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_special_values(smoothing):
    """Labels out of range, labels and other classes of -inf, NaN, nothing but -inf: as with all logits in memory."""
    labels = np.array([[0, -1, CLASSES], [3, -100, 20]])
    options = {"ignore_index": -100, "label_smoothing": smoothing}
    bias = np.where(np.arange(CLASSES) % 5 == 3, -np.inf, BIAS).astype(np.float32)  # the label 3's too
    ours = jax.jit(functools.partial(linear, chunk_size=4, **options, return_lse=True))
    theirs = jax.jit(functools.partial(stored, **options, return_lse=True))
    for b in (bias, np.full_like(bias, -np.inf), np.where(np.arange(CLASSES) == 9, np.inf, bias)):
        assert_close(ours(HIDDEN, WEIGHT, labels, b), theirs(HIDDEN, WEIGHT, labels, b), 2e-6)
    loss = ours(HIDDEN, WEIGHT, labels, bias)[0]
    assert np.isnan(loss[0, 1:]).all() and np.isposinf(loss[1, 0]) and loss[1, 1] == 0 and np.isfinite(loss[0, 0])
    nothing = np.where(np.arange(CLASSES) == 9, np.nan, -np.inf).astype(np.float32)
    assert np.isnan(ours(HIDDEN, WEIGHT, labels, nothing)[0]).tolist() == [[True] * 3, [True, False, True]]
    valid = np.abs(labels) % CLASSES

    def gradients(function, **options):
        total = lambda *v: jnp.sum(jnp.where(valid == 3, 0, function(*v, valid, bias, **options)))  # noqa: E731
        return jax.grad(total, (0, 1))

    actual = jax.jit(gradients(linear, chunk_size=4))(HIDDEN, WEIGHT)
    assert_close(actual, in_float64(gradients(stored), HIDDEN, WEIGHT), 2e-6)


@slow  # test_higher_orders has the second order
@each_choice
def test_every_kind_of_derivative(recompute):
    """Forward mode, and second order by every way there is, beside logits in memory."""
    with jax.enable_x64(True):
        operands = wide(HIDDEN[0]), wide(WEIGHT), wide(BIAS), wide(CLASS_WEIGHTS)
        tangents = [np.cos(v) for v in operands]

        def results(function, **options):
            def total(*operands):
                given = {**SMOOTH, **options, "class_weights": operands[3]}
                return jnp.sum(jnp.sin(function(*operands[:2], LABELS[1], operands[2], **given)))

            def along(*operands):
                return sum(map(jnp.vdot, jax.grad(jax.checkpoint(total), (0, 1))(*operands), tangents))

            hidden = jax.grad(lambda h: total(h, *operands[1:]))
            return (
                jax.jvp(total, operands, tuple(tangents))[1],
                jax.grad(along, (0, 1, 3))(*operands),
                jax.jvp(hidden, operands[:1], tuple(tangents[:1]))[1],
            )

        actual = jax.jit(lambda: results(linear, chunk_size=16, recompute=recompute))()
        assert_close(actual, jax.jit(lambda: results(stored))(), 1e-12)


def test_only_what_is_asked_for():
    """Without a gradient by the weights, its product is not computed; nor are kept logits without a gradient."""

    def products(f):
        return jax.jit(f).lower(HIDDEN, WEIGHT).as_text().count("dot_general")

    def total(h, w, recompute=True):
        return jnp.sum(linear(h, w, np.abs(LABELS), recompute=recompute))

    assert products(total) == 1
    assert products(jax.grad(total)) == products(jax.grad(total, 1)) == 3
    assert products(jax.grad(total, (0, 1))) == 4
    assert products(jax.grad(functools.partial(total, recompute=False), (0, 1))) == 3


@each_choice
def test_what_is_kept(recompute):
    """Reverse mode keeps the operands and a few numbers a row; and the logits if told to."""
    pull = jax.vjp(lambda h, w: linear(h, w, LABELS, ignore_index=-100, recompute=recompute), HIDDEN, WEIGHT)[1]
    shapes = {v.shape for v in jax.tree.leaves(pull) if hasattr(v, "shape")}
    kept = set() if recompute else {(*LABELS.shape, CLASSES)}
    assert shapes == {HIDDEN.shape, WEIGHT.shape, LABELS.shape} | kept


@needs_little_memory
@pytest.mark.costly(1)
@pytest.mark.parametrize("width", [128, 512], ids=["more rows than width", "as many"])
def test_memory(width):
    """Forward and backward take a small part of the memory of the logits."""
    rows, classes = 512, 2**19
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, width), (width, classes))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    f = jax.value_and_grad(lambda h, w, y: jnp.mean(linear(h, w, y)), (0, 1))
    extra = jax.jit(f).lower(*types, labels).compile().memory_analysis().temp_size_in_bytes
    assert extra < rows * classes * 2 / 8


def test_precision():
    """That of the products is what is configured when the function is traced."""
    f = jax.grad(lambda h, w: jnp.sum(linear(h, w, np.abs(LABELS))), (0, 1))
    with jax.default_matmul_precision("highest"):
        traced = jax.jit(f).trace(HIDDEN, WEIGHT)
    assert traced.lower().as_text().count("precision = [HIGHEST, HIGHEST]") == 4


@slow  # test_every_function maps all operands but labels, and the test of reductions those
@each_choice
def test_vmap(recompute):
    """More rows, weights that are mapped, labels that are, and gradients of maps and maps of gradients."""
    f = functools.partial(linear, chunk_size=16, recompute=recompute, ignore_index=-100)
    g = functools.partial(stored, ignore_index=-100)
    weights = np.stack([WEIGHT, 2 * WEIGHT], axis=1)

    def cases(f):
        def gradients(h, w, y):
            return jax.grad(lambda h, w: jnp.sum(jnp.sin(f(h, w, y, BIAS))), (0, 1))(h, w)

        def total(h, w):
            return jnp.sum(jnp.sin(jax.vmap(f, (0, None, 0, None))(h, w, LABELS, BIAS)))

        return (
            jax.grad(total, (0, 1))(HIDDEN, WEIGHT),
            jax.vmap(gradients, (0, None, 0))(HIDDEN, WEIGHT, LABELS),
            jax.vmap(gradients, (None, 1, None))(HIDDEN, weights, LABELS),
        )

    assert_close(jax.jit(lambda: cases(f))(), jax.jit(lambda: cases(g))(), 2e-6)


def test_gradients_of_a_map_are_summed_over_its_rows():
    """vmap over batches adds rows to the loop, so that no gradient by the weights is computed for each batch."""
    f = jax.vmap(functools.partial(linear, ignore_index=-100), (0, None, 0))
    text = jax.jit(jax.grad(lambda w: jnp.sum(f(HIDDEN, w, LABELS)))).lower(WEIGHT).as_text()
    assert f"tensor<2x{WIDTH}x{CLASSES}xf32>" not in text


needs_mesh = pytest.mark.skipif(DEVICES < 8, reason="needs eight devices, which a CPU can pretend to have")
H = RNG.standard_normal((8, 4, 8)).astype(np.float32)
W = RNG.standard_normal((8, 64)).astype(np.float32)
B = RNG.standard_normal(64).astype(np.float32)
Y = RNG.integers(0, 64, (8, 4)).astype(np.int32)
Y[0, 0], Y[1, 1] = -100, 63


def of_mesh(f, **options):
    def total(h, w, b, y):
        return jnp.sum(jnp.sin(f(h, w, y, b, ignore_index=-100, label_smoothing=0.1, **options)))

    return jax.value_and_grad(total, (0, 1, 2))


@pytest.mark.costly(1)
@needs_mesh
@pytest.mark.parametrize(
    ("rows", "weight", "kind", "recompute"),
    [
        (P("a"), P(None, "b"), AxisType.Auto, True),
        (P("a", "b"), P(), AxisType.Explicit, True),
        (P(), P(None, ("a", "b")), AxisType.Auto, False),
        pytest.param(P("a"), P(None, "b"), AxisType.Auto, False, marks=slow),
        pytest.param(P(), P(None, "b"), AxisType.Auto, True, marks=slow),
        pytest.param(P("a"), P("a", None), AxisType.Auto, True, marks=slow),
        pytest.param(P("a"), P("b", None), AxisType.Explicit, False, marks=slow),
    ],
)
def test_mesh(rows, weight, kind, recompute):
    """Rows and classes over a mesh: what moves is numbers of rows, and the gradients that are sums over devices."""
    mesh = mesh_of(kind)
    classes = P(weight[1]) if len(weight) > 1 else P()
    specs = rows, weight, classes, rows
    args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((H, W, B, Y), specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(of_mesh(linear, chunk_size=6, recompute=recompute)).lower(*args).compile()
    assert_close(compiled(*args), in_float64(lambda *v: of_mesh(stored)(*v, Y), H, W, B), 5e-6)
    per_row = int(np.prod(NamedSharding(mesh, rows).shard_shape(Y.shape)))
    local = NamedSharding(mesh, weight).shard_shape(W.shape)
    whole, devices = (W.shape[0], local[1]), W.shape[1] // local[1]
    allowed = [
        *[per_row * 8] * (devices > 1),  # of hidden's gradient
        *([int(np.prod(whole)), whole[1], 1] if rows else []),  # of the weights', the bias', and the total
        *([1] if len(rows) > 1 else []),
    ]
    moved = collectives(compiled)
    gathers = [shape for name, shape in moved if name == "all-gather"]
    expected = [W.shape] if local[0] != W.shape[0] else []  # weights that are sharded along hidden
    expected += [(devices, 5, per_row)] * (devices > 1)  # m and s, the label's score, two sums
    assert gathers == expected, moved
    sizes = sorted(int(np.prod(shape)) for name, shape in moved if name == "all-reduce")
    assert len(moved) == len(sizes) + len(gathers), moved
    in_chunks = (
        2 if rows else 0
    )  # more of the weights', which are summed in up to three chunks: of the loop, and after it
    assert len(sizes) <= len(allowed) + in_chunks and sum(sizes) <= sum(allowed), (moved, allowed)


@pytest.mark.costly(1)
@needs_mesh
@pytest.mark.parametrize("weight", [P(None, "b"), P()], ids=["sharded", "whole"])
def test_chunks_of_gpus(weight, monkeypatch):
    """Each device takes as many rows as hidden has numbers, by the chunks of a GPU."""
    on_a_gpu(monkeypatch)
    mesh = mesh_of(AxisType.Auto)
    h, w = H[:, :2].reshape(16, 8), np.tile(W, 80)
    y = RNG.integers(0, w.shape[1], 16)

    def gradients(f):
        return jax.value_and_grad(lambda h, w, y: jnp.sum(jnp.sin(f(h, w, y))), (0, 1))

    specs = P("a"), weight, P("a")
    args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((h, w, y), specs, strict=True)]
    with jax.set_mesh(mesh):
        actual = jax.jit(gradients(linear))(*args)
    assert_close(actual, in_float64(lambda *v: gradients(stored)(*v, y), h, w), 2e-5)


@pytest.mark.costly(1)
@needs_mesh
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=slow)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "logits_soft_cap": 3.0}], ids=["plain", "smoothed"])
def test_entropy_of_sharded_classes(kind, options):
    """The entropy of chunks that lie on several devices, and its gradients."""

    def gradients(f):
        def total(h, w, y):
            loss, lse, entropy = f(h, w, y, return_lse=True, return_entropy=True, ignore_index=-100, **options)
            every = jnp.sin(loss) + jnp.cos(entropy) + jnp.where(y == -100, 0, jnp.sin(lse))
            return jnp.sum(every), (loss, entropy)

        return jax.value_and_grad(total, (0, 1), has_aux=True)

    expected = in_float64(lambda h, w: gradients(stored)(h, w, Y), H, W)
    ours = jax.jit(gradients(functools.partial(linear, chunk_size=6)))
    assert_close(ours(H, W, Y), expected, 5e-6)
    mesh = mesh_of(kind)
    args = [
        jax.device_put(v, NamedSharding(mesh, s))
        for v, s in zip((H, W, Y), (P("a"), P(None, "b"), P("a")), strict=True)
    ]
    with jax.set_mesh(mesh):
        assert_close(ours(*args), expected, 5e-6)


@needs_mesh
def test_class_weights_over_explicit_axes():
    """The weight of each label's class goes where the label is, from weights that are sharded as the classes are."""

    def gradients(f):
        def total(h, w, c, y):
            return jnp.sum(f(h, w, y, class_weights=c, ignore_index=-100, label_smoothing=0.1))

        return jax.value_and_grad(total, (0, 1, 2))

    class_weights = np.exp(B)
    expected = in_float64(lambda *v: gradients(stored)(*v, Y), H, W, class_weights)
    mesh = mesh_of(AxisType.Explicit)
    specs = P("a"), P(None, "b"), P("b"), P("a")
    given = zip((H, W, class_weights, Y), specs, strict=True)
    args = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in given]
    with jax.set_mesh(mesh):
        both = [gradients(f) for f in (functools.partial(linear, chunk_size=6), stored)]
        for actual in jax.jit(lambda *v: [g(*v) for g in both])(*args):
            assert_close(actual, expected, 5e-6)


@needs_mesh
def test_whole_labels_over_explicit_axes():
    """Labels that are on every device, beside rows that are sharded."""

    def gradient(f):
        return jax.grad(lambda h: jnp.sum(f(h, W, Y, ignore_index=-100)))

    both = [gradient(f) for f in (functools.partial(linear, chunk_size=6), stored)]
    expected, mesh = in_float64(both[1], H), mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = [jax.device_put(H, NamedSharding(mesh, spec)) for spec in (P("a"), P(("a", "b")), P())]
        for actual in jax.jit(lambda args: [g(h) for g in both for h in args])(args):
            assert_close(actual, expected, 5e-6)


@needs_mesh
@pytest.mark.parametrize("manual", [pytest.param({"a", "b"}, marks=slow), {"a"}], ids=["fully", "partially"])
def test_shard_map(manual):
    """Rows that are shard_map's: the gradients by what all rows share are summed over them.

    The test of reductions has a mesh all of whose axes are shard_map's by default.
    """
    mesh = mesh_of(AxisType.Auto)
    expected = in_float64(lambda *v: of_mesh(stored)(*v, Y), H, W, B)
    spec = P("a", "b" if "b" in manual else None)

    def f(h, w, y, b, **options):
        def local(h, w, y, b):
            return linear(h, w, y, b, chunk_size=20, **options)

        return jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec, P()), out_specs=spec, axis_names=manual)(
            h, w, y, b
        )

    assert_close(jax.jit(of_mesh(f))(H, W, B, Y), expected, 5e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": np.float32(1)}, ValueError, r"hidden must have the shape \(\.\.\., d\)"),
        ({"hidden": HIDDEN.astype(np.complex64)}, TypeError, "hidden must hold float16"),
        ({"weight": WEIGHT.T}, ValueError, r"weight must have the shape \(8, classes\); got shape \(33, 8\)"),
        ({"weight": WEIGHT.astype(jnp.float8_e4m3fn)}, TypeError, "weight must hold float16"),
        ({"bias": BIAS[1:]}, ValueError, r"bias must have the shape \(33,\)"),
        ({"labels": LABELS[0]}, ValueError, "labels must have the shape"),
        ({"labels": HIDDEN[..., 0]}, TypeError, "labels must hold integers"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be None or an integer that is known"),
        ({"recompute": 1}, TypeError, "recompute must be True or False"),
        ({"label_smoothing": 2}, ValueError, "label_smoothing must be between 0 and 1"),
        ({"class_weights": BIAS[1:]}, ValueError, "class_weights must have one number"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        linear(**{"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **arguments})
