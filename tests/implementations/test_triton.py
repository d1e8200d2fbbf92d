"""The Triton kernels without a GPU: planned, compiled for GPUs that are not here, and interpreted on a CPU.

The interpreter runs the kernels' arithmetic by numpy, whose sums and exponentials are not the GPU's. On a GPU the tests
of values take these kernels with the others.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import pickle
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu, operand, rows, slow, target
from jax.sharding import PartitionSpec
from truth import Truth, assert_last_place, assert_within, wide

import jaxsoft
from jaxsoft import triton_kernels
from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations import OPERATIONS as RECORDS
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft._rows.spec import RowKind
from jaxsoft.triton_kernels.rows.plan import TritonPlan, plan, tuning

OPERATIONS = {operation.name: operation for operation in RECORDS if operation in triton_kernels.KERNELS}
EPS = 2.0**-23
# What the kernels distinguish: rows of one tile and of several, that end with them or not; several rows a program, of
# which some do not exist; lanes, units, packs and vectors of one and of more.
CUTS = {
    "rows, exact": TritonPlan(n=64, tiles=1, units=2, packs=1, rows=4, lanes=8, vector=4, warps=1),
    "rows, masked": TritonPlan(n=100, tiles=1, units=4, packs=1, rows=4, lanes=8, vector=4, warps=1),
    "rows of one element": TritonPlan(n=1, tiles=1, units=1, packs=1, rows=32, lanes=1, vector=1, warps=1),
    "one row, masked": TritonPlan(n=77, tiles=1, units=1, packs=4, rows=1, lanes=32, vector=1, warps=1),
    "tiles, exact": TritonPlan(n=128, tiles=2, units=1, packs=1, rows=1, lanes=32, vector=2, warps=1),
    "tiles, masked": TritonPlan(n=301, tiles=3, units=2, packs=2, rows=1, lanes=32, vector=1, warps=1),
}

needs_triton = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")), reason="needs jax-triton"
)
each_operation = pytest.mark.parametrize("operation", OPERATIONS)


def row_operands(operation: str) -> int:
    """How many operands have the shape of the scores."""
    return sum(kind.whole_rows for kind in OPERATIONS[operation].kinds)


def sizes(operation: str, dtype):
    return tuning(Generation.HOPPER, row_operands(operation), jnp.dtype(dtype).itemsize)


def statistic(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("arrays", [1, 2])
def test_plans(itemsize, arrays):
    """Every row is covered, once; and what a row is cut into does not depend on the others."""
    limits = tuning(Generation.HOPPER, arrays, itemsize)
    lengths = (*range(1, 70), 127, 1000, 1024, 2051, 4096, 16384, 16391, 32768, 32769, 50257, 2**20, 2**31 + 8)
    for n in lengths:
        cuts = [plan(count, n, itemsize, limits) for count in (1, 3, 600, 2**20, 2**31 - 1)]
        for cut in cuts:
            assert n % cut.vector == 0 and cut.vector * itemsize <= 16
            assert cut.tiles * cut.tile >= n > (cut.tiles - 1) * cut.tile
            assert cut.exact == (cut.tiles * cut.tile == n)
            threads = 32 * cut.warps
            assert threads <= 1024 and cut.rows * cut.lanes % threads == 0
            assert all(k.bit_count() == 1 for k in (cut.packs, cut.rows, cut.lanes, cut.vector))
            assert cut.units <= 8 and (cut.packs == 1 or cut.rows == 1)
            assert cut.tiles == 1 if n <= limits.most_elements * limits.most_lanes else cut.rows == 1
            assert cut.units * cut.packs * cut.vector * cut.rows * cut.lanes <= 2 * limits.elements * threads
        assert len({(cut.tiles, cut.units, cut.lanes, cut.vector) for cut in cuts}) == 1


def test_plans_fill_a_gpu():
    """Rows are put together only where there are many programs."""
    for n in (8, 100, 512, 1024):
        for count in (1, 100, 10_000, 10**6):
            cut = plan(count, n, 4, tuning(Generation.HOPPER, 1, 4))
            assert cut.rows * cut.lanes <= 32 or -(-count // cut.rows) >= 512
        assert plan(10**6, n, 4, tuning(Generation.HOPPER, 1, 4)).warps == 4


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiles the kernel of an operation to PTX."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jaxsoft.triton_kernels.rows import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {jnp.float16: "fp16", jnp.bfloat16: "bf16", jnp.float32: "fp32", jnp.float64: "fp64"}

    def ptx(operation, dtype, cut, capability=90):
        kernel = getattr(kernels, f"{operation}_kernel")
        kinds = (*OPERATIONS[operation].kinds, *OPERATIONS[operation].result_kinds)
        arrays = ("*" + names[dtype if kind.whole_rows else statistic(dtype)] for kind in kinds)
        signature = ["i64", *arrays, "constexpr"]
        source = ASTSource(
            kernel,
            dict(zip(kernel.arg_names, signature, strict=True)),
            {"plan": cut},
            {(i,): [["tt.divisibility", 16]] for i in range(1, len(signature) - 1)},
        )
        options = {"num_warps": cut.warps}
        return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]

    return ptx


def vectors(operation: str, cut: TritonPlan) -> tuple[int, int]:
    """How many 16-byte loads and stores a thread's part of a tile takes, each pass over it counted."""
    operands, results = row_operands(operation), OPERATIONS[operation].result_kinds.count(RowKind.ROW)
    each = cut.units * cut.packs * max(1, cut.rows * cut.lanes // (32 * cut.warps))
    second = cut.tiles > 1 and operation not in ("state", "logsumexp_vjp")
    first = operands if operation != "log_softmax_vjp" else 1  # only g is summed
    return each * (first + operands if second else operands), each * results


@pytest.mark.costly(1)
@needs_triton
@each_operation
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d == jnp.bfloat16 else slow) for d in (*triton_kernels._DTYPES,)],
    ids=lambda dtype: dtype.__name__,
)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=slow), 90])
def test_compiles(compiled, operation, dtype, capability):
    """Whole rows of several a program and of several warps, and tiles; all in 16-byte loads and stores."""
    for n in (1000, 4096, 131072):
        cut = plan(10**5, n, jnp.dtype(dtype).itemsize, sizes(operation, dtype))
        ptx = compiled(operation, dtype, cut, capability)
        assert f".target sm_{capability}" in ptx
        wide_load, wide_store = (
            f"{name}.v2.b64" if dtype == jnp.float64 else f"{name}.v4.b32" for name in ("ld.global", "st.global")
        )
        assert (ptx.count(wide_load), ptx.count(wide_store)) == vectors(operation, cut), (n, cut)
        # Rows that fit a warp need no shared memory, but to put statistics in order.
        if cut.lanes <= 32 and RowKind.STATISTIC not in OPERATIONS[operation].result_kinds:
            assert "bar.sync" not in ptx


@needs_triton
@pytest.mark.parametrize("operation", ["softmax", "softmax_vjp"])
def test_compiles_for_ampere(compiled, operation):
    cut = plan(10**5, 4096, 4, sizes(operation, jnp.float32))
    assert ".target sm_80" in compiled(operation, jnp.float32, cut, 80)


@pytest.mark.costly
@needs_triton
@pytest.mark.parametrize("n", [1, 7, 1001, 50257, 2**31 + 8])
def test_compiles_any_length(compiled, n):
    for operation in ("log_softmax", "softmax_vjp"):
        cut = plan(3, n, 4, sizes(operation, jnp.float32))
        assert "ld.global" in compiled(operation, jnp.float32, cut)


ORDINARY = 3  # rows before the special ones


def special_rows(n: int, dtype) -> np.ndarray:
    x = rows(n, dtype, count=9)
    x[3] = -np.inf
    x[4], x[4, n - 1] = -np.inf, 3
    x[5, n // 2] = np.nan
    x[6, n // 2], x[6, 0] = np.inf, -np.inf
    x[7, n // 2], x[7, n - 1] = np.inf, np.nan
    x[8], x[8, 0] = -np.inf, np.nan
    return x


def operands_for(operation: str, n: int, dtype) -> list[np.ndarray]:
    """Rows with special values, and what goes with them."""
    x = special_rows(n, dtype)
    g = np.random.default_rng(n).standard_normal(x.shape).astype(dtype)
    m, s = (np.asarray(v) for v in formula("state", x))
    return {
        "softmax_vjp": [np.asarray(formula("softmax", x)[0]), g],
        "log_softmax_vjp": [x, m, s, g],
        "logsumexp_vjp": [x, m, s, g[:, 0].astype(m.dtype)],
    }.get(operation, [x])


def formula(operation: str, *operands) -> tuple[jax.Array, ...]:
    types = [operand(v.shape, v.dtype) for v in operands]
    chosen = RowOperation(OPERATIONS[operation], RowForm(operands[0].dtype), "xla").choose("cpu", types)
    return jax.jit(chosen.function)(*operands)


def interpreted(operation: str, calls: list[tuple[TritonPlan, list[np.ndarray]]], folder: pathlib.Path):
    """What the interpreter makes of an operation, in a process of its own."""
    kinds = OPERATIONS[operation].result_kinds
    types = [
        {RowKind.ROW: (x.shape, x.dtype), RowKind.STATISTIC: (x.shape[:1], np.dtype(np.float32))}
        for _, (x, *_) in calls
    ]
    with open(folder / "calls", "wb") as file:
        given = zip(calls, types, strict=True)
        pickle.dump([(operation, cut, operands, [t[kind] for kind in kinds]) for (cut, operands), t in given], file)
    script = pathlib.Path(__file__).parent / "interpret_triton.py"
    command = [sys.executable, script, folder / "calls", folder / "results"]
    package = str(pathlib.Path(jaxsoft.__file__).parents[1])  # the one that is tested, as of a clone
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": package}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(folder / "results", "rb") as file:
        return pickle.load(file)


@pytest.mark.costly(1)
@needs_triton
@on_cpu
@each_operation
def test_values(operation, tmp_path):
    """The formulas' values, of ordinary rows and of special ones; and those of float64."""
    cases = [(name, jnp.float32) for name in CUTS]
    cases += [(name, jnp.bfloat16) for name in CUTS if name.endswith("masked") and operation.startswith("softmax")]
    calls = [(CUTS[name], operands_for(operation, CUTS[name].n, dtype)) for name, dtype in cases]
    for (_, operands), results, case in zip(calls, interpreted(operation, calls, tmp_path), cases, strict=True):
        expected = tuple(map(np.asarray, formula(operation, *operands)))
        chex.assert_trees_all_equal_shapes_and_dtypes(tuple(results), expected)
        if operation in ("log_softmax", "state"):
            *_, m, s = expected
            expected = (*expected[:-2], np.where(np.isnan(s), np.nan, m), s)  # XLA's may not see a NaN
        size = np.nan_to_num(np.abs(wide(operands[-1])), posinf=0, neginf=0).max()
        for actual, true in zip(results, expected, strict=True):
            rtol, atol = (1e-5, 1e-6 * min(size, 10)) if actual.dtype == np.float32 else (2.0**-7, 1e-6)
            np.testing.assert_allclose(wide(actual), wide(true), rtol, atol, err_msg=str(case))

        x, first = operands[0][:ORDINARY], results[0][:ORDINARY]
        truth = Truth.of(x)
        if operation == "softmax" and x.dtype == np.float32:
            assert_within(first, truth.p, EPS * (4 + truth.d) * np.maximum(truth.p, 1e-30), str(case))
        elif operation == "softmax":
            assert_last_place(first, truth.p, 1, np.float64(1e-30), str(case))
        elif operation == "state":
            s = np.exp(truth.log_s[:, 0])
            chex.assert_trees_all_equal(wide(first), truth.m[:, 0])
            assert_within(results[1][:ORDINARY], s, 8 * EPS * s, str(case))


@needs_triton
@each_operation
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"])
def test_lowers(operation, kind):
    """For GPUs that are not here, by jax-triton; rows of any leading dimensions."""
    with target(kind):
        if reason := triton_kernels.unavailable("cuda"):
            pytest.skip(reason)
        for shape, dtype in (((2, 3, 100), jnp.float32), ((1, 1024), jnp.float32), ((70000, 1001), jnp.bfloat16)):
            full, one = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
            sides = OPERATIONS[operation].kinds, OPERATIONS[operation].result_kinds
            given, results = ([full if kind.whole_rows else one for kind in kinds] for kinds in sides)
            called = RowOperation(OPERATIONS[operation], RowForm(jnp.dtype(dtype)), "triton")
            lowered = jax.jit(lambda *v, f=called: f(*v)).trace(*given).lower(lowering_platforms=("cuda",))
            assert len(re.findall("custom_call @triton_kernel_call", lowered.as_text())) == 1
            chex.assert_trees_all_equal_shapes_and_dtypes(lowered.out_info, tuple(results))


@needs_triton
def test_lowers_under_transformations(monkeypatch):
    """Forward and backward are one kernel each, also under vmap and shard_map."""
    monkeypatch.setattr(gpus, "targets", lambda: {"NVIDIA H200": gpus.H200})
    if reason := triton_kernels.unavailable("cuda"):
        pytest.skip(reason)
    softmax, spec = functools.partial(jaxsoft.softmax, implementation="triton"), PartitionSpec("rows")
    mesh = jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((4, 3, 1024), jnp.float32)
    for f in (softmax, jax.vmap(softmax), jax.shard_map(softmax, mesh=mesh, in_specs=spec, out_specs=spec)):
        both = jax.jit(lambda x, g, f=f: jax.vjp(f, x)[1](g))
        text = both.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall("custom_call @triton_kernel_call", text)) == 2


@on_cpu
@needs_triton
def test_unavailable():
    reason = triton_kernels.unavailable
    assert "NVIDIA GPUs only" in reason("cpu")
    assert "not tested on AMD GPUs" in reason("rocm")
    assert "no NVIDIA GPU here" in reason("cuda")
    for kind in ("Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce GTX 1080"):
        with target(kind):
            assert f"needs Ampere (compute capability 8.0) or newer; {kind} is older" in reason("cuda")
            with pytest.raises(ValueError, match="implementation='triton' cannot serve this call: it needs Ampere"):
                RowOperation(SOFTMAX, RowForm(np.dtype(np.float32)), "triton").choose(
                    "cuda", [operand((2, 1024), jnp.float32)]
                )


@pytest.mark.parametrize("module, package", [("jax_triton", "jax-triton"), ("triton", "triton")])
def test_without_the_packages(monkeypatch, module, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name) or "found")
    message = rf"{package} is not installed; pip install 'jaxsoft\[triton\]'"
    with pytest.raises(ValueError, match=message), target("NVIDIA A100-SXM4-80GB"):
        RowOperation(SOFTMAX, RowForm(np.dtype(np.float32)), "triton").choose("cuda", [operand((2, 1024), jnp.float32)])


def test_without_the_gpu_support_of_jax(monkeypatch):
    from jaxlib import gpu_triton

    monkeypatch.delattr(gpu_triton, "TritonKernelCall", raising=False)
    assert "JAX's GPU support" in triton_kernels._broken.__wrapped__()


def test_several_compute_capabilities(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    for found, reason in (
        ({"NVIDIA A100": 80, "NVIDIA H100": 90}, "one compute capability, .*NVIDIA A100, NVIDIA H100"),
        ({"Tesla V100": 70, "NVIDIA H100": 90}, r"this is Tesla V100 \(7\.0\)"),
    ):
        known = {kind: dataclasses.replace(gpus.H200, capability=number) for kind, number in found.items()}
        monkeypatch.setattr(gpus, "targets", lambda known=known: known)
        with pytest.raises(ValueError, match=reason):
            RowOperation(STATE, RowForm(np.dtype(np.float32)), "triton").choose(
                "cuda", [operand((2, 1024), jnp.float32)]
            )


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((3, 1024), jnp.float32, None),
        ((3, 1), jnp.float16, None),
        ((3, 50257), jnp.bfloat16, None),
        ((3, 7), jnp.float64, None),
        ((3, 1024), jnp.int32, "not int32"),
        ((3, 1024), jnp.float8_e5m2, "not float8_e5m2"),
        ((3, 1024), jnp.complex64, "not complex64"),
        ((2, 2**30, 3), jnp.float32, "rows at most; got 2147483648"),
    ],
)
def test_unsupported(shape, dtype, reason):
    with jax.enable_x64(True):
        actual = triton_kernels.unsupported([operand(shape, dtype)])
    chex.assert_equal(actual is None, reason is None)
    assert reason is None or reason in actual


def test_symbolic_shapes():
    """A kernel is compiled for a row length: exported programs for any are left to others."""
    shape = jax.export.symbolic_shape("a, n")
    assert "shapes that are known" in triton_kernels.unsupported([operand(shape, jnp.float32)])


def test_is_not_imported_before_it_is_asked_for():
    code = "import sys, jaxsoft; jaxsoft.implementations('cpu'); print(*({'triton', 'jax_triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done
