"""Rows on a GPU by what holds them: registers, a cluster of blocks or the grid, for many rows and for few.

The reference is XLA in float64. Rows differ in scale and offset, and some hold infinities and NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import IMPLEMENTATIONS, each_op, on_gpu, ours
from truth import assert_within, beside_float64

# Clusters of 1 to 16 blocks; odd lengths, whose rows begin anywhere; lengths that leave a little over; the longest that
# a cluster holds.
MANY = [
    (700, 8193),
    (512, 16391),
    (300, 32768),
    (300, 50257),
    (300, 50240),
    (150, 100003),
    (150, 131072),
    (100, 200_064),
    (70, 262147),
    (40, 524288),
    (40, 600_001),
]
# So many that small blocks take the state of rows that larger ones would hold.
MANY += [(2200, 32_000), (1200, 60_000), (1200, 30_001), (500, 140_001)]
FEW = [(1, 5000), (2, 16391), (64, 8192), (64, 32000), (1, 50257), (16, 131072), (3, 262147), (1, 524288), (2, 2**20)]
FEW += [(5, 700_001), (3, 1_048_577), (4, 2_097_152)]
# So many that the Pallas kernels do not cut them up as few, in each of their ways: by blocks and clusters that end with
# their row, or stay, in which all of a row fits, or all of it that is folded, or neither; with tiles that overlap.
TILED = [(2200, 8192), (900, 20_000), (450, 40_000), (340, 50_240), (170, 100_000), (130, 131_072), (60, 300_000)]
TILED += [(33, 524_288), (29, 600_000), (17, 2**20), (15, 1_200_000), (9, 2**21)]
# Rows that no cluster holds, and the longest that the grid does.
LONG = [(13, 1_000_003), (12, 2_097_152), (17, 1_900_001), (9, 4_300_000), (6, 6_500_001)]


@on_gpu
@each_op
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("extras", ["", "scale, where", "bias"])
@pytest.mark.parametrize("shapes", [MANY, FEW, LONG], ids=["many", "few", "long"])
def test_long_rows(op, dtype, extras, shapes):
    assert_long_rows("ffi", op, dtype, extras, shapes)


@pytest.mark.skipif("pallas" not in IMPLEMENTATIONS, reason="needs a GPU from Hopper on")
@each_op
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("extras", ["", "scale, where"])
@pytest.mark.parametrize("shape", TILED, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_tiled_rows(op, dtype, extras, shape):
    assert_long_rows("pallas", op, dtype, extras, [shape])


def assert_long_rows(implementation, op, dtype, extras, shapes):
    for rows, n in shapes:
        x = jax.random.normal(jax.random.key(n), (rows, n), jnp.float32)
        row = jnp.arange(rows, dtype=jnp.float32)[:, None]
        x = x * (1 + row % 5) + 100 * (row % 3)
        x = x.astype(dtype).at[3, 7].set(jnp.nan).at[5, n - 1].set(-jnp.inf).at[7].set(-jnp.inf).at[9, 0].set(jnp.inf)
        some = np.unique(np.r_[:12, rows - 3 : rows] % rows)
        given = {
            "scale, where": {"scale": -1.5, "where": jnp.arange(n) % 7 != 3},
            "bias": {"bias": jnp.sin(jnp.arange(n)).astype(dtype)},
        }.get(extras, {})
        g = jax.random.normal(jax.random.key(1), (rows,) if op == "logsumexp" else (rows, n), dtype)

        (y, true_y), (dx, true_dx) = beside_float64(op, x, g, some, implementation, **given)
        eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
        z = np.abs(np.asarray(x[some]).astype(np.float64)) * 1.5 + 20
        for what, actual, true, size in (("value", y, true_y, 0), ("gradient", dx, true_dx, 1)):
            spread = np.where(np.isfinite(z), z, 0) if actual.ndim == 2 else 400
            places = 2 * eps + 2.0**-21 * spread
            bound = places * (np.abs(true) + size * np.nanmax(np.where(np.isinf(true), 0, np.abs(true))))
            assert_within(actual, true, bound + tiny, f"{what} of {op} of {jnp.dtype(dtype).name} {rows}x{n}")


# Rows that some lanes, a warp or a block hold in registers.
HELD = [(300, 8), (300, 24), (200, 100), (200, 104), (100, 1000), (100, 1001), (100, 4096), (100, 9000)]
# Some of a row's first scores, from one of which the others are measured, as it lies in memory.
FIRST = np.array([0, 4, 5, 6, 7])
# How far from them the others are: around where the sum of exp leaves what f32 holds, or 16 bits need; and farther.
OFFSETS = np.float32([0, 50, -12, -20, -25, -40, -70, -85, -105, 55, 61, 80, 90, 1e3, -1e3])


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("extras", ["", "scale, where", "bias", "is_causal"])
def test_offsets(dtype, extras):
    """Rows side by side whose scores are of every size: each result to its last place, subnormal ones too."""
    for rows, n in HELD:
        x = 3 * jax.random.normal(jax.random.key(n), (rows, n), jnp.float32)
        turn, row = np.divmod(np.arange(rows), len(OFFSETS))
        x = (x + OFFSETS[row][:, None]).at[:, 3].add(-75)
        # Near 0, where the others are, or too far for anything to be measured from them.
        first = x[:, FIRST] - OFFSETS[row][:, None]
        first = jnp.where((turn % 3 == 0)[:, None], first, jnp.where((turn % 3 == 1)[:, None], x[:, FIRST], -9000))
        x = x.at[:, FIRST].set(first).astype(dtype)
        x = x.at[3, 1].set(jnp.nan).at[20, 2].set(-jnp.inf).at[37].set(-jnp.inf).at[54, 0].set(jnp.inf)
        given = {
            "scale, where": {"scale": -0.75, "where": jnp.arange(n) % 7 != 3},
            "bias": {"bias": jnp.sin(jnp.arange(n)).astype(dtype)},
            "is_causal": {"is_causal": True},
        }.get(extras, {})
        (y, true_y), (dx, true_dx) = beside_float64("softmax", x, jnp.cos(x), np.arange(rows), **given)
        eps, least = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
        z = np.abs(np.asarray(x).astype(np.float64))
        places = eps + 2.0**-21 * (np.where(np.isfinite(z), z, 0) + 20)
        what = f"softmax of {jnp.dtype(dtype).name} {rows}x{n}, {extras}"
        assert_within(y, true_y, places * true_y + least, what)
        size = np.abs(true_dx) + np.nan_to_num(np.abs(true_dx)).max(axis=1, keepdims=True) + 2 * true_y
        assert_within(dx, true_dx, 2 * places * size + least, f"gradient of {what}")


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("extras", ["", "scale"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(9, 10), (9, 100), (5, 4096), (7, 20_001), (5, 100_003)],
        pytest.param(MANY, marks=on_gpu),
        pytest.param(FEW, marks=on_gpu),
        pytest.param([(13, 1_000_003), (12, 2_097_152), (2, 17_000_001)], marks=on_gpu),
    ],
    ids=["short", "many", "few", "long"],
)
def test_dominated_rows(dtype, extras, shapes):
    """One score, or two that are equal, far above the others: what the others add to 1 keeps its digits, as in f64."""
    for rows, n in shapes:
        row = np.arange(rows)
        top, at = 14.0 + 3 * (row % 5), (row * 7919) % n
        x = np.sin(np.arange(n, dtype=np.float32) * np.float32(1.37) + row[:, None].astype(np.float32)).astype(dtype)
        x[row, at] = top
        two = row % 3 == 2
        x[row[two], n - 1 - at[two]] = top[two]
        given = {"scale": 0.75} if extras else {}
        some = np.unique(np.r_[:12, rows - 3 : rows] % rows)
        z, places = x[some].astype(np.float64) * (0.75 if extras else 1), at[some]
        others = np.array([np.exp(np.delete(z[i], places[i]) - z[i, places[i]]).sum() for i in range(len(some))])
        rtol = 4e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
        results = {-1: ours("log_softmax", "ffi", **given)(x)}
        if n <= 100_003:
            results[0] = ours("log_softmax", "ffi", axis=0, **given)(np.ascontiguousarray(x.T)).T
        for axis, result in results.items():
            actual = np.asarray(result).astype(np.float64)[row, at][some]
            np.testing.assert_allclose(actual, -np.log1p(others), rtol, 1e-15, err_msg=f"{rows}x{n}, axis {axis}")
