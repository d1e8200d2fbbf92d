"""Row operations over a mesh: rows stay on their devices, and a row that lies on several is reduced by all-reduces.

XLA's partitioner cannot see into a custom call, and would gather its operands on every device. `partitioned` tells
it how the operation splits. Where only leading dimensions are sharded, each device runs the kernel on its rows. Where
the reduced axis is sharded, each device reduces its part of every row, the states are combined over the mesh (a
maximum and a sum of one number a row), and each device writes its part. To find the k largest elements, each device
gathers those that every device has found in its part.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft import fold
from jaxsoft._core.mesh import Axes, axes_of, combined, if_even, on_one_device, refined
from jaxsoft._rows import formulas
from jaxsoft._rows.forms import Form, compose, formula, split
from jaxsoft._rows.operation import Extra, Kind, Operation, Reductions, RowFunction
from jaxsoft.fold import State, accumulator


@functools.cache
def partitioned(operation: Operation, form: Form, kernel: Callable[[Form], RowFunction]) -> RowFunction:
    """The operation in this form as a function that a mesh may partition, given its kernel in any form."""
    function = custom_partitioning(kernel(form))

    def partition(mesh, operands, results):
        del results
        x, mesh = operands[0], refined(mesh)
        dims = _dims(operation, form, [v.shape for v in operands])
        axes = dict(zip(dims[0], axes_of(x, mesh), strict=True))
        axes["n"] = if_even(axes["n"], x.shape[dims[0].index("n")], mesh)

        def sharding(dims):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) or None for dim in dims)))

        local = _over_shards(operation, form, axes["n"], kernel) if axes["n"] else kernel(form)
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

    function.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return function


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


def _over_shards(operation: Operation, form: Form, axes: Axes, kernel: Callable[[Form], RowFunction]) -> RowFunction:
    """The operation on one device's part of rows that are sharded over mesh axes."""
    if operation.selects:
        return selected_over_shards(form, axes, kernel)
    function = compose(operation, form, formula(operation, form, _reductions(axes)))

    def local(*operands):
        base, extras = split(operation, form, operands)
        begin = jax.lax.axis_index(axes).astype(jnp.int32) * base[0].shape[-1]
        if Extra.LIMIT in extras:
            extras[Extra.LIMIT] = extras[Extra.LIMIT] - begin
        pairs = zip(operation.kinds, base, strict=True)
        base = tuple(formulas.labels_within(v, begin) if kind is Kind.LABEL else v for kind, v in pairs)
        return function(*base, *extras.values())

    return local


def selected_over_shards(form: Form, axes: Axes, kernel: Callable[[Form], RowFunction]) -> RowFunction:
    """The k largest elements of rows that are sharded over mesh axes."""

    def local(x):
        k = min(form.k, x.shape[-1])
        _, _, i, *state = kernel(dataclasses.replace(form, k=k))(x)
        m, s = combined(State(*state), axes)
        ordered = formulas.has_softmax(m, s)
        i = jnp.where(ordered[..., None], i, formulas.positions(i))
        begin = jax.lax.axis_index(axes).astype(jnp.int32) * x.shape[-1]
        found = [jax.lax.all_gather(v, axes, axis=v.ndim - 1, tiled=True) for v in (formulas.at(x, i), begin + i)]
        best = formulas.largest(found[0], form.k, ordered)
        values, i = (formulas.at(v, best) for v in found)
        return values, formulas.defined_probabilities(values, m, s).astype(form.dtype), i, m, s

    return local


def _reductions(axes: Axes) -> Reductions:
    """The reductions of a last axis that is sharded over mesh axes."""

    def state(x):
        return combined(fold.state(x), axes)

    def total(x):
        return jax.lax.psum(jnp.sum(x, axis=-1, dtype=accumulator(x.dtype)), axes)

    def take(x, i):
        here = (i >= 0) & (i < x.shape[-1])
        value = jnp.where(here, formulas.take(x, i), 0)
        value, found = jax.lax.psum((value, here.astype(accumulator(x.dtype))), axes)
        return jnp.where(found > 0, value, jnp.nan)

    return Reductions(state, total, take)
