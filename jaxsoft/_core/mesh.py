"""What operations of any family need over a mesh: whether and how to partition, and states combined over its axes."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsoft.fold import State, weight

type Axes = tuple[str, ...]


def can_partition() -> bool:
    """Whether a partitioned function may be called here: custom_partitioning does not know shard_map's outer axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.manual_axes or len(mesh.manual_axes) == len(mesh.axis_names)


def on_one_device[**P](local: Callable[P, tuple]) -> Callable[P, tuple]:
    """`local`, traced as code for one device even while a mesh with explicit axes is set. The device stays the same."""

    def function(*args: P.args, **kwargs: P.kwargs) -> tuple:
        device = jax.sharding.get_abstract_mesh().abstract_device
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            return tuple(local(*args, **kwargs))

    return function


def automatically[T](function: Callable[..., T], shardings: T, *operands: jax.Array) -> T:
    """The results of a function, with these shardings. XLA partitions it where operands lie over explicit mesh axes."""
    if all(axis is None for v in operands for axis in jax.typeof(v).sharding.spec):
        return function(*operands)
    # The gradient by an operand that lies on one device has its type, but is computed over the mesh.
    shardings = jax.tree.map(lambda s: sharding_over(s.spec, *operands) if s.mesh.empty else s, shardings)
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(*operands)


def refined(mesh: Mesh, x: jax.ShapeDtypeStruct) -> Mesh:
    """The mesh of an operand x, with an axis for each prime factor of the size of each of its axes.

    XLA may cut one axis of a mesh into two: where a sharded dimension is reshaped to two, each is sharded over a part
    of the axis. Over the refined mesh, that is a sharding as any other. Of a program none of whose operands lies over a
    mesh, JAX gives an empty one, though there may be constraints inside: then the devices of x's sharding are an axis.
    """
    if mesh.empty and x.sharding is not None:
        devices = [*x.sharding.devices_indices_map((len(x.sharding.device_set),) * len(x.shape))]
        mesh = Mesh(np.array(devices), ("devices",))
    factors = [(f"{name}_{i}", factor) for name, size in mesh.shape.items() for i, factor in enumerate(_primes(size))]
    names, sizes = zip(*factors, strict=True) if factors else ((), ())
    return Mesh(mesh.devices.reshape(sizes), names)


def _primes(size: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    for factor in range(2, math.isqrt(size) + 1):
        if size % factor == 0:
            return [factor, *_primes(size // factor)]
    return [size] if size > 1 else []


def axes_of(x: jax.ShapeDtypeStruct, mesh: Mesh) -> list[Axes]:
    """The axes of a refined mesh over which each dimension of x is sharded, the outermost first.

    Custom partitioning can decode a sharding itself, but fails where an axis of the user's mesh is cut. So this asks
    the sharding where each device's part begins. If it is none over the mesh's axes, x counts as whole everywhere.
    """
    ndim = len(x.shape)
    whole: list[Axes] = [()] * ndim
    if mesh.empty or x.sharding is None or not ndim:
        return whole
    places = x.sharding.devices_indices_map((mesh.size,) * ndim)  # every sharding divides such a shape
    begins = np.array([[part.start or 0 for part in places[device]] for device in mesh.devices.flat])
    begins = begins.reshape(*mesh.devices.shape, ndim)
    steps = [np.take(begins, 1, axis)[(0,) * (mesh.devices.ndim - 1)] for axis in range(mesh.devices.ndim)]
    found = [
        tuple(name for step, name in sorted(zip(by_dim, mesh.axis_names, strict=True), reverse=True) if step)
        for by_dim in zip(*steps, strict=True)
    ]
    decoded = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in found)))
    return found if decoded.is_equivalent_to(x.sharding, ndim) else whole


def if_even(axes: Axes, size: int, mesh: Mesh) -> Axes:
    """The axes, if they cut a dimension of this size into equal parts, and else none.

    XLA fills up parts of a dimension that are shorter than others, and what it fills them with must not be reduced.
    """
    return axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def with_axis(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """x, sharded along a dimension over an axis of the mesh. Over an explicit one it lies as its type says."""
    if axis not in jax.sharding.get_abstract_mesh().auto_axes:
        return x
    spec = [axis if i == dim else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def sharded_like(v: jax.Array, x: jax.Array) -> jax.Array:
    """v, whose dimensions are those of x or the leading ones of these, sharded as they are over explicit mesh axes."""
    return _resharded(v, jax.typeof(x).sharding.spec[: v.ndim], x)


def with_batch_of(x: jax.Array, v: jax.Array) -> jax.Array:
    """v, whose first dimension is sharded as that of x is over explicit mesh axes, and no other one over these."""
    first, (_, *others) = jax.typeof(x).sharding.spec[0], jax.typeof(v).sharding.spec
    taken = {*_names(first)}
    return _resharded(v, [first, *(None if taken & {*_names(names)} else names for names in others)], x)


def _names(entry: str | Axes | None) -> Axes:
    """The axes of the mesh in an entry of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def whole_along(v: jax.Array, axes: Sequence[int]) -> jax.Array:
    """v, with these dimensions whole on every device if they are sharded over explicit mesh axes."""
    return _resharded(v, [None if a in axes else names for a, names in enumerate(jax.typeof(v).sharding.spec)], v)


def _resharded(v: jax.Array, spec: Sequence, like: jax.Array) -> jax.Array:
    """v with this spec over the mesh of `like`. Where no axis is explicit, a spec names none, and v stays as it is."""
    if tuple(jax.typeof(v).sharding.spec) == tuple(spec):
        return v
    return jax.sharding.reshard(v, sharding_over(spec, like, v))


def sharding_over(spec: Sequence, *arrays: jax.Array) -> NamedSharding:
    """The sharding with this spec over the mesh of the first of these arrays that has one; none on one device has."""
    meshes = [jax.typeof(v).sharding.mesh for v in arrays]
    return NamedSharding(next(mesh for mesh in meshes if not mesh.empty), PartitionSpec(*spec))


def varying_alike(*values: jax.Array) -> list[jax.Array]:
    """The values, made to vary over the same axes of a mesh inside shard_map, as what is computed of them all does.

    So the gradient of a value is summed over the axes over which it did not vary.
    """
    axes = [jax.typeof(v).manual_axis_type.varying for v in values]
    missing = [tuple(frozenset().union(*axes) - own) for own in axes]
    return [jax.lax.pcast(v, more, to="varying") for v, more in zip(values, missing, strict=True)]


def varying_over(axis: str, *values: jax.Array) -> list[jax.Array]:
    """The values, made to vary over a manual axis of the mesh."""
    own = [jax.typeof(v).manual_axis_type.varying for v in values]
    return [v if axis in over else jax.lax.pcast(v, axis, to="varying") for v, over in zip(values, own, strict=True)]


def combined(st: State, axes: Axes) -> State:
    """The state of all scores that lie over mesh axes, given each device's."""

    def of_sums(maxima, m, s):
        return [s * weight(m, *maxima)]

    (m,), (s,) = exchanged(axes, st, lambda m, s: [m], of_sums)
    return State(m, s)


# An all-gather takes one latency, 20 to 25 us between H200s, and all-reduces of a maximum and of sums relative to it
# take two, but a device receives less by them where there are many devices. In one latency it receives some 4 MiB.
_FEW_DEVICES = 16
_GATHERED_BYTES = 2**22


def exchanged(
    axes: Axes,
    numbers: Sequence[jax.Array],
    of_maxima: Callable[..., Sequence[jax.Array]],
    of_sums: Callable[..., Sequence[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Maxima and sums over mesh axes, with the same bits on every device: by one exchange where numbers are few.

    A maximum may pass over a NaN.

    Args:
      axes: of the mesh.
      numbers: what this device has, arrays of one shape and one dtype.
      of_maxima: (*numbers) -> what of a device's numbers the maxima are taken of.
      of_sums: (maxima, *numbers) -> likewise the sums, which may be relative to the maxima.
    """
    devices, stacked = jax.lax.axis_size(axes), jnp.stack(numbers)
    if devices > _FEW_DEVICES or devices * stacked.nbytes > _GATHERED_BYTES:
        maxima = [*jax.lax.pmax(jnp.stack(of_maxima(*numbers)), axes)]
        return maxima, [*jax.lax.psum(jnp.stack(of_sums(maxima, *numbers)), axes)]
    gathered = jax.lax.all_gather(stacked, axes)
    parts = [jax.lax.index_in_dim(gathered, i, axis=1, keepdims=False) for i in range(len(numbers))]
    maxima = [jnp.max(v, axis=0, keepdims=True) for v in of_maxima(*parts)]
    sums = [jnp.sum(v, axis=0) for v in of_sums(maxima, *parts)]
    return [v[0] for v in maxima], sums
