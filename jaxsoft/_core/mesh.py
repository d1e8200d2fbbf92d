"""What operations of any family need over a mesh: whether and how to partition, and states combined over its axes."""

from collections.abc import Callable

import jax

from jaxsoft.fold import State, weight

type Axes = str | tuple[str, ...]


def can_partition() -> bool:
    """Whether a partitioned function may be called here: custom_partitioning does not know shard_map's outer axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.manual_axes or len(mesh.manual_axes) == len(mesh.axis_names)


def on_one_device[**P](local: Callable[P, tuple]) -> Callable[P, tuple]:
    """`local`, traced as code for one device even while a mesh with explicit axes is set."""

    def function(*args: P.args, **kwargs: P.kwargs) -> tuple:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tuple(local(*args, **kwargs))

    return function


def spec_of(x: jax.ShapeDtypeStruct) -> tuple:
    """The mesh axes of each dimension."""
    spec = getattr(x.sharding, "spec", ())  # whole on one device, or on every one
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def combined(st: State, axes: Axes) -> State:
    """The state of all scores that lie over mesh axes, given each device's."""
    m = jax.lax.pmax(st.m, axes)
    return State(m, jax.lax.psum(st.s * weight(st.m, m), axes))
