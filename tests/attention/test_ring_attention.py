"""Attention over sequences that lie over several devices, against its definition for the whole sequence in float64.

Most programs compute in float64, where a formula that is wrong shows, and each makes many comparisons.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import case
from common import ATTENTION_IMPLEMENTATIONS, on_gpu, precision, same_bits, served, slow, some
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, mesh_of, needs_devices
from ring_calls import LAYOUTS, Ring, check, compiled, ring_case, sizes_of
from truth import in_float64, wide

import jaxsoft

pytestmark = needs_devices
Auto, Explicit = AxisType.Auto, AxisType.Explicit
CAUSAL = {"is_causal": True}
# Between devices of 4 tokens: within a device's part, as long as it, as long as several, none, and on either side.
WINDOWS = ((0, 0), (2, 1), (1, 5), (4, 0), (3, None), (None, 2), (0, None), (9, 9), (13, 0), (20, 3))
LIMITS = ({}, CAUSAL, *({"local_window_size": w} for w in WINDOWS), {"local_window_size": (5, None), **CAUSAL})
FEW = ({}, CAUSAL, {"local_window_size": (5, 0)}, {"local_window_size": (2, 1)})
OPTIONS = ("sinks", "scale", "segments", "cap")
KERNELS = ("ffi", "pallas")
MOST = min(DEVICES, 8)


def devices_of(*numbers):
    """Skips a test on fewer devices."""
    if int(np.prod(numbers)) > DEVICES:
        pytest.skip(f"needs {int(np.prod(numbers))} devices")


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("layout", "devices", "tokens", "kind", "inside", "limits"),
    [
        ("contiguous", 2, 4, Auto, True, FEW[3:]),
        pytest.param("contiguous", 4, 4, Auto, True, FEW[2:], marks=slow),
        ("striped", 4, 3, Explicit, False, FEW[1:3]),
        ("zigzag", 2, 6, Auto, False, FEW[3:]),
        ("zigzag", 4, 4, Explicit, True, FEW[1:2]),
        *(
            pytest.param(layout, devices, tokens, kind, inside, LIMITS, marks=slow)
            for devices, tokens, kind, inside in [
                (2, 4, Explicit, True),
                (4, 4, Auto, False),
                (4, 4, Auto, True),
                (8, 2, Explicit, False),
            ]
            for layout in LAYOUTS
        ),
    ],
    ids=lambda v: f"{len(v)} limits" if isinstance(v, tuple) else getattr(v, "name", str(v)),
)
def test_ring(layout, devices, tokens, kind, inside, limits):
    """Values and gradients by all operands that have them."""
    devices_of(devices)
    ring = Ring(layout, manual=("s",) if inside else ())
    with precision(np.float64), jax.set_mesh(mesh_of(kind, s=devices)):
        check([ring_case(ring, sizes_of(devices * tokens, k=2), OPTIONS, np.float64, more) for more in limits])


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("method", "layout", "devices", "kind", "inside", "limits"),
    [
        ("all_gather", "zigzag", 2, Auto, True, FEW[2:3]),
        pytest.param("all_gather", "zigzag", 2, Auto, True, FEW[1:2], marks=slow),
        pytest.param("all_gather", "striped", 4, Auto, False, FEW[:1], marks=slow),
        ("all_to_all", "striped", 2, Auto, True, FEW[2:3]),
        ("all_to_all", "zigzag", 4, Explicit, False, FEW[1:2]),
        *(
            pytest.param(method, layout, devices, kind, inside, LIMITS, marks=slow)
            for method in ("all_gather", "all_to_all")
            for layout in LAYOUTS
            if (method, layout) != ("all_gather", "striped")
            for devices, kind, inside in [(2, Explicit, True), (4, Auto, False), (4, Auto, True), (8, Explicit, False)]
        ),
    ],
    ids=lambda v: f"{len(v)} limits" if isinstance(v, tuple | list) else getattr(v, "name", str(v)),
)
def test_other_methods(method, layout, devices, kind, inside, limits):
    devices_of(devices)
    ring = Ring(layout, method, manual=("s",) if inside else ())
    with precision(np.float64), jax.set_mesh(mesh_of(kind, s=devices)):
        check([ring_case(ring, sizes_of(devices * 4, k=8), OPTIONS, np.float64, more) for more in limits])


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("devices", "tokens", "layout", "others", "check_vma"),
    [
        (min(DEVICES, 4), 1, "contiguous", {"n": 4, "k": 1}, False),
        pytest.param(MOST, 1, "contiguous", {"n": 4, "k": 1}, False, marks=slow),
        pytest.param(2, 7, "striped", {"n": 2, "k": 2, "d": 3}, True, marks=slow),
        (4, 2, "zigzag", {"n": 2, "k": 2, "b": 1, "h": 3, "d": 5}, False),
        *(
            pytest.param(devices, tokens, layout, others, check_vma, marks=slow)
            for devices in (2, 4, 8)
            for layout, tokens in [("contiguous", 1), ("striped", 1), ("zigzag", 2), ("contiguous", 7), ("zigzag", 6)]
            for others in ({"k": 1, "d": 4}, {"n": 3, "k": 3, "h": 5, "d": 1})
            for check_vma in (True, False)
        ),
    ],
    ids=str,
)
def test_sizes(devices, tokens, layout, others, check_vma):
    """One token on each device, odd numbers of them, groups of heads, and values of another size."""
    devices_of(devices)
    ring = Ring(layout, manual=("s",), check_vma=check_vma)
    sizes = sizes_of(devices * tokens, **others)
    with precision(np.float64), jax.set_mesh(mesh_of(s=devices)):
        check([ring_case(ring, sizes, ("sinks",), np.float64, {"local_window_size": (3, 0)})])


BY_HEADS = P("data", "s", "heads")


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("axes", "manual", "kind", "spec", "method", "k"),
    [
        ({"data": 2, "s": 2, "other": 2}, (), Auto, P("data", "s", None), "ring", 2),
        ({"s": 2, "heads": 2}, (), Explicit, P(None, "s", "heads"), "ring", 1),
        ({"data": 2, "heads": 2, "s": 2}, ("data", "heads", "s"), Auto, BY_HEADS, "ring", 2),
        ({"data": 2, "s": 2}, ("s",), Auto, P("data", "s", None), "ring", 2),
        *(
            pytest.param(axes, manual, kind, P(*(a if a in axes else None for a in BY_HEADS)), method, k, marks=slow)
            for axes in (
                {"s": 4, "data": 2},
                {"heads": 4, "s": 2},
                {"s": 2, "heads": 4},
                {"heads": 2, "s": 2, "data": 2},
            )
            for manual, k in (((), 1), ((), 2), (tuple(axes), 4))
            for kind in (Auto, Explicit)
            for method in ("ring", "all_gather", "all_to_all")
            if method != "all_to_all" or (k == 4 and axes.get("heads", 1) * axes["s"] <= 4)
        ),
    ],
    ids=str,
)
def test_meshes(axes, manual, kind, spec, method, k):
    """Batch and heads over other axes, before or after, one that nothing is sharded over, and axes that XLA has."""
    devices_of(*axes.values())
    of_keys = spec if k % axes.get("heads", 1) == 0 else P(*spec[:2], None)
    ring = Ring("zigzag", method, spec, of_keys, manual)
    call = ring_case(ring, sizes_of(8 * axes["s"], b=2, k=k), ("sinks", "segments"), np.float32, CAUSAL)
    with jax.set_mesh(mesh_of(kind, **axes)):
        check([call])


@pytest.mark.parametrize(
    ("layout", "inside", "names"),
    [
        ("striped", (), [()]),
        ("zigzag", ("s",), [()]),
        pytest.param("striped", (), None, marks=slow),
    ],
    ids=str,
)
def test_not_compiled(layout, inside, names):
    """Operation by operation, as a call outside jit."""
    with precision(np.float64), jax.set_mesh(mesh_of(s=2)):
        call = ring_case(Ring(layout, manual=inside), sizes_of(8, b=1), ("sinks",), np.float64, CAUSAL)
        check([call], names, run=lambda f: lambda *v: f(*(jax.device_put(x, P()) for x in v)))


@pytest.mark.costly(1)
@pytest.mark.parametrize("method", [None, *(pytest.param(m, marks=slow) for m in ("ring", "all_gather", "all_to_all"))])
@pytest.mark.parametrize("which", [1, 0, 2])
def test_segments(method, which):
    """64-bit numbers that differ in their upper half, numbers that no key has, and padding."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4, (2, 24)), axis=1) << 33
    without = ids.copy()
    without[0, 5:9], without[1] = -7, 1
    limits = (
        {"query_segment_ids": ids, "key_value_segment_ids": ids},
        {"query_segment_ids": without, "key_value_segment_ids": ids, **CAUSAL},
        {"query_segment_ids": ids.astype(np.int32) + 3, "key_value_segment_ids": (ids >> 33).astype(np.int32) + 3},
    )
    with precision(np.float64), jax.set_mesh(mesh_of(s=2)):
        ring = Ring("zigzag", method, manual=() if which else ("s",))
        check([ring_case(ring, sizes_of(24), (), np.float64, limits[which])])


def each_sequence(f):
    """One sequence after the other, which has no dimension for the batch."""

    def call(**named):
        axes = ({name: None if name in ("sinks", "scale") else 0 for name in named},)
        return jax.vmap(lambda one: f(**one), axes)(named)

    return call


def each_query(f):
    """Several queries for the same keys and values, of which the first is wanted."""

    def call(query, **named):
        return [y[0] for y in jax.vmap(lambda q: f(query=q, **named))(jnp.stack([query, query[..., ::-1]]))]

    return lambda **named: tuple(call(**named))


ORDERS = [("jvp",), ("grad", "grad"), ("grad", "jvp"), ("jvp", "grad"), ("checkpoint", "grad")]
MAPS = [
    ("vmap", "grad"),
    ("grad", "vmap"),
    ("vmap of the first operand", "grad"),
    ("grad", "vmap of the first operand"),
]


@pytest.mark.parametrize(
    ("layout", "method", "inside", "names"),
    [
        pytest.param("contiguous", "ring", True, ORDERS[2:3], marks=slow),
        *(
            pytest.param(layout, method, inside, ORDERS, marks=slow)
            for layout in LAYOUTS
            for method in ("ring", "all_gather", "all_to_all")
            for inside in (True, False)
            if (layout, method) != ("striped", "all_gather")
        ),
    ],
    ids=lambda v: f"{len(v)} orders" if isinstance(v, list) else str(v),
)
def test_transformations(layout, method, inside, names):
    """Forward mode, second derivatives and recomputation. By default test_every_function has the first derivatives."""
    ring = Ring(layout, method, manual=("s",) if inside else ())
    sizes = sizes_of(8, b=1, n=2, k=2, h=3, d=3)
    with precision(np.float64), jax.set_mesh(mesh_of(s=2)):
        check([ring_case(ring, sizes, ("sinks", "scale"), np.float64, CAUSAL)], names)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("layout", "method", "around"),
    [
        ("striped", "ring", each_sequence),
        ("zigzag", "ring", MAPS[1]),
        ("contiguous", "all_gather", each_query),
        *(
            pytest.param(layout, method, around, marks=slow)
            for layout in LAYOUTS
            for method in ("ring", "all_gather", "all_to_all")
            for around in (*MAPS, each_sequence, each_query)
            if (layout, method) != ("striped", "all_gather")
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else getattr(v, "__name__", None) or " of ".join(reversed(v)),
)
def test_vmap(layout, method, around):
    """Of everything and of the query alone, around shard_map and jit and inside."""
    sizes, options = sizes_of(8, b=2, n=2, k=2, h=3, d=3), ("sinks", "segments")
    with precision(np.float64), jax.set_mesh(mesh_of(s=2)):
        if callable(around):
            ring = Ring(layout, method, manual=("s",), around=around)
            check([ring_case(ring, sizes, options if around is each_sequence else (), np.float64, CAUSAL)])
        else:
            ring = Ring(layout, method, manual=("s",) if around == MAPS[0] else ())
            check([ring_case(ring, sizes, options, np.float64, CAUSAL)], [around])


@pytest.mark.parametrize("what", [np.nan, *(pytest.param(x, marks=slow) for x in (np.inf, -np.inf))], ids=str)
@pytest.mark.parametrize(
    "layout", ["zigzag", pytest.param("contiguous", marks=slow), pytest.param("striped", marks=slow)]
)
@pytest.mark.parametrize("more", [CAUSAL, pytest.param({}, marks=slow)], ids=str)
def test_not_finite(more, layout, what):
    """One number of a key that is not finite is in the rows and in the gradients that it is in on one device."""
    sizes = sizes_of(4 * min(DEVICES, 4), b=1, n=2, k=2)
    one = case((), sizes, np.float32, more=more)
    one.operands[1][0, sizes.t // 2, 0, 1] = what

    def both(f, *operands):
        results, pull = jax.vjp(f, *operands)
        return results, pull(tuple(jnp.ones_like(y) for y in results))

    expected = jax.jit(functools.partial(both, one.ours))(*one.operands)
    with jax.set_mesh(mesh_of(s=min(DEVICES, 4))):
        ring = ring_case(Ring(layout), sizes, more=more)
        found = compiled(functools.partial(both, ring.ours))(*one.operands)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", some(sorted({min(DEVICES, n) for n in (2, 4, 8)}), [min(DEVICES, 4)]))
@pytest.mark.parametrize("layout", some(LAYOUTS, ["contiguous"]))
def test_16_bits(layout, devices):
    """The state is carried in f32, so that errors are no larger than those of one device.

    On a GPU those of some gradients are: Pallas' kernels round them for each block of keys, before they are added.
    """
    rounded = () if jax.default_backend() == "cpu" else ("query", "key", "value")
    sizes = sizes_of(8 * devices, n=4)
    ring = ring_case(Ring(layout), sizes, ("sinks",), jnp.bfloat16, CAUSAL)
    one = case(("sinks",), sizes, jnp.bfloat16, more=CAUSAL)

    def both(f):
        def total(*v):
            found = f(*v)
            return jnp.sum(found[0].astype(wide_of(f)) ** 2), found

        return jax.grad(total, (0, 1, 2, 3), has_aux=True)

    def wide_of(f):
        return jnp.float64 if f is one.theirs else jnp.float32

    with jax.set_mesh(mesh_of(s=devices)):
        found = compiled(both(ring.ours))(*ring.operands)
    alone = jax.jit(both(one.ours))(*one.operands)
    expected = in_float64(both(one.theirs), *one.operands)
    names = "query", "key", "value", "sinks", "output", "lse"
    for name, a, b, e in zip(names, *map(jax.tree.leaves, (found, alone, expected)), strict=True):
        ours, theirs = (np.linalg.norm(wide(x) - wide(e)) / np.linalg.norm(wide(e)) for x in (a, b))
        assert a.dtype == b.dtype
        assert ours <= (1.5 if name in rounded else 1.05) * theirs + 1e-6, (name, ours, theirs)


def test_dtype_and_bits():
    """The output's dtype, the one output without a residual, and the same bits of several runs."""
    query, key, value = (jnp.asarray(v) for v in case((), sizes_of(16), jnp.bfloat16).operands)
    with jax.set_mesh(mesh_of(s=2)):
        laid = [jax.device_put(x, P(None, "s")) for x in (query, key, value)]

        def both(*laid):
            y, pull = jax.vjp(lambda *v: jaxsoft.ring_attention(*v, axis_name="s", dtype=jnp.float32), *laid)
            return y, pull(y)

        program = jax.jit(both)
        found = [program(*laid) for _ in range(3)]
    assert found[0][0].dtype == jnp.float32 and found[0][1][0].dtype == jnp.bfloat16
    assert found[0][0].sharding.spec[1] == "s" and found[0][1][1].sharding.spec[1] == "s"
    expected = jaxsoft.dot_product_attention(query, key, value, dtype=jnp.float32)
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-4, atol=1e-5)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@on_gpu
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("implementation", [name for name in ATTENTION_IMPLEMENTATIONS if name in (None, *KERNELS)])
@pytest.mark.parametrize(
    ("layout", "method"),
    [
        *((layout, "ring") for layout in LAYOUTS),
        *(pytest.param("zigzag", method, marks=slow) for method in ("all_gather", "all_to_all")),
    ],
)
def test_kernels(layout, method, implementation, size):
    """In bf16, of lengths that are no multiples of all tiles, against float64 on the CPU; the same bits twice."""
    for more in ({}, CAUSAL):
        sizes = sizes_of(2 * 640, n=4, k=2, h=size, d=size)
        ring = ring_case(Ring(layout, method), sizes, (), jnp.bfloat16, more, implementation=implementation)
        rng = np.random.default_rng(1)
        weights = (
            rng.standard_normal((sizes.b, sizes.t, sizes.n, size)),
            rng.standard_normal((sizes.b, sizes.t, sizes.n)),
        )

        def both(f, *operands, weights=weights):
            results, pull = jax.vjp(f, *operands)
            return results, pull(tuple(jnp.asarray(w, y.dtype) for w, y in zip(weights, results, strict=True)))

        with jax.default_device(jax.devices("cpu")[0]):
            expected = in_float64(functools.partial(both, ring.theirs), *ring.operands)
        with jax.set_mesh(mesh_of(s=2)), served(implementation):
            program = compiled(functools.partial(both, ring.ours))
            found, again = program(*ring.operands), program(*ring.operands)
            assert same_bits(found, again)
            (output, lse), gradients = jax.tree.map(wide, found)
            (of_rows, of_lse), of_gradients = jax.tree.map(wide, expected)
            error, norm = (np.linalg.norm(x, axis=-1) for x in (output - of_rows, of_rows))
            assert (error <= 1e-2 * norm).all(), (more, (error / norm).max())
            np.testing.assert_allclose(lse, of_lse, rtol=1e-5, atol=1e-4)
            for name, a, e in zip(("query", "key", "value"), gradients, of_gradients, strict=True):
                assert np.linalg.norm(a - e) <= 1e-2 * np.linalg.norm(e), (more, name)
