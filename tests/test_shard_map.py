"""Derivatives inside `jax.shard_map`, with its default checks, of what has integers among its operands or results.

What varies over the axes of a mesh is part of every type there, of tangents too, on a mesh of one device as well.
"""

import functools

import calls
import definitions
import jax
import numpy as np
import pytest
from cases import Case
from common import OPS, each_implementation, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

ROWS = np.random.default_rng(4).standard_normal((16, 40)).astype(np.float32)
SMOOTH = {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.01}


def functions(name, implementation, labels):
    """A function of rows, which may have a label each, and its definition."""
    if name == "top_k":
        return calls.top_k(implementation, 3)
    if name == "integer":
        return calls.integer(implementation, labels, **SMOOTH)
    if name == "dense":
        ours, theirs = calls.dense(implementation)
        return tuple(lambda x, f=f: f(x, jax.nn.one_hot(labels, 40)) for f in (ours, theirs))
    if name == "kl":
        return tuple(lambda x, f=f: f(x, jax.numpy.cos(x)) for f in calls.kl_divergence(implementation))
    return calls.row_function(implementation, name)


# test_sharding has the functions of OPS inside shard_map.
NAMES = ["top_k", "integer", "kl", *(name for name in definitions.ROW_FUNCTIONS if name not in OPS)]
SLOW_NAMES = ["dense", *OPS]


@pytest.mark.costly(1)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=slow) for name in SLOW_NAMES)])
@each_implementation
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=slow), AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("manual", [("a", "b"), pytest.param(("a",), marks=slow)], ids=["fully", "partially"])
def test_derivatives(name, implementation, kind, manual):
    """First and second order in both modes."""
    if implementation not in (None, "xla") and len(manual) == 1:
        pytest.skip("such a mesh needs implementation=None")
    mesh, spec = mesh_of(kind), P(manual)
    labels = (np.arange(16) % 7).astype(np.int32)
    with jax.set_mesh(mesh), served(implementation):
        put = lambda v: jax.device_put(v, NamedSharding(mesh, spec))  # noqa: E731
        f = jax.shard_map(
            lambda x, y: functions(name, implementation, y)[0](x),
            in_specs=(spec, spec),
            out_specs=spec,
            axis_names=set(manual),
        )
        labels_there = put(labels)
        ours, theirs = (lambda x: f(x, labels_there)), functions(name, implementation, labels)[1]
        case = Case(f"{name} in shard_map", ours, theirs, [ROWS])
        orders = ["jvp"], ["grad", "jvp"], ["grad", "grad"]
        every = [functools.reduce(Case.through, order, case) for order in orders]
        Case.together(f"derivatives of {case.what}", every).check(lambda f: lambda x: jax.jit(f)(put(x)))
