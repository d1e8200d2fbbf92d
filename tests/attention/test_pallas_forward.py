"""The Pallas kernel of attention without a GPU: interpreted on a CPU, races detected, and lowered for a GPU elsewhere.

NPROC=8 in the environment lets the interpreter run on a machine of few cores (`common.interpreted` says why). It knows
no layouts and no rules of copies, which lowering checks.
"""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import interpreted, slow, target

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft.pallas_kernels.attention import choice, ranges
from jaxsoft.pallas_kernels.attention.extra_tiles import ExtraRings
from jaxsoft.pallas_kernels.attention.forward import forward
from jaxsoft.pallas_kernels.attention.plan import FORWARD, ForwardPlan
from jaxsoft.pallas_kernels.attention.schedule import ordered, schedule

BF16, F16, F32 = (np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
SEGMENTS = (Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS)
LENGTHS = (Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS)
HEADS = [
    (64, 64),
    (128, 128),
    (256, 256),
    (192, 128),
    (8, 8),
    (40, 72),
    (32, 32),
    (96, 96),
    (128, 192),
    (256, 64),
    (224, 256),
    (256, 224),
]
# Small tiles, with which few queries and keys do what many do.
PLAN = ForwardPlan(groups=2, query_rows=64, key_tile=64, slots=2)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """Fails a test where the interpreter reports a race: some versions of JAX raise, others print."""
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def form_of(*extras, dtype=BF16, **rules):
    return AttentionForm(dtype, rules.pop("scale", 0.2), extras=extras, **rules)


def operands_of(form, queries, keys, head=32, value=32, dtype=BF16, bias=None, mask=None, bias_dtype=F32):
    """Two entries of the batch, two query heads and a key head; shapes of a bias and a mask, if they are broadcast."""
    rng = np.random.default_rng(queries)
    operands = [
        rng.standard_normal((2, length, heads, size)).astype(dtype)
        for length, heads, size in ((queries, 2, head), (keys, 1, head), (keys, 1, value))
    ]
    for extra in form.extras:
        length = queries if extra in (Extra.QUERY_SEGMENTS, Extra.QUERY_LENGTHS) else keys
        if extra is Extra.BIAS:
            operands.append(rng.standard_normal(bias or (2, 2, queries, keys)).astype(bias_dtype))
        elif extra is Extra.MASK:
            operands.append(rng.random(mask or (2, 2, queries, keys)) < 0.7)
        elif extra in SEGMENTS:
            operands.append(np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32))
        elif extra is Extra.SINKS:
            operands.append(np.array([[0.5, -np.inf]], np.float32))
        else:
            operands.append(np.array([9, -5] if extra is Extra.OFFSET else [length - 7, 0], np.int32))
    return operands


def exact(form, operands):
    """The output and the log-sum-exp in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in operands[:3])
    extras = form.named(operands)
    key, value = (np.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    z = np.einsum("btnh,bsnh->bnts", query, key) * form.scale
    z = z if form.cap is None else form.cap * np.tanh(z / form.cap)
    z = z + extras.get(Extra.BIAS, 0.0)
    i, j = np.ogrid[: z.shape[2], : z.shape[3]]
    number = {name: np.reshape(x, (-1, 1, 1, 1)) for name, x in extras.items() if np.ndim(x) == 1}
    position = i + number.get(Extra.OFFSET, 0)
    counts = np.broadcast_to(extras.get(Extra.MASK, True), z.shape).copy()
    if form.left is not None:
        counts &= j >= position - form.left
    if form.right is not None:
        counts &= j <= position + form.right
    counts &= (i < number.get(Extra.QUERY_LENGTHS, z.shape[2])) & (j < number.get(Extra.KEY_LENGTHS, z.shape[3]))
    if SEGMENTS[0] in extras:
        counts &= (extras[SEGMENTS[0]][:, :, None] == extras[SEGMENTS[1]][:, None, :])[:, None]
    sinks = np.reshape(extras.get(Extra.SINKS, np.array([[-np.inf]])), (1, -1, 1, 1)).astype(np.float64)
    z = np.where(counts, z, -np.inf)
    m = np.maximum(z.max(axis=-1, keepdims=True), sinks)
    m = np.where(m == -np.inf, 0, m)
    e = np.exp(z - m)
    s = e.sum(axis=-1, keepdims=True) + np.exp(sinks - m)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(s))[..., 0]
    return np.einsum("bnts,bsnd->btnd", e / np.where(s == 0, 1, s), value), lse


def assert_right(form, operands, plan=PLAN):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    output, lse, rest, *lost = jax.jit(forward(form, types, plan, blocks=3))(*operands)
    assert len(lost) == form.rounded
    expected, expected_lse = exact(form, operands)
    chex.assert_type([output, lse, rest], [form.dtype, jnp.float32, jnp.float32])
    chex.assert_shape([output, lse, rest], [expected.shape, expected_lse.shape, expected_lse.shape])
    np.testing.assert_allclose(lse, expected_lse, rtol=3e-6, atol=3e-6)
    assert np.abs(rest).max() <= 3e-6
    bound = float(jnp.finfo(operands[0].dtype).eps) * (np.abs(expected) + np.abs(expected).max())
    assert (np.abs(np.asarray(output, np.float64) - expected) <= bound).all()
    empty = np.isneginf(expected_lse).transpose(0, 2, 1)
    assert not np.asarray(output)[empty].any()
    if form.rounded:  # half of the last digit, at most
        half = 0.5 * float(jnp.finfo(form.dtype).eps) * np.abs(np.asarray(output, np.float64))
        left = np.abs(np.asarray(lost[0], np.float64))
        assert lost[0].dtype == operands[0].dtype and (left <= half).all() and left.any()


@interpreted
@pytest.mark.parametrize(
    "form, queries, keys, options",
    [
        (form_of(right=0), 150, 130, {"head": 40, "value": 40}),
        (form_of(Extra.OFFSET, left=50, right=10, dtype=F16), 130, 200, {"dtype": F16}),
        (form_of(*SEGMENTS), 140, 200, {}),
        (form_of(*LENGTHS, Extra.SINKS, right=3), 100, 150, {"value": 96}),
        (form_of(*LENGTHS), 70, 150, {}),
        (
            form_of(Extra.BIAS, Extra.MASK, cap=5.0, dtype=F32),
            70,
            150,
            {"bias": (1, 2, 70, 150), "mask": (2, 1, 1, 150)},
        ),
        (form_of(Extra.BIAS, Extra.MASK), 1, 100, {"bias": (2, 1, 1, 1), "mask": (1, 2, 1, 100)}),
        (form_of(scale=-0.3), 64, 64, {}),
        (
            form_of(Extra.BIAS, Extra.MASK, *LENGTHS, left=70, right=3),
            150,
            200,
            {"bias": (2, 1, 150, 200), "mask": (1, 1, 150, 200), "bias_dtype": BF16},
        ),
        (form_of(Extra.MASK, right=0), 17, 200, {"mask": (2, 1, 17, 200)}),
    ],
    ids=["causal", "window", "segments", "sinks", "lengths", "cap", "one query", "negative", "bias", "mask"],
)
def test_values(form, queries, keys, options):
    assert_right(form, operands_of(form, queries, keys, **options))


@interpreted
@pytest.mark.parametrize(
    "form",
    [
        form_of(),
        form_of(right=0),
        form_of(left=20),
        form_of(*LENGTHS, Extra.OFFSET, left=30, right=0),
        form_of(*SEGMENTS, left=90, right=0),
        form_of(Extra.BIAS, left=40, right=20),
    ],
    ids=["plain", "causal", "left", "lengths", "segments", "bias"],
)
def test_own_tiles(form):
    """Of three warp groups, each lets the tiles of keys pass that only others need, and the last has no queries."""
    for queries in (100, 310):
        assert_right(form, operands_of(form, queries, 200), dataclasses.replace(PLAN, groups=3, slots=3))


@interpreted
@pytest.mark.parametrize("offset", [-1e4, -1e9, float(np.finfo(np.float32).min)], ids=str)
def test_rest(offset):
    """Of one key, all keys, and none, beside a number that leaves nothing of a score."""
    form = form_of(Extra.BIAS, Extra.KEY_LENGTHS, dtype=F32)
    query, key, value, *_ = operands_of(form_of(dtype=F32), 70, 130)
    for count in (1, 130, 0):
        operands = [query * 0, key, value, np.full((1, 2, 70, 1), offset, np.float32), np.array([130, count], np.int32)]
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        output, lse, rest = jax.jit(forward(form, types, PLAN))(*operands)
        with np.errstate(divide="ignore"):
            expected = offset + np.log(count)
        np.testing.assert_allclose(
            np.asarray(lse, np.float64)[1] + np.asarray(rest)[1], expected, rtol=1e-15, atol=1e-6
        )
        mean = value.astype(np.float64)[1, :count].sum(axis=0) / max(count, 1)
        np.testing.assert_allclose(np.asarray(output)[1], np.broadcast_to(mean, (70, 2, 32)), rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("plan", [{"turns": True}, {"persistent": False}, {"groups": 1, "slots": 3}], ids=str)
def test_values_by_plan(plan):
    """Of more items than blocks, with an output that has room of its own or takes that of queries."""
    form = form_of(Extra.SINKS, right=0, rounded=True)
    for head, value in ((32, 32), (32, 64), (256, 256)):  # the last leaves no room for the output
        assert_right(form, operands_of(form, 140, 70, head, value), dataclasses.replace(PLAN, **plan))


@pytest.mark.costly(4)
@pytest.mark.parametrize(("head", "value"), HEADS)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form_of(), marks=slow, id="plain"),
        pytest.param(form_of(right=0), marks=slow, id="causal"),
        pytest.param(form_of(*LENGTHS, Extra.OFFSET, Extra.SINKS, left=30, right=0), id="lengths"),
        pytest.param(form_of(*SEGMENTS, right=0), marks=slow, id="segments"),
        pytest.param(form_of(Extra.BIAS, Extra.MASK, cap=30.0), id="bias and mask"),
        pytest.param(form_of(Extra.BIAS), marks=slow, id="bias"),
        pytest.param(form_of(dtype=F32), marks=slow, id="f32"),
    ],
)
def test_lowers_for_hopper(form, head, value):
    queries, keys = (300, 517) if head == 64 else (256, 384)
    bias_dtype = (F32, BF16, F16)[HEADS.index((head, value)) % 3]
    operands = operands_of(form, queries, keys, head, value, bias_dtype=bias_dtype)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    assert choice.unsupported(form, types) is None
    with target("NVIDIA H100 80GB HBM3"):
        lowered = jax.jit(forward(form, types)).trace(*types).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    output, *numbers = lowered.out_info
    assert output.shape == (2, queries, 2, value)
    assert [x.shape for x in numbers] == [(2, 2, queries)] * 2


@pytest.mark.cover
@pytest.mark.parametrize("axis", [0, 1], ids=["queries", "keys"])
@pytest.mark.parametrize("left", [None, 0, 70])
@pytest.mark.parametrize("right", [None, 0, 70])
@pytest.mark.parametrize("offset", [-100, 0, 130])
def test_ranges(axis, left, right, offset):
    """No tile that matters is left out, and no score of the interior is excluded."""
    form = form_of(Extra.OFFSET, *LENGTHS, left=left, right=right)
    shape = ranges.Shape(queries=300, keys=200, query_tile=64, key_tile=32)
    for lengths in ((300, 200), (170, 100), (128, 0), (0, 64)):
        refs = dict(zip(form.extras, (jnp.array([n], jnp.int32) for n in (offset, *lengths)), strict=True))
        i, j = np.ogrid[:320, :224]
        counts = (i < lengths[0]) & (j < lengths[1])
        counts &= (left is None or j >= i + offset - left) & (right is None or j <= i + offset + right)
        counts = counts if axis == 0 else counts.T
        function, block, tile = ((ranges.key_tiles, 128, 32), (ranges.query_tiles, 32, 64))[axis]
        for begin in range(0, counts.shape[0] - block + 1, block):
            span = function(form, shape, refs, 0, jnp.int32(begin), block)
            span = ranges.Range(
                *(int(getattr(span, name)) for name in ("begin", "interior_begin", "interior_end", "end"))
            )
            assert span.begin <= span.interior_begin <= span.interior_end <= span.end
            here = counts[begin : begin + block]
            assert not here[:, : span.begin * tile].any() and not here[:, span.end * tile :].any()
            assert here[:, span.interior_begin * tile : span.interior_end * tile].all()


def test_plans():
    """Every head size has a plan whose tiles fit shared memory."""
    assert all(list(plans) == sorted(plans) for plans in FORWARD.values())
    form = form_of()
    for head in range(8, 264, 8):
        for value in (8, head, 256):
            types = [jax.ShapeDtypeStruct((1, 64, 1, size), BF16) for size in (head, head, value)]
            assert choice.unsupported(form, types) is None


def test_extra_rings():
    """What has queries and keys gets slots where there is room, one for each before any has two."""
    arrays = {Extra.BIAS: jnp.zeros((1, 1, 4, 4), BF16), Extra.MASK: jnp.zeros((2, 1, 4, 4), jnp.int8)}
    for free, expected in ((0, (0, 0)), (256, (0, 1)), (512, (1, 0)), (768, (1, 1)), (1279, (1, 2)), (9999, (2, 2))):
        slots = ExtraRings.fitting(arrays, (8, 16), 2, free).slots
        assert tuple(slots.get(name, 0) for name in arrays) == expected, free
    arrays = {Extra.BIAS: jnp.zeros((1, 1, 1, 4)), Extra.MASK: jnp.zeros((2, 1, 4, 1))}
    assert not ExtraRings.fitting(arrays, (8, 16), 2, 9999).slots


def test_ordered():
    """Heads side by side under a causal rule, and entries of the batch where they share tiles of a bias or mask."""
    grid = {"batch": 2, "heads": 3, "queries": 4}
    bias, mask = jnp.zeros((1, 3, 5, 6)), jnp.zeros((2, 1, 5, 6), jnp.int8)
    for arrays, shared in (
        ({}, False),
        ({Extra.BIAS: bias}, True),
        ({Extra.MASK: mask}, False),
        ({Extra.BIAS: bias, Extra.MASK: mask}, True),
        ({Extra.BIAS: bias[:, :, :1]}, False),
    ):
        for right, length, order in (
            (None, 512, ["heads", "queries"]),
            (0, 512, ["queries", "heads"]),
            (0, 2**15, ["heads", "queries"]),
        ):
            found = ordered(form_of(right=right), grid, length, arrays)
            assert found == grid
            assert list(found) == ([*order, "batch"] if shared else ["batch", *order])
    assert list(ordered(form_of(), {**grid, "batch": 1}, 512, {Extra.BIAS: bias})) == list(grid)


def test_schedule():
    """Every item goes to one block, in order, and no block has more than an item to do when another is done."""
    grid = ordered(form_of(right=0), {"batch": 3, "heads": 12, "queries": 11}, 1408, {})
    shape = ranges.Shape(queries=1408, keys=1408, query_tile=64, key_tile=64)
    for form in (form_of(), form_of(right=0), form_of(left=300, right=0), form_of(Extra.BIAS, right=5)):
        numbers, begins = schedule(form, PLAN, shape, grid, blocks=132)
        assert sorted(numbers) == list(range(3 * 12 * 11)) and begins.shape == (133,)
        queries = 10 - numbers // 12 % 11 if form.right is not None else numbers // 12 % 11
        end = 1408 if form.right is None else np.minimum(128 * queries + 128 + form.right, 1408)
        first = 0 if form.left is None else np.maximum(128 * queries - form.left, 0)
        work = np.add.reduceat(np.broadcast_to((end - first) / 64, numbers.shape), begins[:-1])
        assert work.max() - work.min() <= 1408 / 64, form
        assert all((np.diff(numbers[a:b]) > 0).all() for a, b in itertools.pairwise(begins))

    def is_none(*extras, plan=PLAN, blocks=132, **axes):
        return schedule(form_of(*extras, right=0), plan, shape, {**grid, **axes}, blocks) is None

    assert not is_none() and not is_none(Extra.MASK, Extra.SINKS)
    assert is_none(*SEGMENTS) and is_none(Extra.KEY_LENGTHS) and is_none(Extra.QUERY_LENGTHS) and is_none(Extra.OFFSET)
    assert is_none(plan=dataclasses.replace(PLAN, persistent=False))
    assert is_none(blocks=3 * 12 * 11) and is_none(batch=1000)


def test_unsupported():
    def reason(query=BF16, key=BF16, head=64, value=64, output=BF16):
        sizes = (head, query), (head, key), (value, key)
        types = [jax.ShapeDtypeStruct((2, 64, 2, size), dtype) for size, dtype in sizes]
        return choice.unsupported(form_of(dtype=np.dtype(output)), types)

    assert reason() is None
    assert "not float32" in reason(query=F32, key=F32, output=F32)
    assert "bfloat16 and float16" in reason(key=F16)
    assert "multiples of 8" in reason(head=20)
    assert "at most 256" in reason(value=264)
    many = [jax.ShapeDtypeStruct((1, 8, 2**16, 64), BF16)] * 3
    assert "at most 65535" in choice.unsupported(form_of(), many)
