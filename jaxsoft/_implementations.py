"""Which implementation serves a row operation: the list of them, what each can do, and the choice.

A row operation has a name, and every implementation offers it under that name. A choice depends on the platform that
the computation is lowered for, so it is made when the operation is lowered (`_rows`), not when it is called.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence

import jax

import jaxsoft.pallas_kernels as pallas_kernels
from jaxsoft import _ffi, _reference, _xla
from jaxsoft._formulas import Operation

# What `implementation=None` tries, in this order. XLA always works.
_PREFERENCE = {"cpu": ("ffi", "xla"), "cuda": ("ffi", "xla")}
_ALWAYS = ("xla",)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of the row operations.

    Attributes:
      operations: its row operations by name; one that it lacks is served by the default choice.
      unavailable: (platform) -> None, or why it cannot be used there.
      unsupported: (operands) -> None, or why it cannot take operands of these shapes and dtypes.
      opaque: whether XLA's partitioner cannot see into it, as into a custom call.
    """

    operations: dict[str, Operation]
    unavailable: Callable[[str], str | None] = lambda platform: None
    unsupported: Callable[[Sequence[jax.core.ShapedArray]], str | None] = lambda operands: None
    opaque: bool = False


def _no_triton(platform: str) -> str:
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed, and this version of jaxsoft has no Triton kernels yet"
    return "this version of jaxsoft has no Triton kernels yet"


IMPLEMENTATIONS = {
    "ffi": Implementation(_ffi.OPERATIONS, _ffi.unavailable, _ffi.unsupported, opaque=True),
    "pallas": Implementation(
        pallas_kernels.OPERATIONS, pallas_kernels.unavailable, pallas_kernels.unsupported, opaque=True
    ),
    "triton": Implementation({}, _no_triton, opaque=True),
    "xla": Implementation(_xla.OPERATIONS),
    "reference": Implementation(_reference.OPERATIONS),
}


def implementations(platform: str | None = None) -> dict[str, str | None]:
    """What can be used here, and why something cannot.

    Args:
      platform: "cpu" or "cuda"; None for the platform of JAX's default device.

    Returns:
      For each name that `implementation=` takes: None where it is available, else the reason why not.

    >>> implementations("cpu")["xla"] is None
    True
    """
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    return {name: impl.unavailable(platform) for name, impl in IMPLEMENTATIONS.items()}


def check_name(implementation: str | None) -> None:
    """Raises for a name that is no implementation's."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"implementation must be None or one of {names}; got {implementation!r}")


def is_opaque(implementation: str | None) -> bool:
    """Whether XLA's partitioner may be unable to see into the chosen kernel."""
    return implementation is None or IMPLEMENTATIONS[implementation].opaque


def check_operands(implementation: str | None, operands: Sequence[jax.core.ShapedArray]) -> None:
    """Raises where a named implementation cannot take such operands on any platform."""
    if implementation is not None and operands[0].size:
        _raise_for(implementation, IMPLEMENTATIONS[implementation].unsupported(operands), operands)


def choose(
    operation: str, implementation: str | None, platform: str, operands: Sequence[jax.core.ShapedArray]
) -> Operation:
    """The kernel for a row operation on a platform. Raises where a named implementation cannot serve."""
    if operands[0].size == 0:  # nothing to compute: no kernel needs to know about empty rows
        return _xla.OPERATIONS[operation]
    if implementation is not None and operation in IMPLEMENTATIONS[implementation].operations:
        named = IMPLEMENTATIONS[implementation]
        _raise_for(implementation, named.unavailable(platform) or named.unsupported(operands), operands)
        return named.operations[operation]
    if implementation is not None and not IMPLEMENTATIONS[implementation].operations:
        _raise_for(implementation, IMPLEMENTATIONS[implementation].unavailable(platform), operands)
    for name in _PREFERENCE.get(platform, _ALWAYS):
        impl = IMPLEMENTATIONS[name]
        if operation in impl.operations and not impl.unavailable(platform) and not impl.unsupported(operands):
            return impl.operations[operation]
    raise AssertionError("xla serves everything")


def _raise_for(implementation: str, reason: str | None, operands: Sequence[jax.core.ShapedArray]) -> None:
    if reason is None:
        return
    able = [name for name, impl in IMPLEMENTATIONS.items() if impl.operations and not impl.unsupported(operands)]
    others = ", ".join(repr(name) for name in able if name != implementation)
    raise ValueError(
        f"implementation={implementation!r} cannot serve this call: {reason}. implementation=None always works; by "
        f"name, these take such operands where they are available: {others}"
    )
