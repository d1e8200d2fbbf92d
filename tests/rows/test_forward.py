"""Values against float64, for every implementation, dtype and class of row lengths.

Lengths lie on and around what kernels cut rows by (a warp, a tile of 2048, a segment of 65536) and are those of real
vocabularies. Bounds are relative to the true value. The rounding of x - m is multiplied by exp, hence the |x - m|.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import each_dtype, each_fast_implementation, each_op, ours, precision, rows, served, slow
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from truth import Truth, assert_values

SHORT = (1, 2, 3, 31, 32, 33, 127, 1000, 1023, 1024, 1025, 4097)
LONG, LONGEST = (50257, 65537, 131072, 151936), (999983, 2**20)


@pytest.mark.cover("op", "implementation")
@each_op
@each_dtype
@each_fast_implementation
@pytest.mark.parametrize("lengths", [SHORT, LONG, LONGEST], ids=["short", "long", "longest"])
def test_against_float64(op, dtype, implementation, lengths):
    with precision(dtype):
        f = jax.jit(ours(op, implementation))
        for n in lengths:
            with served(implementation):
                x, truth = case(n, dtype)
                assert_values(op, x, f(x), truth)


@functools.lru_cache(maxsize=len(LONG))
def case(n, dtype):
    x = rows(n, dtype)
    return x, Truth.of(x)


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
@each_op
@pytest.mark.parametrize("n", [33, 1025, 1])
def test_the_reference_against_float64(op, dtype, n):
    x = rows(n, dtype)
    assert_values(op, x, jax.jit(ours(op, "reference"))(x))


@each_op
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_one_row_of_more_than_2_to_the_24(op, dtype):
    """Few different scores, in turn: of what each gives, the least and the largest are compared."""
    part, count = rows(4099, dtype, count=1), 4099
    truth = Truth.of(part)
    truth = dataclasses.replace(
        truth,
        p=truth.p / count,
        log_p=truth.log_p - np.log(count),
        log_s=truth.log_s + np.log(count),
        lse=truth.lse + np.log(count),
    )
    y = np.asarray(ours(op)(np.tile(part, count)))
    if op == "logsumexp":
        return assert_values(op, part, y, truth)
    y = y.reshape(count, -1)
    for extreme in (y.min(axis=0), y.max(axis=0)):
        assert_values(op, part, extreme[None], truth)
    if op == "softmax":
        np.testing.assert_allclose(y.sum(dtype=np.float64), 1, rtol=1e-5 if dtype == jnp.float32 else 2.0**-8)


@each_op
@each_fast_implementation
@given(data=st.data())
def test_any_shape_axis_and_values(op, implementation, data):
    """Small arrays of any rank over any axes, of any finite values (whose differences do not overflow)."""
    shape = data.draw(st.sampled_from([(5,), (3, 4), (2, 3, 5), (4, 1, 3)]))
    axes = st.lists(st.sampled_from(range(-len(shape), 0)), min_size=1, unique=True).map(tuple)
    axis = data.draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1), axes))
    x = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    reduced = tuple(range(len(shape))) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    reduced = sorted(a % len(shape) for a in reduced)
    kept = [a for a in range(len(shape)) if a not in reduced]

    def as_rows(v):
        return np.asarray(v).transpose(*kept, *reduced).reshape(*(shape[a] for a in kept), -1)

    with served(implementation):
        y = ours(op, implementation, axis=axis)(x)
        assert_values(op, as_rows(x), y if op == "logsumexp" else as_rows(y))
