"""Row operations over a mesh: rows stay on their devices, and a row that lies on several is reduced by all-reduces.

XLA's partitioner cannot see into a custom call, and would gather its operands on every device. `partitioned` tells
it how the operation splits. Where only leading dimensions are sharded, each device runs the kernel on its rows. Where
the last axis is sharded, each device reduces its part of every row with the kernel, the states are combined over the
mesh (a maximum and a sum of one number a row), and each device writes its part.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft import fold
from jaxsoft._formulas import Operation, row_operations
from jaxsoft.fold import State, accumulator, reference


@functools.cache
def partitioned(operation: str, kernel: Operation, kinds: str) -> Callable[..., tuple[jax.Array, ...]]:
    """`kernel`, of an operation with operands of these kinds, as a function that a mesh may partition."""

    def call(*operands):
        return tuple(kernel(*operands))

    function = custom_partitioning(call)

    def partition(mesh, operands, results):
        spec = _spec(operands[0])
        full, statistic = NamedSharding(mesh, PartitionSpec(*spec)), NamedSharding(mesh, PartitionSpec(*spec[:-1]))
        ndim = len(spec)
        local = call if spec[-1] is None else row_operations(*_reductions(spec[-1]))[operation]
        return (
            mesh,
            _on_one_device(local),
            jax.tree.map(lambda result: full if len(result.shape) == ndim else statistic, results),
            tuple(full if kind == "x" else statistic for kind in kinds),
        )

    function.def_partition(partition, sharding_rule=functools.partial(_sharding_rule, kinds))
    return function


def _on_one_device(local: Operation) -> Operation:
    """`local`, traced as code for one device even while a mesh with explicit axes is set."""

    def function(*operands):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tuple(local(*operands))

    return function


def can_partition() -> bool:
    """Whether a partitioned function may be called here: custom_partitioning does not know shard_map's outer axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.manual_axes or len(mesh.manual_axes) == len(mesh.axis_names)


def _spec(x: jax.ShapeDtypeStruct) -> tuple:
    spec = x.sharding.spec
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def _sharding_rule(kinds: str, mesh, operand_types, result_types) -> str:
    """Every leading dimension passes from operands to results; so does the last one, where a result has it."""
    del mesh
    rows = " ".join(f"r{i}" for i in range(len(operand_types[0].shape) - 1))
    full = f"{rows} n"
    sides = [full if kind == "x" else rows for kind in kinds]
    results = [full if len(t.shape) == len(operand_types[0].shape) else rows for t in result_types]
    return f"{', '.join(sides)} -> {', '.join(results)}"


def _reductions(axes: str | tuple[str, ...]):
    """State and sum of a last axis that is sharded over mesh axes."""

    def state(x):
        m, s = fold.state(x)
        total = jax.lax.pmax(m, axes)
        return State(total, jax.lax.psum(s * jnp.exp(m - reference(total)), axes))

    def total(x):
        return jax.lax.psum(jnp.sum(x, axis=-1, dtype=accumulator(x.dtype)), axes)

    return state, total
