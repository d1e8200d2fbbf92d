"""Meshes that the tests run over, and the collective operations of a program that was compiled for one."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

DEVICES = len(jax.devices())
needs_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two devices, or eight, which a CPU can pretend to have")
# 2 x 4 of eight devices; of fewer, powers of two that there are.
MESH = (2, 4) if DEVICES >= 8 else (2, 2) if DEVICES >= 4 else (1, min(DEVICES, 2))
each_axis_type = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of some of the devices, whose axes have these sizes; without any, "a" and "b" have those of `MESH`."""
    axes = axes or dict(zip("ab", MESH, strict=True))
    names, shape = zip(*axes.items(), strict=True)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(axes), devices=devices)


def collectives(compiled) -> list[tuple[str, tuple[int, ...]]]:
    """The collective operations of a program with the shapes of their results.

    An asynchronous one is in the text as its start and its end. The end counts: the start's shapes have operands too.
    """
    names = "all-reduce|all-gather|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    found = []
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({names})(-done)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found += [(match[2], tuple(map(int, dims.split(",") if dims else ()))) for dims in shapes]
    return found


def kernels(compiled) -> set[str]:
    """Which of the library's kernels a program calls."""
    return set(re.findall(r'custom_call_target="jaxsoft_(\w+)"', compiled.as_text()))


def check_moved(spec, moved, most: int, rows: int, exchanges: int | None = None) -> None:
    """All-reduces and all-gathers of at most so many numbers a row together, and at most so many exchanges."""
    assert len(moved) <= (most if exchanges is None else exchanges), (spec, moved)
    assert {name for name, _ in moved} <= {"all-reduce", "all-gather"}, (spec, moved)
    sizes = [np.prod(shape) / (DEVICES if name == "all-gather" else 1) for name, shape in moved]
    assert sum(sizes) <= most * rows, (spec, moved)


def rows_on_a_device(mesh, spec, shape):
    return int(np.prod(NamedSharding(mesh, spec).shard_shape(shape)[:-1]))
