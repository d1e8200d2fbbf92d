"""Which GPU a kernel is compiled for: Triton has to know the compute capability when a computation is lowered."""

import re

from jaxsoft._core import devices

# The compute capabilities of GPUs by patterns of their names. Of a GPU that is not here, but that a computation is
# lowered for, only the name is known.
_CAPABILITIES = {
    r"A100|A800|A30": 80,
    r"A2|A10G?|A16|A40|RTX A\d{4}|RTX 30[5-9]0": 86,
    r"L4|L20|L40S?|RTX 40[5-9]0|RTX \d{4} Ada": 89,
    r"H20|H[128]00|GH200": 90,
    r"G?B200": 100,
    r"G?B300": 103,
    r"RTX 50[5-9]0|RTX PRO \d{4}": 120,
}


def capability() -> int:
    """The compute capability that kernels are compiled for, 90 for 9.0; `unavailable` has seen that there is one."""
    [found] = set(targets().values())
    assert found is not None
    return found


def targets() -> dict[str, int | None]:
    """The compute capability of each kind of GPU that a computation may run on; None where it is not known."""
    if kind := devices.elsewhere():
        numbers = (number for name, number in _CAPABILITIES.items() if re.search(rf"\b({name})\b", kind))
        return {kind: next(numbers, None)}
    return {**devices.present()}
