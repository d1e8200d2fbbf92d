"""A drop-in for jax.nn and optax: their parameters, and for drawn arguments the same values, shapes, dtypes."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import OPS, as_usual, each_op, each_op_in_turn, slow, some
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxsoft

# Not bool, which softmax of jax.nn refuses, nor unsigned integers, whose differences it lets wrap around: jaxsoft takes
# both.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64")
MORE_DTYPES = ("bool", "uint8", "complex64")  # of logsumexp


@each_op
def test_signature(op):
    """jax.nn's parameters with their order, kinds and defaults, then our own, by name only."""
    actual = inspect.signature(getattr(jaxsoft, op)).parameters
    expected = inspect.signature(getattr(jax.nn, op)).parameters
    same, more = list(actual.items())[: len(expected)], list(actual.items())[len(expected) :]
    assert [(n, p.kind, p.default) for n, p in same] == [(n, p.kind, p.default) for n, p in expected.items()]
    ours = [("scale", None), ("bias", None), ("is_causal", False), ("dtype", None), ("implementation", None)]
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
    dtypes = st.sampled_from(DTYPES + MORE_DTYPES * (op == "logsumexp")).map(jax.dtypes.canonicalize_dtype)
    dtype, x = draw(dtypes), rng.standard_normal(shape) * 3
    x = jnp.asarray((x.astype(int) if np.issubdtype(dtype, np.integer) else x).astype(dtype))
    if shape == () and draw(st.booleans()):
        x = float(x.real)  # a Python number has a weak type
    if draw(st.booleans()):
        options["where"] = rng.random(draw(part_of(shape))) < 0.7
    if op == "logsumexp":
        options["keepdims"] = draw(st.booleans())
        options["return_sign"] = draw(st.booleans())
        if draw(st.booleans()):
            options["b"] = jnp.asarray(rng.integers(-2, 3, draw(part_of(shape))).astype(draw(dtypes)))
    return x, options


def part_of(shape):
    """Shapes that broadcast to `shape`."""
    return st.sampled_from([shape[k:] for k in range(len(shape) + 1)] + [tuple(min(d, 1) for d in shape)])


each_precision = pytest.mark.parametrize("x64", [False, pytest.param(True, marks=slow)], ids=["32 bits", "64 bits"])


@each_precision
@each_op_in_turn
@given(data=st.data())
def test_any_arguments(op, x64, data):
    with jax.enable_x64(x64):
        x, options = data.draw(arguments(op))
        # Factors of another dtype are promoted, which strict promotion refuses to JAX as to jaxsoft.
        with as_usual() if "b" in options else contextlib.nullcontext():
            actual = jax.tree.leaves(getattr(jaxsoft, op)(x, **options))
        with as_usual():
            expected = jax.tree.leaves(jax.jit(functools.partial(getattr(jax.nn, op), **options))(x))
        for a, b in zip(actual, expected, strict=True):
            what = f"{op}({x!r}, {options})"
            assert jax.typeof(a).str_short() == jax.typeof(b).str_short(), what
            assert a.weak_type == b.weak_type, what
            # jax.nn computes 16-bit numbers in 16 bits.
            eps = float(jnp.finfo(a.dtype).eps)
            a, b = (np.asarray(v).astype(np.complex128) for v in (a, b))
            if op == "softmax" and "where" in options:
                b = np.nan_to_num(b)  # a row of which nothing is selected
            np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps, err_msg=what)


@st.composite
def losses(draw, dense):
    """Arguments as optax takes them: labels and logits broadcast with each other, where with the logits."""
    shape, rng = draw(st.sampled_from([(5,), (2, 3), (3, 1, 4), (2, 3, 4), (0, 4)])), np.random.default_rng(0)
    ndim = len(shape)
    axis = draw(st.integers(-ndim, ndim - 1) | st.lists(st.integers(0, ndim - 1), min_size=1, unique=True).map(tuple))
    axes = tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))

    def some(shape, least=0):
        return tuple(1 if d > least and draw(st.booleans()) else d for d in shape)

    rows = tuple(d for a, d in enumerate(shape) if a not in axes)
    logits = [1 if a not in axes and d > 1 and draw(st.booleans()) else d for a, d in enumerate(shape)]
    x = (3 * rng.standard_normal(logits)).astype(draw(st.sampled_from(["float16", "bfloat16", "float32"])))
    if dense:
        labels = rng.random(some(shape)).astype(np.float32)
        if all(d > 1 for d in shape):
            labels = labels[(0,) * draw(st.integers(0, ndim - 1))]
    else:
        classes = int(np.prod([shape[a] for a in axes]))
        assume(x.size)  # of an empty batch optax has no loss
        labels = rng.integers(0, classes, some(rows)).astype(draw(st.sampled_from(["int32", "uint8", "int16"])))
    where = None
    if draw(st.booleans()):
        where = rng.random(x.shape) < 0.7
        if len(axes) == 1 and draw(st.booleans()):
            where = rng.random(tuple(d for a, d in enumerate(x.shape) if a not in axes)) < 0.7
    return x, labels, axis, where


@pytest.mark.parametrize("dense", [False, True], ids=["integers", "probabilities"])
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_any_arguments_of_a_loss(dense, data):
    """As optax, in its shapes; 16-bit logits as optax has them in f32, in which jaxsoft computes."""
    x, labels, axis, where = data.draw(losses(dense))
    name = "softmax_cross_entropy" if dense else "softmax_cross_entropy_with_integer_labels"
    with as_usual():
        function = functools.partial(getattr(optax, name), axis=axis, where=where)
        expected = jax.jit(function)(np.asarray(x, np.float32), labels)
    actual = getattr(jaxsoft, name)(x, labels, axis, where)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=f"{x!r}, {labels!r}, {axis}, {where!r}")


@pytest.mark.parametrize("dtype", some([jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64], [jnp.float32]))
def test_jaxs_functions_replaced_by_ours(monkeypatch, dtype):
    """As people patch libraries: jaxsoft's functions do not call what stands in the place of JAX's."""
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32).astype(dtype)
    names = ("softmax", "log_softmax", "logsumexp")
    with as_usual():
        expected = [np.asarray(getattr(jax.nn, name)(x, -1)).astype(np.complex64) for name in names]
    for name in names:
        monkeypatch.setattr(jax.nn, name, getattr(jaxsoft, name))
    monkeypatch.setattr(jax.scipy.special, "logsumexp", jaxsoft.logsumexp)
    for implementation in (None, "xla"):
        for name, want in zip(names, expected, strict=True):
            for where in (None,) if implementation else (None, np.ones(40, bool)):
                y = getattr(jax.nn, name)(x, -1, where=where, implementation=implementation)
                tolerance = 1e-5 if x.dtype.itemsize >= 4 else 0.3
                np.testing.assert_allclose(np.asarray(y).astype(np.complex64), want, rtol=tolerance, atol=tolerance)
                if dtype == jnp.float32:
                    g = jax.grad(
                        lambda x, n=name, i=implementation: jnp.sum(getattr(jax.nn, n)(x, -1, implementation=i))
                    )
                    assert np.isfinite(g(x)).all()
    if dtype == jnp.float32:
        labels = np.array([0, 1, 2])
        assert np.isfinite(jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, implementation="xla")).all()
        assert np.isfinite(jaxsoft.softmax_cross_entropy(x, x, implementation="xla")).all()
        assert np.isfinite(jaxsoft.top_k_softmax(x, 3, implementation="xla")[1]).all()


def test_names():
    """All that is public, and nothing else, is in jaxsoft.__all__."""
    assert set(OPS) <= set(jaxsoft.__all__)
    assert all(hasattr(jaxsoft, name) for name in jaxsoft.__all__)
    assert jaxsoft.__all__ == sorted(jaxsoft.__all__)
    assert jaxsoft.__version__.count(".") >= 2


@pytest.mark.parametrize(
    ("op", "old", "new"),
    [(op, "causal", "is_causal") for op in ("softmax", "log_softmax", "logsumexp", "entropy")]
    + [
        (op, "logit_softcap", "logits_soft_cap")
        for op in (
            "softmax_cross_entropy",
            "softmax_cross_entropy_with_integer_labels",
            "linear_softmax_cross_entropy",
        )
    ],
)
def test_renamed(op, old, new):
    function = getattr(jaxsoft, op)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    assert "old" not in inspect.signature(function).parameters
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected .* '{old}'; '{new}' is what '{old}' was"):
        function(*[jnp.zeros((2, 2))] * len(required), **{old: True})
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument 'no_such'$"):
        function(*[jnp.zeros((2, 2))] * len(required), no_such=1)
