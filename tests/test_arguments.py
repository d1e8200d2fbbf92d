"""Arguments: what is wrong is named, with what was given and what is allowed; what jax.nn takes is taken."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import IMPLEMENTATIONS, OPS, each_op, loss, ours, same_bits, slow, theirs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from truth import assert_values

import jaxsoft
from jaxsoft._core import gpus
from jaxsoft._core.implementations import REGISTERED
from jaxsoft._ops import cross_entropy

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
        ({"where": jax.random.key(0)}, TypeError, r"where must hold booleans or integers; got dtype key"),
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


@pytest.mark.costly
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
    if name == "pallas" and jax.__version_info__ < (0, 11, 1):  # which is said wherever they are
        reason = f"JAX {jax.__version__} cannot lower its kernels for rows"
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


@pytest.mark.cover("op")
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


@pytest.mark.cover("op")
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


RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.standard_normal((4, 7)).astype(np.float32), np.array([0, 6, 3, 1])
HIDDEN, WEIGHT = RNG.standard_normal((4, 5)).astype(np.float32), RNG.standard_normal((5, 7)).astype(np.float32)
Q = RNG.standard_normal((1, 8, 2, 8)).astype(np.float32)
TABLE, LENGTHS = np.array([[0, 1]]), np.array([16])
PAGES = RNG.standard_normal((2, 8, 2, 8)).astype(np.float32)


def ring(**options):
    """Ring attention over two devices, if there are so many, which what is traced enters as an argument."""
    devices = jax.devices()[:2]
    traced = {name: v for name, v in options.items() if isinstance(v, jax.core.Tracer)}
    mapped = jax.shard_map(
        lambda q, traced: jaxsoft.ring_attention(q, q, q, axis_name="d", **(options | traced)),
        mesh=jax.make_mesh((len(devices),), ("d",), axis_types=(AxisType.Auto,), devices=devices),
        in_specs=(P(None, "d"), P()),
        out_specs=P(None, "d"),
    )
    return jax.jit(mapped)(Q, traced)


def kl_divergence(**options):
    return jaxsoft.softmax_kl_divergence(LOGITS, LOGITS[::-1], **options)


# Functions of their options alone, by name.
FUNCTIONS = {
    **{op: functools.partial(getattr(jaxsoft, op), LOGITS, -1) for op in (*OPS, "entropy")},
    "softmax_kl_divergence": kl_divergence,
    "top_k_softmax": functools.partial(jaxsoft.top_k_softmax, LOGITS),
    "integer": functools.partial(jaxsoft.softmax_cross_entropy_with_integer_labels, LOGITS, LABELS),
    "dense": functools.partial(jaxsoft.softmax_cross_entropy, LOGITS, np.abs(LOGITS)),
    "linear": functools.partial(jaxsoft.linear_softmax_cross_entropy, HIDDEN, WEIGHT, LABELS),
    "linear, mean": functools.partial(jaxsoft.linear_softmax_cross_entropy, HIDDEN, WEIGHT, LABELS, reduction="mean"),
    "sample": functools.partial(jaxsoft.random.sample, jax.random.key(0), LOGITS),
    "attention": functools.partial(jaxsoft.dot_product_attention, Q, Q, Q),
    "paged_attention": functools.partial(jaxsoft.paged_attention, Q, PAGES, PAGES, TABLE, LENGTHS),
    "ring_attention": ring,
    "fold.state": functools.partial(jaxsoft.fold.state, LOGITS),
    "fold.attention_state": functools.partial(jaxsoft.fold.attention_state, LOGITS, WEIGHT.T),
}
LOSSES, ATTENTIONS = ("integer", "dense", "linear", "linear, mean"), ("attention", "paged_attention", "ring_attention")

# Options that are numbers, and may be traced.
NUMBERS = [
    (name, "scale") for name in (*OPS, "entropy", "softmax_kl_divergence", "linear", "linear, mean", *ATTENTIONS)
]
NUMBERS += [(name, option) for name in LOSSES for option in ("label_smoothing", "z_loss")]
NUMBERS += [("sample", option) for option in ("temperature", "top_p", "min_p")]


class Parameter:
    """What only `__jax_array__` makes an array of, as a parameter of Flax."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


HALVES = [np.float16(0.5), np.float32(0.5), np.float64(0.5), jnp.bfloat16(0.5), np.asarray(jnp.bfloat16(0.5))[()]]
HALVES += [np.array(0.5), np.array(0.5, np.float32), jnp.float32(0.5), jnp.asarray(0.5), Parameter(0.5)]


@pytest.mark.costly(9)
@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_numbers_of_every_kind(name, option):
    """Python's, NumPy's and JAX's, arrays of one number and parameters, under jit and vmap too."""
    f = lambda value: FUNCTIONS[name](**{option: value})  # noqa: E731
    expected = f(0.5)
    for half in HALVES:
        assert_trees_all_close(f(half), expected, rtol=1e-5, atol=1e-6)
    if option != "top_p":  # whose 1 is none, if it is a number of Python's or NumPy's
        whole = f(1)
        for one in (np.int8(1), np.uint32(1), np.array(1), jnp.int32(1), 1.0):
            assert_trees_all_close(f(one), whole, rtol=1e-5, atol=1e-6)
    *jitted, quarter, of_each = jax.jit(lambda h, b, each: (f(h), f(b), f(0.25), jax.vmap(f)(each)))(
        jnp.float32(0.5), jnp.bfloat16(0.5), np.array([0.5, 0.25], np.float32)
    )
    for actual in jitted:
        assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    one_by_one = jax.tree.map(lambda *v: np.stack(v), expected, quarter)
    assert_trees_all_close(of_each, one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_what_is_no_number(name, option):
    f = FUNCTIONS[name]
    for value in (True, np.True_, jnp.asarray(True), "a", 1j, np.complex64(1), jax.random.key(0), np.ones((9, 9, 9))):
        with pytest.raises((TypeError, ValueError), match=f"^{option} must "):
            f(**{option: value})


@pytest.mark.parametrize("name", LOSSES)
def test_range_of_what_is_known(name):
    """A number that is a constant is checked; one that is traced is what the formula makes of it."""
    f = FUNCTIONS[name]
    for option, value in {"label_smoothing": 1.5, "z_loss": -1.0}.items():
        for known in (value, np.float32(value), np.array(value)):
            with pytest.raises(ValueError, match=f"^{option} must be "):
                f(**{option: known})
        assert np.all(np.isfinite(f(**{option: jnp.float32(value)})))


@pytest.mark.parametrize("name", ["integer", "dense"])
def test_derivatives_of_gradients_by_numbers(name):
    """The gradient by the logits, mapped over numbers, and its derivative by them: a loss is linear in each."""

    def gradient(x, s, z):
        return jax.grad(
            lambda x: FUNCTIONS[name].func(x, *FUNCTIONS[name].args[1:], label_smoothing=s, z_loss=z).sum()
        )(x)

    numbers = np.array([0.1, 0.4, 0.7], np.float32), np.array([0.3, 0.2, 0.9], np.float32)

    @jax.jit
    def results(x, s, z):
        known = *zip(*(v.tolist() for v in numbers), strict=True), (0.0, 0.3), (0.5, 0.3), (0.0, 1.3)
        mapped = jax.vmap(gradient, (None, 0, 0))(x, s, z)
        return mapped, jax.jacobian(gradient, (1, 2))(x, s[0], z[0]), [gradient(x, *v) for v in known]

    mapped, (by_s, by_z), (*one_by_one, plain, half, squared) = results(LOGITS, *numbers)
    assert_trees_all_close(mapped, np.stack(one_by_one), rtol=1e-5, atol=1e-6)
    assert_trees_all_close(by_s, 2 * (half - plain), rtol=1e-4, atol=1e-5)
    assert_trees_all_close(by_z, squared - plain, rtol=1e-4, atol=1e-5)


def test_arrays_compile_once():
    """A number of Python is a constant of the program, and an array of JAX is none."""
    f, programs = FUNCTIONS["integer"], cross_entropy._with_integer_labels
    count = []
    for kind in (jnp.float32, float):
        f(z_loss=kind(0.59375))
        before = programs._cache_size()
        for value in (0.40625, 0.34375, 0.28125):  # which no other test has
            f(z_loss=kind(value))
        count.append(programs._cache_size() - before)
    assert count == [0, 3]


# Options that are constants of a program, with a number that each takes.
CONSTANTS = [(name, "logits_soft_cap", 2) for name in (*LOSSES, *ATTENTIONS)]
CONSTANTS += [(name, "local_window_size", 2) for name in ATTENTIONS]
CONSTANTS += [("attention", "dropout_rate", 0), ("ring_attention", "dropout_rate", 0)]
CONSTANTS += [("integer", "ignore_index", 3), ("linear", "ignore_index", 3), ("linear", "chunk_size", 2)]
CONSTANTS += [("top_k_softmax", "k", 2), ("sample", "top_k", 2)]


@pytest.mark.cover
@pytest.mark.parametrize(("name", "option", "number"), CONSTANTS)
def test_constants_of_every_kind(name, option, number):
    """Whatever is known when the call is traced; what is not says so, and what to write."""
    f = lambda value: FUNCTIONS[name](**{option: value})  # noqa: E731
    expected = f(number)
    for kind in (np.int8, np.uint64, np.array, jnp.int32):
        assert same_bits(f(kind(number)), expected)
    with pytest.raises(TypeError, match=rf"^{option} must be .*known when the call is traced; got .*static_argnames"):
        jax.jit(f)(number)
    for value in (True, np.True_, "a", 1j, np.ones(3), jnp.ones(3)):
        with pytest.raises((TypeError, ValueError), match=f"^{option} must "):
            f(value)
    assert same_bits(jax.jit(f, static_argnums=0)(number), jax.jit(lambda: f(number))())


@pytest.mark.parametrize("name", ATTENTIONS)
def test_minus_one_is_no_window(name):
    """FlashAttention's -1 may as well be an empty window's length less one, so the error says what to write."""
    f = FUNCTIONS[name]
    for given, meant in ((-1, "None"), ((-1, -1), "(None, None)"), ((-1, 0), "(None, 0)"), ([3, -1], "(3, None)")):
        message = f"local_window_size must not be negative; got {given}. No limit is None, not -1: write {meant}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}(\n|$)"):
            f(local_window_size=given)
    with pytest.raises(ValueError, match=r"local_window_size must not be negative; got \(2, -2\)(\n|$)"):
        f(local_window_size=(2, -2))


MASKS = [(name, "where") for name in (*OPS, "entropy", "softmax_kl_divergence", "integer", "dense")]
MASKS += [
    ("fold.state", "where"),
    ("fold.attention_state", "where"),
    ("attention", "mask"),
    ("paged_attention", "mask"),
]


@pytest.mark.parametrize(("name", "option"), MASKS)
def test_masks(name, option):
    """Booleans, and integers of which 0 is False; floats may be what is added to scores, where 0 is for what counts."""
    f = lambda mask: FUNCTIONS[name](**{option: mask})  # noqa: E731
    n = {"paged_attention": 16, "attention": 8}.get(name, 7)
    mask = np.arange(n)[None] % 3 != 1
    expected = f(mask)
    for dtype in (np.int8, np.uint8, np.int32, np.uint32):
        assert same_bits(f(mask.astype(dtype) * dtype(2)), expected)
        assert same_bits(f(jnp.asarray(mask, dtype)), expected)
    assert same_bits(f(mask.tolist()), expected)
    for dtype in (np.float32, jnp.bfloat16, np.complex64):
        dtype = np.dtype(dtype)
        message = f"^{option} must hold booleans or integers; got dtype {dtype.name}. .* bias.* {option} != 0$"
        with pytest.raises(TypeError, match=message):
            f(mask.astype(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1), (1, 1)])
def test_shapes_of_numbers_of_rows(shape):
    """A temperature may have the shapes that a scale may have, with the same meaning."""
    warm = np.resize(np.array([0.5, 1, 2, 4], np.float32), shape)
    column = np.broadcast_to(warm.reshape(warm.shape if warm.ndim > 1 else (-1, 1)), (4, 1))
    for name in (*OPS, "entropy", "softmax_kl_divergence"):
        f = FUNCTIONS[name]
        assert_trees_all_close(f(scale=warm), f(scale=column), rtol=1e-6)
    p = jaxsoft.softmax(LOGITS, scale=1 / column)
    token, drawn = FUNCTIONS["sample"](temperature=warm)
    assert_trees_all_close(drawn, jnp.asarray(p)[np.arange(4), token], rtol=1e-5)
    assert same_bits(FUNCTIONS["sample"](top_p=warm / 4), FUNCTIONS["sample"](top_p=column[:, 0] / 4))


@pytest.mark.parametrize("shape", [(3,), (7,), (1, 4), (4, 7), (1, 4, 1)], ids=str)
def test_shapes_that_are_no_numbers_of_rows(shape):
    for name, option in (("softmax", "scale"), ("entropy", "scale"), ("sample", "temperature"), ("sample", "min_p")):
        with pytest.raises(ValueError, match=rf"^{option} must broadcast to .*\(4, 7\), .*\(4,\); got shape"):
            FUNCTIONS[name](**{option: np.ones(shape, np.float32)})


def test_scales_of_the_shape_of_rows():
    """The shape of x without the reduced axes, wherever these are; NumPy's rule of broadcasting holds for others."""
    x = RNG.standard_normal((3, 2, 3, 5)).astype(np.float32)
    axes = (0, 1, 2, 3, (1, 2), (0, 3), (0, 1, 3))
    scales = [RNG.uniform(0.5, 2, x.max(axis).shape).astype(np.float32) for axis in axes]
    per_second = np.array([[0.5], [2]], np.float32)  # (2, 1) broadcasts to (3, 2, 5) where the axis is the last
    *actual, y = jax.jit(
        lambda x, scales: (
            *(jaxsoft.softmax(x, axis, scale=scale) for axis, scale in zip(axes, scales, strict=True)),
            jaxsoft.softmax(x[:, 0, :2], scale=per_second),
        )
    )(x, scales)

    def definition(x, axis):
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    for axis, scale, found in zip(axes, scales, actual, strict=True):
        np.testing.assert_allclose(found, definition(x * np.expand_dims(scale, axis), axis), rtol=1e-5)
    np.testing.assert_allclose(y, definition(x[:, 0, :2] * per_second, -1), rtol=1e-5)
