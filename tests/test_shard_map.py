"""Derivatives inside `jax.shard_map`, with its default checks, of what has integers among its operands or results.

What varies over the axes of a mesh is part of every type there, of tangents too, on a mesh of one device as well.
"""

import functools

import definitions
import jax
import numpy as np
import pytest
from cases import Case
from common import each_implementation, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import jaxsoft

ROWS = np.random.default_rng(4).standard_normal((16, 40)).astype(np.float32)
# Functions of rows and a label each, beside their definitions.
FUNCTIONS = {
    "top_k": (lambda x, y, **o: jaxsoft.top_k_softmax(x, 3, **o)[:2], lambda x, y: definitions.top_k_softmax(x, 3)),
    "integer": (
        lambda x, y, **o: jaxsoft.softmax_cross_entropy_with_integer_labels(
            x, y, ignore_index=3, label_smoothing=0.1, z_loss=0.01, return_lse=True, **o
        ),
        lambda x, y: definitions.integer_cross_entropy(x, None, y, ignore_index=3, label_smoothing=0.1, z_loss=0.01),
    ),
    "dense": (
        lambda x, y, **o: jaxsoft.softmax_cross_entropy(x, jax.nn.one_hot(y, 40), return_lse=True, **o),
        lambda x, y: definitions.cross_entropy(x, jax.nn.one_hot(y, 40), None),
    ),
}


@pytest.mark.parametrize("name", ["top_k", "integer", pytest.param("dense", marks=slow)])
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
        local = functools.partial(FUNCTIONS[name][0], implementation=implementation)
        f = jax.shard_map(local, in_specs=(spec, spec), out_specs=spec, axis_names=set(manual))
        for order in (["jvp"], ["grad", "jvp"], ["grad", "grad"]):
            ours, theirs = (lambda x: f(x, put(labels))), (lambda x: FUNCTIONS[name][1](x, labels))
            case = functools.reduce(Case.through, order, Case(f"{name} in shard_map", ours, theirs, [ROWS]))
            case.check(lambda f: lambda x: jax.jit(f)(put(x)))
