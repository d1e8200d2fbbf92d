"""Shardings that come about inside a program: parts of a dimension that are not equal, axes that are cut in two, and
those of arrays that lie nowhere before.

No user can give an array one of the first two. XLA does, where a sharded dimension is sliced or reshaped under `jit`.
"""

import calls
import definitions
import jax
import numpy as np
import pytest
from cases import Case
from common import each_fast_implementation, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives

pytestmark = pytest.mark.skipif(DEVICES < 2, reason="needs two devices, or eight, which a CPU can pretend to have")


def mesh():
    return jax.make_mesh((DEVICES,), ("a",), axis_types=(AxisType.Auto,))


# The other calls are these with more arguments.
NAMES = (*definitions.ROW_FUNCTIONS, "integer", "kl", "top_k", "attention, segments", "fold")


@pytest.mark.costly
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in NAMES else slow) for name in calls.CALLS])
@pytest.mark.parametrize("dim", [0, -1], ids=["first", "last"])
def test_uneven(name, dim):
    """Every operand is the beginning of one that is sharded, along its first dimension or its last."""

    def padded(v):
        fill, spec = [(0, 0)] * v.ndim, [None] * v.ndim
        if v.ndim:
            fill[dim], spec[dim] = (0, -v.shape[dim] % DEVICES), "a"
            v = np.pad(v, fill, constant_values=9)
        return jax.device_put(v, NamedSharding(mesh(), P(*spec)))

    def sliced(f):
        def call(*operands):
            parts = [tuple(map(slice, v.shape)) for v in operands]
            of_parts = jax.jit(lambda *whole: f(*(v[part] for v, part in zip(whole, parts, strict=True))))
            return of_parts(*map(padded, operands))

        return call

    case = calls.case_of(name, None, np.float32)
    case.check(sliced)
    case.through("grad").check(sliced)


@pytest.mark.skipif(DEVICES < 4, reason="needs an axis that can be cut")
@pytest.mark.parametrize("name", definitions.ROW_FUNCTIONS)
@each_fast_implementation
def test_cut_axes(name, implementation):
    """A dimension over all devices becomes two, of which the first one is over some of them and the second over others.

    The rows stay where they are, and what moves is their states.
    """
    x = np.random.default_rng(0).standard_normal((2, 8 * DEVICES)).astype(np.float32)
    ours, theirs = calls.row_function(implementation, name)
    shape = (2, DEVICES // 2, 16)

    def reshaped(f):
        return lambda x: f(x.reshape(shape))

    with served(implementation):
        sharded = jax.device_put(x, NamedSharding(mesh(), P(None, "a")))
        Case(name, reshaped(ours), reshaped(theirs), [x]).check(lambda f: lambda x: jax.jit(f)(sharded))
        compiled = jax.jit(lambda x: jax.numpy.sum(reshaped(ours)(x)[0])).lower(sharded).compile()
        if implementation != "xla":
            assert max(np.prod(size) for _, size in collectives(compiled)) < 2 * DEVICES


@pytest.mark.parametrize("name", definitions.ROW_FUNCTIONS)
@each_fast_implementation
def test_constraints(name, implementation):
    """Of an operand of the host, a constraint inside the program says how it lies. Rows stay on their devices."""
    x = np.random.default_rng(0).standard_normal((DEVICES, 16)).astype(np.float32)
    ours, theirs = calls.row_function(implementation, name)

    def laid(f):
        return lambda x: f(jax.lax.with_sharding_constraint(x, P("a")))

    with jax.set_mesh(mesh()), served(implementation):
        Case(name, laid(ours), theirs, [x]).check(jax.jit)
        assert not [*collectives(jax.jit(laid(ours)).lower(x).compile())]
