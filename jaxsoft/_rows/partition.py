"""Row operations over a mesh: how each is partitioned.

XLA's partitioner cannot see into a custom call, and would gather its operands on every device. `partitioned` tells
it how the operation splits. Where only leading dimensions are sharded, each device runs the kernel on its rows. Where
the reduced axis is sharded, each has a part of every row: see `shards`.
"""

import functools
from collections.abc import Sequence

from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._core.mesh import axes_of, if_even, on_one_device, refined
from jaxsoft._core.partitioning import partitionable
from jaxsoft._rows.forms import Form, Kernels
from jaxsoft._rows.operation import Kind, Operation, RowFunction
from jaxsoft._rows.shards import on_shards


@functools.cache
def partitioned(operation: Operation, form: Form, kernels: Kernels) -> RowFunction:
    """The operation in this form as a function that a mesh may partition."""
    kernel = kernels(operation, form)

    def partition(mesh, operands, results):
        del results
        x, mesh = operands[0], refined(mesh, operands[0])
        dims = _dims(operation, form, [v.shape for v in operands])
        axes = dict(zip(dims[0], axes_of(x, mesh), strict=True))
        axes["n"] = if_even(axes["n"], x.shape[dims[0].index("n")], mesh)

        def sharding(dims):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) or None for dim in dims)))

        local = on_shards(operation, form, axes["n"], kernels) if axes["n"] else kernel
        return (
            mesh,
            on_one_device(local),
            tuple(map(sharding, _result_dims(operation, dims[0]))),
            tuple(map(sharding, dims)),
        )

    def rule(mesh, operand_types, result_types):
        del mesh, result_types
        dims = _dims(operation, form, [t.shape for t in operand_types])
        return " -> ".join(", ".join(map(" ".join, side)) for side in (dims, _result_dims(operation, dims[0])))

    return partitionable(kernel, partition, rule, operation, form, kernels)


def _dims(operation: Operation, form: Form, shapes: Sequence[Sequence[int]]) -> list[list[str]]:
    """A name for each dimension of each operand.

    The dimensions that are x's have its names, so that they are sharded alike. One of length 1 where x's is longer has
    a name of its own, and is whole on every device.
    """
    ndim = len(shapes[0])
    x = [f"r{i}" for i in range(ndim)]
    x[ndim - 1 - form.trailing] = "n"
    rows = [dim for dim in x if dim != "n"]
    dims = [x if kind.whole_rows else rows for kind in operation.kinds]
    length = dict(zip(x, shapes[0], strict=True))
    for extra, shape in zip(form.extras, shapes[len(dims) :], strict=True):
        like = zip(x if extra.whole_rows else rows, shape, strict=True)
        dims.append([dim if length[dim] == size else f"{extra.value}{dim}" for dim, size in like])
    return dims


def _result_dims(operation: Operation, x: list[str]) -> list[list[str]]:
    rows = [dim for dim in x if dim != "n"]
    chosen = [*rows, "k"]
    return [{Kind.ROW: x, Kind.STATISTIC: rows}.get(kind, chosen) for kind in operation.result_kinds]
