"""Parts of rows on several devices: every operation on them, against its definition in float64 and one device's results.

What moves between devices is tested in `test_sharding`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import precision, same_bits, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, each_axis_type, kernels, mesh_of, needs_devices
from row_operations import LIMIT, SCALE, WHERE, assert_exact, exact, operands_of

import jaxsoft
from jaxsoft._core import mesh as exchange
from jaxsoft._rows.forms import Form, split
from jaxsoft._rows.operation import NO_ROW, Kind
from jaxsoft._rows.operations import OPERATIONS
from jaxsoft._rows.operations.entropy import ENTROPY
from jaxsoft._rows.operations.labels import LABEL_ENTROPY, LABEL_STATE, LABEL_SUMS
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft._rows.primitive import row_operation

pytestmark = needs_devices
SERVED = [operation for operation in OPERATIONS if operation.has_kernels and not operation.selects]
FORWARD = [SOFTMAX, LOG_SOFTMAX, STATE, ENTROPY, LABEL_STATE, LABEL_SUMS, LABEL_ENTROPY]
LABELLED = [LABEL_STATE, LABEL_SUMS, LABEL_ENTROPY]


def over(axes):
    """The mesh, and what puts an operation's operands on it with parts of rows on the devices along some axes."""
    mesh = mesh_of(AxisType.Auto)

    def put(operation, form, operands):
        base, extras = split(operation, form, operands)
        whole = [kind.whole_rows for kind in operation.kinds] + [extra.whole_rows for extra in extras]
        specs = [P(*(None,) * (v.ndim - 1 - form.trailing), axes) if w else P() for v, w in zip(operands, whole)]
        return [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(operands, specs, strict=True)]

    return put


def compiled_for(operation, form, operands, implementation=None):
    return jax.jit(functools.partial(row_operation, operation, form, implementation)).lower(*operands).compile()


@pytest.mark.parametrize("operation", SERVED, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_operations(operation, dtype):
    """Values of every operation in its plain form, and with all extras that its kernels take, by the library's kernel."""
    forms = [Form(np.dtype(dtype)), Form(np.dtype(dtype), operation.extras)]
    if operation.any_axis:
        forms.append(Form(np.dtype(dtype), trailing=1))
    for form in forms if operation.extras else forms[:1]:
        shape = (5, 64, 3) if form.trailing else (3, 5, 64)
        operands = operands_of(operation, form, shape, dtype)
        sharded = over(("a", "b"))(operation, form, operands)
        program = compiled_for(operation, form, sharded, "ffi")
        assert_exact(operation, form, operands, program(*sharded))
        if not operation.linear or Kind.COTANGENT not in operation.kinds:
            assert kernels(program), (operation, form)
        assert len(collectives(program)) <= 1, (operation, form)


def special_rows(operation) -> tuple[list[np.ndarray], int]:
    """Rows with a part that is -inf, or holds NaN or +inf; of large scores; that begin with -inf; and labels anywhere."""
    n = 64
    x = np.random.default_rng(0).standard_normal((16, n)).astype(np.float32)
    x[1, :32], x[2, 32:], x[3], x[4, 40], x[5, 3], x[6, 60] = -np.inf, -np.inf, -np.inf, np.nan, np.inf, -np.inf
    x[7] += 1e4
    x[8, 8:] = -np.inf
    x[9] = 3e38 * np.sign(x[9])
    x[10, :8] = np.nan
    x[11, ::8] = -np.inf
    label = np.array([0, 5, 40, 7, 3, 3, 60, 63, 40, 1, NO_ROW, 17, -1, n, 2**31 - 1, NO_ROW], np.int32)
    return [x, label] if operation.has_label else [x]


@pytest.mark.parametrize("operation", FORWARD, ids=repr)
@pytest.mark.parametrize("extras", [(), (WHERE,), (LIMIT,)], ids=["all", "where", "limit"])
def test_special_rows(operation, extras):
    """Rows of which parts are empty, infinite or undefined, with what does not count, as on one device."""
    form = Form(np.dtype(np.float32), extras)
    operands = special_rows(operation)
    rng = np.random.default_rng(1)
    where = rng.random((16, 64)) < 0.5
    where[0], where[7, :48] = False, False
    limit = rng.integers(0, 65, 16).astype(np.int32)
    limit[:8] = 0, 3, 8, 9, 64, 20, 63, 50
    operands += [{WHERE: where, LIMIT: limit}[extra] for extra in extras]
    alone = compiled_for(operation, form, operands)(*operands)
    for axes in (("b",), ("a", "b")):
        sharded = over(axes)(operation, form, operands)
        found = compiled_for(operation, form, sharded)(*sharded)
        for actual, expected, result in zip(found, alone, operation.results, strict=True):
            if result.name == "maximum" or (result.name == "sum" and operation is not STATE):
                continue  # a maximum may pass over a NaN, and the sum then is NaN: below by their logsumexp
            actual, expected = np.asarray(actual), np.asarray(expected)
            if result.name == "products":  # which of +inf and NaN they are of an undefined row is nobody's
                actual, expected = (np.where(np.isfinite(v), v, np.nan) for v in (actual, expected))
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5, err_msg=f"{result.name} over {axes}")


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("many", [False, True], ids=["gathered", "reduced"])
def test_distances_from_the_label(offset, many, monkeypatch):
    """Sums of distances keep their digits where all scores are large, and the label is in another part of the row."""
    if many:
        monkeypatch.setattr(exchange, "_FEW_DEVICES", 1)
    x = (np.random.default_rng(2).integers(-8, 9, (DEVICES, 256)) + offset).astype(np.float32)
    x[1, :40:3], x[2, 128:] = -np.inf, -np.inf
    label = np.arange(DEVICES, dtype=np.int32) * (256 // DEVICES) + 1
    form = Form(np.dtype(np.float32))
    expected = exact(LABEL_SUMS, form, x, label)
    sharded = over(("a", "b"))(LABEL_SUMS, form, [x, label])
    program = compiled_for(LABEL_SUMS, form, sharded)
    for actual, want in zip(program(*sharded), expected, strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-6, atol=1e-5)
    assert {name for name, _ in collectives(program)} == {"all-reduce" if many else "all-gather"}


@pytest.mark.parametrize("operation", FORWARD, ids=repr)
def test_many_devices(operation, monkeypatch):
    """All-reduces of maxima and sums, as many devices make them, give what an all-gather gives."""
    form = Form(np.dtype(np.float32))
    sharded = over(("a", "b"))(operation, form, special_rows(operation))
    gathered = compiled_for(operation, form, sharded)
    monkeypatch.setattr(exchange, "_GATHERED_BYTES", 0)
    reduced = compiled_for(operation, form, sharded)
    assert [name for name, _ in collectives(gathered)] == ["all-gather"]
    assert [name for name, _ in collectives(reduced)] == ["all-reduce"] * 2
    for actual, expected in zip(reduced(*sharded), gathered(*sharded), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    assert same_bits(gathered(*sharded), gathered(*sharded))


@each_axis_type
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64], ids=lambda dtype: dtype.__name__)
def test_second_derivatives(kind, dtype):
    """grad of grad and vmap of a loss with all its parts, as on one device."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 6, 32)).astype(dtype)
    labels = rng.integers(0, 32, (4, 6)).astype(np.int32)
    labels[0, 0] = -100

    def f(x, labels):
        loss, entropy = jaxsoft.softmax_cross_entropy_with_integer_labels(
            x, labels, label_smoothing=0.1, z_loss=0.01, ignore_index=-100, return_entropy=True
        )
        return jnp.sum(jnp.sin(loss) + entropy * entropy)

    def derivatives(x, labels):
        first = jax.grad(lambda x: jnp.sum(jax.vmap(f)(x, labels)))
        return first(x), jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(x)

    mesh = mesh_of(kind)
    with precision(dtype):
        expected = jax.jit(derivatives)(x, labels)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, ("a", "b"))))
            found = jax.jit(derivatives)(sharded, labels)
    tolerance = {jnp.float64: 1e-12, jnp.float32: 1e-5, jnp.bfloat16: 2e-2}[dtype]
    for actual, want in zip(found, expected, strict=True):
        actual, want = np.asarray(actual, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(actual, want, rtol=tolerance, atol=tolerance / 10)


def test_scale_of_softmax():
    """A scale of 0 or of any sign, which softmax must not take from its pullback."""
    x, scale = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32), np.float32([[0], [-2], [3]])
    form = Form(np.dtype(np.float32), (SCALE,))
    operands = [x, scale[:, 0]]
    sharded = over(("b",))(SOFTMAX, form, operands)
    assert_exact(SOFTMAX, form, operands, compiled_for(SOFTMAX, form, sharded)(*sharded))
