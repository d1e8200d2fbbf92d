"""What carries an operation: plain JAX, or kernels of one kind. `implementation=` names one of them.

Whether one can be used depends on the platform that a computation is lowered for. What it can serve depends on the
operation, so each family has its own table of that, such as `jaxsoft._rows.choice`.
"""

import dataclasses
from collections.abc import Callable

import jax

import jaxsoft.pallas_kernels as pallas_kernels
import jaxsoft.triton_kernels as triton_kernels
from jaxsoft._core import cudnn, devices, library


@dataclasses.dataclass(frozen=True)
class Carrier:
    """A way to run operations.

    Attributes:
      unavailable: (platform) -> None, or why it cannot be used there.
      opaque: whether XLA's partitioner cannot see into it, as into a custom call.
    """

    unavailable: Callable[[str], str | None] = lambda platform: None
    opaque: bool = False


CARRIERS = {
    "ffi": Carrier(library.unavailable, opaque=True),
    "pallas": Carrier(pallas_kernels.unavailable, opaque=True),
    "triton": Carrier(triton_kernels.unavailable, opaque=True),
    "cudnn": Carrier(cudnn.unavailable, opaque=True),
    "xla": Carrier(),
    "reference": Carrier(),
}

# What `implementation=None` tries on each platform, in this order, unless a family's table says that another leads. XLA
# serves everything, everywhere.
PREFERENCE = {"cpu": ("ffi", "xla"), "cuda": ("ffi", "pallas", "triton", "xla")}
ALWAYS = ("xla",)


def implementations(platform: str | None = None) -> dict[str, str | None]:
    """The implementations that can be used here, and the reasons why others cannot.

    Args:
      platform: "cpu" or "cuda"; None for the platform of JAX's default device.

    Returns:
      For each name that `implementation=` takes: None where it is available, else the reason why not.

    >>> implementations("cpu")["xla"] is None
    True
    """
    if platform is None:
        platform = jax.default_backend()
        if platform == "gpu":  # as JAX calls NVIDIA's and AMD's
            platform = "cuda" if devices.present() else "rocm"
    return {name: carrier.unavailable(platform) for name, carrier in CARRIERS.items()}


def check_name(implementation: str | None) -> None:
    """Raises for a name that is no implementation's."""
    if implementation is not None and not (isinstance(implementation, str) and implementation in CARRIERS):
        names = ", ".join(repr(name) for name in CARRIERS)
        raise ValueError(f"implementation must be None or one of {names}; got {implementation!r}")


def is_opaque(implementation: str | None) -> bool:
    """Whether XLA's partitioner may be unable to see into the chosen kernel."""
    return implementation is None or CARRIERS[implementation].opaque
