"""The table of NVIDIA GPUs, and which of them a computation is lowered for: one that is here, or one that is not.

Kernels that are compiled when a computation is lowered have to know. A table of sizes of kernels is keyed by the
generation: a kernel serves those that have a row in its table. Nothing here touches a GPU before it is asked.
"""

import dataclasses
import enum
import functools
import re

import jax


class Generation(enum.Enum):
    """What GPUs share that run the same kernels equally well."""

    AMPERE = "Ampere"
    ADA = "Ada"
    HOPPER = "Hopper"
    BLACKWELL = "data-centre Blackwell"
    BLACKWELL_RTX = "Blackwell"
    OTHER = "another generation"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      names: a pattern of the names of its devices, as nothing else is known of one that is lowered for and not here.
      generation: which.
      capability: the compute capability, 90 for 9.0.
      multiprocessors: how many it has; in the table, for a device that does not say.
      shared_bytes: the shared memory that a block may have.
    """

    names: str
    generation: Generation
    capability: int
    multiprocessors: int
    shared_bytes: int

    @property
    def version(self) -> str:
        """The compute capability as NVIDIA writes it."""
        return f"{self.capability // 10}.{self.capability % 10}"


H200 = Gpu(r"G?H[128]00", Generation.HOPPER, 90, 132, 227 << 10)
# Compute capabilities and shared memory are those of the CUDA programming guide. A device has the first row with its
# name; if it is here, the first of its compute capability.
# --8<-- [start:gpus]
GPUS = (
    Gpu(r"H100 PCIe", Generation.HOPPER, 90, 114, 227 << 10),
    Gpu(r"H20", Generation.HOPPER, 90, 78, 227 << 10),
    H200,
    Gpu(r"G?B[12]00", Generation.BLACKWELL, 100, 148, 227 << 10),
    Gpu(r"G?B300", Generation.BLACKWELL, 103, 148, 227 << 10),
    Gpu(r"A100|A800", Generation.AMPERE, 80, 108, 163 << 10),
    Gpu(r"A30", Generation.AMPERE, 80, 56, 163 << 10),
    Gpu(r"A10G?|A40|RTX A\d{4}|RTX 30[5-9]0", Generation.AMPERE, 86, 80, 99 << 10),
    Gpu(r"A2|A16", Generation.AMPERE, 86, 10, 99 << 10),
    Gpu(r"L20|L40S?|RTX 40[5-9]0|RTX \d{4} Ada", Generation.ADA, 89, 128, 99 << 10),
    Gpu(r"L4", Generation.ADA, 89, 58, 99 << 10),
    Gpu(r"RTX 50[5-9]0|RTX PRO \d{4}", Generation.BLACKWELL_RTX, 120, 170, 99 << 10),
)
# --8<-- [end:gpus]


_LEAST_SHARED_BYTES = 48 << 10  # what every GPU has


@functools.cache
def present() -> dict[str, Gpu]:
    """Each kind of GPU that is here, by its name."""
    try:
        return {device.device_kind: _of_device(device) for device in jax.devices("cuda")}
    except RuntimeError:
        return {}


def any_before(generation: Generation) -> bool:
    """Whether a GPU that is here is older than those of a generation."""
    first = min(gpu.capability for gpu in GPUS if gpu.generation is generation)
    return any(gpu.capability < first for gpu in present().values())


def elsewhere() -> str | None:
    """The name of the GPU that is lowered for, as `jax.sharding.use_abstract_mesh` names it, if it is not here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or getattr(device, "platform", "gpu") != "gpu" or device.device_kind in present():
        return None
    return device.device_kind


def targets() -> dict[str, Gpu | None]:
    """Each kind of GPU that a computation may run on, by its name; None for a name that is not known."""
    kind = elsewhere()
    if kind is None:
        return {**present()}
    found, device = of_kind(kind), jax.sharding.get_abstract_mesh().abstract_device
    if found and device and device.num_cores:
        found = dataclasses.replace(found, multiprocessors=device.num_cores)
    return {kind: found}


def target() -> Gpu | None:
    """The GPU that is lowered for; None if there is none, or it is not known, or there are several unlike ones.

    Of several of the same compute capability it is the one with the fewest multiprocessors.
    """
    found = [*targets().values()]
    known = [gpu for gpu in found if gpu]
    if len(known) < len(found) or len({gpu.capability for gpu in known}) != 1:
        return None
    return min(known, key=lambda gpu: gpu.multiprocessors)


def assumed() -> Gpu:
    """The GPU that is lowered for, and where that is none or not known, the one that most records were taken on.

    Plans are also made where kernels are interpreted on a CPU.
    """
    return target() or H200


def multiprocessors() -> int:
    """How many of them the GPU has that is lowered for, or that is assumed."""
    return assumed().multiprocessors


def generation() -> Generation | None:
    """That of the GPU that is lowered for."""
    found = target()
    return found.generation if found else None


def of_kind(kind: str) -> Gpu | None:
    """The row for a device of this name, if there is one."""
    return next((gpu for gpu in GPUS if re.search(rf"\b({gpu.names})\b", kind)), None)


def _of_device(device: jax.Device) -> Gpu:
    major, minor = device.compute_capability.split(".")
    capability = 10 * int(major) + int(minor)
    known = next((gpu for gpu in GPUS if gpu.capability == capability), None)
    found = known or Gpu(device.device_kind, Generation.OTHER, capability, 1, _LEAST_SHARED_BYTES)
    return dataclasses.replace(found, multiprocessors=device.core_count)
