"""Meshes that the tests run over, and the collective operations of a program that was compiled for one."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

DEVICES = len(jax.devices())
needs_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two devices, or eight, which a CPU can pretend to have")
# 2 x 4 of eight devices; of fewer, powers of two that there are.
MESH = (2, 4) if DEVICES >= 8 else (2, 2) if DEVICES >= 4 else (1, min(DEVICES, 2))
each_axis_type = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])


def mesh_of(kind):
    return jax.make_mesh(MESH, ("a", "b"), axis_types=(kind, kind))


def collectives(compiled) -> list[tuple[str, tuple[int, ...]]]:
    """The collective operations of a program with the shapes of what they move."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    found = []
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({names})(?:-start)?\(", line):
            found += [
                (match[2], tuple(map(int, dims.split(",") if dims else ())))
                for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
    return found


def check_moved(spec, moved, most: int, rows: int) -> None:
    """At most so many all-reduces, of a number a row each; on a GPU XLA may make one of two."""
    assert len(moved) <= most, (spec, moved)
    assert all(name == "all-reduce" for name, _ in moved), (spec, moved)
    sizes = [int(np.prod(shape)) for _, shape in moved]
    assert sum(sizes) <= most * rows, (spec, moved)
    if jax.default_backend() == "cpu":
        assert all(size <= rows for size in sizes), (spec, moved)


def rows_on_a_device(mesh, spec, shape):
    return int(np.prod(NamedSharding(mesh, spec).shard_shape(shape)[:-1]))
