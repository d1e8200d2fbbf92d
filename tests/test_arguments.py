"""Arguments: what is wrong is named, with what was given and what is allowed; what jax.nn takes is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import IMPLEMENTATIONS, OPS, each_op, loss, ours, same_bits, slow, theirs
from truth import assert_values

import jaxsoft
from jaxsoft._core import gpus
from jaxsoft._core.implementations import REGISTERED

X = np.ones((2, 3), np.float32)


@each_op
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": 2}, ValueError, r"axis must be between -2 and 1 for an array of 2 dimensions; got 2"),
        ({"axis": (0, -3)}, ValueError, r"axis must be between -2 and 1 .*got \(0, -3\)"),
        ({"axis": (1, -1)}, ValueError, r"axis must not name a dimension twice; got \(1, -1\)"),
        ({"axis": 0.5}, TypeError, r"axis must be an integer, a sequence of integers or None; got 0\.5"),
        ({"axis": "rows"}, TypeError, r"axis must be an integer, a sequence of integers or None; got 'rows'"),
        ({"where": np.ones(4, bool)}, ValueError, r"where must broadcast to .*\(2, 3\); got shape \(4,\)"),
        ({"where": np.ones((5, 2, 3), bool)}, ValueError, r"where must broadcast to .*\(2, 3\); got shape \(5, 2, 3\)"),
        ({"where": jax.random.key(0)}, TypeError, r"where must hold numbers; got dtype key"),
        ({"scale": "a"}, TypeError, r"scale must be a number or an array of numbers; got 'a'"),
        ({"bias": [1, "a"]}, TypeError, r"bias must be a number or an array of numbers; got \[1, 'a'\]"),
        ({"where": np.array([None])}, TypeError, r"where must be a number or an array of numbers; got array\(\[None\]"),
        ({"dtype": "foo"}, TypeError, r"dtype must be None or one of float16, .*; got 'foo'"),
        ({"dtype": jax.dtypes.prng_key}, TypeError, r"dtype must be None or one of float16, .*; got <class"),
        ({"implementation": "fast"}, ValueError, r"implementation must be None or one of 'ffi', .*'xla'.*; got 'fast'"),
    ],
)
def test_bad_arguments(op, options, error, message):
    with pytest.raises(error, match=message):
        ours(op, **options)(X)
    with pytest.raises(error, match=message):
        jax.jit(ours(op, **options))(X)


@each_op
def test_bad_scores(op):
    name = "a" if op == "logsumexp" else "x"
    with pytest.raises(TypeError, match=f"{name} must hold numbers; got dtype key"):
        ours(op)(jax.random.key(0).reshape(1))
    with pytest.raises(TypeError, match=f"{name} must be a number or an array of numbers; got 'scores'"):
        ours(op)("scores")
    with pytest.raises(
        ValueError, match=r"axis must name an axis of the array, and one of shape \(\) has none; got -1"
    ):
        ours(op)(1.0)


EVERY_ARRAY = [
    (jaxsoft.softmax, ("x",)),
    (jaxsoft.log_softmax, ("x",)),
    (jaxsoft.logsumexp, ("a", "b")),
    (jaxsoft.entropy, ("x",)),
    (functools.partial(jaxsoft.top_k_softmax, k=2), ("x",)),
    (jaxsoft.softmax_cross_entropy, ("logits", "labels", "class_weights")),
    (jaxsoft.softmax_cross_entropy_with_integer_labels, ("logits", "labels", "class_weights")),
    (jaxsoft.linear_softmax_cross_entropy, ("hidden", "weight", "labels", "row_weights", "class_weights")),
    (jaxsoft.fold.state, ("x", "where")),
    (jaxsoft.fold.from_lse, ("value",)),
]


@pytest.mark.parametrize(("f", "names"), EVERY_ARRAY)
def test_what_is_no_array_is_named(f, names):
    for i, name in enumerate(names):
        good = {other: np.zeros(3, int) if other == "labels" else np.ones((3, 3), np.float32) for other in names[:i]}
        required = {other: np.zeros(3, int) for other in names[i + 1 :] if other in ("weight", "labels")}
        bad = [None] * (i == 0 or name in ("weight", "labels")) + ["a", np.array([None]), [[1, 2], [3]], 2**70]
        for value in bad:
            with pytest.raises((TypeError, ValueError), match=f"^{name} must be a number or an array of numbers; got "):
                f(**good, **{name: value}, **required)


def test_implementations_that_are_no_names():
    for name in ([], (), ("ffi", "fast"), ("ffi", None), 1, np.array(["ffi"])):
        with pytest.raises(ValueError, match=r"implementation must be None or one of 'ffi', .*; got "):
            jaxsoft.softmax(X, implementation=name)


def test_arrays_without_an_axis():
    """axis=None and () name none, as in jax.nn; -1 is none of theirs."""
    for axis in (None, ()):
        assert jaxsoft.softmax(1.0, axis) == 1
    for f in (jaxsoft.entropy, functools.partial(jaxsoft.top_k_softmax, k=1), jaxsoft.fold.running_states):
        with pytest.raises(ValueError, match=r"axis must name an axis of the array, and one of shape \(\) has none"):
            f(1.0)
    for f in (jaxsoft.softmax_cross_entropy_with_integer_labels, jaxsoft.softmax_cross_entropy):
        with pytest.raises(
            ValueError, match=r"logits must have at least one axis, that of the classes; got shape \(\)"
        ):
            f(1.0, 0)


def test_numpys_booleans():
    h, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    expected = jaxsoft.linear_softmax_cross_entropy(h, w, [0, 1], recompute=True)
    assert same_bits(jaxsoft.linear_softmax_cross_entropy(h, w, [0, 1], recompute=np.True_), expected)
    with pytest.raises(TypeError, match="recompute must be True or False; got 1"):
        jaxsoft.linear_softmax_cross_entropy(h, w, [0, 1], recompute=1)


def test_bad_factors():
    with pytest.raises(TypeError, match="b must hold numbers; got dtype key"):
        jaxsoft.logsumexp(X, b=jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match=r"b must broadcast with a, of shape \(2, 3\); got shape \(4,\)"):
        jaxsoft.logsumexp(X, b=np.ones(4, np.float32))
    for name in ("ffi", "reference"):
        with pytest.raises(
            ValueError, match=f"implementation='{name}' cannot serve this call: it has no factors b.*'xla'"
        ):
            jaxsoft.logsumexp(X, b=np.ones(3, np.float32), implementation=name)


@each_op
def test_positional_arguments_are_jaxs(op):
    """implementation can only be given by name, so that no position means something else than in jax.nn."""
    with pytest.raises(TypeError):
        getattr(jaxsoft, op)(X, -1, None, None, None, None, "xla")


@each_op
@pytest.mark.parametrize("name", [name for name in jaxsoft.implementations() if name not in IMPLEMENTATIONS])
def test_an_implementation_that_is_not_here(op, name):
    """It says why, and what else there is; also under jit and in the derivative."""
    reason = jaxsoft.implementations()[name] if REGISTERED[name].rows else "it has no kernels for rows"
    for f in (ours(op, name), jax.jit(ours(op, name)), jax.grad(loss(ours(op, name)))):
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot serve this call") as error:
            f(np.ones((8, 1024), np.float32))
        assert reason in str(error.value)
        assert "implementation=None always works" in str(error.value)
        assert "'xla'" in str(error.value)


@each_op
@pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=slow if name == "reference" else (), id=str(name)) for name in IMPLEMENTATIONS],
)
def test_an_implementation_that_is_here(op, implementation):
    """What is said to be available serves an ordinary call, forward and backward; and None is one of the others."""
    x = np.random.default_rng(0).standard_normal((8, 1024)).astype(np.float32)
    y = ours(op, implementation)(x)
    assert_values(op, x, y)
    dx, expected = jax.jit(lambda x: (jax.grad(loss(ours(op, implementation)))(x), jax.grad(loss(theirs(op)))(x)))(x)
    assert_trees_all_close(dx, expected, rtol=1e-4, atol=1e-5)
    if implementation is None:
        assert any(same_bits(y, ours(op, name)(x)) for name in IMPLEMENTATIONS[1:])


def test_the_list_of_implementations():
    for platform in ("cpu", "cuda", None, "tpu"):
        names = jaxsoft.implementations(platform)
        assert list(names) == ["ffi", "pallas", "triton", "cudnn", "xla", "reference"]
        assert names["xla"] is None and names["reference"] is None
        assert all(reason is None or len(reason) > 10 for reason in names.values())
    assert "tpu" in jaxsoft.implementations("tpu")["ffi"]


def test_the_list_of_implementations_on_an_amd_gpu(monkeypatch):
    """JAX calls it "gpu", as it calls NVIDIA's."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpus, "present", lambda: {})
    names = jaxsoft.implementations()
    assert names == jaxsoft.implementations("rocm")
    assert "rocm" in names["ffi"] and "AMD" in names["triton"] and names["pallas"]
    assert names["xla"] is None


@each_op
@pytest.mark.parametrize(
    "x",
    [
        [1, 2, 3],
        [[0.5, 1.5], [2.5, -1.0]],
        (1.0, 2.0),
        [True, False],
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.arange(4, dtype=np.uint32),
        np.array([True, False, True]),
        np.arange(3.0),
    ],
    ids=repr,
)
def test_lists_integers_and_booleans(op, x):
    """As floats. jax.nn takes neither lists nor booleans, and lets differences of unsigned integers wrap around."""
    expected = theirs(op)(np.asarray(x, jnp.exp(jnp.asarray(x)).dtype))
    for scores in (x, np.asarray(x), jnp.asarray(x)):
        actual = ours(op)(scores)
        assert_trees_all_close(actual, expected, rtol=1e-6)
        assert actual.dtype == expected.dtype


@each_op
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_dtypes_that_are_left_to_jax(op, dtype):
    """No kernel computes in them; jax.nn's result, in both modes. A kernel that is named says that it cannot."""
    x = (np.random.default_rng(0).standard_normal((2, 4)) + (1j if dtype == jnp.complex64 else 0)).astype(dtype)
    x = jnp.asarray(x)
    assert_trees_all_close(ours(op)(x), theirs(op)(x), rtol=1e-6)
    assert ours(op)(x).dtype == dtype
    where = np.array([True, True, False, True])
    if dtype != jnp.complex64:
        wide = ours(op)(x, where=where).astype(jnp.float32)
        assert_trees_all_close(wide, theirs(op)(x, where=where).astype(jnp.float32), rtol=1e-6)
    with pytest.raises(ValueError, match=f"implementation='ffi' cannot serve this call: .*{jnp.dtype(dtype).name}"):
        ours(op, "ffi")(x)


@each_op
def test_axis_may_be_any_integer_or_sequence(op):
    expected = {axis: np.asarray(theirs(op, axis=axis)(X)) for axis in (0, 1)}
    for axis in (1, -1, np.int64(1), jnp.int32(1).item(), (1,), [1], (-1,), [np.int32(-1)]):
        np.testing.assert_allclose(ours(op, axis=axis)(X), expected[1], rtol=1e-6)
    np.testing.assert_allclose(ours(op, axis=[0])(X), expected[0], rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_where_may_be_numbers(op):
    """What is not boolean counts where it is not 0, as in jax.nn."""
    where = np.array([[1, 0, 2], [0.0, 0.5, 1]])
    np.testing.assert_allclose(ours(op, where=where)(X), theirs(op, where=where.astype(bool))(X), rtol=1e-6)
