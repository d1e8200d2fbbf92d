"""Row operations over a mesh: rows stay on their devices, and a row that lies on several is reduced by all-reduces.

XLA's partitioner cannot see into a custom call, and would gather its operands on every device. `partitioned` tells
it how the operation splits. Where only leading dimensions are sharded, each device runs the kernel on its rows. Where
the reduced axis is sharded, each device reduces its part of every row, the states are combined over the mesh (a
maximum and a sum of one number a row), and each device writes its part. Of the k largest elements each device gathers
those that every device has found in its part.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft import fold
from jaxsoft._rows import formulas
from jaxsoft._rows.forms import (
    NO_ROW,
    OPERATIONS,
    RESULTS,
    Form,
    Operation,
    compose,
    is_wide,
    positions,
    split,
)
from jaxsoft.fold import State, accumulator, reference


@functools.cache
def partitioned(operation: str, form: Form, kernel: Operation) -> Callable[..., tuple[jax.Array, ...]]:
    """`kernel`, of an operation in this form, or in another as `form=`, as a function that a mesh may partition."""

    def call(*operands):
        return tuple(kernel(*operands))

    function = custom_partitioning(call)

    def partition(mesh, operands, results):
        x = operands[0]
        dims = _dims(operation, form, [v.shape for v in operands])
        axes = dict(zip(dims[0], spec_of(x), strict=True))

        def sharding(dims):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

        local = call if axes["n"] is None else _over_shards(operation, form, axes["n"], kernel)
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

    function.def_partition(partition, sharding_rule=rule)
    return function


def _dims(operation: str, form: Form, shapes: Sequence[Sequence[int]]) -> list[list[str]]:
    """A name for each dimension of each operand. Those that are x's have its names, so that they are sharded alike; one
    of length 1 where x's is longer has its own, and is whole on every device."""
    ndim = len(shapes[0])
    x = [f"r{i}" for i in range(ndim)]
    x[ndim - 1 - form.trailing] = "n"
    rows = [dim for dim in x if dim != "n"]
    dims = [x if is_wide(kind) else rows for kind in OPERATIONS[operation]]
    length = dict(zip(x, shapes[0], strict=True))
    for extra, shape in zip(form.extras, shapes[len(dims) :], strict=True):
        like = rows if extra in "sl" else x
        dims.append([dim if length[dim] == size else f"{extra}{dim}" for dim, size in zip(like, shape, strict=True)])
    return dims


def _result_dims(operation: str, x: list[str]) -> list[list[str]]:
    rows = [dim for dim in x if dim != "n"]
    of_kind = {"x": x, "r": rows, "k": [*rows, "k"], "j": [*rows, "k"]}
    return [of_kind[kind] for kind in RESULTS[operation]]


def _over_shards(operation: str, form: Form, axes: str | tuple[str, ...], kernel: Operation) -> Operation:
    """The operation on one device's part of rows that are sharded over mesh axes."""
    if operation == "top_k":
        return _top_k_over_shards(form, axes, kernel)
    function = compose(operation, form, formulas.row_operations(*_reductions(axes))[operation])

    def local(*operands):
        base, extras = split(operation, form, operands)
        begin = jax.lax.axis_index(axes).astype(jnp.int32) * base[0].shape[-1]
        if "l" in extras:
            extras["l"] = extras["l"] - begin
        if "i" in OPERATIONS[operation]:
            base = (base[0], moved(base[1], begin), *base[2:])
        return function(*base, *extras.values())

    return local


def _top_k_over_shards(form: Form, axes: str | tuple[str, ...], kernel: Operation) -> Operation:
    def local(x):
        k = min(form.k, x.shape[-1])
        _, i, *state = kernel(x, form=dataclasses.replace(form, k=k))
        m, s = combined(State(*state), axes)
        ordered = formulas.has_softmax(m, s)
        i = jnp.where(ordered[..., None], i, positions(i))
        begin = jax.lax.axis_index(axes).astype(jnp.int32) * x.shape[-1]
        found = [jax.lax.all_gather(v, axes, axis=v.ndim - 1, tiled=True) for v in (formulas.at(x, i), begin + i)]
        best = formulas.largest(found[0], form.k, ordered)
        return *(formulas.at(v, best) for v in found), m, s

    return local


def moved(i: jax.Array, begin: jax.Array) -> jax.Array:
    """Indices of labels from an element on."""
    return jnp.where(i == NO_ROW, i, jnp.maximum(i, -1) - begin)


def on_one_device(local: Operation) -> Operation:
    """`local`, traced as code for one device even while a mesh with explicit axes is set."""

    def function(*operands):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tuple(local(*operands))

    return function


def can_partition() -> bool:
    """Whether a partitioned function may be called here: custom_partitioning does not know shard_map's outer axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.manual_axes or len(mesh.manual_axes) == len(mesh.axis_names)


def spec_of(x: jax.ShapeDtypeStruct) -> tuple:
    """The mesh axes of each dimension."""
    spec = getattr(x.sharding, "spec", ())  # whole on one device, or on every one
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def combined(st: State, axes: str | tuple[str, ...]) -> State:
    """The state of all scores that lie over mesh axes, given each device's."""
    m = jax.lax.pmax(st.m, axes)
    return State(m, jax.lax.psum(st.s * jnp.exp(st.m - reference(m)), axes))


def _reductions(axes: str | tuple[str, ...]):
    """State, sum and element of a last axis that is sharded over mesh axes."""

    def state(x):
        return combined(fold.state(x), axes)

    def total(x):
        return jax.lax.psum(jnp.sum(x, axis=-1, dtype=accumulator(x.dtype)), axes)

    def take(x, i):
        here = (i >= 0) & (i < x.shape[-1])
        value, found = jax.lax.psum((jnp.where(here, formulas.take(x, i), 0), here.astype(accumulator(x.dtype))), axes)
        return jnp.where(found > 0, value, jnp.nan)

    return state, total, take
