"""Parts of rows on several devices: every operation on them, against its definition and against one device's results.

What moves between devices is tested in `test_sharding`.
"""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import AVAILABLE, operand, pallas_is_tested, precision, same_bits, slow, target
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, kernels, mesh_of, needs_devices
from row_operations import LIMIT, SCALE, WHERE, assert_exact, exact, operands_of
from truth import in_float64

import jaxsoft
from jaxsoft._core import mesh as exchange
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations import OPERATIONS
from jaxsoft._rows.operations.entropy import entropy_of_rows
from jaxsoft._rows.operations.kl_divergence import KL_DIVERGENCE, kl_divergence_of_rows
from jaxsoft._rows.operations.labels import LABEL_SUMS, label_entropy_of_rows, label_state_of_rows, label_sums_of_rows
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX_VJP, log_softmax_of_rows
from jaxsoft._rows.operations.logsumexp import STATE, logsumexp_of_rows
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP, softmax_of_rows
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.spec import NO_ROW

pytestmark = needs_devices
SERVED = [operation for operation in OPERATIONS if operation.has_kernels and not operation.selects]
FUNCTIONS = softmax_of_rows, log_softmax_of_rows, logsumexp_of_rows, entropy_of_rows
FUNCTIONS += label_state_of_rows, label_sums_of_rows, label_entropy_of_rows, kl_divergence_of_rows
FORWARD = {function.forward: function for function in FUNCTIONS}


def over(axes):
    """The mesh, and what puts an operation's operands on it with parts of rows on the devices along some axes."""
    mesh = mesh_of(AxisType.Auto)

    def put(operation, form, operands):
        kinds = *operation.kinds, *form.extras

        def spec(kind, v):
            return P(*(None,) * (v.ndim - 1 - form.trailing), axes) if kind.whole_rows else P()

        return [jax.device_put(v, NamedSharding(mesh, spec(kind, v))) for kind, v in zip(kinds, operands, strict=True)]

    return put


def compiled_for(operation, form, operands, implementation=None):
    return jax.jit(lambda *v: RowOperation(operation, form, implementation)(*v)).lower(*operands).compile()


@pytest.mark.costly
@pytest.mark.parametrize("operation", SERVED, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_operations(operation, dtype):
    """Values of every operation, plain, with all extras that its kernels take, and along another axis, by a kernel."""
    forms = [RowForm(np.dtype(dtype)), RowForm(np.dtype(dtype), operation.extras)]
    if operation.any_axis:
        forms.append(RowForm(np.dtype(dtype), trailing=1))
    for form in forms if operation.extras else forms[:1]:
        shape = (5, 64, 3) if form.trailing else (3, 5, 64)
        operands = operands_of(operation, form, shape, dtype)
        sharded = over(("a", "b"))(operation, form, operands)
        program = compiled_for(operation, form, sharded, "ffi" if "ffi" in AVAILABLE else None)
        assert_exact(operation, form, operands, program(*sharded))
        if "ffi" in AVAILABLE and operation not in (SOFTMAX_VJP, LOG_SOFTMAX_VJP):  # which are loops of XLA's
            assert kernels(program), (operation, form)
        assert len(collectives(program)) <= 1, (operation, form)


def special_rows(operation) -> list[np.ndarray]:
    """Rows with a part that is -inf, or holds NaN or +inf; of large scores; that begin with -inf; labels anywhere."""
    n = 64
    x = np.random.default_rng(0).standard_normal((16, n)).astype(np.float32)
    x[1, :32], x[2, 32:], x[3], x[4, 40], x[5, 3], x[6, 60] = -np.inf, -np.inf, -np.inf, np.nan, np.inf, -np.inf
    x[7] += 1e4
    x[8, 8:] = -np.inf
    small = operation in (LABEL_SUMS, KL_DIVERGENCE)  # whose sums and distances would be out of range
    x[9] = (1e36 if small else 3e38) * np.sign(x[9])
    x[10, :8] = np.nan
    x[11, ::8] = -np.inf
    label = np.array([0, 5, 40, 7, 3, 3, 60, 63, 40, 1, NO_ROW, 17, -1, n, 2**31 - 1, NO_ROW], np.int32)
    y = x + np.random.default_rng(1).standard_normal(x.shape, np.float32) / 8
    y[1::2] = np.roll(y[1::2], 8, axis=-1)
    return [x, label] if operation.has_label else [x, y] if len(operation.inputs) > 1 else [x]


@pytest.mark.cover
@pytest.mark.parametrize("operation", FORWARD, ids=repr)
@pytest.mark.parametrize("extras", [(), (WHERE,), (LIMIT,)], ids=["all", "where", "limit"])
@pytest.mark.parametrize("axes", [("b",), ("a", "b")], ids=str)
def test_special_rows(operation, extras, axes):
    """Rows of which parts are empty, infinite or undefined, with what does not count, as on one device."""
    form = RowForm(np.dtype(np.float32), extras)
    operands = special_rows(operation)
    rng = np.random.default_rng(1)
    where = rng.random((16, 64)) < 0.5
    where[0], where[7, :48] = False, False
    limit = rng.integers(0, 65, 16).astype(np.int32)
    limit[:8] = 0, 3, 8, 9, 64, 20, 63, 50
    operands += [{WHERE: where, LIMIT: limit}[extra] for extra in extras]
    values = jax.jit(FORWARD[operation].values)
    sharded = over(axes)(operation, form, operands)
    alone, found = (compiled_for(operation, form, given)(*given) for given in (operands, sharded))
    for actual, expected in zip(values(operands, found), values(operands, alone), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.cover
@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("many", [False, True], ids=["gathered", "reduced"])
def test_distances_from_the_label(offset, many, monkeypatch):
    """Sums of distances keep their digits where all scores are large, and the label is in another part of the row."""
    if many:
        monkeypatch.setattr(exchange, "_FEW_DEVICES", 1)
    x = (np.random.default_rng(2).integers(-8, 9, (8, 256)) + offset).astype(np.float32)
    x[1, :40:3], x[2, 128:] = -np.inf, -np.inf
    label = np.arange(8, dtype=np.int32) * 32 + 1  # in all parts
    form = RowForm(np.dtype(np.float32))
    expected = exact(LABEL_SUMS, form, x, label)
    sharded = over(("a", "b"))(LABEL_SUMS, form, [x, label])
    program = compiled_for(LABEL_SUMS, form, sharded)
    for actual, want in zip(program(*sharded), expected, strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-6, atol=1e-5)
    assert {name for name, _ in collectives(program)} == {"all-reduce" if many else "all-gather"}


@pytest.mark.costly
@pytest.mark.parametrize("operation", FORWARD, ids=repr)
def test_many_devices(operation, monkeypatch):
    """All-reduces of maxima and sums, as many devices make them, give what an all-gather gives."""
    form = RowForm(np.dtype(np.float32))
    sharded = over(("a", "b"))(operation, form, special_rows(operation))
    gathered = compiled_for(operation, form, sharded)
    monkeypatch.setattr(exchange, "_GATHERED_BYTES", 0)
    reduced = compiled_for(operation, form, sharded)
    assert [name for name, _ in collectives(gathered)] == ["all-gather"]
    assert [name for name, _ in collectives(reduced)] == ["all-reduce"] * 2
    for actual, expected in zip(reduced(*sharded), gathered(*sharded), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    assert same_bits(gathered(*sharded), gathered(*sharded))


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -100}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (AxisType.Auto, jnp.float32),
        pytest.param(AxisType.Explicit, jnp.float32, marks=slow),
        pytest.param(AxisType.Auto, jnp.bfloat16, marks=slow),
        pytest.param(AxisType.Auto, jnp.float64, marks=slow),
    ],
)
def test_second_derivatives(kind, dtype):
    """grad of grad, and vmap, of a loss."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 6, 32)).astype(dtype)
    labels = rng.integers(0, 32, (4, 6)).astype(np.int32)
    labels[0, 0] = -100

    def f(x, labels):
        return jnp.sum(jnp.sin(jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, **OPTIONS)))

    def definition(x, labels):
        return jnp.sum(jnp.sin(definitions.integer_cross_entropy(x, None, labels, **OPTIONS)[0]))

    def derivatives(f, x, labels):
        first = jax.grad(lambda x: jnp.sum(jax.vmap(f)(x, labels)))
        return first(x), jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(x)

    mesh = mesh_of(kind)
    expected = in_float64(lambda x: derivatives(definition, x, labels), x)
    with precision(dtype):
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, ("a", "b"))))
            found = jax.jit(functools.partial(derivatives, f))(sharded, labels)
    tolerance = {jnp.float64: 1e-12, jnp.float32: 1e-5, jnp.bfloat16: 2e-2}[dtype]
    for actual, want in zip(found, expected, strict=True):
        actual, want = np.asarray(actual, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(actual, want, rtol=tolerance, atol=tolerance / 10)


def test_scale_of_softmax():
    """A scale of 0 or of any sign, which softmax must not take from its pullback."""
    x, scale = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32), np.float32([[0], [-2], [3]])
    form = RowForm(np.dtype(np.float32), (SCALE,))
    operands = [x, scale[:, 0]]
    sharded = over(("b",))(SOFTMAX, form, operands)
    assert_exact(SOFTMAX, form, operands, compiled_for(SOFTMAX, form, sharded)(*sharded))


@pytest.mark.cover
@pytest.mark.parametrize("k", [3, 13])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float64, marks=slow)])
def test_largest(k, dtype):
    """The bits of the k largest, of parts that have fewer too: of equal ones, and where parts are -inf or undefined."""
    x = np.random.default_rng(5).integers(-3, 4, (12, 64)).astype(np.float32)
    x[1, :40], x[2], x[3, 50], x[4, 20], x[5, 9:], x[6, ::2], x[7] = -np.inf, -np.inf, np.nan, np.inf, -np.inf, -0.0, 0
    x = x.astype(dtype)
    with precision(dtype):
        form = RowForm(np.dtype(dtype), k=k)
        alone = compiled_for(TOP_K, form, [x])(x)
        sharded = over(("b", "a"))(TOP_K, form, [x])
        program = compiled_for(TOP_K, form, sharded)
        values, p, i, m, s = program(*sharded)
    assert same_bits([values, i], [alone[0], alone[2]])
    p, expected = (np.asarray(v).astype(np.float64) for v in (p, alone[1]))
    np.testing.assert_allclose(p, expected, rtol=1e-2 if x.itemsize == 2 else 1e-6)
    ordered = ~np.isnan(expected[:, 0])
    assert (ordered.sum(), ordered[[2, 3, 4]].any()) == (9, False)
    np.testing.assert_array_equal(m[ordered], alone[3][ordered])
    np.testing.assert_allclose(s[ordered], alone[4][ordered], rtol=1e-6)
    assert [name for name, _ in collectives(program)] == ["all-gather"]


@pallas_is_tested
def test_parts_that_an_implementation_does_not_take():
    """A named one serves rows whose parts it does not take: XLA does. These parts are no multiple of 16 bytes."""
    n = 2 * 200_002
    with target("NVIDIA H100 80GB HBM3"):
        assert RowOperation(STATE, RowForm(np.dtype(np.float32)), "pallas")._is_taken([operand((4, n), np.float32)])
        assert not RowOperation(STATE, RowForm(np.dtype(np.float32)), "pallas")._is_taken(
            [operand((4, n // 4), np.float32)]
        )
