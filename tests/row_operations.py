"""Operands for a row operation in any form, and its results beside those of its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from truth import wide

from jaxsoft._rows import plain
from jaxsoft._rows.forms import RowForm, compose
from jaxsoft._rows.operations.kl_divergence import KL_DIVERGENCE
from jaxsoft._rows.operations.labels import LABEL_STATE
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.spec import NO_ROW, RowExtra, RowKind

SCALE, LIMIT, WHERE, BIAS = ALL_EXTRAS = (RowExtra.SCALE, RowExtra.LIMIT, RowExtra.WHERE, RowExtra.BIAS)
OTHER_SCALE = RowExtra.OTHER_SCALE


def operands_of(operation, form, shape, dtype, ones=()):
    """Operands such as the operation gets them, with extras of length 1 along the dimensions `ones`."""
    rng = np.random.default_rng([len(shape), shape[-1]])
    state = np.float64 if dtype == jnp.float64 else np.float32
    leading = tuple(1 if i in ones else d for i, d in enumerate(shape[:-1]))
    rows = shape if form.trailing == 0 else np.moveaxis(np.empty(shape), -1 - form.trailing, -1).shape
    n = rows[-1]
    extras = {
        SCALE: rng.uniform(-1.5, 1.5, leading).astype(state),
        LIMIT: rng.integers(0, n + 3, leading).astype(np.int32),
        WHERE: rng.random((*leading, n)) < 0.7,
        BIAS: rng.standard_normal((*leading, n)).astype(dtype),
        OTHER_SCALE: np.random.default_rng(n).uniform(-1.5, 1.5, leading).astype(state),
    }
    extras = {name: v for name, v in extras.items() if name in form.extras}
    x = rng.standard_normal(shape).astype(dtype)
    g = rng.standard_normal(shape).astype(dtype)
    if operation is SOFTMAX_VJP:
        limit = {LIMIT: extras[LIMIT]} if LIMIT in extras else {}
        (y,) = exact(SOFTMAX, RowForm(np.dtype(np.float64), tuple(limit), form.trailing), x, *limit.values())
        y = np.where(rng.random(shape) < 0.1 * form.masked, 0, y)
        return [y.astype(dtype), np.where(y == 0, np.inf, g).astype(dtype) if form.masked else g, *extras.values()]
    base = [x, *(rng.standard_normal(shape).astype(dtype) for _ in operation.inputs[1:])]
    if operation.has_label:
        label = rng.integers(-1, n, rows[:-1]).astype(np.int32)
        label.flat[1::5] = NO_ROW
        np.moveaxis(x, -1 - form.trailing, -1)[label == NO_ROW] = np.nan
        base.append(label)
    if statistics := operation.kinds.count(RowKind.STATISTIC):
        several = len(operation.inputs) > 1
        of, known = (KL_DIVERGENCE, 5) if several else (LABEL_STATE if operation.has_label else STATE, 2)
        with np.errstate(over="ignore"):
            of_x = exact(of, RowForm(np.dtype(np.float64), form.extras, form.trailing), *base, *extras.values())
        base += [v.astype(state) for v in of_x[:known]]
        base += [rng.standard_normal(of_x[0].shape).astype(state) for _ in range(statistics - known)]
    if RowKind.COTANGENT in operation.kinds:
        base.append(g)
    return [*base, *extras.values()]


def exact(operation, form, *operands):
    """The definition, in float64."""
    with jax.enable_x64(True):
        form = RowForm(np.dtype(np.float64), form.extras, form.trailing, form.masked)
        wide_operands = [v if v.dtype in (bool, np.int32) else wide(v) for v in operands]
        return [
            np.asarray(v) for v in jax.jit(compose(operation, form, plain.formula(operation, form)))(*wide_operands)
        ]


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
