"""What surrounds the C++ kernels: buffers that do not fit are an error and never a crash, and so is an old library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu, on_gpu
from ffi_calls import call

import jaxsoft
from jaxsoft._core import library
from jaxsoft._rows import ffi

pytestmark = pytest.mark.skipif(
    jaxsoft.implementations()["ffi"] is not None, reason=f"no C++ kernels: {jaxsoft.implementations()['ffi']}"
)
PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"


F32, F16 = jnp.float32, jnp.float16
X, R, I = jnp.ones((4, 8), F32), jnp.ones(4, F32), jnp.ones(4, jnp.int32)


@pytest.mark.parametrize(
    ("target", "results", "operands"),
    [
        ("softmax", [((4, 8), jnp.int32)], [jnp.ones((4, 8), jnp.int32)]),
        ("softmax", [((4, 9), F32)], [X]),
        ("softmax", [((32,), F32)], [X]),
        ("softmax", [((4, 8), jnp.float64)], [X]),
        ("softmax", [((), F32)], [jnp.ones((), F32)]),
        ("softmax_vjp", [((4, 8), F32)], [X, jnp.ones((4, 7), F32)]),
        ("softmax_vjp", [((4, 8), F32)], [X, X.astype(F16)]),
        ("log_softmax", [((4, 8), F32), ((4,), F16), ((4,), F32)], [X]),
        ("log_softmax", [((4, 8), F16), ((4,), F16), ((4,), F16)], [X.astype(F16)]),
        ("log_softmax", [((4, 8), F32), ((4,), F32), ((3,), F32)], [X]),
        ("log_softmax_vjp", [((4, 8), F32)], [X, R, jnp.ones(5, F32), X]),
        ("log_softmax_vjp", [((4, 8), F32)], [X, R, R, jnp.ones((8, 4), F32)]),
        ("state", [((4, 1), F32), ((4,), F32)], [X]),
        ("state", [((4,), F32), ((4,), jnp.int32)], [X]),
        ("logsumexp_vjp", [((4, 8), F32)], [X, R, R, X]),
        ("logsumexp_vjp", [((4, 8), F32)], [X, R, R, R.astype(F16)]),
        ("label_state", [((4,), F32)] * 3, [X, R]),
        ("label_state", [((4,), F32)] * 3, [X, I[:3]]),
        ("label_state", [((4,), F32)] * 2 + [((4, 8), F32)], [X, I]),
        ("label_state_vjp", [((4, 8), F32)], [X, I, R, R, R, jnp.ones(5, F32)]),
        ("label_sums", [((4,), F32)] * 4 + [((5,), F32)], [X, I]),
        ("label_sums_vjp", [((4, 8), F32)], [X, I, R, R, R, R, X]),
        ("label_entropy", [((4,), F32)] * 3 + [((5,), F32)], [X, I]),
        ("label_entropy_vjp", [((4, 8), F32)], [X, I, R, R, R, R, R, X]),
    ],
)
def test_bad_buffers(target, results, operands):
    with jax.enable_x64(True), pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxsoft: .*\("):
        call(target, results, *operands)


S, L, W, B = jnp.ones(4, F32), jnp.ones(4, jnp.int32), jnp.ones((4, 8), bool), X


@pytest.mark.parametrize(
    ("target", "results", "operands", "form", "message"),
    [
        ("softmax", [((4, 8), F32)], [X, S], {"extras": "l"}, "limit must be S32 of the first operand's shape without"),
        ("softmax", [((4, 8), F32)], [X, L], {"extras": "s"}, "scale must be F32 of the first operand's shape without"),
        ("softmax", [((4, 8), F32)], [X, X], {"extras": "w"}, "where must be PRED of the first operand's"),
        ("softmax", [((4, 8), F32)], [X, W[:, :1]], {"extras": "w"}, "where must be PRED of the first operand's"),
        ("softmax", [((4, 8), F32)], [X, W[:2]], {"extras": "w"}, "where must be PRED of the first operand's"),
        ("softmax", [((4, 8), F32)], [X, W[0]], {"extras": "w"}, "where must be PRED of the first operand's"),
        ("softmax", [((4, 8), F32)], [X, B.astype(F16)], {"extras": "b"}, "bias must be F32 of the first"),
        ("softmax", [((4, 8), F32)], [X, S[:3]], {"extras": "s"}, "scale must be F32"),
        ("softmax", [((4, 8), F32)], [X, W, S], {"extras": "ws"}, "extras='ws' must be some of 'slwb', in this order"),
        ("softmax", [((4, 8), F32)], [X, S, S], {"extras": "ss"}, "extras='ss' must be some of 'slwb'"),
        ("softmax", [((4, 8), F32)], [X, S], {"extras": "q"}, "extras='q' must be some of 'slwb'"),
        ("softmax", [((4, 8), F32)], [X], {"extras": "s"}, "extras='s' with 0 extra operands"),
        ("softmax", [((4, 8), F32)], [X, S], {}, "extras='' with 1 extra operands"),
        ("softmax", [((4, 8), F32)], [X, S], {"extras": "s", "trailing": 1}, "extras='s' must be empty beside"),
        ("softmax", [((4, 8), F32)], [X], {"trailing": 2}, "trailing=2 leaves no dimension"),
        ("softmax", [((4, 8), F32)], [X], {"trailing": -1}, "trailing=-1 leaves no dimension"),
        ("softmax", [((4, 8), F32)], [X], {"masked": True}, "masked must be false, except for softmax_vjp"),
        ("softmax_vjp", [((4, 8), F32)], [X, X, W], {"extras": "w"}, "extras='w' must be some of 'sl'"),
        ("log_softmax_vjp", [((4, 8), F32)], [X, R, R, X, B], {"extras": "b"}, "extras='b' must be some of 'slw'"),
        ("log_softmax_vjp", [((4, 8), F32)], [X, R, R, X], {"trailing": 1}, "maximum must be F32, one a row of scores"),
        ("softmax", [((4, 8), jnp.bfloat16)], [X.astype(F16)], {}, "result must be F16 or F32, of the same"),
        ("softmax", [((4, 8), F32)], [X], {"cap": 2.0}, "cap must be 0, except for label_state, label_state_vjp"),
        ("label_state", [((4,), F32)] * 3, [X, I], {"cap": -2.0}, "cap must be a number, at least 0: got -2"),
        ("label_state", [((8,), F32)] * 3, [X, I], {"trailing": 1}, "trailing must be 0, except for softmax"),
        ("label_state", [((4,), F32)] * 3, [X, I, X], {"extras": "b"}, "extras='b' must be some of 'lw'"),
    ],
)
def test_bad_forms(target, results, operands, form, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(target, results, *operands, **form)


def test_extras_that_differ_in_too_many_dimensions():
    shape = (2, 3, 2, 3, 2, 8)
    scale = jnp.ones((2, 1, 2, 1, 2), F32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broadcast in more ways than the kernels know"):
        call("softmax", [(shape, F32)], jnp.ones(shape, F32), scale, extras="s")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "expected 4 attributes but got 0"),
        ({"extras": "", "trailing": np.int32(0), "masked": False, "cap": 0.0}, "expected S64 but got S32"),
    ],
)
def test_bad_attributes(attributes, message):
    x = jnp.ones((3, 7), F32)  # a shape of its own: to JAX's cache of compiled calls, np.int32(0) is np.int64(0)
    types = [jax.ShapeDtypeStruct(x.shape, F32), *ffi.workspace("softmax", x)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.ffi.ffi_call("jaxsoft_softmax", types)(x, **attributes))


@pytest.mark.parametrize("n", [100, 5000])
def test_scaled_scores_are_those_of_which_m_is_the_maximum(n):
    """A product that is not rounded before m is subtracted differs from m by up to 1024 here, and exp(1024) is inf."""
    x = np.linspace(1e10, 3e10, n, dtype=np.float32)[None]
    scale = np.full(1, 0.7, np.float32)
    y, _ = call("softmax", [((1, n), F32)], x, scale, extras="s")
    top = np.max(x * scale)
    np.testing.assert_array_equal(y, (x * scale == top) / np.sum(x * scale == top, dtype=np.float32))


@pytest.mark.costly(1)
@on_cpu  # the row operations never send empty arrays to a kernel; a buffer of another's making may be empty
@pytest.mark.parametrize(
    ("shape", "trailing"),
    [
        ((2, 0), 0),
        pytest.param((0, 3), 0, marks=pytest.mark.slow),
        pytest.param((2, 0, 3), 1, marks=pytest.mark.slow),
        ((2, 2**24, 0), 1),
    ],
)
def test_empty_buffers(shape, trailing):
    x = jnp.ones(shape, F32)
    statistic = shape[: len(shape) - 1 - trailing] + shape[len(shape) - trailing :]
    y, _ = call("softmax", [(shape, F32)], x, trailing=trailing)
    m, s, _ = call("state", [(statistic, F32)] * 2, x, trailing=trailing)
    assert y.shape == shape and (m == -jnp.inf).all() and (s == 0).all()
    if trailing:
        return
    i = jnp.zeros(statistic, jnp.int32)
    m, s, t, _ = call("label_state", [(statistic, F32)] * 3, x, i)
    assert (m == -jnp.inf).all() and (s == 0).all() and jnp.isnan(t).all()
    pullbacks = {"label_state_vjp": [m, s, s, s], "label_sums_vjp": [m, s, s, s, s]}
    for operation, numbers in (pullbacks | {"label_entropy_vjp": [m, s, s, s, s, s]}).items():
        assert call(operation, [(shape, F32)], x, i, *numbers)[0].shape == shape


@on_gpu
@pytest.mark.parametrize(("shape", "trailing"), [((0, 3), 0), ((0, 5, 4), 0), ((2, 2**24, 0), 1)])
def test_no_rows(shape, trailing):
    x = jnp.ones(shape, F32)
    statistic = shape[: len(shape) - 1 - trailing] + shape[len(shape) - trailing :]
    assert call("softmax", [(shape, F32)], x, trailing=trailing)[0].shape == shape
    assert call("state", [(statistic, F32)] * 2, x, trailing=trailing)[0].shape == statistic


@on_gpu
@pytest.mark.parametrize(("shape", "trailing"), [((2, 0), 0), ((2, 0, 3), 1)])
def test_rows_without_elements_are_refused(shape, trailing):
    statistic = shape[: len(shape) - 1 - trailing] + shape[len(shape) - trailing :]
    with pytest.raises(jax.errors.JaxRuntimeError, match="state has no kernel for rows without elements: got F32"):
        call("state", [(statistic, F32)] * 2, jnp.ones(shape, F32), trailing=trailing)


@pytest.mark.parametrize(
    ("target", "results", "operands", "message"),
    [
        ("softmax_vjp", [((4, 8), F32)], [X], r"operands: got 1 instead of \(probabilities, cotangents\)"),
        ("state", [((4,), F32)] * 2, [], r"operands: got 0 instead of \(scores\)"),
        ("state", [((4,), F32)], [X], r"results: got 2 instead of \(maximum, sum\) and a workspace"),
        ("softmax", [((4, 8), F32)] * 2, [X], r"results: got 3 instead of \(result\) and a workspace"),
        ("logsumexp_vjp", [((4, 8), F32)] * 2, [X, R, R, R], r"results: got 2 instead of \(result\)"),
        ("softmax_vjp", [((4, 8), F32)], [X, X, X], "extras='' with 1 extra operands"),
    ],
)
def test_wrong_number_of_buffers(target, results, operands, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoft: {target}: .*{message}"):
        call(target, results, *operands)


@pytest.mark.parametrize(
    ("results", "operand", "message"),
    [
        ([(4, 3), (4, 3)], X, None),
        ([(4, 3), (4, 2)], X, "indices must be S32, .* the same number in each result"),
        ([(4, 9), (4, 9)], X, "values must be F32, 1 to 256 of"),
        ([(4, 0), (4, 0)], X, "values must be F32, 1 to 256 of"),
        ([(3, 3), (3, 3)], X, "values must be F32, 1 to 256 of"),
        ([(4, 257), (4, 257)], jnp.ones((4, 300), F32), "values must be F32, 1 to 256 of"),
    ],
)
def test_the_shapes_of_what_is_chosen(results, operand, message):
    values, indices = results
    types = [(values, F32), (values, F32), (indices, jnp.int32), ((4,), F32), ((4,), F32)]
    if message is None:
        assert call("top_k", types, operand)[2].tolist() == [[0, 1, 2]] * 4
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call("top_k", types, operand)


def test_good_buffers():
    """The call above is one that works when its buffers fit, in any rank."""
    for shape in ((8,), (4, 8), (2, 2, 8)):
        y, _ = call("softmax", [(shape, F32)], jnp.ones(shape, F32))
        assert (y == 1 / 8).all()
        m, s, _ = call("state", [(shape[:-1], F32)] * 2, jnp.ones(shape, F32))
        assert (m == 1).all() and (s == 8).all()


def test_a_library_for_a_newer_xla_is_not_registered(monkeypatch):
    """XLA would disable the platform over it, so it is found out before, and said."""
    monkeypatch.setattr(library, "xla_api", lambda: (0, 1))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    reason = library._register.__wrapped__(PLATFORM)[1]
    assert "was built for version" in reason and "jaxlib has 0.1" in reason and "install jaxsoft" in reason


def test_a_library_for_another_major_version_is_not_registered(monkeypatch):
    monkeypatch.setattr(library, "xla_api", lambda: (9, 99))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    assert "jaxlib has 9.99" in library._register.__wrapped__(PLATFORM)[1]


def test_a_library_that_is_missing_or_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "find", lambda platform: None)
    assert "was not built" in library._register.__wrapped__(PLATFORM)[1]
    broken = tmp_path / "libjaxsoft.so"
    broken.write_text("no library")
    monkeypatch.setattr(library, "find", lambda platform: broken)
    library._loaded.cache_clear()
    assert "libjaxsoft.so could not be loaded" in library._register.__wrapped__(PLATFORM)[1]


def test_library_of_another_version(monkeypatch):
    """As that of an older package is, beside a clone."""
    monkeypatch.setattr(library, "_SAID", ("what_is_new",))
    names, reason = library._register.__wrapped__("cpu")
    assert not names and "jaxsoft_what_is_new" in reason


def test_the_version_that_jaxlib_has():
    major, minor = library.xla_api()
    assert (major, minor) >= (0, 3)  # JAX 0.10.0's
