"""Attention over pages on meshes: sequences and heads stay where they are, each device has all pages of its heads, and
writing into these moves new tokens alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from common import PAGED_IMPLEMENTATIONS, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, needs_devices
from paged_calls import Sizes, case, table_and_lengths, writing
from ring_calls import check

import jaxsoft

pytestmark = needs_devices
Auto, Explicit = AxisType.Auto, AxisType.Explicit
each_axis_type = pytest.mark.parametrize("kind", [Auto, Explicit], ids=["Auto", "Explicit"])
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name == "xla" else (), id=str(name))
        for name in PAGED_IMPLEMENTATIONS
        if name != "reference"
    ],
)
SIZES = Sizes(b=8, t=2, n=8, k=8, h=64, d=64, number=3, size=16, pages=30)
OPTIONS = ("bias of a head", "sinks", "key scale", "value scale", "causal", "out of range")
# How query is sharded, (B, T, N, H): its sequences, its heads, or both.
SPECS = [P("a", None, "b"), P(None, None, ("a", "b")), P(("a", "b")), P("b")]


def specs_of(call, spec, sizes):
    """How each operand of a call is sharded: sequences and heads as those of query, where that is possible."""
    _, _, heads = (*spec, None, None, None)[:3]
    axes = heads if isinstance(heads, tuple) else (heads,)
    devices = int(np.prod([jax.sharding.get_mesh().shape[a] for a in axes if a]))
    of_keys = heads if sizes.k % devices == 0 else None
    pages = P(None, None, of_keys)
    others = [P(None, heads) if v.ndim == 4 else P(heads) if v.shape == (sizes.n,) else P() for v in call.operands[3:]]
    return [spec, pages, pages, *others]


def put(operands, specs):
    mesh = jax.sharding.get_mesh()
    return [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(operands, specs, strict=True)]


def sharded(specs):
    """What calls a function on operands that are sharded so."""
    return lambda f: lambda *operands: jax.jit(f)(*put(operands, specs))


@pytest.mark.costly(1)
@each_implementation
@pytest.mark.parametrize("k", [8, 4, 2, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@each_axis_type
def test_collectives(k, implementation, kind, spec):
    """Values, where the results lie, and that nothing moves."""
    sizes = SIZES._replace(k=k)
    dtype = np.float32 if implementation is None else jnp.bfloat16
    call = case(OPTIONS, sizes, dtype, implementation)
    with jax.set_mesh(mesh_of(kind)), served(implementation):
        operands = put(call.operands, specs_of(call, spec, sizes))
        compiled = jax.jit(call.ours).lower(*operands).compile()
        assert collectives(compiled) == [], (spec, compiled.as_text())
        output, lse = compiled(*operands)
        assert output.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), spec), 4)
        assert lse.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), spec), 3)
        call.check(lambda _: lambda *_: (output, lse))


@slow  # test_any_dimension and test_shard_map differentiate
@each_axis_type
@pytest.mark.parametrize("names", [("grad",), ("jvp",), ("vmap", "grad")], ids=" of ".join)
def test_derivatives(names, kind):
    sizes = SIZES._replace(k=4, h=4, d=4, size=4)
    call = functools.reduce(Case.through, reversed(names), case(("sinks", "shared", "causal"), sizes, np.float32))
    mapped = (None,) * ("vmap" in names)
    with jax.set_mesh(mesh_of(kind)):
        heads = "b" if 4 % jax.sharding.get_mesh().shape["b"] == 0 else None
        pages = P(*mapped, None, None, heads)
        call.check(sharded([P(*mapped, "a", None, "b"), pages, pages, P(*mapped, "b")]))


@pytest.mark.costly(1)
@each_axis_type
@pytest.mark.parametrize(
    ("spec", "pages"),
    [(P("a", None, None, "b"), P("b", None, None, "a")), (P(None, "a", "b"), P("a", "b"))],
    ids=str,
)
def test_any_dimension(spec, pages, kind):
    """Pages, slots, queries and head sizes may be sharded as well. They are gathered, and the values are right."""
    call = case(("bias", "state", "key scale"), SIZES._replace(t=8, k=2, pages=32), np.float32)
    specs = [spec, pages, P(None, "a"), *(P() for _ in call.operands[3:])]
    names = None if kind == Auto and spec[0] == "a" else [()]  # with gradients
    with jax.set_mesh(mesh_of(kind)):
        check([call], names, sharded(specs))


@pytest.mark.costly(1)
@pytest.mark.parametrize(("manual", "kind"), [(("a", "b"), Explicit), (("a",), Auto)], ids=str)
def test_shard_map(manual, kind):
    """Inside shard_map: each device has a cache of its own over one axis, and heads over the other."""
    z = SIZES._replace(b=8, k=8, h=8, d=8, size=4)
    mesh = mesh_of(kind)
    groups, heads = mesh.shape["a"], "b" if "b" in manual else None
    rng = np.random.default_rng(0)
    many = [table_and_lengths(rng, z._replace(b=z.b // groups), shared=True) for _ in range(groups)]
    table, lengths = (np.concatenate(v) for v in zip(*many, strict=True))
    first = np.repeat(np.arange(groups), z.b // groups)[:, None] * z.pages
    pages = [rng.standard_normal((groups * z.pages, z.size, z.k, 8)).astype(np.float32) for _ in range(2)]
    query = rng.standard_normal((z.b, z.t, z.n, 8)).astype(np.float32)
    new = [rng.standard_normal((z.b, z.t, z.k, 8)).astype(np.float32) for _ in range(2)]

    def step(query, key_pages, value_pages, key, value, table, lengths):
        pages = jaxsoft.write_pages(key_pages, value_pages, key, value, table, lengths)
        return jaxsoft.paged_attention(query, *pages, table, lengths, is_causal=True), *pages

    within = np.where((table >= 0) & (table < z.pages), table + first, -1).astype(np.int32)
    whole = lambda q, *pages: jnp.sum(jnp.sin(step(q, *pages, *new, within, lengths)[0]))  # noqa: E731
    expected = jax.jit(lambda *v: (step(*v, *new, within, lengths), jax.grad(whole, (0, 1, 2))(*v)))(query, *pages)
    with jax.set_mesh(mesh):
        by_sequences, by_pages = P("a", None, heads), P("a", None, heads)
        f = jax.shard_map(
            step,
            in_specs=(by_sequences, by_pages, by_pages, by_sequences, by_sequences, P("a"), P("a")),
            out_specs=(by_sequences, by_pages, by_pages),
            axis_names=set(manual),
        )
        operands = put([query, *pages, *new], [by_sequences, by_pages, by_pages, by_sequences, by_sequences])
        integers = put([table, lengths], [P("a"), P("a")])
        compiled = jax.jit(f).lower(*operands, *integers).compile()
        assert collectives(compiled) == []
        total = lambda *v: jnp.sum(jnp.sin(f(*v, *operands[3:], *integers)[0]))  # noqa: E731
        found = compiled(*operands, *integers), jax.jit(jax.grad(total, (0, 1, 2)))(*operands[:3])
        for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.costly(1)
@each_axis_type
def test_writing(kind):
    """Heads stay, and of sequences that are sharded, the new tokens go to all devices."""
    z = SIZES._replace(h=8, d=8)
    call = writing(z, np.float32)
    with jax.set_mesh(mesh_of(kind)):
        mesh = jax.sharding.get_mesh()
        for batch, heads in ((None, "b"), ("a", "b"), (("a", "b"), None)):
            pages, tokens = P(None, None, heads), P(batch, None, heads)
            specs = [pages, pages, tokens, tokens]
            operands = put(call.operands, specs)
            compiled = jax.jit(call.ours, donate_argnums=(0, 1)).lower(*operands).compile()
            moved = sum(int(np.prod(shape)) for _, shape in collectives(compiled))
            assert moved <= (2 * z.b * z.t * z.k * 8 + 100 if batch else 0), (batch, heads, collectives(compiled))
            found = compiled(*operands)
            call.check(lambda _, found=found: lambda *_: found)
            for y in found:
                assert y.sharding.is_equivalent_to(NamedSharding(mesh, pages), 4)
            if batch == "a":
                call.through("grad").check(sharded(specs))
