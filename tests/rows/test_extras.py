"""scale, bias, causal and dtype beside where: values and derivatives, of x, scale and bias, for every implementation.

Against float64: numpy's where a dtype's rounding is looked at, jax.nn's of scores z = x * scale + bias where the
arguments' shapes, transformations or orders are.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    DTYPES,
    OPS,
    as_usual,
    each_dtype_in_turn,
    each_fast_implementation,
    each_implementation,
    each_op,
    each_op_in_turn,
    ours,
    precision,
    same_bits,
    served,
    slow,
    theirs,
)
from truth import EPS, Truth, assert_last_place, assert_within, in_float64, pullback, wide

import jaxsoft

NOTHING = {"softmax": 0, "log_softmax": -np.inf, "logsumexp": -np.inf}


def case(shape, dtype, extras, seed=0):
    """x, and arguments that stand for the letters of a form's extras: scale, causal, where, bias."""
    rng = np.random.default_rng([*shape, seed])
    *leading, q, n = shape
    x = (2 * rng.standard_normal(shape)).astype(dtype)
    options = {}
    if "s" in extras:
        options["scale"] = (
            np.linspace(-1.5, 2, q).reshape(q, 1).astype(np.float64 if dtype == np.float64 else np.float32)
        )
    if "l" in extras:
        options["is_causal"] = True
    if "w" in extras:
        options["where"] = rng.random((*leading, 1, n)) < 0.7
    if "b" in extras:
        options["bias"] = rng.standard_normal((q, n)).astype(dtype)
    return x, options


def truth_of(x, scale=1.0, bias=0.0, where=True, is_causal=False):
    """What counts, and the truth about z, of which f32 holds x * scale + bias to its own rounding."""
    counts = np.broadcast_to(where, x.shape) & (np.tri(*x.shape[-2:], dtype=bool) if is_causal else True)
    product, bias = wide(x) * wide(scale), wide(bias)
    with np.errstate(invalid="ignore"):
        truth = Truth.of(np.where(counts, product + bias, -np.inf))
        size = np.where(counts, np.abs(product) + np.abs(bias), 0).max(axis=-1, initial=0, keepdims=True)
        d = np.where(counts, truth.d, 0) + 2 * size
    empty = ~counts.any(axis=-1)
    p, log_p = np.where(counts, truth.p, 0), np.where(counts, truth.log_p, -np.inf)
    m, log_s = (np.where(empty[..., None], 0, v) for v in (truth.m, truth.log_s))
    return counts, Truth(d, p, log_p, m, log_s, np.where(empty, -np.inf, truth.lse))


def assert_result(op, x, y, truth):
    """As `truth.assert_values`, for scores that are not x and results of any dtype."""
    eps = EPS[8 if x.dtype == np.float64 and y.dtype == np.float64 else 4]
    if op == "softmax":
        expected, bound = truth.p, eps * (4 + truth.d) * np.maximum(truth.p, 1e-30)
    elif op == "log_softmax":
        expected, bound = truth.log_p, eps * (4 + truth.d + truth.log_s + np.abs(np.nan_to_num(truth.log_p, neginf=0)))
    else:
        expected, bound = (
            truth.lse,
            (eps * (4 + truth.d.max(-1, keepdims=True) + np.abs(truth.m) + truth.log_s))[..., 0],
        )
    what = f"{op} of {x.dtype} {x.shape}"
    y = np.asarray(y)
    if y.dtype.itemsize == 2:
        return assert_last_place(y, wide(expected), 2 if op == "log_softmax" else 1, wide(bound), what)
    assert_within(y, wide(expected), wide(bound), what)


def everything(op, implementation, options):
    """A jitted function: the value, and the pullback of g to x, scale and bias."""
    moving = {name: options[name] for name in ("scale", "bias") if name in options}
    fixed = {name: v for name, v in options.items() if name not in moving}

    @jax.jit
    def f(x, g, moving, fixed_where):
        rest = {**fixed, **({"where": fixed_where} if fixed_where is not None else {})}
        y, pull = jax.vjp(lambda x, moving: ours(op, implementation, **rest)(x, **moving), x, moving)
        return y, *pull(g)

    return lambda x, g: f(x, g, moving, options.get("where"))


EXTRAS = ("s", "l", "w", "b", "lw", "slwb")
SHAPES = ((2, 5, 33), (2, 3, 1), (1, 7, 1000), (2, 40, 24), (3, 2, 2049), (2, 6, 65))


@pytest.mark.cover("op", "implementation")
@each_op
@each_dtype_in_turn
@each_fast_implementation
def test_against_float64(op, dtype, implementation):
    """Value and gradients, each within the rounding of the arithmetic and one rounding to the result's dtype."""
    with precision(dtype):
        for extras, shape in zip(EXTRAS, SHAPES, strict=True):
            x, options = case(shape, dtype, extras)
            counts, truth = truth_of(x, **options)
            g = np.random.default_rng(1).standard_normal(shape[:-1] if op == "logsumexp" else shape).astype(dtype)
            with served(implementation):
                y, dx, moved = jax.tree.map(np.asarray, everything(op, implementation, options)(x, g))
                assert y.dtype == dx.dtype == x.dtype
                assert_result(op, x, y, truth)
                assert_gradients(op, x, g, options, counts, truth, dx, moved)


def assert_gradients(op, x, g, options, counts, truth, dx, moved):
    z = np.zeros(x.shape, x.dtype)  # for its dtype: the truth knows its values
    dz, bound = pullback(op, z, np.where(counts, g, 0) if op != "logsumexp" else g, truth)
    dz, bound = np.where(counts, dz, 0), np.where(counts, bound, 0)
    scale = np.broadcast_to(wide(options.get("scale", 1.0)), x.shape)
    rounding = float(jnp.finfo(x.dtype).eps) + EPS[4]
    smallest = float(jnp.finfo(x.dtype).smallest_subnormal)
    assert_within(dx, scale * dz, np.abs(scale) * (bound + rounding * np.abs(dz)) + smallest, f"dx of {op} {x.dtype}")
    np.testing.assert_array_equal(wide(dx)[~counts], 0)
    for name, along in (("scale", wide(x)), ("bias", np.ones(x.shape))):
        if name in options:
            shape = options[name].shape
            expected, slack = (
                summed(dz * along, shape),
                summed((bound + 40 * EPS[4] * np.abs(dz)) * np.abs(along), shape),
            )
            if x.dtype == np.float64:
                slack = summed((bound + 1e-13 * np.abs(dz)) * np.abs(along), shape)
            assert moved[name].dtype == options[name].dtype
            assert_within(
                moved[name], expected, slack + rounding * np.abs(expected) + smallest, f"d{name} of {op} {x.dtype}"
            )


def summed(v, shape):
    """The sum of v over what broadcasting to it has added to `shape`."""
    v = v.sum(axis=tuple(range(v.ndim - len(shape))))
    return v.sum(axis=tuple(a for a, d in enumerate(shape) if d == 1), keepdims=True)


@pytest.mark.cover("op", "implementation")
@each_op
@each_fast_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("part", [0, 1])
def test_lengths(op, implementation, dtype, part):
    """All extras at once, for lengths on and around what kernels cut rows by."""
    for n in (2, 3, 31, 127, 1023, 1025, 4097, 65537, 131075)[part::2]:
        x, options = case((3, n), dtype, "slwb")
        options["where"] = options["where"] | (np.arange(n) == 0)
        options.pop("is_causal") if n > 1000 else None
        with served(implementation):
            assert_result(op, x, jax.jit(ours(op, implementation, **options))(x), truth_of(x, **options)[1])


def by_jax(op, axis=-1, scale=None, bias=None, is_causal=False, where=None):
    """The same by jax.nn, from z in memory. Rows of which nothing counts get a score that nothing depends on."""

    def f(x, scale=scale, bias=bias):
        with as_usual():
            z = x if scale is None else x * scale
            z = z if bias is None else z + bias
            if where is None and not is_causal:
                return theirs(op, axis=axis)(z)
            counts = jnp.broadcast_to(True if where is None else where, z.shape)
            counts = counts & jnp.tri(*z.shape[-2:], dtype=bool) if is_causal else counts
            some = counts.any(axis=axis, keepdims=True)
            y = theirs(op, axis=axis)(jnp.where(counts, z, jnp.where(some, -jnp.inf, 0)))
            return jnp.where(some.reshape(y.shape) if op == "logsumexp" else counts, y, NOTHING[op])

    return f


def total(f):
    """A scalar of f's finite results, of which no derivative vanishes."""

    def of(*args):
        y = f(*args)
        weight = 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7
        return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(jnp.where(jnp.isfinite(y), y, 0)) * weight, 0))

    return of


def both(f, x, scale, bias):
    """The value, and the gradients by what is not None."""
    given = [i for i, v in enumerate((x, scale, bias)) if v is not None]
    return f(x, scale, bias), jax.grad(total(f), given)(x, scale, bias)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("axis", [-1, pytest.param(1, marks=slow), (0, 2), None, pytest.param((), marks=slow)])
@pytest.mark.parametrize("half", [0, 1])
def test_shapes(op, implementation, axis, half):
    """Every shape that broadcasts, over every axis; a mask of whole rows is no mask of elements."""
    with jax.enable_x64(True), served(implementation):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 3, 4))
        axes = range(3) if axis is None else axis if isinstance(axis, tuple) else (axis % 3,)
        one = [1 if a in axes else d for a, d in enumerate(x.shape)]
        scales = [None, 0.5, rng.standard_normal(one), rng.standard_normal([*one[:2], 1])]
        others = [(), (1,), (4,), (3, 1), (3, 4), (2, 1, 4), (2, 3, 1), (2, 3, 4), (1, 1, 1)]
        cases = [(scales[i % 4], others[i], others[-i]) for i in range(len(others))][half::2]

        def results(function):
            return [
                both(function(where), x, scale, bias) for scale, bias, where in [(s, v(b), u(w)) for s, b, w in cases]
            ]

        def v(shape):
            return np.sin(np.arange(np.prod(shape, dtype=int))).reshape(shape)

        def u(shape):
            return np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape) > -0.5

        def mine(where):
            return lambda x, s, b: ours(op, implementation, axis=axis)(x, scale=s, bias=b, where=where)

        def jaxs(where):
            return by_jax(op, tuple(axes), where=where)

        actual, expected = jax.jit(lambda: (results(mine), results(jaxs)))()
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@each_op
@each_implementation
@pytest.mark.parametrize("mask", ["of elements", "of rows", "none"])
def test_causal(op, implementation, mask):
    """More rows than elements and fewer, alone and beside a mask; the first row always has its first element."""
    cases = []
    for i, shape in enumerate(((3, 5), (5, 3), (1, 4), (4, 1), (2, 4, 4))):
        masks = {"of elements": np.arange(shape[-1]) % 3 < 2, "of rows": np.arange(shape[-2])[:, None] > 0}
        cases.append((np.random.default_rng(i).standard_normal(shape), masks.get(mask)))

    def results(function):
        return [both(lambda x, s, b, f=function(where): f(x), x, None, None) for x, where in cases]

    with jax.enable_x64(True), served(implementation):
        mine, jaxs = (
            (lambda w: ours(op, implementation, where=w, is_causal=True)),
            (lambda w: by_jax(op, -1, None, None, True, w)),
        )
        actual, expected = jax.jit(lambda: (results(mine), results(jaxs)))()
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@each_op
@each_fast_implementation
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "where": np.arange(300) % 5 > 0}], ids=["plain", "masked"])
def test_dtypes_of_results(op, implementation, options):
    """From every dtype to every other, rounded once; the gradient comes back in x's."""
    x64 = np.random.default_rng(0).standard_normal((3, 300))
    cases = list(itertools.product(DTYPES, DTYPES))

    @jax.jit
    def results(cotangents):  # from outside: what is rounded inside, XLA may not round
        found = []
        for (given, result), g in zip(cases, cotangents, strict=True):
            y, pull = jax.vjp(ours(op, implementation, dtype=result, **options), jnp.asarray(x64.astype(given)))
            found.append((y, pull(g)[0]))
        return found

    shape = (3,) if op == "logsumexp" else x64.shape
    g64 = np.cos(np.arange(np.prod(shape))).reshape(shape)
    with jax.enable_x64(True), served(implementation):
        found = results([g64.astype(result) for _, result in cases])
        for (given, result), (y, dx) in zip(cases, found, strict=True):
            assert y.dtype == result and dx.dtype == given
            x, g = x64.astype(given), g64.astype(result)
            counts, truth = truth_of(x, **options)
            assert_result(op, x, y, truth)
            dz, _ = pullback(op, np.zeros(x.shape), np.where(counts, g, 0) if op != "logsumexp" else g, truth)
            expected = np.where(counts, options.get("scale", 1) * dz, 0)
            # softmax keeps its result, in the dtype that it has.
            eps = max(EPS[4], *(float(jnp.finfo(d).eps) for d in ((given, result) if op == "softmax" else (given,))))
            bound = 4 * eps * (np.abs(expected) + 5 * truth.p) + 1e-7
            assert_within(dx, expected, bound, f"gradient of {op} from {given.__name__} to {result.__name__}")


def test_bias_of_another_dtype():
    """It is added as it is: what x's dtype cannot hold is not lost, and its gradient has its dtype."""
    x = jnp.zeros((2, 64), jnp.bfloat16)
    for dtype in (jnp.float16, jnp.float32, jnp.int32):
        bias = jnp.asarray(np.arange(64) * (1 if dtype == jnp.int32 else 0.001), dtype)
        for op in OPS:
            _, truth = truth_of(np.asarray(x), bias=np.asarray(bias))
            assert_result(op, np.asarray(x), ours(op, bias=bias)(x), truth)
        if dtype != jnp.int32:
            assert jax.grad(lambda b: jaxsoft.softmax(x, bias=b)[0, 0].astype(jnp.float32))(bias).dtype == dtype


@pytest.mark.costly(1)
@each_op
@each_implementation
@pytest.mark.parametrize("of_x", [0, None], ids=["x mapped", "x shared"])
def test_vmap_over_any_operands(op, implementation, of_x):
    """Any subset of x, scale, bias and where mapped: values and gradients."""
    with jax.enable_x64(True), served(implementation):
        rng = np.random.default_rng(0)
        x, scale, bias = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 2, 1)), rng.standard_normal((3, 2, 4))
        where = rng.random((3, 2, 4)) < 0.7

        def results(function):
            found = []
            for mapped in itertools.product((of_x,), *[(None, 0)] * 3):
                args = [v if m == 0 else v[0] for v, m in zip((x, scale, bias, where), mapped, strict=True)]

                def of(x, s, b, w):
                    return both(lambda x, s, b: function(x, s, b, w), x, s, b)

                found.append((jax.vmap(of, mapped) if 0 in mapped else of)(*args))
            return found

        def mine(x, s, b, w):
            return ours(op, implementation)(x, scale=s, bias=b, where=w, is_causal=True)

        def jaxs(x, s, b, w):
            return by_jax(op, where=w, is_causal=True)(x, s, b)

        actual, expected = jax.jit(lambda: (results(mine), results(jaxs)))()
        assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-11)


def operands_of(jaxpr) -> list[list[tuple[int, ...]]]:
    """The shapes that each row operation in a program is given."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jaxsoft" and eqn.params["call"] is None:
            found.append([v.aval.shape for v in eqn.invars])
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            found += operands_of(inner) if hasattr(inner, "eqns") else []
    return found


@each_op
def test_nothing_is_made_larger(op):
    """Operations get scale, where, bias and the causal limit in the shapes that were given, vmapped or not."""

    def f(x):
        where, bias = np.ones((1, 9), bool), np.zeros((5, 9), np.float32)
        return ours(op, scale=np.float32(2), where=where, bias=bias, is_causal=True)(x)

    extras = [(1, 1), (1, 5), (1, 1, 9), (1, 5, 9)]
    x = np.ones((4, 5, 9), np.float32)
    for program, count in ((f, 1), (jax.grad(total(f)), 2)):
        whole = operands_of(jax.make_jaxpr(program)(x).jaxpr)
        assert len(whole) == count and whole[0] == [(4, 5, 9), *extras]
        mapped = operands_of(jax.make_jaxpr(jax.vmap(program))(x[None]).jaxpr)
        expected = [(1, 4, 5, 9), *[(1, *shape) for shape in extras]]
        assert len(mapped) == count and mapped[0] == expected
        assert all(shape.count(1) >= len(shape) - 2 for shape in mapped[-1][-2:])
    rows_masked = operands_of(jax.make_jaxpr(lambda x: ours(op, where=np.ones((5, 1), bool))(x))(x).jaxpr)
    assert rows_masked == [[(4, 5, 9), (1, 5)]]
    along_axis = operands_of(jax.make_jaxpr(ours(op, axis=1))(x).jaxpr)
    assert along_axis == [[(4, 5, 9)]]


@slow  # test_higher_orders has the second order
@each_op_in_turn
@each_implementation
def test_every_order_of_both_modes(op, implementation):
    """Jacobians and Hessians by x, scale and bias at once, with a row of which nothing counts."""
    with jax.enable_x64(True), served(implementation):
        rng = np.random.default_rng(0)
        x, scale, bias = rng.standard_normal((3, 3)), rng.standard_normal((3, 1)), rng.standard_normal(3)
        where = np.array([[True, False, True], [True, True, True], [False, False, False]])
        fast = implementation != "reference"

        def derivatives(f):
            t = (np.cos(x), np.sin(scale), np.cos(bias))
            first = jax.jvp(f, (x, scale, bias), t), jax.vjp(total(f), x, scale, bias)[1](1.0)
            second = [a(b(total(f), (0, 1, 2)), (0, 1, 2))(x, scale, bias) for a in MODES for b in MODES[: 1 + fast]]
            third = jax.grad(lambda s: jnp.sum(jax.hessian(total(f))(x, s, bias)))(scale) if fast else None
            return first, second, third

        mine = ours(op, implementation, where=where)
        functions = (lambda x, s, b: mine(x, scale=s, bias=b), by_jax(op, where=where))
        actual, expected = jax.jit(lambda: [derivatives(f) for f in functions])()
        assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-10)


MODES = (jax.jacfwd, jax.jacrev)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_does_not_count_is_not_seen(op, implementation, dtype):
    """NaN and infinities in x, bias and the cotangent where nothing counts; and rows of which nothing does."""
    rng = np.random.default_rng(0)
    shape = (4, 6, 700)
    counts = rng.random(shape) < 0.6
    counts[0, 0], counts[1] = False, False
    x, bias = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    scale = rng.standard_normal((4, 6, 1)).astype(np.float32)
    g = rng.standard_normal(shape[:-1] if op == "logsumexp" else shape).astype(dtype)
    f = ours(op, implementation, where=counts)

    @jax.jit
    def results(x, scale, bias, g):
        y, pull = jax.vjp(lambda x, s, b: f(x, scale=s, bias=b), x, scale, bias)
        _, pull_x = jax.vjp(lambda x: f(x, scale=scale, bias=bias), x)
        return y, pull(g), pull_x(g), jax.jvp(lambda x, s, b: f(x, scale=s, bias=b), (x, scale, bias), (x, scale, bias))

    with served(implementation):
        clean = results(x, scale, bias, g)
        for hidden in (np.nan, np.inf, -np.inf):
            x1, b1 = (np.where(counts, v, hidden).astype(dtype) for v in (x, bias))
            g1 = g if op == "logsumexp" else np.where(counts, g, hidden).astype(dtype)
            assert same_bits(clean, results(x1, scale, b1, g1)), hidden
    y, (dx, ds, db), (dx_alone,), (_, dy) = jax.tree.map(wide, clean)
    assert all(np.isfinite(v).all() for v in (dx, ds, db, dx_alone, dy))
    assert not dx[~counts].any() and not db[~counts].any() and not dx_alone[~counts].any() and not ds[0, 0].any()
    assert (y[1] == NOTHING[op]).all() and (op == "logsumexp" or (y[~counts] == NOTHING[op]).all())


@each_op
@each_implementation
def test_scale_at_the_edges(op, implementation):
    """0 makes all scores equal, as far as 0 * x is 0; a negative one turns them around; an infinite one overflows."""
    x = np.array([[1.0, 2, 3], [1, -np.inf, 3], [1, np.inf, 3]], np.float32)
    with served(implementation):
        y = np.asarray(ours(op, implementation)(x, scale=0.0))
        np.testing.assert_allclose(
            y[0], {"softmax": 1 / 3, "log_softmax": -np.log(3), "logsumexp": np.log(3)}[op], rtol=1e-6
        )
        assert np.isnan(y[1:]).all()
        f = ours(op, implementation)
        np.testing.assert_allclose(f(x[:2], scale=-2.0), f(-2 * x[:2]), rtol=1e-6)
        big = np.float32([[1e30, 2e30]])
        np.testing.assert_allclose(f(big, scale=1e-30), f(np.float32([[1, 2]])), rtol=1e-6)
        np.testing.assert_array_equal(f(big, scale=1e30), f(np.float32([[np.inf, np.inf]])))
        dx, ds = jax.grad(lambda x, s: f(x, scale=s)[0].sum() if op == "logsumexp" else f(x, scale=s)[0, 0], (0, 1))(
            x[:1], 0.0
        )
        assert not dx.any()
        np.testing.assert_allclose(ds, {"softmax": -1 / 3, "log_softmax": -1, "logsumexp": 2}[op], rtol=1e-6)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@pytest.mark.parametrize("n", [6, 700, 9001])
def test_no_scale_shows_what_does_not_count(op, implementation, n):
    """A scale that makes 0 or -inf into NaN does so only where an element counts, in values and gradients alike."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32)
    counts = rng.random((3, n)) < 0.6
    counts[0], counts[1:, 0] = False, True
    for scale in (0.0, np.nan, np.inf, -np.inf):

        def results(implementation, scale=scale):
            y, pull = jax.vjp(lambda x: ours(op, implementation, where=counts)(x, scale=np.float32(scale)), x)
            return np.asarray(y), np.asarray(pull(jnp.ones_like(y))[0])

        with served(implementation):
            y, dx = results(implementation)
            assert not dx[~counts].any() and (y[0] == NOTHING[op]).all(), scale
            assert op == "logsumexp" or (y[~counts] == NOTHING[op]).all(), scale
            assert np.isfinite(dx[counts]).all() == (scale == 0), scale
            np.testing.assert_allclose(y, results("xla")[0], rtol=1e-5, err_msg=str(scale))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scores_are_not_rounded(dtype):
    """z of 16-bit scores keeps f32's places, and sums of 16-bit gradients are those of f32."""
    x = jnp.full((1, 4), 100, dtype)
    bias = jnp.asarray([0, 0.01, 0.02, 0.03], dtype)  # nothing beside 100 in 16 bits
    _, truth = truth_of(np.asarray(x), bias=np.asarray(bias))
    assert_result("softmax", np.asarray(x), jaxsoft.softmax(x, bias=bias), truth)
    assert jaxsoft.softmax(x, scale=1.001, dtype=jnp.float32)[0, 0] == 0.25
    many = jnp.zeros((4096, 2), dtype)
    g = jnp.tile(jnp.asarray([1, 0], dtype), (4096, 1))
    _, pull = jax.vjp(lambda b: jaxsoft.softmax(many, bias=b), jnp.zeros(2, dtype))
    np.testing.assert_array_equal(wide(pull(g)[0]), [1024, -1024])


@pytest.mark.costly
@each_op
@each_implementation
def test_empty_arrays(op, implementation):
    for shape in ((3, 0), (0, 3), (2, 0, 4)):
        x = np.zeros(shape, np.float32)
        options = {"where": np.ones(shape[-1], bool), "bias": np.zeros((1, shape[-1]), np.float32), "is_causal": True}

        @jax.jit
        def results(x, options=options):
            f = ours(op, implementation, scale=2.0, **options)
            along = jax.grad(total(ours(op, implementation, axis=0, dtype=jnp.float16)))(x)
            return *both(lambda x, s, b: f(x), x, None, None), along

        y, dx, along = results(x)
        assert y.shape == (shape[:-1] if op == "logsumexp" else shape) and dx[0].shape == shape
        assert op != "logsumexp" or (np.asarray(y) == -np.inf).all()
        assert along.shape == shape


@each_op
def test_what_is_kept(op):
    """For a gradient by x alone, softmax keeps its result, and the others x and two numbers a row; extras as given."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    where, bias = np.arange(512) < 100, np.zeros((1, 512), np.float32)

    def kept(f, *args):
        _, pull = jax.vjp(f, *args)
        return sorted(v.shape for v in jax.tree.leaves(pull) if getattr(v, "ndim", 0) and v.size > 10)

    rows = [] if op == "softmax" else [(1, 512), (1, 512)]
    assert kept(lambda x: ours(op)(x, scale=2.0, where=where, bias=bias), x) == [*rows, (4, 512)]
    by_all = kept(lambda x, s, b: ours(op)(x, scale=s, where=where, bias=b), x, np.float32(2), bias)
    assert by_all.count((4, 512)) == 2 and set(by_all) <= {(4, 512), (1, 512)}  # and x, for the gradient by scale


@each_op
@each_fast_implementation
def test_deterministic(op, implementation):
    x, options = case((2, 40, 1000), jnp.float32, "slwb")
    g = np.ones(x.shape[:-1] if op == "logsumexp" else x.shape, np.float32)
    with served(implementation):
        f = everything(op, implementation, options)
        first = f(x, g)
        assert all(same_bits(first, f(x, g)) for _ in range(5))


X = np.ones((2, 3), np.float32)


@each_op
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"scale": np.ones(3)},
            ValueError,
            r"scale must broadcast to .*\(2, 3\), with length 1 along .*; got shape \(3,\)",
        ),
        ({"scale": np.ones((3, 1))}, ValueError, r"scale must broadcast to .*\(2, 3\), .*; got shape \(3, 1\)"),
        ({"scale": np.ones((1, 2, 1))}, ValueError, r"scale must broadcast to .*\(2, 3\), .*; got shape \(1, 2, 1\)"),
        ({"scale": True}, TypeError, r"scale must hold numbers; got dtype bool"),
        (
            {"scale": np.complex64(1j)},
            TypeError,
            r"scale must hold real numbers beside real scores; got dtype complex64",
        ),
        (
            {"bias": np.ones((3, 3))},
            ValueError,
            r"bias must broadcast to the shape of the scores, \(2, 3\); got .*\(3, 3\)",
        ),
        ({"bias": np.ones(3, bool)}, TypeError, r"bias must hold numbers; got dtype bool"),
        (
            {"bias": np.ones(3, np.complex64)},
            TypeError,
            r"bias must hold real numbers beside real scores; got dtype complex64",
        ),
        ({"is_causal": 1}, TypeError, r"is_causal must be True or False; got 1"),
        (
            {"is_causal": True, "axis": 0},
            ValueError,
            r"is_causal needs one reduced axis, the last.*got axis=\(0,\) .*\(2, 3\)",
        ),
        (
            {"is_causal": True, "axis": None},
            ValueError,
            r"is_causal needs one reduced axis, the last.*got axis=\(0, 1\)",
        ),
        (
            {"dtype": jnp.int32},
            ValueError,
            r"dtype must be None or one of float16, bfloat16, float32 and float64; got int32",
        ),
        ({"dtype": jnp.complex64}, ValueError, r"dtype must be None or one of float16, .*; got complex64"),
    ],
)
def test_bad_arguments(op, options, error, message):
    for f in (ours(op, **options), jax.jit(ours(op, **options))):
        with pytest.raises(error, match=message):
            f(X)


@each_op
def test_bad_arguments_beside_others(op):
    with pytest.raises(ValueError, match=r"is_causal needs .* at least 2 dimensions; .* shape \(3,\)"):
        ours(op, is_causal=True)(X[0])
    with pytest.raises(ValueError, match="dtype must be None for complex scores"):
        ours(op, dtype=jnp.float32)(X + 1j)
    for options in ({"scale": 2.0}, {"bias": X}, {"is_causal": True}, {"dtype": jnp.float16}):
        with pytest.raises(ValueError, match="implementation='ffi' cannot serve this call"):
            ours(op, "ffi", **options)(X.astype(jnp.float8_e4m3fn))
    with pytest.raises(TypeError):
        getattr(jaxsoft, op)(X, -1, None, False, False, None, 2.0)


@pytest.mark.costly
@each_op
def test_dtypes_without_kernels(op):
    """Complex and 8-bit scores are scaled and masked in plain JAX."""
    z = np.random.default_rng(0).standard_normal((3, 4)) + 1j
    z = z.astype(np.complex64)
    x = z.real.astype(jnp.float8_e4m3fn)
    scaled = {"scale": 0.5, "bias": np.float32([0, 1, 2, 3])}
    few, causal = np.arange(4) < 3, np.tri(3, 4, dtype=bool)

    @jax.jit
    def results(z, x):
        of_x = ours(op, is_causal=True, dtype=jnp.float32, **scaled)(x)
        return ours(op, where=few, **scaled)(z), of_x, ours(op, scale=0.5)(x)

    of_z, of_x, narrow = results(z, x)
    scores = [np.float32(0.5) * v + scaled["bias"] for v in (z, x.astype(np.float32))]
    expected = jax.jit(lambda z, x: (theirs(op, where=few)(z), theirs(op, where=causal)(x)))(*scores)
    assert_trees_all_close((of_z, of_x), expected, rtol=1e-6)
    assert of_x.dtype == jnp.float32 and narrow.dtype == x.dtype


def test_factors():
    """logsumexp's factors beside scale, bias, a mask and the causal rule."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        a, b, bias = (rng.standard_normal((4, 5)) for _ in range(3))
        where = rng.random((4, 5)) < 0.8
        where[:, 0] = True
        counts = where & np.tri(4, 5, dtype=bool)

        @jax.jit
        def results(a, b, s, bias):
            extras = {"where": where, "scale": 0.5, "bias": bias, "is_causal": True, "dtype": jnp.float32}
            of_squares = lambda s, bias: jaxsoft.logsumexp(a, -1, b**2, scale=s, bias=bias).sum()  # noqa: E731
            return jaxsoft.logsumexp(a, -1, b, return_sign=True, **extras), jax.grad(of_squares, (0, 1))(s, bias)

        def definition(a, b, s, bias):
            of_squares = lambda s, bias: jax.nn.logsumexp(a * s + bias, -1, b**2).sum()  # noqa: E731
            values = jax.nn.logsumexp(a * 0.5 + bias, -1, b, return_sign=True, where=counts)
            return values, jax.grad(of_squares, (0, 1))(s, bias)

        operands = a, b, np.float64(0.5), bias
        (actual, df), (expected, df_expected) = results(*operands), in_float64(definition, *operands)
        assert all(v.dtype == jnp.float32 for v in actual)
        assert_trees_all_close(actual, jax.tree.map(np.float32, expected), rtol=1e-5)
        assert_trees_all_close(df, df_expected, rtol=1e-10)
