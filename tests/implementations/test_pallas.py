"""The Pallas kernels without a GPU: interpreted on a CPU, races detected, and lowered for a GPU that is not here.

The interpreter knows neither layouts nor the rules of asynchronous copies, which lowering checks. Neither runs the
code that a GPU runs: there, the tests of values take these kernels with the others.
"""

import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu, operand, pallas_is_tested, pretend, rows, slow, target
from jax.experimental.pallas import mosaic_gpu as plgpu
from row_operations import ALL_EXTRAS, BIAS, LIMIT, SCALE, WHERE, assert_exact
from row_operations import operands_of as operands_of_form
from truth import assert_within, wide

import jaxsoft
from jaxsoft import fold, pallas_kernels
from jaxsoft._rows import plain as plain_rows
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations import OPERATIONS
from jaxsoft._rows.operations.entropy import ENTROPY_VJP
from jaxsoft._rows.operations.labels import LABEL_STATE, LABEL_STATE_VJP
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.spec import NO_ROW, RowKind
from jaxsoft.pallas_kernels.rows import choice, register_rows, sizes, split, tiled
from jaxsoft.pallas_kernels.rows import fold as kernel_fold
from jaxsoft.pallas_kernels.rows import plan as plans
from jaxsoft.pallas_kernels.rows.extras import Extras
from jaxsoft.pallas_kernels.rows.operations import KERNELS as PALLAS_OPERATIONS
from jaxsoft.pallas_kernels.rows.operations import Signature
from jaxsoft.pallas_kernels.rows.plan import RegisterPlan, SplitPlan, TiledPlan

pytestmark = pallas_is_tested

# By dtype: shapes, and small plans with which few and short rows do what many and long ones do.
CASES = {
    jnp.float32: [
        # 2 to 128 threads hold a row, side by side or not; chunks overlap; rows are left over.
        ((70, 24), RegisterPlan(vector=4, lanes=2, repeat=1)),
        ((17, 50), RegisterPlan(vector=2, lanes=16, repeat=2)),
        ((9, 1000), RegisterPlan(vector=4, lanes=32, repeat=2)),
        ((5, 301), RegisterPlan(vector=1, lanes=64, repeat=2)),
        ((3, 300), RegisterPlan(vector=4, lanes=64, repeat=1)),
        # Rings keep a row and the beginning of the next, or do not keep it whole, and registers keep some tiles; by one
        # warp group and by two; more rows than blocks, and as many; tiles overlap or do not.
        ((3, 2300), TiledPlan(vector=4, chunks=1, tiles=5, ring=4, warpgroups=2, cluster=1, clusters=2)),
        (
            (3, 3300),
            TiledPlan(vector=4, chunks=1, tiles=7, ring=2, warpgroups=2, cluster=1, clusters=1, register_tiles=2),
        ),
        ((2, 2048), TiledPlan(vector=4, chunks=2, tiles=2, ring=2, warpgroups=1, cluster=1, clusters=2)),
        # Rows are split into parts, of which a block has several.
        ((2, 64 * 72), SplitPlan(64, RegisterPlan(vector=4, lanes=16, repeat=1))),
    ],
    jnp.bfloat16: [
        ((3, 1040), RegisterPlan(vector=8, lanes=128, repeat=1)),
        (
            (3, 6152),
            TiledPlan(vector=8, chunks=1, tiles=7, ring=2, warpgroups=1, cluster=1, clusters=1, register_tiles=2),
        ),
        ((1, 4104), TiledPlan(vector=8, chunks=2, tiles=3, ring=3, warpgroups=2, cluster=1, clusters=1)),
        ((1, 128 * 136), SplitPlan(128, RegisterPlan(vector=8, lanes=16, repeat=1))),
    ],
    jnp.float16: [
        ((17, 104), RegisterPlan(vector=8, lanes=8, repeat=1)),
        ((2, 4096), TiledPlan(vector=8, chunks=1, tiles=4, ring=3, warpgroups=2, cluster=1, clusters=1)),
    ],
}
# A shape for each way to cut up rows.
WAYS = [
    (30000, 40),  # in a warp
    (70, 2, 1024),  # in several warps
    (70000, 8192),
    (30000, 32768),  # by a block, or by a cluster that ends with its row
    (3000, 65536 + 8),
    (300, 262144),  # by a persistent cluster, which the row fits, or not
    (10, 2**23),
    (2, 3, 50264),  # few rows, by clusters, and split
    (3, 2**20),
    (1, 16),  # fewer rows than a block has
    (70, 1001),  # elements that are loaded one by one
]
EPS = 2.0**-23

PLAIN = [op for op in OPERATIONS if op in PALLAS_OPERATIONS]
KERNELS = [*PLAIN, LABEL_STATE, LABEL_STATE_VJP]
STAND_FOR_THE_OTHERS = (SOFTMAX, LOG_SOFTMAX_VJP, LABEL_STATE)
each_operation = pytest.mark.parametrize(
    "operation", [pytest.param(op, marks=() if op in STAND_FOR_THE_OTHERS else slow, id=op.name) for op in KERNELS]
)


# Every other shape, with every kind of plan.
each_half = pytest.mark.parametrize("half", [0, pytest.param(1, marks=slow)])


def each_in(dtype, *some):
    """Every operation and dtype, of which some in this one, which stand for the others, are not slow."""
    return pytest.mark.parametrize(
        ("operation", "dtype"),
        [
            pytest.param(op, other, marks=() if other == dtype and op in some else slow, id=f"{other.__name__}-{op}")
            for op in KERNELS
            for other in CASES
        ],
    )


@pytest.fixture(autouse=True)
def no_races(capfd):
    """Fails a test where the interpreter reports a race: some versions of JAX raise, others print."""
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def interpreted(operation, plan, *operands, extras=(), masked=False):
    """The results of a kernel."""
    x = operands[0]
    alike, names, given = choice.unlabelled(operation, RowForm(x.dtype, extras), [jnp.asarray(v) for v in operands])
    k, (*leading, n) = len(alike.operands), x.shape
    beside = Extras.of(names, masked, leading, [v.shape for v in given[k:]])
    flat = [v.reshape(-1, n) if v.ndim == x.ndim else v.reshape(-1) for v in given]
    flat = [v.astype(jnp.uint8) if v.dtype == bool else v for v in flat]
    flat[:k] = sorted(flat[:k], key=lambda v: -v.ndim)
    shape = flat[0].shape
    with jax.enable_x64(False), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        if isinstance(plan, RegisterPlan):
            results = register_rows.row_kernel(alike, *shape, x.dtype, plan, beside)(*flat)
        elif isinstance(plan, SplitPlan):
            results = split.row_kernel(alike, *shape, x.dtype, plan)(*flat)
        else:
            flat = [v.reshape(len(v), -1, plan.vector) if v.ndim == 2 else v for v in flat]
            results = tiled.row_kernel(alike, *shape, (x.dtype, x.dtype), plan, beside)(*flat)
    results = [v.reshape(x.shape if v.ndim > 1 else leading) for v in results]
    return [*results, choice.label_score(*operands[:2])] if operation is LABEL_STATE else results


# The forms that kernels take, shapes, and the leading dimensions along which the extras have length 1. Rows that a
# block holds have rows of the extras of their own, or share one.
FORMS = [
    ((SCALE,), (2, 64, 20), (0, 1)),
    ((LIMIT,), (3, 16, 100), (0,)),
    ((WHERE,), (2, 64, 24), (1,)),
    ((BIAS,), (2, 3, 16, 64), (0, 2)),
    (ALL_EXTRAS, (3, 2, 8, 500), (1,)),
    (ALL_EXTRAS, (48, 72), ()),
    ((LIMIT,), (7, 2112), ()),  # of a quarter, two, three or all of a row: what counts
    (ALL_EXTRAS, (2, 2, 1100), (0,)),
]


def formula(operation):
    """The operation in plain JAX."""
    return plain_rows.formula(operation, RowForm(np.dtype(np.float32)))


def taken_by(operation):
    """Which extras the kernels of an operation take."""
    if operation.has_label:
        return LIMIT, WHERE
    return (SCALE, LIMIT) if operation is SOFTMAX_VJP else ALL_EXTRAS


LONG_FORMS = [((LIMIT,), (3, 2, 2300), (1,)), (ALL_EXTRAS, (2, 2, 2300), (0,))]


@pytest.mark.costly(1)
@on_cpu
@each_in(jnp.float32, LOG_SOFTMAX_VJP, LABEL_STATE)
@each_half
def test_forms(operation, dtype, half):
    """Extras, a mask by y, and another result dtype in the kernel itself."""
    labelled = operation.has_label
    for extras, shape, ones in (FORMS[dtype == jnp.bfloat16 :: 3] if labelled else FORMS)[half::2]:
        extras = tuple(name for name in extras if name in taken_by(operation))
        result = np.dtype(jnp.float32 if extras == (SCALE,) else dtype)
        form = RowForm(result, extras, 0, operation is SOFTMAX_VJP)
        operands = operands_of_form(operation, form, shape, dtype, ones)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            kernel = pallas_kernels.kernel(operation, form, "cuda", operands)
            results = kernel(*map(jnp.asarray, operands))
        assert_exact(operation, form, operands, results)


@pytest.mark.costly(1)
@on_cpu
@each_operation
def test_forms_of_long_rows(operation):
    for extras, shape, ones in LONG_FORMS:
        ring = 2 if len(extras) > 1 else 4  # the row does not fit it, or does
        plan = TiledPlan(vector=4, chunks=1, tiles=5, ring=ring, warpgroups=2, cluster=1, clusters=2)
        extras = tuple(name for name in extras if name in taken_by(operation))
        form = RowForm(np.dtype(jnp.float32), extras, 0, operation is SOFTMAX_VJP)
        operands = operands_of_form(operation, form, shape, jnp.float32, ones)
        results = interpreted(operation, plan, *operands, extras=extras, masked=form.masked)
        assert_exact(operation, form, operands, results)


def test_extras():
    """Which rows of an extra belong to a row, with groups of dimensions, and without any."""
    shape, given = (2, 3, 1, 4, 5), [(2, 3, 1, 4, 5), (2, 1, 1, 1, 5), (1, 1, 1, 1, 1), (1, 3, 1, 4, 5)]
    extras = Extras.of(ALL_EXTRAS, False, shape, given)
    row = np.arange(math.prod(shape), dtype=np.int32)
    for name, of in zip(ALL_EXTRAS, given, strict=True):
        index, same = jax.vmap(lambda r, name=name: extras.place(name, r))(row)
        expected = np.broadcast_to(np.arange(math.prod(of)).reshape(of), shape).ravel()
        np.testing.assert_array_equal(index, expected)
        assert not same.any() if of[-1] == 5 else same.all()
    assert extras.together == 5
    for rows_ in (1, 5):
        blocks = np.arange(row.size // rows_, dtype=np.int32)
        first = np.asarray(jax.vmap(lambda block, rows_=rows_: extras.first_row(block, rows_))(blocks))
        np.testing.assert_array_equal(np.sort(first), blocks * rows_)
        assert first[1] - first[0] == 20 * 3  # the bias is the same along the dimension of length 2
    assert Extras.of((SCALE,), False, (1, 1), [(1, 1)]).together == 0


def operands_of(operation, x):
    """Operands of an operation whose scores are x, as the formulas give them."""
    rng = np.random.default_rng(x.shape[-1])
    g = rng.standard_normal(x.shape).astype(x.dtype)
    if operation is SOFTMAX_VJP:
        return np.asarray(formula(SOFTMAX)(x)[0]), g
    count, n = x.shape
    label = ()
    if operation.has_label:  # in the last tile or chunk, the first, others, none, at their borders; and no row
        label = (np.resize(np.array([n - 1, NO_ROW, 0, n // 2, n - 2, -1, 511, 512, n], np.int32), count),)
    if operation.is_pullback:
        m, s = (np.asarray(v) for v in formula(LABEL_STATE if label else STATE)(x, *label)[:2])
        numbers = rng.standard_normal((operation.kinds.count(RowKind.STATISTIC) - 2, count)).astype(np.float32)
        return x, *label, m, s, *([g] if operation is LOG_SOFTMAX_VJP else numbers)
    return x, *label


def plain(operation, implementation, platform, *operands):
    """What is chosen for the plain form of an operation."""
    return RowOperation(operation, RowForm(operands[0].dtype), implementation).choose(platform, operands).function


@pytest.mark.parametrize("limits", sizes.SIZES.values(), ids=[generation.value for generation in sizes.SIZES])
def test_plans(limits):
    """Rows of every length and number are cut up within the limits of the hardware, or refused."""
    lengths = {n + k for p in range(2, 26) for n in (2**p, 3 * 2 ** (p - 1)) for k in (0, 1, 2, 4, -8) if n + k > 0}
    for n, rows_, size in itertools.product(sorted(lengths), (1, 3, 64, 2000, 10**6), (2, 4)):
        for operation in PLAIN:
            if cut := plans.register_rows(limits.registers, rows_, n, size):
                assert cut.width <= n and n % cut.vector == 0 and cut.lanes in (2, 4, 8, 16, 32, 64, 128)
                assert cut.rows <= rows_ or cut.repeat == 1
            if cut := plans.split(limits, operation, rows_, n, size):
                assert n % cut.parts == 0 and cut.parts % cut.part.rows == 0 and cut.part.width <= n // cut.parts
            if cut := plans.tiled(limits, operation, rows_, n, size):
                arrays = Signature.of(operation).rows
                assert cut.tile <= n <= cut.tile * cut.tiles < n + cut.tile and cut.tiles >= cut.members
                assert cut.ring * cut.warpgroups <= 32
                assert cut.ring * arrays * cut.warpgroups * cut.tile * size <= limits.ring_bytes
                assert cut.tiles > cut.members or n % cut.tile == 0  # one writer for what overlaps
                assert cut.clusters == rows_ or cut.clusters * cut.cluster <= limits.gpu.multiprocessors


@on_cpu
@each_in(jnp.float32, SOFTMAX_VJP)
@each_half
def test_values(operation, dtype, half):
    cases = CASES[dtype] if operation in (SOFTMAX, SOFTMAX_VJP) else CASES[dtype][::2]
    if operation.has_label:
        cases = CASES[dtype][::3]
    if operation is LOGSUMEXP_VJP or operation.has_label:
        cases = [(shape, plan) for shape, plan in cases if not isinstance(plan, SplitPlan)]
    for (count, n), plan in cases[half::2]:
        x = rows(n, dtype, count=count)
        operands = operands_of(operation, x)
        results = interpreted(operation, plan, *operands)
        exact = [v if v.dtype == np.int32 else wide(v) for v in operands]
        with jax.enable_x64(True):
            expected = [np.asarray(v) for v in jax.jit(formula(operation))(*exact)]
        for actual, true in zip(results, expected, strict=True):
            chex.assert_shape(actual, true.shape)
            chex.assert_type(actual, dtype if true.ndim == 2 else jnp.float32)
            # exp's argument is rounded, so its relative error is as large as the row's spread in units of EPS.
            spread = np.ptp(wide(x), axis=-1, keepdims=True) if true.ndim == 2 else np.ptp(wide(x), axis=-1)
            scale = np.abs(true) + (np.abs(true).max(axis=-1, keepdims=True) if operation.is_pullback else 0)
            if operation is SOFTMAX_VJP:
                y, g = exact
                scale = np.abs(y) * (np.abs(g) + np.abs(y * g).sum(axis=-1, keepdims=True))
            bound = EPS * (8 + spread) * (scale + (operation is LOG_SOFTMAX)) + 1e-30
            if actual.dtype.itemsize == 2:
                bound += 0.51 * (
                    float(jnp.finfo(dtype).eps) * np.abs(true) + float(jnp.finfo(dtype).smallest_subnormal)
                )
            assert_within(actual, true, bound, f"{operation} {x.dtype} {x.shape} {plan}")


@pytest.mark.costly(1)
@on_cpu
@each_operation
@pytest.mark.parametrize(
    "n, plan",
    [
        (600, RegisterPlan(vector=4, lanes=64, repeat=1)),
        (2300, TiledPlan(vector=4, chunks=1, tiles=5, ring=3, warpgroups=2, cluster=1, clusters=12)),
    ],
    ids=["registers", "tiled"],
)
def test_special_values(operation, n, plan):
    x = np.zeros((12, n), np.float32)
    x[0] = -np.inf
    x[1], x[1, n - 1] = -np.inf, 3
    x[2, : n // 2 + 9] = -np.inf
    x[3, 5] = np.nan
    x[4, n - 1] = np.nan
    x[5, 7] = np.inf
    x[6, n // 2], x[6, 1] = np.inf, -np.inf
    x[7, 3], x[7, n - 3] = np.inf, np.nan
    x[8], x[8, 1] = -np.inf, np.nan
    x[9] = np.linspace(-3e38, 3e38, n)
    x[10] = np.finfo(np.float32).smallest_subnormal
    x[11] = np.linspace(-200, 200, n)
    operands = operands_of(operation, x)
    results = interpreted(operation, plan, *operands)
    expected = list(formula(operation)(*map(jnp.asarray, operands)))
    if RowKind.STATISTIC in operation.result_kinds:  # XLA's maximum does not always see a NaN; the sum does
        m = operation.result_kinds.index(RowKind.STATISTIC)
        expected[m] = jnp.where(jnp.isnan(expected[m + 1]), jnp.nan, expected[m])
    chex.assert_trees_all_close(results, expected, rtol=2e-5, atol=1e-5 if operation.is_pullback else 1e-37)


@pytest.mark.cover
@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-3, 0.7], ids=str)
@pytest.mark.parametrize("level", [0.0, -1.2], ids=str)
def test_long_sums(step, level):
    """A lane that folds 2^14 tiles, with a rising maximum or without, keeps its sum to a few roundings."""
    tiles = 1 << 14
    x = np.full((tiles, 2, 4, 4), level, np.float32) + np.arange(tiles, dtype=np.float32)[:, None, None, None] * step
    x[0, 0] = max(0.0, level)

    @jax.jit
    def state(x):
        scores = kernel_fold.SCORES
        lanes, _ = jax.lax.scan(lambda lanes, tile: (scores.accumulate(lanes, list(tile)), None), scores.identity(4), x)
        return scores.total(scores.state(lanes))

    m, s = state(x)
    expected = np.exp(wide(x) - wide(m)).sum()
    assert m == x.max()
    assert_within(s, expected, 1e-6 * expected, "s")
    chex.assert_trees_all_close(fold.State(m, s), fold.state(x.ravel()), rtol=1e-4)


@each_in(jnp.bfloat16, LOG_SOFTMAX_VJP)
@each_half
def test_lowers_for_hopper(operation, dtype, half):
    with target("NVIDIA H100 80GB HBM3"):
        for shape in (WAYS[1::3] if operation.has_label else WAYS)[1 - half :: 2]:
            full, number = operand(shape, dtype), operand(shape[:-1], jnp.float32)
            kinds = {RowKind.STATISTIC: number, RowKind.LABEL: operand(shape[:-1], jnp.int32)}
            operands = [kinds.get(kind, full) for kind in operation.kinds]
            kernel = plain(operation, "pallas", "cuda", *operands)
            lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",))
            # ENTROPY_VJP has no kernel, and reduces nothing that STATE's could do: it is a formula.
            assert ("mosaic_gpu" in lowered.as_text()) == (operation is not ENTROPY_VJP)
            results = [kinds.get(kind, full) for kind in operation.result_kinds]
            results = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in results]
            chex.assert_trees_all_equal_shapes_and_dtypes(lowered.out_info, tuple(results))


@on_cpu
def test_unavailable():
    reason = pallas_kernels.unavailable
    assert "NVIDIA GPUs only" in reason("cpu")
    assert "NVIDIA GPUs only" in reason("rocm")
    assert "no NVIDIA GPU" in reason("cuda")
    others = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090"
    for kind in (*others, "NVIDIA GeForce RTX 5090"):
        with target(kind):
            assert f"needs a data-centre GPU from Hopper on (compute capability 9 or 10); this is {kind}" in reason(
                "cuda"
            )
            with pytest.raises(
                ValueError, match="implementation='pallas' cannot serve this call: it needs a data-centre GPU"
            ):
                plain(SOFTMAX, "pallas", "cuda", operand((2, 1024), jnp.float32))
    for kind in ("NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA B200", "NVIDIA GB300"):
        with target(kind):
            assert reason("cuda") is None


@pytest.mark.parametrize(
    "n, dtype, reason",
    [
        (1024, jnp.float32, None),
        (4, jnp.float32, None),
        (6, jnp.bfloat16, None),
        (1000, jnp.bfloat16, None),
        (8190, jnp.float32, None),
        (50256, jnp.bfloat16, None),
        (2, jnp.float32, None),
        (1001, jnp.bfloat16, None),
        (1, jnp.float32, "at least 2 elements; got n=1"),
        (50257, jnp.bfloat16, "a multiple of 16 bytes.* n=50257 of bfloat16"),
        (50260, jnp.float16, "a multiple of 16 bytes"),
        (1024, jnp.float64, "not float64"),
        (1024, jnp.int32, "not int32"),
    ],
)
def test_unsupported(n, dtype, reason):
    with jax.enable_x64(True):
        actual = pallas_kernels.unsupported([operand((3, n), dtype)])
    chex.assert_equal(actual is None, reason is None)
    if reason is not None:
        assert re.search(reason, actual)


@on_cpu
def test_choice_of_few_long_rows(monkeypatch):
    """The default is this implementation where it is the fastest, else "ffi"."""
    pretend(monkeypatch, None)

    def lowered(operation, shape, dtype):
        x = [operand(shape, dtype) for _ in operation.operands]
        kernel = RowOperation(operation, RowForm(np.dtype(dtype)), None).choose("cuda", x).function
        text = jax.jit(kernel).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
        return "mosaic_gpu" if "mosaic_gpu" in text else "ffi" if "jaxsoft_" in text else "xla"

    with target("NVIDIA H200"):
        for shape in ((1, 32000), (2, 64, 65536), (8, 2**20)):
            assert lowered(SOFTMAX, shape, jnp.float32) == "mosaic_gpu"
        for shape in ((1, 8192), (9, 2**20), (1, 128257)):
            assert lowered(SOFTMAX, shape, jnp.float32) == "ffi"
        assert lowered(SOFTMAX, (4, 131072), jnp.bfloat16) == "mosaic_gpu"
        for shape in ((1, 16384), (5, 131072), (4, 2**23)):
            assert lowered(SOFTMAX, shape, jnp.bfloat16) == "ffi"
        assert lowered(SOFTMAX_VJP, (1, 32000), jnp.float32) == "ffi"
    with target("NVIDIA A100-SXM4-80GB"):
        assert lowered(SOFTMAX, (1, 32000), jnp.float32) == "ffi"


@on_cpu
def test_choice_of_cross_entropy(monkeypatch):
    """The default is this implementation for many long rows, else "ffi"; named, it serves what it has no kernel for."""
    pretend(monkeypatch, None)

    def lowered(rows, n, implementation=None, **options):
        def loss(x):
            labels = jnp.zeros(rows, jnp.int32)
            return jaxsoft.softmax_cross_entropy_with_integer_labels(
                x, labels, implementation=implementation, **options
            ).sum()

        with target("NVIDIA H200"):
            x = jax.ShapeDtypeStruct((rows, n), jnp.float32)
            text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return {name for name in ("mosaic_gpu", "jaxsoft_label") if name in text}

    assert lowered(600, 32000) == lowered(600, 1000, "pallas") == {"mosaic_gpu"}
    assert lowered(8, 32000) == lowered(600, 1000) == lowered(600, 50257) == {"jaxsoft_label"}
    assert lowered(600, 32000, logits_soft_cap=5.0) == lowered(600, 32000, label_smoothing=0.1) == {"jaxsoft_label"}
    for options in ({"logits_soft_cap": 5.0}, {"label_smoothing": 0.1}, {"where": jnp.ones((600, 1), bool)}):
        assert lowered(600, 32000, "pallas", **options) == {"mosaic_gpu"}


@on_cpu
def test_top_k_has_the_state_of_a_named_kernel():
    """And XLA's top_k beside it."""
    x = jax.ShapeDtypeStruct((600, 32000), jnp.float32)
    with target("NVIDIA H200"):
        f = jax.jit(lambda x: jaxsoft.top_k_softmax(x, 5, implementation="pallas"))
        assert "jaxsoft_state_tiled" in f.trace(x).lower(lowering_platforms=("cuda",)).as_text()


@on_cpu
def test_choice_without_the_cuda_library(monkeypatch):
    """On Hopper these kernels are the default for the forms that they take; XLA has the others, and older GPUs."""
    pretend(monkeypatch, "it was not built")
    x = operand((8, 2048), jnp.float32)

    def lowered(trailing):
        kernel = RowOperation(SOFTMAX, RowForm(x.dtype, (), trailing), None).choose("cuda", [x]).function
        return jax.jit(kernel).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    with target("NVIDIA H200"):
        assert "mosaic_gpu" in lowered(0)
        assert "custom_call" not in lowered(1)
    with target("Tesla V100-SXM2-16GB"):
        assert "custom_call" not in lowered(0)


@pytest.mark.parametrize(
    ("shape", "what"), [((70000, 4096), "registers"), ((3000, 65536), "tiled"), ((1, 2**20), "split")]
)
def test_description(shape, what):
    """What is said of the choice begins with the name that the kernel has in the program."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    operation = RowOperation(SOFTMAX, RowForm(x.dtype), "pallas")
    with target("NVIDIA H100 80GB HBM3"):
        chosen = operation.choose("cuda", [jax.core.ShapedArray(shape, x.dtype)])
        text = jax.jit(lambda x: operation(x)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    name, words = chosen.kernel.split(": ")
    assert name == f"jaxsoft_softmax_{what}" and name in text and words
