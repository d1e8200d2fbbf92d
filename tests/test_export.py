"""jax.export: programs that are stored, moved and called again, for shapes and platforms not known beforehand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import OPS, each_op, loss, ours, slow, theirs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import needs_devices
from truth import assert_values

import jaxsoft
from jaxsoft._core import library

CALLS = sorted(frozenset().union(*map(library.operations, library.PLATFORMS)))
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"jaxsoft_{name}") for name in CALLS]
PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def there_and_back(f, *operands, platforms=None):
    exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=CHECKS)(*operands)
    return jax.export.deserialize(exported.serialize())


@pytest.mark.costly(1)
@each_op
@pytest.mark.parametrize("implementation", [None, "xla"], ids=str)
def test_round_trip(op, implementation):
    x = np.random.default_rng(0).standard_normal((4, 33)).astype(np.float32)
    f = ours(op, implementation)
    assert_values(op, x, there_and_back(f, x).call(x))
    assert_trees_all_close(
        there_and_back(jax.grad(loss(f)), x).call(x), jax.grad(loss(theirs(op)))(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.costly(1)
@each_op
@pytest.mark.parametrize("implementation", [None, "xla"], ids=str)
def test_symbolic_shapes(op, implementation):
    """One program for any number of rows and any length."""
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b, n"), jnp.float32)
    exported = there_and_back(ours(op, implementation), shape)
    pulled = there_and_back(lambda x: jax.vjp(ours(op, implementation), x)[1](ours(op, implementation)(x))[0], shape)
    for given in ((2, 3, 33), (1, 1, 1), (3, 1, 5000)):
        x = np.random.default_rng(0).standard_normal(given).astype(np.float32)
        assert_values(op, x, exported.call(x))
        y, pull = jax.vjp(theirs(op), x)
        assert_trees_all_close(pulled.call(x), pull(y)[0], rtol=1e-4, atol=1e-5)


def exported(f, *types):
    """The value and the gradient by the first operand of a function, as one program for symbolic shapes."""

    def both(x, *others):
        def total(x):
            return sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(v), v, 0))) for v in jax.tree.leaves(f(x, *others)))

        return f(x, *others), jax.grad(total)(x)

    checked = jax.export.export(jax.jit(both), disabled_checks=CHECKS)(*types)
    return both, jax.export.deserialize(checked.serialize())


SMOOTH = {"label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 9.0}
AXES = [(0, 2), None, *(pytest.param(axis, marks=slow) for axis in (-1, 0, (1, 2)))]


@pytest.mark.costly(1)
@pytest.mark.parametrize("sizes", [((3, 2, 300),), pytest.param(((2, 3, 33), (1, 1, 1)), marks=slow)], ids=str)
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_symbolic_shapes_over_any_axes(axis, sizes):
    """Every function that takes axes, and what scores are made of, for three unknown lengths."""
    shape = jax.export.symbolic_shape("a, b, n")
    axes = tuple(range(3)) if axis is None else tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    kept = [a for a in range(3) if a not in axes]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    types += [jax.ShapeDtypeStruct(tuple(shape[a] for a in kept), jnp.int32)]

    def f(x, other, labels):
        given = {"scale": 0.5, "bias": other[:1], "where": other > -1}
        rows = [getattr(jaxsoft, op)(x, axis) for op in OPS]
        rows += [getattr(jaxsoft, op)(x, axis, **given) for op in OPS]
        rows += [jaxsoft.logsumexp(x, axis, other * other, return_sign=True)[0]]
        integer = jaxsoft.softmax_cross_entropy_with_integer_labels
        q = jnp.abs(other) / 8
        losses = [
            jaxsoft.softmax_cross_entropy(x, q, axis),
            jaxsoft.softmax_cross_entropy(x, q, axis, other > 0, **SMOOTH),
        ]
        if axis is not None:
            losses += [
                integer(x, labels, axis),
                integer(x, labels, axis, other > 0, **SMOOTH, ignore_index=1),
            ]
        return rows, losses

    both, program = exported(f, *types)
    rng = np.random.default_rng(0)
    for given in sizes:
        x, other = rng.standard_normal((2, *given)).astype(np.float32)
        labels = rng.integers(0, 2, [given[a] for a in kept]).astype(np.int32)
        expected = jax.jit(both)(x, other, labels)
        assert_trees_all_close(program.call(x, other, labels), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("sizes", [((2, 3),), pytest.param(((1, 1),), marks=slow)], ids=str)
def test_symbolic_rows(sizes):
    """What takes rows of a known length: causal scores, top-k, sampling and the linear cross-entropy of any batch."""
    shape = jax.export.symbolic_shape("a, b")
    x = jax.ShapeDtypeStruct((*shape, 40), jnp.float32)
    weight = jax.ShapeDtypeStruct((40, 50), jnp.float32)
    labels = jax.ShapeDtypeStruct(shape, jnp.int32)

    def f(x, weight, labels):
        tokens = jax.random.key(0)
        return (
            jaxsoft.softmax(x, is_causal=True),
            jaxsoft.top_k_softmax(x, 3)[:2],
            jaxsoft.linear_softmax_cross_entropy(x, weight, labels, label_smoothing=0.1),
            jaxsoft.linear_softmax_cross_entropy(x, weight, labels, reduction="mean"),
            jaxsoft.random.sample(tokens, x, top_k=5)[1],
        )

    both, program = exported(f, x, weight, labels)
    for a, b in sizes:
        rng = np.random.default_rng(a)
        given = [rng.standard_normal(s).astype(np.float32) for s in ((a, b, 40), (40, 50))]
        given.append(rng.integers(0, 50, (a, b)).astype(np.int32))
        assert_trees_all_close(program.call(*given), jax.jit(both)(*given), rtol=2e-4, atol=2e-5)


def test_symbolic_width_of_a_linear_layer():
    """How many numbers hidden states have, where the rows are known."""
    (width,) = jax.export.symbolic_shape("d")
    weight, labels = jax.ShapeDtypeStruct((width, 40), jnp.float32), np.arange(8, dtype=np.int32)
    options = {}, {"recompute": False}, {"reduction": "mean", "chunk_size": 3}

    def losses(x, w):
        return [jaxsoft.linear_softmax_cross_entropy(x, w, labels, **o) for o in options]

    both, program = exported(losses, jax.ShapeDtypeStruct((8, width), jnp.float32), weight)
    for d in (8, 12):
        given = [np.random.default_rng(d).standard_normal(s).astype(np.float32) for s in ((8, d), (d, 40))]
        assert_trees_all_close(program.call(*given), jax.jit(both)(*given), rtol=2e-4, atol=2e-5)


def test_states():
    """As results and as arguments of programs that are stored."""
    x = np.random.default_rng(0).standard_normal((4, 33)).astype(np.float32)
    state = there_and_back(jaxsoft.fold.state, x).call(x)
    assert_trees_all_close(state, jaxsoft.fold.state(x), rtol=1e-6)
    assert_trees_all_close(there_and_back(jaxsoft.fold.lse, state).call(state), theirs("logsumexp")(x), rtol=1e-6)


def test_states_of_attention():
    """Of some keys, from a program that is stored to another that goes on from it."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4, 8)).astype(np.float32)

    def begin(q, k, v):
        return jaxsoft.dot_product_attention(q, k, v, return_state=True)[1]

    def go_on(q, k, v, state):
        return jaxsoft.dot_product_attention(q, k, v, state=state)

    state = there_and_back(begin, q, k[:, :2], v[:, :2]).call(q, k[:, :2], v[:, :2])
    y = there_and_back(go_on, q, k[:, 2:], v[:, 2:], state).call(q, k[:, 2:], v[:, 2:], state)
    assert_trees_all_close(y, jaxsoft.dot_product_attention(q, k, v), rtol=1e-5, atol=1e-6)


@needs_devices
def test_ring_attention():
    """For as many devices, inside `jax.shard_map`: value and gradient."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tokens = P(None, "a")

    def f(q):
        how = {"layout": "zigzag", "method": "ring", "implementation": "xla"}
        return jaxsoft.ring_attention(q, q, q, axis_name="a", is_causal=True, **how)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=tokens, out_specs=tokens)
    both = jax.jit(lambda q: (mapped(q), jax.grad(loss(mapped))(q)))
    x = np.random.default_rng(0).standard_normal((2, 8, 4, 8)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, tokens))
    exported = jax.export.deserialize(jax.export.export(both)(x).serialize())
    assert exported.nr_devices == 2
    y, gradient = jax.jit(exported.call)(x)
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert_trees_all_close((y, gradient), both(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [((3, 40, 1030),), pytest.param(((2, 3, 5), (1, 1, 1)), marks=slow)], ids=str)
def test_symbolic_shapes_of_attention(every):
    """Batch, queries and keys that are not known, with every argument."""
    b, t, s = jax.export.symbolic_shape("b, t, s")

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    types = [array(b, t, 4, 8), array(b, s, 2, 8), array(b, s, 2, 6), array(4, 1, s), array(4)]
    types += [array(b, 1, t, s, dtype=bool), array(b, t, dtype=jnp.int32), array(b, s, dtype=jnp.int32)]

    def f(q, k, v, bias, sinks, mask, of_queries, of_keys):
        lengths = of_keys[:, 0] + 2
        given = {"logits_soft_cap": 3.0, "query_segment_ids": of_queries, "key_value_segment_ids": of_keys}
        return (
            jaxsoft.dot_product_attention(q, k, v, bias, mask, sinks=sinks, **given, return_residual=True),
            jaxsoft.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=4, query_offset=lengths, key_value_seq_lengths=lengths + 3,
                query_seq_lengths=lengths, return_state=True,
            )[1],
        )  # fmt: skip

    both, program = exported(f, *types)
    for sizes in every:
        rng, size = np.random.default_rng(0), dict(zip("bts", sizes, strict=True))
        given = []
        for x in types:
            shape = tuple(d if isinstance(d, int) else size[str(d)] for d in x.shape)
            given.append(
                rng.standard_normal(shape).astype(x.dtype)
                if x.dtype == jnp.float32
                else rng.integers(0, 2, shape).astype(x.dtype)
            )
        assert_trees_all_close(program.call(*given), jax.jit(both)(*given), rtol=2e-4, atol=2e-5)


def test_what_needs_known_shapes():
    """It says so, and what it was given; a length that is known to suffice will do for k."""
    a, n = jax.export.symbolic_shape("a, n")
    x, w = jax.ShapeDtypeStruct((a, n), jnp.float32), jax.ShapeDtypeStruct((8, n), jnp.float32)
    h, labels = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    q, reference = jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32), {"implementation": "reference"}
    for f, given, message in (
        (
            ours("softmax", "reference"),
            (x,),
            "'reference' cannot .*: its scan needs rows .* known; got n=n",
        ),
        (
            functools.partial(jaxsoft.dot_product_attention, **reference),
            (q, q, q),
            r"'reference' cannot .*: its scan needs shapes that are known; got \(1, n, 2, 8\)",
        ),
        (jaxsoft.fold.cumlogsumexp, (x,), r"x must have a known length along axis -1.*got shape \(a, n\)"),
        (jaxsoft.linear_softmax_cross_entropy, (h, w, labels), r"weight must have a known number .*got shape \(8, n\)"),
        (functools.partial(jaxsoft.random.sample, jax.random.key(0)), (x,), r"logits must have a known .*\(a, n\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.export.export(jax.jit(f))(*given)
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(Exception, match="'n' >= '3' is inconclusive"):
        jax.export.export(jax.jit(lambda x: jaxsoft.top_k_softmax(x, 3)))(jax.ShapeDtypeStruct((n,), jnp.float32))
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 3"])
    _, program = exported(lambda x: jaxsoft.top_k_softmax(x, 3)[:2], jax.ShapeDtypeStruct((n,), jnp.float32))
    x = np.arange(7, dtype=np.float32)
    assert program.call(x)[0][0].tolist() == [6, 5, 4]


def test_two_platforms_of_attention():
    if PLATFORM not in ("cpu", "cuda"):
        pytest.skip(f"runs on cpu and cuda, and this is {PLATFORM}")
    q = np.random.default_rng(0).standard_normal((1, 40, 2, 8)).astype(np.float32)

    def f(q):
        return jaxsoft.dot_product_attention(q, q, q, is_causal=True)

    exported = there_and_back(jax.grad(lambda q: jnp.sum(jnp.sin(f(q)))), q, platforms=("cpu", "cuda"))
    assert set(exported.platforms) == {"cpu", "cuda"}
    assert_trees_all_close(exported.call(q), jax.grad(lambda q: jnp.sum(jnp.sin(f(q))))(q), rtol=1e-5, atol=1e-6)


@pytest.mark.costly(1)
@each_op
def test_two_platforms(op):
    """One program for CPU and GPU holds both kernels; here it runs on whichever is there."""
    if PLATFORM not in ("cpu", "cuda"):
        pytest.skip(f"runs on cpu and cuda, and this is {PLATFORM}")
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    exported = there_and_back(ours(op), x, platforms=("cpu", "cuda"))
    assert set(exported.platforms) == {"cpu", "cuda"}
    assert_values(op, x, exported.call(x))
    pulled = there_and_back(jax.grad(loss(ours(op))), x, platforms=("cpu", "cuda"))
    assert_trees_all_close(pulled.call(x), jax.grad(loss(theirs(op)))(x), rtol=1e-4, atol=1e-5)
