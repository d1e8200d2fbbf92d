"""A drop-in for jax.nn: the same parameters, and for drawn arguments the same values, shapes, dtypes and weak types."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import OPS, each_op, slow, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoft

# Not bool, which jax.nn refuses, nor unsigned integers, whose differences it lets wrap around: both are taken here.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64")


@each_op
def test_signature(op):
    """jax.nn's parameters with their order, kinds and defaults, then our own, by name only."""
    actual = inspect.signature(getattr(jaxsoft, op)).parameters
    expected = inspect.signature(getattr(jax.nn, op)).parameters
    same, more = list(actual.items())[: len(expected)], list(actual.items())[len(expected) :]
    assert [(n, p.kind, p.default) for n, p in same] == [(n, p.kind, p.default) for n, p in expected.items()]
    ours = [("scale", None), ("bias", None), ("causal", False), ("dtype", None), ("implementation", None)]
    assert [(n, p.default) for n, p in more] == ours
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for _, p in more)


def test_scipys_name():
    assert inspect.signature(jax.scipy.special.logsumexp) == inspect.signature(jax.nn.logsumexp)


SHAPES = st.sampled_from([(), (1,), (5,), (2, 3), (3, 1, 4), (2, 0), (0,)])


@st.composite
def arguments(draw, op):
    """x, and the other arguments that jax.nn has."""
    shape, seed = draw(SHAPES), draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    axes = [st.none(), st.just(())]
    if shape:
        axes += [st.integers(-len(shape), len(shape) - 1)]
        axes += [st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True).map(tuple)]
    options = {"axis": draw(st.one_of(axes))}
    dtypes = st.sampled_from(DTYPES).map(jax.dtypes.canonicalize_dtype)
    x = jnp.asarray(rng.standard_normal(shape) * 3).astype(draw(dtypes))
    if shape == () and draw(st.booleans()):
        x = float(x)  # a Python number has a weak type
    if draw(st.booleans()):
        options["where"] = rng.random(draw(part_of(shape))) < 0.7
    if op == "logsumexp":
        options["keepdims"] = draw(st.booleans())
        options["return_sign"] = draw(st.booleans())
        if draw(st.booleans()):
            options["b"] = jnp.asarray(rng.integers(-2, 3, draw(part_of(shape)))).astype(draw(dtypes))
    return x, options


def part_of(shape):
    """Shapes that broadcast to `shape`."""
    return st.sampled_from([shape[k:] for k in range(len(shape) + 1)] + [tuple(min(d, 1) for d in shape)])


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=slow)], ids=["32 bits", "64 bits"])
@each_op
@settings(max_examples=40)
@given(data=st.data())
def test_any_arguments(op, x64, data):
    with jax.enable_x64(x64):
        x, options = data.draw(arguments(op))
        expected = jax.tree.leaves(getattr(jax.nn, op)(x, **options))
        actual = jax.tree.leaves(getattr(jaxsoft, op)(x, **options))
        for a, b in zip(actual, expected, strict=True):
            what = f"{op}({x!r}, {options})"
            assert jax.typeof(a).str_short() == jax.typeof(b).str_short(), what
            assert a.weak_type == b.weak_type, what
            # jax.nn computes 16-bit numbers in 16 bits.
            eps = float(jnp.finfo(a.dtype).eps)
            a, b = wide(a), wide(b)
            if op == "softmax" and "where" in options:
                b = np.nan_to_num(b)  # a row of which nothing is selected
            np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps, err_msg=what)


def test_names():
    """All that is public, and nothing else, is in jaxsoft.__all__."""
    assert set(OPS) <= set(jaxsoft.__all__)
    assert all(hasattr(jaxsoft, name) for name in jaxsoft.__all__)
    assert jaxsoft.__all__ == sorted(jaxsoft.__all__)
    assert jaxsoft.__version__.count(".") >= 2
