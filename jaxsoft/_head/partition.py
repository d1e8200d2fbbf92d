"""Linear heads over a mesh: rows lie as hidden has them, classes as weight has them, and neither moves.

Each device takes its classes for its rows in chunks. Where classes are sharded, the devices' numbers a row are
combined, and the gradient of hidden is summed over them (see `exchange`); where rows are sharded, the gradients of the
other parameters are.
"""

import functools
import math
from collections.abc import Callable, Iterable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._core.mesh import Axes, axes_of, if_even, on_one_device, refined
from jaxsoft._core.partitioning import partitionable
from jaxsoft._head.operation import Dimension, Kind, Operation, Shards

_WIDTH, _CLASSES = "width", "classes"


@functools.cache
def partitioned(
    operation: Operation, call: Callable[..., tuple[jax.Array, ...]]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation as a function that a mesh may partition, given call(operation, *operands) for one device."""

    def partition(mesh, operands, results):
        del results
        hidden, weight = operands[:2]
        rows, mesh = _row_names(hidden), refined(mesh, hidden)

        def even_axes(x: jax.ShapeDtypeStruct) -> list[Axes]:
            return [if_even(axes, size, mesh) for axes, size in zip(axes_of(x, mesh), x.shape, strict=True)]

        axes = dict(zip(rows, even_axes(hidden), strict=False))
        taken = {axis for row_axes in axes.values() for axis in row_axes}
        of_classes = tuple(axis for axis in axes_of(weight, mesh)[1] if axis not in taken)
        axes[_CLASSES] = if_even(of_classes, weight.shape[1], mesh)
        shards = Shards(tuple(axis for axis in mesh.axis_names if axis in taken), axes[_CLASSES])

        def shardings(kinds: Iterable[Kind]):
            specs = (PartitionSpec(*(axes.get(name) or None for name in _names(kind, rows))) for kind in kinds)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, local(operation, shards), shardings(operation.results), shardings(operation.operands)

    def rule(mesh, operand_types, result_types):
        del mesh, result_types
        rows = _row_names(operand_types[0])
        sides = (operation.operands, operation.results)
        named = " -> ".join(", ".join(" ".join(_names(kind, rows)) for kind in side) for side in sides)
        return named, {"need_replication_factors": (_WIDTH,)}

    return partitionable(functools.partial(call, operation), partition, rule, operation)


def _row_names(hidden: jax.ShapeDtypeStruct) -> list[str]:
    """A name for each dimension of the rows of hidden."""
    return [f"rows{i}" for i in range(len(hidden.shape) - 1)]


def _names(kind: Kind, rows: list[str]) -> list[str]:
    """The names of the dimensions of such an array, which are sharded alike where they are the same."""
    names = {Dimension.ROWS: rows, Dimension.WIDTH: [_WIDTH], Dimension.CLASSES: [_CLASSES]}
    return [name for dimension in kind.dimensions for name in names[dimension]]


@functools.cache
def local(operation: Operation, shards: Shards = Shards()) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation in code for one device, which has these shards of the operands."""

    def function(*operands):
        leading = operands[0].shape[:-1]

        def flat(kind: Kind, v: jax.Array) -> jax.Array:
            return v.reshape(math.prod(leading), *v.shape[len(leading) :]) if kind.has_rows else v

        def shaped(kind: Kind, v: jax.Array) -> jax.Array:
            return v.reshape(*leading, *v.shape[1:]) if kind.has_rows else v

        given = zip(operation.operands, operands, strict=True)
        results = operation.on_rows(shards, *(flat(kind, v) for kind, v in given))
        return tuple(shaped(kind, v) for kind, v in zip(operation.results, results, strict=True))

    return on_one_device(function)
