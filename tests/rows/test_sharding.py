"""Meshes: sharded rows stay where they are, and a sharded row costs one exchange of a few numbers.

A custom call by itself would make XLA gather its operands on every device, with the right values; so the compiled
program is read for its collectives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import (
    IMPLEMENTATIONS,
    as_usual,
    each_fast_implementation,
    each_op,
    each_op_in_turn,
    loss,
    ours,
    same_bits,
    served,
    slow,
    theirs,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    MESH,
    check_moved,
    collectives,
    each_axis_type,
    kernels,
    mesh_of,
    needs_devices,
    rows_on_a_device,
)

pytestmark = needs_devices
# Without the reference, whose scan XLA partitions, correctly, with collectives of its own.
NAMES = [name for name in IMPLEMENTATIONS if name != "reference"]
each_implementation = pytest.mark.parametrize(
    "implementation", [pytest.param(name, marks=slow if name in (None, "xla") else ()) for name in NAMES]
)
# None decides by itself what a partially manual mesh gets.
each_choice = pytest.mark.parametrize(
    "implementation", [pytest.param(name, marks=slow if name == "xla" else ()) for name in NAMES]
)

X = np.random.default_rng(0).standard_normal((8, 64, 256)).astype(np.float32)
G = np.sin(np.arange(X.size)).reshape(X.shape).astype(np.float32)
ROWS_SHARDED = (P("a", "b"), P(("a", "b")), P(None, "b"), P())
LAST_SHARDED = (P(None, None, "b"), P(None, None, ("a", "b")))
BOTH_SHARDED = (P("a", None, "b"), P(None, "b", "a"))


def each_spec(*specs):
    return pytest.mark.parametrize("spec", specs, ids=str)


def pulled_back(f):
    return lambda x, g: jax.vjp(f, x)[1](g)[0]


@functools.cache
def known(op, of, **options):
    """What `of` makes of jax.nn's operation and X, in one program of one device."""
    return jax.jit(lambda x: of(theirs(op, **options), x))(X)


def value_and_pulled_back(f, x):
    y, pull = jax.vjp(f, x)
    return y, pull(G if y.ndim == G.ndim else G[..., 0])[0]


def pushed_and_pulled_back(f, x):
    return jax.jvp(f, (x,), (G,)), pulled_back(f)(x, jnp.sin(f(x)))


def value_and_gradient(f, x):
    return f(x), jax.grad(loss(f))(x)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@each_axis_type
@each_spec(*ROWS_SHARDED, *LAST_SHARDED, *BOTH_SHARDED)
def test_collectives(op, implementation, kind, spec):
    """Forward and backward: values, gradients, where the results lie, and what moves between devices."""
    mesh, f = mesh_of(kind), ours(op, implementation)
    g = G if op != "logsumexp" else G[..., 0]
    expected = known(op, value_and_pulled_back)
    with jax.set_mesh(mesh), served(implementation):
        out_spec = P(*(*spec, None, None, None)[: 3 if op != "logsumexp" else 2])
        x = jax.device_put(X, NamedSharding(mesh, spec))
        ct = jax.device_put(g, NamedSharding(mesh, out_spec))
        forward = jax.jit(f).lower(x).compile()
        backward = jax.jit(pulled_back(f)).lower(x, ct).compile()
        y, dx = forward(x), backward(x, ct)
        assert_trees_all_close((y, dx), expected, rtol=2e-5, atol=1e-6)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), y.ndim)
        assert dx.sharding.is_equivalent_to(x.sharding, 3)
        whole = spec in ROWS_SHARDED
        for compiled, most, exchanges in ((forward, 2, 1), (backward, 3, 2)):
            exchanges = None if whole or implementation == "xla" else exchanges
            rows = rows_on_a_device(mesh, spec, X.shape)
            check_moved(spec, collectives(compiled), 0 if whole else most, rows, exchanges)
        if implementation == "ffi":  # whose kernels take parts of rows
            cut = x.sharding.shard_shape(X.shape)[-1] < X.shape[-1]
            assert ("state" if cut else op.replace("logsumexp", "state")) in kernels(forward)
            assert op == "log_softmax" or not cut or "logsumexp_vjp" in kernels(backward)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@each_axis_type
def test_other_axes_and_masks(op, implementation, kind):
    """A reduced axis that is not the last, tuples and masks, under jit with sharded operands: no gathering either."""
    mesh = mesh_of(kind)
    where = np.random.default_rng(1).random(X.shape) < 0.7
    masked = [functools.partial(theirs(op, axis=axis), where=where) for axis in (1, -1)]
    expected = jax.jit(lambda x: [f(x) for f in (*masked, theirs(op, axis=(0, 2)))])(X)
    with jax.set_mesh(mesh), served(implementation):
        x, w = (jax.device_put(v, NamedSharding(mesh, P("a", None, "b"))) for v in (X, where))
        actual = []
        for axis in (1, -1):
            f = jax.jit(lambda x, w, axis=axis: ours(op, implementation, axis=axis)(x, where=w))
            compiled = f.lower(x, w).compile()
            check_moved(axis, collectives(compiled), 2, 8 * 64, None if implementation == "xla" else 1)
            actual.append(compiled(x, w))
        over_b = jax.device_put(X, NamedSharding(mesh, P(None, "b")))
        actual.append(jax.jit(ours(op, implementation, axis=(0, 2)))(over_b))
        assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


# Beside X: one a row, one for some rows, the same for all; each where x's shards need it, whatever its own sharding.
EXTRAS = {
    "scale": np.linspace(0.5, 2, 64, dtype=np.float32).reshape(64, 1),
    "bias": np.random.default_rng(2).standard_normal((8, 1, 256)).astype(np.float32),
    "where": np.random.default_rng(3).random((64, 256)) < 0.7,
}
COUNTS = EXTRAS["where"] & np.tri(64, 256, dtype=bool)


def gradients(f):
    """By x, scale and bias."""
    return jax.grad(lambda *v: loss(lambda x: f(x, *v[1:]))(v[0]), (0, 1, 2))


@pytest.mark.cover("op", "implementation")
@each_op_in_turn
@each_fast_implementation
@each_axis_type
@each_spec(P("a", "b", None), P("a", None, "b"), P(None, None, ("a", "b")))
def test_extras(op, implementation, kind, spec):
    """scale, bias, where and the causal rule: values, all gradients, and nothing gathered for the gradient by x."""

    def finite(y):
        return jnp.where(COUNTS.any(axis=-1) if op == "logsumexp" else COUNTS, y, 0)

    def f(x, scale, bias, where):
        return finite(ours(op, implementation)(x, scale=scale, bias=bias, where=where, is_causal=True))

    def f0(x, scale, bias, where):
        some = COUNTS.any(axis=-1, keepdims=True)
        with as_usual():
            return finite(theirs(op)(jnp.where(COUNTS, x * scale + bias, jnp.where(some, -jnp.inf, 0))))

    mesh, given = mesh_of(kind), (X, *EXTRAS.values())
    expected = jax.jit(lambda *v: (f0(*v), gradients(f0)(*v)))(*given)
    with jax.set_mesh(mesh), served(implementation):
        specs = spec, P(spec[1]), P(spec[0], None, spec[2]), P(*spec[1:])
        args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(given, specs, strict=True)]
        forward = jax.jit(f).lower(*args).compile()
        y = forward(*args)
        assert_trees_all_close((y, jax.jit(gradients(f))(*args)), expected, rtol=2e-4, atol=2e-5)
        by_x = jax.jit(lambda g, x, *others: jax.vjp(lambda x: f(x, *others), x)[1](g))
        for compiled, most in ((forward, 2), (by_x.lower(y, *args).compile(), 3)):
            rows = rows_on_a_device(mesh, spec, X.shape)
            check_moved(spec, collectives(compiled), most if spec[2] else 0, rows)


@pytest.mark.cover("op", "implementation")
@each_op
@each_fast_implementation
@each_axis_type
@each_spec(P("a", None, "b"), P(None, None, ("a", "b")), P("a", "b"))
def test_axes_in_place(op, implementation, kind, spec):
    """A reduced axis before the last: dimensions on either side of it are rows, and its own shards cost an exchange."""
    mesh, f = mesh_of(kind), ours(op, implementation, axis=1)
    expected = known(op, value_and_gradient, axis=1)
    with jax.set_mesh(mesh), served(implementation):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        forward, backward = jax.jit(f).lower(x).compile(), jax.jit(jax.grad(loss(f)))
        assert_trees_all_close((forward(x), backward(x)), expected, rtol=2e-4, atol=2e-5)
        check_moved(spec, collectives(forward), 2 if spec[1] else 0, 8 * 256 // MESH[0])


@pytest.mark.cover("op", "implementation")
@each_op
@each_fast_implementation
@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2), *(pytest.param(axes, marks=slow) for axes in ((1, 2), (0, 1)))])
@each_spec(P(None, None, "b"), P(None, "a", "b"), P("a", "b"), P(("a", "b")))
def test_several_explicit_axes(op, implementation, axes, spec):
    """Dimensions over explicit axes are merged to one row, and the result has the type of jax.nn's."""

    def value_and_pullback(f, x):
        y, pull = jax.vjp(f, x)
        return y, pull(y)[0]

    f = ours(op, implementation, axis=axes)
    with jax.set_mesh(mesh_of(AxisType.Explicit)), served(implementation):
        x = jax.device_put(X[:, :8, :16], NamedSharding(jax.sharding.get_mesh(), spec))
        expected, dx_expected = jax.jit(functools.partial(value_and_pullback, theirs(op, axis=axes)))(x)
        for run in (value_and_pullback, jax.jit(value_and_pullback, static_argnums=0)):
            y, dx = run(f, x)
            assert jax.typeof(y) == jax.typeof(expected)
            assert_trees_all_close(y, expected, rtol=2e-5, atol=1e-6)
            assert_trees_all_close(dx, dx_expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cover("op", "implementation")
@each_op_in_turn
@each_implementation
@each_axis_type
@each_spec(P("a", "b"), P("a", None, "b"))
def test_not_jitted(op, implementation, kind, spec):
    """Operation by operation on sharded arrays, in both modes."""
    mesh, f = mesh_of(kind), ours(op, implementation)
    pushed, dx = known(op, pushed_and_pulled_back)
    with jax.set_mesh(mesh), served(implementation):
        x, t = (jax.device_put(v, NamedSharding(mesh, spec)) for v in (X, G))
        y = f(x)
        assert_trees_all_close(y, pushed[0], rtol=2e-5, atol=1e-6)
        assert_trees_all_close(jax.jvp(f, (x,), (t,)), pushed, rtol=2e-5, atol=1e-5)
        assert_trees_all_close(pulled_back(f)(x, jnp.sin(y)), dx, rtol=2e-4, atol=1e-5)


@pytest.mark.cover("implementation", "manual")
@each_op
@each_choice
@each_axis_type
@pytest.mark.parametrize("manual", [("a", "b"), ("a",)], ids=["fully", "partially"])
def test_shard_map(op, implementation, kind, manual):
    """Inside shard_map, over all axes of the mesh and over some: forward and backward, jitted or not."""
    mesh = mesh_of(kind)
    spec = P(*manual)
    y, dx = known(op, value_and_gradient)
    with jax.set_mesh(mesh), served(implementation):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        f = jax.shard_map(ours(op, implementation), mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual))
        forward = jax.jit(f).lower(x).compile()
        assert_trees_all_close(forward(x), y, rtol=2e-5, atol=1e-6)
        assert_trees_all_close(jax.jit(jax.grad(loss(f)))(x), dx, rtol=2e-4, atol=1e-5)
        assert not collectives(forward)


@pytest.mark.cover("op", "implementation")
@each_op
@each_implementation
@each_axis_type
@each_spec(P("a"), P("a", None, "b"), P(None, None, ("a", "b")))
def test_vmap_and_special_rows(op, implementation, kind, spec):
    """vmap of a sharded call; rows that are masked on one device, on all, or hold NaN and +inf."""
    mesh = mesh_of(kind)
    x = X.copy()
    x[0, 0, :16], x[0, 1], x[1, 0, 3], x[1, 1, 40], x[2, 2] = -np.inf, -np.inf, np.nan, np.inf, 1e4
    x[3, 3], x[3, 3, 50] = -np.inf, 1.0
    expected = jax.jit(theirs(op))(x)
    with jax.set_mesh(mesh), served(implementation):
        y = jax.jit(jax.vmap(ours(op, implementation)))(jax.device_put(x, NamedSharding(mesh, spec)))
        assert_trees_all_close(y, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.cover("op")
@each_op
@each_axis_type
def test_deterministic(op, kind):
    """The same bits in every run; and for rows that are whole, the bits of one device."""
    mesh, f = mesh_of(kind), jax.jit(ours(op))
    with jax.set_mesh(mesh):
        for spec in (P("a", "b"), P("a", None, "b")):
            x = jax.device_put(X, NamedSharding(mesh, spec))
            first = f(x)
            assert all(same_bits(first, f(x)) for _ in range(10))
            if spec == P("a", "b"):
                alone = np.asarray(first)
    assert same_bits(alone, f(jax.device_put(X, jax.devices()[0])))
