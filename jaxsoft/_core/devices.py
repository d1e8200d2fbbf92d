"""Which NVIDIA GPUs a computation is lowered for: those that are here, or one that is not.

Kernels that are compiled when a computation is lowered have to know. Nothing here touches a GPU before it is asked.
"""

import functools

import jax


@functools.cache
def present() -> dict[str, int]:
    """The compute capability of each kind of GPU that is here, 90 for 9.0."""
    try:
        return {device.device_kind: _number(device.compute_capability) for device in jax.devices("cuda")}
    except RuntimeError:
        return {}


def elsewhere() -> str | None:
    """The kind of the GPU that is lowered for, as `jax.sharding.use_abstract_mesh` names it, if it is not here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != "gpu" or device.device_kind in present():
        return None
    return device.device_kind


def are_hopper() -> bool:
    """Whether all GPUs that a computation may be lowered for are of Hopper's generation (compute capability 9.0)."""
    from jaxsoft.pallas_kernels.rows import sizes

    if kind := elsewhere():
        gpu = sizes.of_kind(kind)
        return gpu is not None and 90 in gpu.capabilities
    return set(present().values()) == {90}


def _number(version: str) -> int:
    major, minor = str(version).split(".")
    return 10 * int(major) + int(minor)
