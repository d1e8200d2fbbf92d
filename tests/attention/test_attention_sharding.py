"""Attention over meshes: batch and heads stay where they are, anything else may be sharded, and gradients are summed.

A custom call by itself would make XLA gather its operands on every device, with the right values; so the compiled
program is read for its collectives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import Sizes, case
from cases import Case
from common import ATTENTION_IMPLEMENTATIONS, served, slow, some
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_devices
from ring_calls import check

import jaxsoft

pytestmark = needs_devices
Auto, Explicit = AxisType.Auto, AxisType.Explicit
each_axis_type = pytest.mark.parametrize("kind", [pytest.param(Auto, marks=slow), Explicit], ids=["Auto", "Explicit"])
# By name, XLA partitions plain JAX itself.
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name == "xla" else (), id=str(name))
        for name in ATTENTION_IMPLEMENTATIONS
        if name != "reference"
    ],
)
SIZES = Sizes(b=8, t=6, s=10, n=8, k=8, h=32, d=32)
OPTIONS = ("bias of a head", "sinks", "segments", "key lengths")
# How query is sharded, (B, T, N, H): its batch, its heads, or both.
SPECS = [P("a", None, "b"), P(None, None, ("a", "b")), P(("a", "b")), P("b")]


def dtype_for(implementation):
    """Kernels that have a name compute in 16 bits."""
    return np.float32 if implementation is None else jnp.bfloat16


def specs_of(call, spec, sizes):
    """How each operand of a call is sharded: the batch and the heads as those of query, where that is possible."""
    batch, _, heads = (*spec, None, None, None)[:3]

    def devices(axes):
        axes = axes if isinstance(axes, tuple) else (axes,)
        return int(np.prod([jax.sharding.get_mesh().shape[a] for a in axes if a]))

    of_keys = heads if sizes.k % devices(heads) == 0 else None
    specs = [spec, P(batch, None, of_keys), P(batch, None, of_keys)]
    return specs + [P(None, heads) if v.ndim == 4 else P(heads) for v in call.operands[3:]]


def put(operands, specs):
    mesh = jax.sharding.get_mesh()
    return [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(operands, specs, strict=True)]


def sharded(specs):
    """What calls a function on operands that are sharded so."""
    return lambda f: lambda *operands: jax.jit(f)(*put(operands, specs))


HEADS = [
    pytest.param(k, kind, spec, marks=slow if (k, kind) not in [(8, Auto), (2, Explicit), (1, Auto)] else ())
    for k in (2, 8, 4, 1, 0)
    for kind in (Auto, Explicit)
    for spec in (SPECS if k else SPECS[2:])
]


@pytest.mark.costly(1)
@each_implementation
@pytest.mark.parametrize(("k", "kind", "spec"), HEADS, ids=str)
def test_collectives(k, implementation, kind, spec):
    """Values, all gradients, where the results lie, and what moves: nothing but gradients that devices share."""
    sizes = SIZES._replace(k=k) if k else SIZES._replace(n=6, k=6)  # 6 heads cannot be cut into equal parts
    call = case(OPTIONS, sizes, dtype_for(implementation), implementation)
    names = ("query", "key", "value", "bias", "sinks")
    with jax.set_mesh(mesh_of(kind)), served(implementation):
        specs = specs_of(call, spec, sizes)
        operands = put(call.operands, specs)
        compiled = jax.jit(call.ours).lower(*operands).compile()
        assert collectives(compiled) == [], (spec, compiled.as_text())
        output, lse = compiled(*operands)
        assert output.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), spec), 4)
        assert lse.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), spec), 3)
        grad = call.through("grad")
        of_gradients = jax.jit(grad.ours).lower(*operands).compile()
        if spec == SPECS[0] or kind == Auto:
            call.check(lambda _: lambda *_: (output, lse))
            grad.check(lambda _: lambda *_: of_gradients(*operands))
        moved = collectives(of_gradients)
        shared = [v for name, v, s in zip(names, operands, specs, strict=True) if _is_shared(name, s, spec)]
        most = sum(int(np.prod(v.sharding.shard_shape(v.shape))) for v in shared)
        # Where a head of keys is shared by some of the devices, XLA may gather the gradients once they are summed.
        assert all(name == "all-reduce" for name, _ in moved) or 1 < k < DEVICES, (spec, moved)
        assert sum(int(np.prod(shape)) for _, shape in moved) <= 2 * most, (spec, moved, most)


def _is_shared(name, own, of_query):
    """Whether several devices have the same part of an operand, and compute other parts of its gradient."""
    batch, _, heads = (*of_query, None, None, None)[:3]
    return batch is not None if name in ("bias", "sinks") else heads is not None and own[2] is None


@pytest.mark.costly(1)
@each_axis_type
@pytest.mark.parametrize("spec", [P("a", None, None, "b"), P(None, "a", "b"), P(None, ("a", "b"))], ids=str)
def test_any_dimension(spec, kind):
    """Lengths and head sizes may be sharded as well. They are gathered, and the values are right."""
    sizes = SIZES._replace(t=8, s=16, k=2)
    call = case((*OPTIONS, "mask", "state"), sizes, np.float32)
    with jax.set_mesh(mesh_of(kind)):
        specs = [spec, P(None, "b"), P("a", "b"), *(P(None, None) for _ in call.operands[3:])]
        specs = [P(*s[: v.ndim]) for s, v in zip(specs, call.operands, strict=True)]
        specs[3:5] = [P(None, None, None, "b"), P("a")]  # bias and sinks
        names = None if spec[1] == "a" else [()]  # with gradients
        check([call], names, sharded(specs))


def test_segments_of_64_bits():
    """The two may lie otherwise: their numbers are compared over both."""
    query = np.random.default_rng(0).standard_normal((8, 4, 2, 4)).astype(np.float32)
    ids = np.arange(32).reshape(8, 4) // 3
    with jax.enable_x64(True), jax.set_mesh(mesh_of(Explicit)):

        def attend(q, i, j):
            return jaxsoft.dot_product_attention(q, q, q, query_segment_ids=i, key_value_segment_ids=j)

        expected, program = attend(query, ids, ids), jax.jit(attend)
        for specs in ((P(("a", "b")), P()), (P(), P("a")), (P("b"), P("b"))):
            y = program(*put([query, ids, ids], [P(("a", "b")), *specs]))
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.costly(1)
@each_axis_type
@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_16_bits(spec, kind):
    """The output's residual lies where the output does: nothing moves for gradients."""
    grad = case((), SIZES, jnp.bfloat16).through("grad")
    with jax.set_mesh(mesh_of(kind)):
        operands = put(grad.operands, [spec] * 3)
        compiled = jax.jit(grad.ours).lower(*operands).compile()
        assert collectives(compiled) == []
        grad.check(lambda _: lambda *_: compiled(*operands))


@pytest.mark.costly(1)
@pytest.mark.parametrize("names", [("vmap of the first operand", "grad"), ("grad", "grad")], ids=" of ".join)
@pytest.mark.parametrize("query", [P(None, None, "b"), P(("a", "b"))], ids=str)
def test_sharded_otherwise(query, names):
    """Over explicit axes the batch and a state follow the query, and what lies on one device joins the mesh."""
    call = case(("bias of a query", "state"), SIZES._replace(t=3, s=4, h=4, d=4), np.float32)
    call = functools.reduce(Case.through, reversed(names), call)
    mapped = (None,) * ("vmap" in names[0])
    specs = [P(*mapped, *query), P("a"), P(("a", "b")), None, P(None, None, "a"), P("b"), None]
    with jax.set_mesh(mesh_of(Explicit)):
        mesh = jax.sharding.get_mesh()
        operands = [
            v if spec is None else jax.device_put(v, NamedSharding(mesh, spec))
            for v, spec in zip(call.operands, specs, strict=True)
        ]
        call.check(lambda f: lambda *_: jax.jit(f)(*operands))


@slow  # test_shard_map differentiates in both modes, and test_sharded_otherwise maps
@each_axis_type
@pytest.mark.parametrize("names", [("grad", "jvp"), ("vmap", "grad"), ("jvp",), ("vmap",)], ids=" of ".join)
def test_transformations(names, kind):
    """Forward mode and maps of sharded operands."""
    call = functools.reduce(Case.through, reversed(names), case(("bias", "causal"), SIZES._replace(k=4), np.float32))
    mapped = "vmap" in names
    specs = [P(*(None,) * mapped, "a", None, "b")] * 3 + [P(*(None,) * mapped, "a", "b")]
    with jax.set_mesh(mesh_of(kind)):
        call.check(sharded(specs))


@pytest.mark.costly(1)
@each_implementation
@pytest.mark.parametrize(
    ("manual", "kind"),
    [
        (("a", "b"), Explicit),
        (("a",), Auto),
        *(pytest.param(*v, marks=slow) for v in ((("a", "b"), Auto), (("a",), Explicit))),
    ],
    ids=str,
)
def test_shard_map(manual, implementation, kind):
    """Inside shard_map: batch over one axis, heads over another, keys and bias the same for all of the second."""
    if len(manual) == 1 and implementation is not None:
        pytest.skip("such a mesh needs implementation=None")
    sizes = SIZES._replace(k=1)
    call = case(("bias of a head", "sinks"), sizes, dtype_for(implementation), implementation)
    heads = "b" if "b" in manual else None
    specs = (P("a", None, heads), P("a"), P("a"), P(None, heads), P(heads))
    with jax.set_mesh(mesh_of(kind)), served(implementation):
        ours = jax.shard_map(
            call.ours, in_specs=specs, out_specs=(specs[0], P("a", None, heads)), axis_names=set(manual)
        )
        inside = Case(f"shard_map of {call.what}", ours, call.theirs, call.operands)
        check([inside], [(), ("grad",), ("jvp",)], sharded(specs))
        assert collectives(jax.jit(ours).lower(*put(call.operands, specs)).compile()) == []


@pytest.mark.parametrize("devices", some(sorted({2, DEVICES}), [2]))
@pytest.mark.parametrize("check_vma", some([True, False], [True]))
def test_ring(check_vma, devices):
    """Keys over devices: each attends to its own, and their states are combined as they go around."""

    def ours(query, key, value):
        after = [(i, (i + 1) % devices) for i in range(devices)]
        state = None
        for _ in range(devices):
            y, lse, state = jaxsoft.dot_product_attention(
                query, key, value, state=state, return_state=True, return_residual=True
            )
            key, value = jax.lax.ppermute((key, value), "a", after)
        return y, lse

    with jax.set_mesh(mesh_of(a=devices)):
        f = jax.shard_map(ours, in_specs=P(None, "a"), out_specs=P(None, "a"), check_vma=check_vma)
        call = case((), Sizes(t=2 * devices, s=8 * devices), np.float32)
        ring = Case("ring attention", f, call.theirs, call.operands)
        check([ring], run=sharded([P(None, "a")] * 3))


@pytest.mark.skipif(DEVICES < 4, reason="needs an axis that can be cut")
def test_cut_axes():
    """A projection over all devices becomes heads, which lie on some of them each, and their numbers on others."""
    sizes = SIZES._replace(b=2, n=DEVICES // 2, k=DEVICES // 2)
    call = case((), sizes, np.float32)
    flat = [v.reshape(*v.shape[:2], -1) for v in call.operands]

    def of_flat(f):
        return lambda *operands: f(*(v.reshape(*v.shape[:2], sizes.n, -1) for v in operands))

    mesh = jax.make_mesh((DEVICES,), ("a",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        cut = Case("attention of heads that are cut", of_flat(call.ours), of_flat(call.theirs), flat)
        check([cut], run=sharded([P(None, None, "a")] * 3))
