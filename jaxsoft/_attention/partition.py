"""Attention over a mesh: batch and heads stay on their devices, and sequences if asked to; all else is whole on each.

XLA's partitioner cannot see into a custom call, and would gather its operands on every device. `partition` tells it how
the operation splits: each device takes its batch and its heads of queries, with the heads of keys that these attend
to. Where heads of keys are fewer than devices, several devices have the same ones, and each takes the one it needs.
Gradients of what several devices share are summed over these. Where the operation says that sequences lie over devices,
each has its part of them (see `jaxsoft._attention.ring`).
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsoft._attention import packed
from jaxsoft._attention.form import BASE, DIMENSIONS
from jaxsoft._attention.spec import AttentionSpec
from jaxsoft._core.mesh import Axes, axes_of, if_even, refined
from jaxsoft._core.operation import Function

_WHOLE = ("t", "s", "h", "d", "p", "i", "l", "e", "x")  # the dimensions that are not sharded
_OF_SHARDS = _WHOLE[2:]  # likewise, where sequences lie over devices


def _sizes(operands: Sequence[jax.ShapeDtypeStruct]) -> dict[str, int]:
    """The lengths of the dimensions that may be sharded, of an operation with these operands."""
    query, key = operands[:2]
    return {"b": query.shape[0], "n": query.shape[2], "k": key.shape[2]}


def partition(operation: AttentionSpec, kernel: Function, on_shards: Callable[..., Function], mesh, operands, results):
    """How an operation splits, given the function for one device that has whole sequences, and for axes of a mesh the
    one that has parts of them. See `jaxsoft._core.operation.Served.partition`.
    """
    shards = operation.form.shards
    mesh, sizes = refined(mesh, operands[0]), _sizes(operands)
    of_query = axes_of(operands[0], mesh)
    axes = {"b": if_even(of_query[0], sizes["b"], mesh), "n": if_even(of_query[2], sizes["n"], mesh)}
    devices = math.prod(mesh.shape[axis] for axis in axes["n"])
    if sizes["k"] % devices and devices % sizes["k"]:
        axes["n"] = ()
    axes["k"] = _beginning(axes["n"], sizes["k"], mesh)
    sharing = {"k": axes["n"][len(axes["k"]) :]}
    named = dict(zip(operation.operands, operands, strict=True))
    if "bias" in named:
        own = _sharded("bias", named["bias"].shape, sizes)
        sharing["bias"] = tuple(axis for d in ("b", "n") if d not in own for axis in axes[d])
    if shards is not None and math.prod(mesh.shape[axis] for axis in of_query[1]) == shards.devices:
        axes["t"] = axes["s"] = of_query[1]
    # Where devices share heads of keys, none has the block of all heads that it would keep.
    of_device = on_shards(axes["t"], fresh=bool(sharing["k"])) if "t" in axes else kernel
    local = _local(operation, of_device, sizes, sharing)

    def shardings(names, arrays):
        pairs = zip(names, arrays, strict=True)
        specs = [PartitionSpec(*(axes.get(d) or None for d in _sharded(name, v.shape, sizes))) for name, v in pairs]
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    return mesh, local, shardings(operation.results, results), shardings(operation.operands, operands)


def _sharded(name: str, shape: Sequence[int], sizes: dict[str, int]) -> list[str]:
    """The dimensions of an array by their letters; "" for one that is the same for the whole of a longer dimension."""
    return [d if sizes.get(d, size) == size else "" for d, size in zip(DIMENSIONS[name], shape, strict=True)]


def rule(operation: AttentionSpec, operand_types: Sequence, result_types: Sequence) -> tuple[str, dict]:
    """The sharding rule: which dimensions of which arrays are sharded alike.

    The heads of queries are two factors, the heads of keys and the heads of queries of each. A dimension of length 1
    where that of others is longer has a name of its own.
    """
    sizes = _sizes(operand_types)
    whole_dims = _WHOLE if operation.form.shards is None else _OF_SHARDS
    two = 1 < sizes["k"] < sizes["n"]
    factors = {"n": "(k g)" if two else "k" if sizes["n"] == sizes["k"] else "n", "s": "t"}
    whole: dict[str, None] = {}  # in the order of their first use, as XLA wants them

    def side(names, types):
        arrays = []
        for name, t in zip(names, types, strict=True):
            dims = []
            for d, letter in zip(_sharded(name, t.shape, sizes), DIMENSIONS[name], strict=True):
                own = f"{name.replace('_', '')}{letter}"
                if d in whole_dims:
                    whole[own] = None
                dims.append(own if d in whole_dims or not d else factors.get(d, d))
            arrays.append(" ".join(dims))
        return ", ".join(arrays)

    text = f"{side(operation.operands, operand_types)} -> {side(operation.results, result_types)}"
    return text, {"need_replication_factors": tuple(whole)} | ({"g": sizes["n"] // sizes["k"]} if two else {})


def _beginning(axes: Axes, size: int, mesh: Mesh) -> Axes:
    """As many of the first axes as cut a dimension of this size into equal parts."""
    numbers = [n for n in range(len(axes) + 1) if axes[:n] == if_even(axes[:n], size, mesh)]
    return axes[: max(numbers)]


def _local(operation: AttentionSpec, kernel: Function, sizes: dict[str, int], sharing: dict[str, Axes]) -> Function:
    """The operation on one device, which has its batch and its heads of queries.

    Args:
      operation: which.
      kernel: the function for one device.
      sizes: of the whole operands.
      sharing: the axes of the mesh over which devices share the same heads of keys, of which each needs only one; and
        those over which they share the same part of the bias, if there is one.
    """
    over = sharing["k"]

    def local(*operands):
        named = dict(zip(operation.operands, operands, strict=True))
        head, groups = 0, named[operation.operands[1]].shape[2]
        if over:
            query_head = jax.lax.axis_index(over).astype(jnp.int32) * named["query"].shape[2]
            group = sizes["n"] // sizes["k"]
            head, first = query_head // group, query_head % group == 0
            for name, x in named.items():
                if "k" in DIMENSIONS[name]:
                    named[name] = jax.lax.dynamic_slice_in_dim(x, head, 1, DIMENSIONS[name].index("k"))
                if name in ("key_sum", "value_sum"):  # one of those that share them adds to them
                    named[name] = jnp.where(first, named[name], 0)
        results = dict(zip(operation.results, kernel(*named.values()), strict=True))
        for name, y in results.items():
            if name in ("key", "value") and over:
                whole = jnp.zeros((*y.shape[:2], groups, *y.shape[3:]), y.dtype)
                results[name] = jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(whole, y, head, axis=2), over)
            elif name == "block" and over:
                results[name] = packed.pack(*operands[1:BASE])
            elif name == "bias" and sharing["bias"]:
                results[name] = jax.lax.psum(y, sharing["bias"])
        return tuple(results.values())

    return local
