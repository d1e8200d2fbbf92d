"""Row operations by themselves: every form of every operation, against its definition in float64.

Through the public functions a form comes with others; here each is alone, and a kernel that takes it shows its own
errors. Extras are broadcast in all the ways that they may be.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import DTYPES, each_dtype_in_turn, each_fast_implementation, precision, served, slow
from row_operations import ALL_EXTRAS, BIAS, LIMIT, OTHER_SCALE, SCALE, WHERE, assert_exact, operands_of
from truth import wide

from jaxsoft._rows import plain
from jaxsoft._rows.forms import RowForm, compose, groups, result_types
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations import OPERATIONS
from jaxsoft._rows.operations.entropy import ENTROPY, ENTROPY_VJP
from jaxsoft._rows.operations.kl_divergence import KL_DIVERGENCE, KL_DIVERGENCE_VJP, KL_DIVERGENCE_VJP_OTHER
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.spec import RowKind
from jaxsoft.fold import accumulator

EACH_AND_ALL = ((SCALE,), (LIMIT,), (WHERE,), (BIAS,), ALL_EXTRAS)
OF_TWO_INPUTS = ((SCALE,), (LIMIT,), (WHERE,), (OTHER_SCALE,), (SCALE, LIMIT, WHERE, OTHER_SCALE))
EXTRAS = {
    SOFTMAX: EACH_AND_ALL,
    SOFTMAX_VJP: ((SCALE,), (LIMIT,), (SCALE, LIMIT)),
    LOG_SOFTMAX: EACH_AND_ALL,
    LOG_SOFTMAX_VJP: (*EACH_AND_ALL[:4], (SCALE, LIMIT, WHERE), ALL_EXTRAS),
    STATE: EACH_AND_ALL,
    LOGSUMEXP_VJP: EACH_AND_ALL,
    ENTROPY: EACH_AND_ALL,
    ENTROPY_VJP: EACH_AND_ALL,
    KL_DIVERGENCE: OF_TWO_INPUTS,
    KL_DIVERGENCE_VJP: OF_TWO_INPUTS,
    KL_DIVERGENCE_VJP_OTHER: OF_TWO_INPUTS,
}
each_operation = pytest.mark.parametrize("operation", EXTRAS, ids=str)


def check(operation, form, implementation, operands):
    results = jax.jit(lambda *v: RowOperation(operation, form, implementation)(*v))(*operands)
    assert_exact(operation, form, operands, results)


def check_all(operation, implementation, calls):
    """Calls, each a form and its operands, in one program; or each alone, where a kernel refuses some."""

    def results_of(operands):
        each = zip(calls, operands, strict=True)
        return [RowOperation(operation, form, implementation)(*v) for (form, _), v in each]

    try:
        results = jax.jit(results_of)([operands for _, operands in calls])
    except ValueError:
        for form, operands in calls:
            with served(implementation):
                check(operation, form, implementation, operands)
    else:
        for (form, operands), result in zip(calls, results, strict=True):
            assert_exact(operation, form, operands, result)


# Shapes, and the leading dimensions along which extras have length 1.
SHAPES = [
    ((3, 5), ()),
    ((2, 3, 33), (1,)),
    ((4, 2, 3, 8), (0, 2)),
    ((3, 1000), (0,)),
    ((2, 2, 2049), (0, 1)),
    ((1, 70001), ()),
]


@pytest.mark.cover
@each_operation
@each_dtype_in_turn
@each_fast_implementation
@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_extras(operation, dtype, implementation, i):
    """Each alone and all at once, for short rows and long, broadcast along none, some or all leading dimensions."""
    extras, (shape, ones) = EXTRAS[operation][i % len(EXTRAS[operation])], SHAPES[i]
    with precision(dtype), served(implementation):
        form = RowForm(np.dtype(dtype), extras, masked=operation is SOFTMAX_VJP and LIMIT in extras)
        check(operation, form, implementation, operands_of(operation, form, shape, dtype, ones))


@pytest.mark.costly(6)
@pytest.mark.parametrize("operation", [operation for operation in EXTRAS if operation not in (STATE, ENTROPY)], ids=str)
@each_fast_implementation
@pytest.mark.parametrize(
    "dtypes",
    [pair for pair in itertools.product(DTYPES[:3], repeat=2) if pair[0] != pair[1]],
    ids=lambda pair: " to ".join(dtype.__name__ for dtype in pair),
)
def test_dtypes(operation, implementation, dtypes):
    """Results of another dtype than the scores."""
    given, result = dtypes
    calls = []
    for extras in ((), EXTRAS[operation][-1]):
        form = RowForm(np.dtype(result), extras)
        calls.append((form, operands_of(operation, form, (3, 300), given)))
    check_all(operation, implementation, calls)


@pytest.mark.costly(4)
@each_operation
@each_fast_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
@pytest.mark.parametrize(
    ("shape", "trailing"), [((2, 33, 5), 1), ((3, 2, 64, 1, 17), 2), ((1000, 130), 1), ((7, 3), 1)], ids=str
)
def test_trailing(operation, implementation, dtype, shape, trailing):
    """Axes before the last, beside results of x's dtype and of another."""
    calls = []
    for result in dict.fromkeys((dtype, jnp.float32)):
        form = RowForm(np.dtype(result), (), trailing)
        calls.append((form, operands_of(operation, form, shape, dtype)))
    check_all(operation, implementation, calls)


@each_fast_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_masked(implementation, dtype):
    """Where y is 0, nothing counts: not even an infinite cotangent, nor NaN in the row's sum."""
    for n in (5, 300, 4097):
        with served(implementation):
            form = RowForm(np.dtype(dtype), (SCALE,), masked=True)
            f = jax.jit(RowOperation(SOFTMAX_VJP, form, implementation))
            y, g, scale = operands_of(SOFTMAX_VJP, form, (3, n), dtype)
            assert_exact(SOFTMAX_VJP, form, (y, g, scale), f(y, g, scale))
            y[0], y[1, : n // 2] = 0, np.nan
            (dx,) = f(y, g, scale)
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
    form = RowForm(np.dtype(np.float32), ALL_EXTRAS)
    with served(implementation):
        operands = operands_of(SOFTMAX, form, shape, np.float32, (0, 2, 4))
        check(SOFTMAX, form, implementation, operands)


@pytest.mark.costly(7)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_result_types(operation):
    """What is said of the results without a look at the formula is what the formula gives."""
    k = 3 if operation.selects or RowKind.INDICES in operation.kinds else 0
    for dtype, out in itertools.product((jnp.bfloat16, jnp.float32), repeat=2):
        forms = [RowForm(jnp.dtype(out), k=k)]
        if not k:
            forms += [
                RowForm(jnp.dtype(out), trailing=1),
                *(RowForm(jnp.dtype(out), extras) for extras in EACH_AND_ALL),
            ]
        for form in forms:
            shape = (2, 5, 7)
            rows = shape[:2] if not form.trailing else (2, 7)
            extras = {SCALE: (rows, jnp.float32), LIMIT: (rows, jnp.int32), WHERE: (shape, bool), BIAS: (shape, dtype)}
            types = {
                RowKind.SCORES: (shape, dtype),
                RowKind.PROBABILITIES: (shape, out),
                RowKind.TANGENT: (shape, dtype),
                RowKind.COTANGENT: (shape, out),
                RowKind.STATISTIC: (rows, accumulator(dtype)),
                RowKind.LABEL: (rows, jnp.int32),
                RowKind.VALUES: ((*rows, k), accumulator(dtype)),
                RowKind.INDICES: ((*rows, k), jnp.int32),
            }
            given = (*(types[kind] for kind in operation.kinds), *(extras[extra] for extra in form.extras))
            operands = [jax.ShapeDtypeStruct(*v) for v in given]
            found = result_types(operation, form, operands[0])
            assert found == [*jax.eval_shape(compose(operation, form, plain.formula(operation, form)), *operands)]
