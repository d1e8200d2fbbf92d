"""The mean and the sum of the losses of a linear layer: the gradients of one pass over rows, beside float64."""

import functools
import re

import chex
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import as_usual, needs_library, precision, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of
from truth import in_float64, wide

from jaxsoft import linear_softmax_cross_entropy as linear
from jaxsoft._head import chunks, in_place
from jaxsoft._head.chunks import default_row_chunk

ROWS, WIDTH, CLASSES = 12, 8, 33
RNG = np.random.default_rng(1)
HIDDEN = RNG.standard_normal((4, 3, WIDTH)).astype(np.float32)
WEIGHT = RNG.standard_normal((WIDTH, CLASSES)).astype(np.float32)
BIAS = RNG.standard_normal(CLASSES).astype(np.float32)
CLASS_WEIGHTS = RNG.uniform(0.2, 2, CLASSES).astype(np.float32)
ROW_WEIGHTS = RNG.uniform(0.2, 2, (4, 3)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, (4, 3)).astype(np.int32)
LABELS[0, 1], LABELS[3, 0], LABELS[2, 2] = -100, 0, CLASSES - 1
NAMES = ("bias", "class_weights", "row_weights")
ALL = (HIDDEN, WEIGHT, BIAS, CLASS_WEIGHTS, ROW_WEIGHTS)
IGNORED = {"ignore_index": -100}
SMOOTH = {**IGNORED, "label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 5.0}

each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum"])


def total(labels=LABELS, **options):
    """jaxsoft's loss as a function of hidden, weight, bias, class weights and row weights."""
    return lambda h, w, *rest: linear(h, w, labels, **dict(zip(NAMES, rest, strict=False)), **options)


def defined(labels=LABELS, **options):
    """The same by definition."""

    def f(h, w, *rest):
        given = dict.fromkeys(NAMES) | dict(zip(NAMES, rest, strict=False))
        return definitions.linear_cross_entropy(h, w, *given.values(), labels, **options)[0]

    return f


def assert_close(actual, expected, tolerance):
    """Arrays agree within a tolerance of the largest number of each."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        error = np.abs(wide(a) - wide(e)).max(initial=0) / np.abs(wide(e)).max(initial=1e-6)
        assert error <= tolerance, (error, a, e)


def with_gradients(f, count=5):
    return lambda *operands: jax.value_and_grad(f, tuple(range(count)))(*operands)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("options", "chunk_size"),
    [
        (IGNORED, 5),
        (SMOOTH, 4),
        pytest.param({**IGNORED, "label_smoothing": 1.0, "scale": 3}, 1, marks=slow),
        pytest.param({**SMOOTH, "scale": -0.4}, None, marks=slow),
        pytest.param({**IGNORED, "z_loss": 0.1, "scale": 1e-3}, 12, marks=slow),
        pytest.param({**IGNORED, "logits_soft_cap": 1.0}, 100, marks=slow),
    ],
)
@pytest.mark.parametrize("rows", [4, 2], ids=["more rows than width", "fewer"])
@each_reduction
def test_options(options, chunk_size, rows, reduction):
    """The loss and all gradients, with chunks of rows that are added up, and that wait in the gradient of weight."""
    h, y, u = HIDDEN[:rows], LABELS[:rows], ROW_WEIGHTS[:rows]
    operands = h, WEIGHT, BIAS, CLASS_WEIGHTS, u
    given = {**options, "reduction": reduction}
    actual = jax.jit(with_gradients(total(y, chunk_size=chunk_size, **given)))(*operands)
    assert_close(actual, in_float64(with_gradients(defined(y, **given)), *operands), 3e-6)
    assert not np.asarray(actual[1][0])[y == -100].any()


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [IGNORED, {**SMOOTH, "scale": -0.4}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_as_many_rows_as_width(options, dtype, missing, monkeypatch):
    """All logits then have the shape of the gradient of weight, and one chunk of all rows, or few more, is there."""
    for name, value in {"_LEAST_ROWS": 2, "_CHUNK_BYTES": 4, "_TILE": 2}.items():
        monkeypatch.setattr(chunks, name, value)
    monkeypatch.setattr(in_place, "_MISSING", 1 / WIDTH)
    h, y, u = (v.reshape(ROWS, -1)[: WIDTH - missing] for v in (HIDDEN, LABELS, ROW_WEIGHTS))
    operands = *(v.astype(dtype) for v in (h, WEIGHT, BIAS)), u[:, 0]
    given = {**options, "reduction": "mean"}

    def f(h, w, b, u):
        return linear(h, w, y[:, 0], b, row_weights=u, **given)

    def g(h, w, b, u):
        return defined(y[:, 0], **given)(h, w, b, jnp.ones(CLASSES), u)

    lowered = jax.jit(with_gradients(f, 4)).lower(*operands)
    kept = missing <= 1
    scores = rf"contracting_dims = \[1\] x \[0\].*-> tensor<{WIDTH}x{CLASSES}x"
    assert bool(re.search(scores, lowered.as_text())) == kept
    assert (f"tensor<2x{CLASSES}x" not in lowered.as_text()) == kept
    tolerance = 3e-6 if dtype == jnp.float32 else 6 * float(jnp.finfo(dtype).eps)
    assert_close(lowered.compile()(*operands), in_float64(with_gradients(g, 4), *operands), tolerance)


@pytest.mark.costly(1)
@each_reduction
def test_the_same_without_a_derivative(reduction):
    """The loss alone, and beside what takes the other way, has the same value."""
    f = functools.partial(linear, labels=LABELS, reduction=reduction, chunk_size=5, row_weights=ROW_WEIGHTS)
    expected = in_float64(
        defined(reduction=reduction, **IGNORED), *ALL[:2], np.zeros(CLASSES), np.ones(CLASSES), ALL[4]
    )
    beside = {"return_lse": True, "return_entropy": True, **IGNORED}
    alone, (loss, lse, entropy), each, weighted = jax.jit(
        lambda h, w: (
            f(h, w, **IGNORED),
            f(h, w, **beside),
            linear(h, w, LABELS, **beside),
            linear(h, w, LABELS, row_weights=ROW_WEIGHTS, **IGNORED),
        )
    )(HIDDEN, WEIGHT)
    assert_close([alone, loss], [expected, expected], 2e-6)
    counts = LABELS != -100
    assert_close((np.asarray(lse)[counts], entropy), (np.asarray(each[1])[counts], each[2]), 1e-6)
    assert_close(weighted, ROW_WEIGHTS * np.asarray(each[0]), 1e-6)


@pytest.mark.costly(1)
@each_reduction
def test_gradients_beside_logsumexps(reduction):
    """With the logsumexps, the losses' gradients no longer have one factor: they are right, too."""

    def f(h, w):
        loss, lse = linear(h, w, LABELS, reduction=reduction, return_lse=True, **IGNORED)
        return loss + jnp.sum(jnp.where(LABELS == -100, 0, lse))

    def g(h, w):
        logits = h @ w
        lse = jax.nn.logsumexp(logits, axis=-1)
        return defined(reduction=reduction, **IGNORED)(h, w) + jnp.sum(jnp.where(LABELS == -100, 0, lse))

    assert_close(jax.jit(with_gradients(f, 2))(*ALL[:2]), in_float64(with_gradients(g, 2), *ALL[:2]), 3e-6)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float64, jnp.float64),
        (jnp.bfloat16, jnp.float32),
        pytest.param(jnp.float32, jnp.bfloat16, marks=slow),
    ],
    ids=lambda dtype: dtype.__name__,
)
@pytest.mark.parametrize("rows", [4, 2], ids=["more rows than width", "fewer"])
def test_dtypes(dtype, weight_dtype, rows):
    """Each gradient has its operand's dtype; logits are rounded to that of the products."""
    with precision(dtype), as_usual():
        operands = HIDDEN[:rows].astype(dtype), WEIGHT.astype(weight_dtype), BIAS.astype(weight_dtype)
        f = with_gradients(total(LABELS[:rows], reduction="mean", chunk_size=5, **IGNORED), 3)
        loss, gradients = jax.jit(f)(*operands)
        product = jnp.promote_types(dtype, weight_dtype)
        chex.assert_type(loss, jnp.promote_types(product, jnp.float32))
        chex.assert_type(gradients, [v.dtype for v in operands])
    expected = in_float64(with_gradients(defined(LABELS[:rows], reduction="mean", **IGNORED), 3), *operands)
    unit = 1e-14 if dtype == jnp.float64 else max(3e-6, 4 * float(jnp.finfo(product).eps))
    assert_close(loss, expected[0], unit)
    rounded = float(max(jnp.finfo(v.dtype).eps for v in operands))
    assert_close(gradients, expected[1], unit + 4 * rounded)


def test_f16_has_room_for_a_factor():
    """Gradients of a mean over many classes and rows are too small for f16, until they are multiplied by a factor."""
    h = np.tile(HIDDEN.reshape(ROWS, WIDTH), (40, 1)).astype(np.float16)
    w, y = np.tile(WEIGHT, 30).astype(np.float16), np.tile(np.abs(LABELS.reshape(-1)), 40)
    y = y % w.shape[1]
    gradient = jax.jit(jax.grad(lambda h: 2**12 * linear(h, w, y, reduction="mean")))(h)
    expected = in_float64(jax.grad(lambda *v: 2**12 * defined(y, reduction="mean")(*v)), h, w)
    assert_close(gradient, expected, 4e-3)


def test_only_what_is_asked_for():
    """One product for the loss, two with the gradient of either factor, three with both: no logit is computed twice."""

    def products(f):
        text = jax.jit(lambda h, w: f(h, w)).lower(HIDDEN, WEIGHT).as_text()
        return text.count("dot_general")

    f = total(np.abs(LABELS) % CLASSES, reduction="mean")
    assert products(f) == 1
    assert products(jax.grad(f)) == products(jax.grad(f, 1)) == 2
    assert products(jax.grad(f, (0, 1))) == 3


def test_what_is_kept():
    """Reverse mode keeps the operands and the gradients."""
    pull = jax.vjp(total(reduction="mean", **IGNORED), HIDDEN, WEIGHT)[1]
    shapes = {v.shape for v in jax.tree.leaves(pull) if hasattr(v, "shape")}
    assert shapes == {HIDDEN.shape, WEIGHT.shape, LABELS.shape}


@pytest.mark.parametrize(
    ("rows", "classes", "itemsize", "size"),
    [
        (0, 128_256, 2, 1),
        (1046, 128_256, 2, 1046),  # in 2^28 bytes
        (1047, 128_256, 2, 768),
        (4096, 128_256, 2, 1024),
        (4100, 128_256, 2, 1280),
        (4096, 10**6, 4, 1024),  # more than these bytes
        (60_000, 1000, 4, 60_000),
        (70_000, 1000, 4, 35_072),
        (5, 0, 2, 5),
    ],
)
def test_default_chunks(rows, classes, itemsize, size):
    assert default_row_chunk(rows, classes, itemsize) == size


@pytest.mark.costly(1)
@pytest.mark.parametrize("width", [512, 64], ids=["fewer rows than width", "more"])
def test_memory(width):
    """No array of all logits: chunks, and no more than the gradient of weight where they wait for it."""
    rows, classes, chunk = 512, 2**14, 64
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, width), (width, classes))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    f = jax.value_and_grad(lambda h, w, y: linear(h, w, y, reduction="mean", chunk_size=chunk), (0, 1))
    compiled = jax.jit(f).lower(*types, labels).compile()
    sizes = {int(a) * int(b) for a, b in re.findall(r"f32\[(\d+),(\d+)\]", compiled.as_text())}
    assert max(sizes) == max(width, chunk) * classes
    if jax.default_backend() == "cpu":  # on a GPU cuBLAS takes a workspace of as many bytes as these logits
        assert compiled.memory_analysis().temp_size_in_bytes < rows * classes * 4 / 2


def test_the_cotangent_of_training_costs_nothing():
    """XLA drops the multiplication of the gradients by 1."""

    def multiplied(f):
        text = jax.jit(jax.grad(f, 1)).lower(HIDDEN, WEIGHT).compile().as_text()
        return re.findall(rf"f32\[{WIDTH},{CLASSES}\]\S* multiply\(", text)

    f = total(reduction="mean", **IGNORED)
    assert not multiplied(f) and multiplied(lambda h, w: jnp.sin(f(h, w)))


@each_reduction
def test_nothing_counts(reduction):
    """All rows are ignored, or there are none, or their weights sum to 0: 0, and gradients of 0."""
    f = with_gradients(lambda h, w, u, y: linear(h, w, y, row_weights=u, reduction=reduction, **IGNORED), 3)
    everything = HIDDEN, WEIGHT, np.full_like(ROW_WEIGHTS, np.nan), np.full_like(LABELS, -100)
    nothing = HIDDEN[:, :0], WEIGHT, ROW_WEIGHTS[:, :0], LABELS[:, :0]
    for operands in (everything, nothing):
        assert all(not np.asarray(v).any() for v in jax.tree.leaves(jax.jit(f)(*operands)))
    loss, (dh, dw, _) = jax.jit(f)(HIDDEN, WEIGHT, np.zeros_like(ROW_WEIGHTS), LABELS)
    assert loss == 0 and not dh.any() and not dw.any()


def test_a_mean_over_weights_that_cancel():
    """Weights whose sum is 0, though none of them is, have the mean 0, and gradients of 0."""
    weights = np.where(np.arange(ROWS).reshape(4, 3) % 2, 1, -1).astype(np.float32)
    f = lambda h, w, u: linear(h, w, np.abs(LABELS) % CLASSES, row_weights=u, reduction="mean")  # noqa: E731
    assert all(not np.asarray(v).any() for v in jax.tree.leaves(jax.jit(with_gradients(f, 3))(*ALL[:2], weights)))


def test_rows_without_a_weight_or_a_class():
    """hidden of one dimension, weights that are broadcast, one class, and rows of no numbers."""
    assert_close(
        linear(HIDDEN[0, 0], WEIGHT, LABELS[0, 0], reduction="mean"), linear(HIDDEN[0, 0], WEIGHT, LABELS[0, 0]), 1e-6
    )
    of_last = functools.partial(linear, HIDDEN, WEIGHT, LABELS, reduction="mean", **IGNORED)
    assert_close(of_last(row_weights=ROW_WEIGHTS[:1]), of_last(row_weights=np.tile(ROW_WEIGHTS[:1], (4, 1))), 1e-6)
    assert linear(HIDDEN, WEIGHT[:, :1], np.zeros_like(LABELS), reduction="sum", chunk_size=5) == 0
    assert_close(linear(HIDDEN[..., :0], WEIGHT[:0], LABELS, reduction="mean", **IGNORED), np.log(33.0), 1e-6)


def test_special_values():
    """A label out of range makes the loss NaN, and leaves the gradients of the others finite."""
    labels = np.where(LABELS == 0, CLASSES, LABELS)
    loss, (dh, dw) = jax.jit(with_gradients(total(labels, reduction="mean", chunk_size=5, **IGNORED), 2))(*ALL[:2])
    assert np.isnan(loss) and np.isfinite(dh).all() and np.isfinite(dw).all()
    bias = np.where(np.arange(CLASSES) % 5 == 3, -np.inf, BIAS).astype(np.float32)
    valid = np.where(LABELS % 5 == 3, 1, LABELS)
    f = with_gradients(lambda h, w: linear(h, w, valid, bias, reduction="mean", chunk_size=5, **IGNORED), 2)
    g = with_gradients(lambda h, w: defined(valid, reduction="mean", **IGNORED)(h, w, wide(bias)), 2)
    assert_close(jax.jit(f)(*ALL[:2]), in_float64(g, *ALL[:2]), 3e-6)


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, SMOOTH], ids=["rows", "classes", "smoothed"])
@pytest.mark.parametrize("reduction", ["mean", "sum", None])
def test_weights_of_0(reduction, options):
    """A row whose weight is 0 adds 0 whatever its label is, in all derivatives of both orders, too."""
    bias = np.where(np.arange(CLASSES) == 3, -np.inf, BIAS).astype(np.float32)
    y, u = np.where(LABELS == 3, 1, LABELS), ROW_WEIGHTS.copy()
    zeros = ([0, 1, 2, 3], [0, 1, 1, 2])
    y[zeros], u[zeros] = [-1, CLASSES, 3, 2], 0  # two labels out of range, one whose loss is infinite, and another
    safe = np.where((y < 0) & (y != -100) | (y == CLASSES) | (y == 3), 1, y)
    options = {**IGNORED, **options, "reduction": reduction, "chunk_size": 5}

    def every(h, w, u, y):
        def f(*v):
            found = linear(*v[:2], y, bias, row_weights=v[2], **options)
            return jnp.sum(jnp.sin(found[0] if "return_lse" in options else found))

        def along(*v):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, (0, 1))(*v))

        return f(h, w, u), jax.grad(f, (0, 1, 2))(h, w, u), jax.grad(along, (0, 1))(h, w, u)

    found, known = (jax.jit(every)(HIDDEN, WEIGHT, u, labels) for labels in (y, safe))
    (*same, by_weight), (*expected, by_weight_expected) = found[1], known[1]
    assert_close((found[0], same, found[2]), (known[0], expected, known[2]), 2e-6)
    of_safe, by_weight, by_weight_expected = y == safe, np.asarray(by_weight), np.asarray(by_weight_expected)
    assert_close(by_weight[of_safe], by_weight_expected[of_safe], 2e-6)
    assert np.isfinite(by_weight).all()


def test_the_sum_of_chunks_in_f32():
    """Chunks that are added up in bf16 round the gradient of weight once each, and in f32 once in all."""
    h, w = (RNG.standard_normal(s).astype(jnp.bfloat16) for s in ((256, WIDTH), (WIDTH, CLASSES)))
    y = RNG.integers(0, CLASSES, 256)
    expected = in_float64(jax.grad(lambda w: defined(y, reduction="mean")(wide(h), w)), w)

    def error(**options):
        f = jax.grad(lambda w: linear(h, w, y, reduction="mean", **options))
        return np.linalg.norm(wide(jax.jit(f)(w)) - expected)

    assert error(chunk_size=4, accumulator_dtype=jnp.float32) < 0.6 * error(chunk_size=4)


@pytest.mark.costly(1)
@pytest.mark.parametrize("which", ["rows", "labels", *range(5)])
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad", pytest.param("grad of vmap of grad", marks=slow)])
def test_vmap(which, order):
    """Every operand mapped by itself, and all that rows have."""
    mapped = {0, 4, 5} if which == "rows" else {5} if which == "labels" else {which}
    axes = tuple(0 if i in mapped else None for i in range(6))
    with jax.enable_x64(True):
        operands = [
            np.stack([v, np.flip(v, -1)]) if i in mapped else v for i, v in enumerate((*map(wide, ALL), LABELS))
        ]

        def results(f):
            of_labels = lambda *v: jnp.sin(f(v[5])(*v[:5]))  # noqa: E731
            if order == "grad of vmap":
                return jax.grad(lambda *v: jnp.sum(jnp.sin(jax.vmap(of_labels, axes)(*v))), tuple(range(5)))
            gradients = jax.vmap(jax.grad(of_labels, tuple(range(5))), axes)
            if order == "vmap of grad":
                return gradients
            return jax.grad(lambda *v: sum(jnp.sum(jnp.sin(3 * t)) for t in gradients(*v)), tuple(range(5)))

        given = {"reduction": "mean", **SMOOTH}
        actual = jax.jit(results(lambda y: total(y, chunk_size=5, **given)))(*operands)
        expected = in_float64(lambda: results(lambda y: defined(y, **given))(*operands))
        assert_close(actual, expected, 1e-12)


def test_gradients_of_a_map_are_summed_over_its_elements():
    """No gradient by the weights is computed for each element of a map that is differentiated."""
    f = jax.vmap(functools.partial(linear, reduction="mean", **IGNORED), (0, None, 0))
    text = jax.jit(jax.grad(lambda w: jnp.sum(f(HIDDEN, w, LABELS)))).lower(WEIGHT).as_text()
    assert f"tensor<{WIDTH}x{CLASSES}xf32>" in text
    assert f"tensor<4x{WIDTH}x{CLASSES}xf32>" not in text


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=slow), True])
@pytest.mark.parametrize("second", ["forward", pytest.param("reverse", marks=slow)])
def test_loops(checkpointed, second):
    """A loop over batches: its gradient, and products with its Hessian in both orders."""
    with jax.enable_x64(True):
        operands = tuple(map(wide, ALL))

        given = {"reduction": "mean", **SMOOTH}

        def looped(h, w, b, c, u):
            def step(carry, batch):
                h, u, y = batch
                return carry + jnp.sin(total(y, chunk_size=2, **given)(h, w, b, c, u)), None

            step = jax.checkpoint(step) if checkpointed else step
            return jax.lax.scan(step, jnp.zeros(()), (h, u, LABELS))[0]

        def mapped(h, w, b, c, u):
            return jnp.sum(jnp.sin(jax.vmap(lambda h, u, y: defined(y, **given)(h, w, b, c, u))(h, u, LABELS)))

        def derivatives(f):
            gradients = jax.grad(f, tuple(range(5)))

            def results(*v):
                if second == "forward":
                    return jax.jvp(gradients, v, tuple(map(jnp.cos, v)))
                return jax.grad(lambda *v: sum(map(jnp.vdot, gradients(*v), map(jnp.cos, v))), (0, 1))(*v)

            return results

        assert_close(jax.jit(derivatives(looped))(*operands), in_float64(derivatives(mapped), *operands), 1e-12)


needs_mesh = pytest.mark.skipif(DEVICES < 8, reason="needs eight devices, which a CPU can pretend to have")
H = RNG.standard_normal((8, 4, 8)).astype(np.float32)
W = RNG.standard_normal((8, 64)).astype(np.float32)
B, C = RNG.standard_normal(64).astype(np.float32), RNG.uniform(0.2, 2, 64).astype(np.float32)
U = RNG.uniform(0.2, 2, (8, 4)).astype(np.float32)
Y = RNG.integers(0, 64, (8, 4)).astype(np.int32)
Y[0, 0], Y[1, 1] = -100, 63


@pytest.mark.costly(1)
@needs_mesh
@pytest.mark.parametrize(
    ("rows", "weight", "kind"),
    [
        (P("a"), P(None, "b"), AxisType.Auto),
        (P("a", "b"), P(), AxisType.Explicit),
        (P(), P(None, ("a", "b")), AxisType.Auto),
        pytest.param(P("a"), P(None, "b"), AxisType.Explicit, marks=slow),
        pytest.param(P(), P(None, "b"), AxisType.Explicit, marks=slow),
        pytest.param(P("a"), P("b", None), AxisType.Auto, marks=slow),
    ],
)
def test_mesh(rows, weight, kind):
    """Rows and classes over a mesh: the mean is that of all rows, and no logits move."""
    mesh = mesh_of(kind)
    classes = P(weight[1]) if len(weight) > 1 else P()
    specs = rows, weight, classes, classes, rows, rows
    args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((H, W, B, C, U, Y), specs, strict=True)]
    given = {"reduction": "mean", **SMOOTH}

    def f(h, w, b, c, u, y):
        return jnp.sin(total(y, chunk_size=3, **given)(h, w, b, c, u))

    with jax.set_mesh(mesh):
        compiled = jax.jit(with_gradients(f)).lower(*args).compile()
    expected = in_float64(with_gradients(lambda *v: jnp.sin(defined(Y, **given)(*v))), H, W, B, C, U)
    assert_close(compiled(*args), expected, 1e-5)
    local = NamedSharding(mesh, weight).shard_shape(W.shape)
    moved = collectives(compiled)
    gathers = [shape for name, shape in moved if name == "all-gather"]
    devices = W.shape[1] // local[1]
    numbers = [shape for shape in gathers if len(shape) == 3]  # those of a chunk's rows, from each device
    assert bool(numbers) == (devices > 1) and all(shape[:2] == (devices, 6) for shape in numbers), moved
    others = [shape for shape in gathers if shape not in numbers]
    assert others == ([W.shape] if local[0] != W.shape[0] else []), moved
    # The gradient of weight, that of a chunk's hidden states, and the weights of the labels' classes.
    most = max(W.shape[0] * local[1] if rows else 0, 3 * 8, Y.size)
    assert all(np.prod(shape) <= most for name, shape in moved if name == "all-reduce"), moved


@pytest.mark.costly(1)
@needs_mesh
@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}], ids=["fully", "partially"])
def test_shard_map(manual):
    """Sums of the rows of each device, and the gradients by what all of them share."""
    spec, axes = P("a", "b" if "b" in manual else None), tuple(manual)

    def local(h, w, b, c, u, y):
        return jax.lax.psum(total(y, reduction="sum", chunk_size=3, **SMOOTH)(h, w, b, c, u), axes)

    specs = (spec, P(), P(), P(), spec, spec)
    f = jax.shard_map(local, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P(), axis_names=manual)
    actual = jax.jit(with_gradients(lambda *v: f(*v, Y)))(H, W, B, C, U)
    assert_close(actual, in_float64(with_gradients(defined(Y, reduction="sum", **SMOOTH)), H, W, B, C, U), 5e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reduction": "max"}, ValueError, "reduction must be None, 'mean' or 'sum'; got 'max'"),
        ({"reduction": 1}, ValueError, "reduction must be None, 'mean' or 'sum'; got 1"),
        (
            {"row_weights": ROW_WEIGHTS[:2]},
            ValueError,
            r"row_weights must broadcast to the shape of the losses, \(4, 3\)",
        ),
        ({"row_weights": HIDDEN}, ValueError, "row_weights must broadcast to the shape of the losses"),
        ({"row_weights": LABELS > 0}, TypeError, "row_weights must hold real numbers; got dtype bool"),
        ({"row_weights": 1j * ROW_WEIGHTS}, TypeError, "row_weights must hold real numbers; got dtype complex64"),
        ({"scale": np.inf}, ValueError, "scale must be finite in float32; got inf"),
        ({"scale": np.nan}, ValueError, "scale must be finite in float32; got nan"),
        ({"scale": "1"}, TypeError, "scale must be a real number; got '1'"),
        ({"scale": jnp.ones(2)}, TypeError, r"scale must be a real number; got dtype float32 and shape \(2,\)"),
        ({"scale": jnp.float32(np.inf)}, ValueError, "scale must be finite in float32; got .*inf"),
        ({"recompute": 1}, TypeError, "recompute must be True or False; got 1"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False; got 1"),
        ({"return_entropy": "no"}, TypeError, "return_entropy must be True or False; got 'no'"),
        ({"accumulator_dtype": "int32"}, ValueError, "accumulator_dtype must be None or one of float16, .*; got int32"),
        ({"accumulator_dtype": "a"}, TypeError, "accumulator_dtype must be None or one of float16, .*; got 'a'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        linear(HIDDEN, WEIGHT, LABELS, **arguments)


def test_a_bias_of_a_wider_dtype():
    """Its digits are not rounded to those of the products, whatever all logits have in common."""
    operands = HIDDEN.astype(jnp.bfloat16), WEIGHT.astype(jnp.bfloat16), BIAS + np.float32(1000)
    actual = with_gradients(total(reduction="mean", **IGNORED), 3)(*operands)
    expected = in_float64(with_gradients(defined(reduction="mean", **IGNORED), 3), *operands)
    assert_close(actual[0], expected[0], 1e-5)  # logits of 1000 in f32
    assert_close(actual[1], expected[1], 2.0**-7)


@pytest.mark.parametrize("unit", [1e-36, 1e37, 3e38])
def test_a_mean_does_not_depend_on_the_unit_of_the_weights(unit):
    """Their sum may be out of range."""
    f = lambda weights: jax.value_and_grad(  # noqa: E731
        lambda h: linear(h, WEIGHT, LABELS, row_weights=weights, reduction="mean", **IGNORED)
    )(HIDDEN)
    weights = ROW_WEIGHTS / ROW_WEIGHTS.max()
    assert_close(f(weights * np.float32(unit)), f(weights), 1e-5)


def test_one_chunk_adds_nothing_up():
    """So another dtype for the sum does not matter."""
    f = lambda **options: jax.grad(total(reduction="sum", **IGNORED, **options), 1)(HIDDEN, WEIGHT)  # noqa: E731
    np.testing.assert_array_equal(f(accumulator_dtype=jnp.bfloat16, chunk_size=ROWS), f(chunk_size=ROWS))


@needs_library
@each_reduction
def test_gradients_of_scores_take_their_place_on_a_gpu(reduction):
    """The kernel that makes gradients of scores writes them where the scores are."""
    hidden, weight, labels = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((128, 8192), jnp.bfloat16), jnp.zeros(64, int)
    gradients = jax.jit(jax.grad(lambda h, w: linear(h, w, labels, reduction=reduction), (0, 1)))
    lowered = gradients.trace(hidden, weight).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in lowered.splitlines() if "@jaxsoft_label_state_vjp(" in line]
    assert calls
    assert all("output_operand_alias" in line for line in calls)
