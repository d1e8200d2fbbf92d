"""Row operations by themselves: every form of every operation, against its definition in float64.

Through the public functions a form comes with others; here each is alone, and a kernel that takes it shows its own
errors. Extras are broadcast in all the ways that they may be.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import DTYPES, each_dtype_in_turn, each_fast_implementation, precision, served, slow, wide

from jaxsoft._rows import xla
from jaxsoft._rows.forms import NO_ROW, OPERATIONS, Form, compose, groups
from jaxsoft._rows.primitive import row_operation

EXTRAS = {
    "softmax": ("s", "l", "w", "b", "slwb"),
    "softmax_vjp": ("s", "l", "sl"),
    "log_softmax": ("s", "l", "w", "b", "slwb"),
    "log_softmax_vjp": ("s", "l", "w", "b", "slw", "slwb"),
    "state": ("s", "l", "w", "b", "slwb"),
    "logsumexp_vjp": ("s", "l", "w", "b", "slwb"),
}
each_operation = pytest.mark.parametrize("operation", EXTRAS)


def operands_of(operation, form, shape, dtype, ones=()):
    """Operands such as the operation gets them, with extras of length 1 along the dimensions `ones`."""
    rng = np.random.default_rng([len(shape), shape[-1]])
    state = np.float64 if dtype == jnp.float64 else np.float32
    leading = tuple(1 if i in ones else d for i, d in enumerate(shape[:-1]))
    rows = shape if form.trailing == 0 else np.moveaxis(np.empty(shape), -1 - form.trailing, -1).shape
    n = rows[-1]
    extras = {
        "s": rng.uniform(-1.5, 1.5, leading).astype(state),
        "l": rng.integers(0, n + 3, leading).astype(np.int32),
        "w": rng.random((*leading, n)) < 0.7,
        "b": rng.standard_normal((*leading, n)).astype(dtype),
    }
    extras = {name: v for name, v in extras.items() if name in form.extras}
    x = rng.standard_normal(shape).astype(dtype)
    g = rng.standard_normal(shape).astype(dtype)
    if operation == "softmax_vjp":
        limit = [extras["l"]] if "l" in extras else []
        (y,) = exact("softmax", Form(np.dtype(np.float64), "l" * len(limit), form.trailing), x, *limit)
        y = np.where(rng.random(shape) < 0.1 * form.masked, 0, y)
        return [y.astype(dtype), np.where(y == 0, np.inf, g).astype(dtype) if form.masked else g, *extras.values()]
    base, kinds = [x], OPERATIONS[operation]
    if "i" in kinds:
        label = rng.integers(-1, n, rows[:-1]).astype(np.int32)
        label.flat[1::5] = NO_ROW
        np.moveaxis(x, -1 - form.trailing, -1)[label == NO_ROW] = np.nan
        base.append(label)
    if "r" in kinds:
        of = "label_state" if "i" in kinds else "state"
        with np.errstate(over="ignore"):
            m, s = exact(of, Form(np.dtype(np.float64), form.extras, form.trailing), *base, *extras.values())[:2]
        numbers = [rng.standard_normal(m.shape).astype(state) for _ in range(kinds.count("r") - 2)]
        base += [m.astype(state), s.astype(state), *numbers]
    if "g" in kinds:
        base.append(g)
    return [*base, *extras.values()]


def exact(operation, form, *operands):
    """The definition, in float64."""
    with jax.enable_x64(True):
        form = Form(np.dtype(np.float64), form.extras, form.trailing, form.masked)
        wide_operands = [v if v.dtype in (bool, np.int32) else wide(v) for v in operands]
        return [np.asarray(v) for v in jax.jit(compose(operation, form, xla.OPERATIONS[operation]))(*wide_operands)]


def check(operation, form, implementation, operands):
    results = jax.jit(lambda *v: row_operation(operation, form, implementation, *v))(*operands)
    assert_exact(operation, form, operands, results)


def assert_exact(operation, form, operands, results):
    """The results are those of the definition."""
    x = np.asarray(operands[0])
    for actual, expected in zip(results, exact(operation, form, *operands), strict=True):
        if actual.shape == x.shape:
            assert actual.dtype == form.dtype
        eps = max(float(jnp.finfo(actual.dtype).eps), 1e-13 if x.dtype == np.float64 else 1e-5)
        np.testing.assert_allclose(
            wide(actual), expected, rtol=2 * eps, atol=2 * eps, err_msg=f"{operation} {form} {x.shape}"
        )


@each_operation
@each_dtype_in_turn
@each_fast_implementation
def test_extras(operation, dtype, implementation):
    """Each alone and all at once, for short rows and long, broadcast along none, some or all leading dimensions."""
    with precision(dtype):
        for extras, (shape, ones) in zip(
            itertools.cycle(EXTRAS[operation]),
            (
                ((3, 5), ()),
                ((2, 3, 33), (1,)),
                ((4, 2, 3, 8), (0, 2)),
                ((3, 1000), (0,)),
                ((2, 2, 2049), (0, 1)),
                ((1, 70001), ()),
            ),
            strict=False,
        ):
            form = Form(np.dtype(dtype), extras, masked=operation == "softmax_vjp" and "l" in extras)
            with served(implementation):
                check(operation, form, implementation, operands_of(operation, form, shape, dtype, ones))


@each_operation
@each_fast_implementation
def test_dtypes(operation, implementation):
    """Results of another dtype than the scores."""
    pairs = [(a, b) for a, b in itertools.product(DTYPES[:3], DTYPES[:3]) if a != b]
    for given, result in pairs if operation != "state" else ():
        for extras in ("", EXTRAS[operation][-1]):
            form = Form(np.dtype(result), extras)
            with served(implementation):
                check(operation, form, implementation, operands_of(operation, form, (3, 300), given))


@each_operation
@each_fast_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_trailing(operation, implementation, dtype):
    """Axes before the last, beside results of x's dtype and of another."""
    for shape, trailing in (((2, 33, 5), 1), ((3, 2, 64, 1, 17), 2), ((7, 3), 1), ((1000, 130), 1)):
        for result in (dtype, jnp.float32):
            form = Form(np.dtype(result), "", trailing)
            with served(implementation):
                check(operation, form, implementation, operands_of(operation, form, shape, dtype))


@each_fast_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_masked(implementation, dtype):
    """Where y is 0, nothing counts: not even an infinite cotangent, nor NaN in the row's sum."""
    for n in (5, 300, 4097):
        with served(implementation):
            form = Form(np.dtype(dtype), "s", masked=True)
            check("softmax_vjp", form, implementation, operands_of("softmax_vjp", form, (3, n), dtype))
            y, g, scale = operands_of("softmax_vjp", form, (3, n), dtype)
            y[0], y[1, : n // 2] = 0, np.nan
            (dx,) = row_operation("softmax_vjp", form, implementation, y, g, scale)
            np.testing.assert_array_equal(wide(dx)[y == 0], 0)
            assert np.isnan(wide(dx)[1][y[1] != 0]).all()


def test_groups():
    """In how many ways extras are broadcast, which kernels for the FFI know a few of."""
    assert len(groups((2, 3, 4), [(2, 3, 4), (2, 3, 4, 5)])) == 1
    assert len(groups((2, 1, 4), [(2, 1, 4)])) == 1
    assert len(groups((2, 3, 4), [(2, 1, 4)])) == 3
    assert len(groups((2, 3, 4), [(1, 1, 4), (2, 1, 1, 9)])) == 3
    assert len(groups((), [])) == 0


@each_fast_implementation
def test_more_groups_than_kernels_know(implementation):
    """Broadcast along every second dimension."""
    shape = (2, 3, 2, 3, 2, 3, 8)
    form = Form(np.dtype(np.float32), "slwb")
    with served(implementation):
        operands = operands_of("softmax", form, shape, np.float32, (0, 2, 4))
        check("softmax", form, implementation, operands)
