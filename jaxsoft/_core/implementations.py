"""The implementations of operations: what `implementation=` names, which of them can be used here, and a choice among
them with its reasons.

An implementation is plain JAX, or kernels of one kind. Whether it can be used depends on the platform that a
computation is lowered for. What it can serve depends on the operation, so each family chooses among its kernels: those
for rows are in `Backend.rows`, those for attention in `jaxsoft._attention.choice`. Nothing here knows a package of
kernels: `jaxsoft._registered` names them all.
"""

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxsoft._core import gpus

type Implementation = str | Sequence[str] | None  # one that has to serve, some of which one has to, or any
type Names = str | tuple[str, ...] | None  # the same, after it was checked


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to run operations.

    Attributes:
      unavailable: (platform) -> None, or why it cannot be used there.
      opaque: whether XLA's partitioner cannot see into it, as into a custom call.
      rows: its kernels for rows, a `jaxsoft._rows.forms.RowKernels`; None if it has none.
      by_name_only: None, or why `implementation=None` does not take it although it may be available.
    """

    unavailable: Callable[[str], str | None] = lambda platform: None
    opaque: bool = False
    rows: Any = None
    by_name_only: str | None = None


# By name, in the order in which errors list them.
REGISTERED: dict[str, Backend] = {}

# What `implementation=None` tries on each platform, in this order, unless a family says that another is the fastest.
# XLA serves everything, everywhere.
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
            platform = "cuda" if gpus.present() else "rocm"
    return {name: backend.unavailable(platform) for name, backend in REGISTERED.items()}


def as_names(implementation: Implementation) -> Names:
    """The argument `implementation`: a name, several of which one has to serve the call, or None, after checking."""
    if implementation is None or (isinstance(implementation, str) and implementation in REGISTERED):
        return implementation
    several = tuple(implementation) if isinstance(implementation, tuple | list) else ()
    if not several or not all(isinstance(name, str) and name in REGISTERED for name in several):
        names = ", ".join(repr(name) for name in REGISTERED)
        raise ValueError(f"implementation must be None or one of {names}, or a tuple of some; got {implementation!r}")
    return several


def accepted(names: Names, preferred: Sequence[str]) -> tuple[str, ...]:
    """The implementations that may serve a call, the preferred ones first."""
    if names is None:
        return tuple(preferred)
    if isinstance(names, str):
        return (names,)
    return (*(name for name in preferred if name in names), *(name for name in names if name not in preferred))


def accepts(names: Names, name: str) -> bool:
    """Whether a call may be served by this implementation."""
    return names is None or name in accepted(names, ())


def not_by_default(names: Names, name: str) -> str | None:
    """None, or why a call that names no implementation is not served by this one."""
    return REGISTERED[name].by_name_only if names is None else None


def is_opaque(names: Names) -> bool:
    """Whether XLA's partitioner may be unable to see into the chosen kernel."""
    return names is None or any(REGISTERED[name].opaque for name in accepted(names, ()))


# --8<-- [start:choice]
@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation serves an operation, and why those that come before it do not.

    Attributes:
      operation: what is served.
      implementation: the name of the one that was chosen.
      function: what serves it.
      kernel: the name of its kernel, as a profiler shows a part of it, and how it cuts up its work, in words; "" where
        XLA makes the kernels.
      reasons: for each implementation that was tried before, why it does not serve.
    """

    operation: str
    implementation: str
    function: Callable[..., Any] = dataclasses.field(compare=False, repr=False)
    kernel: str = ""
    reasons: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def scope(self) -> str:
        """What stands for the choice in the metadata of a program, which a profiler shows."""
        return ".".join(part for part in (self.operation, self.implementation, self.kernel.split(":")[0]) if part)

    def __str__(self) -> str:
        """The choice as one line."""
        by = f"{self.operation}: {self.implementation}{f' ({self.kernel})' if self.kernel else ''}"
        return "; ".join([by, *(f"not {name}, as {reason}" for name, reason in self.reasons.items())])
        # --8<-- [end:choice]


def refuse(names: Names, reasons: dict[str, str], able: Sequence[str]) -> ValueError:
    """The error of a call that none of the implementations that it accepts can serve.

    Args:
      names: what the call accepts.
      reasons: why each of them cannot.
      able: the names of those that take such operands.
    """
    why = "; ".join(reasons.values() if isinstance(names, str) else (f"{k}: {v}" for k, v in reasons.items()))
    others = ", ".join(repr(name) for name in able if name not in reasons)
    return ValueError(
        f"implementation={names!r} cannot serve this call: {why}. implementation=None always works; by name, these "
        f"take such operands where they are available: {others}"
    )


_logger = logging.getLogger("jaxsoft")
_collecting: list[list[Choice]] = []
_lock = threading.Lock()  # XLA may call from another thread what splits an operation over a mesh

if "choice" in os.environ.get("JAXSOFT_LOG", "").split(","):
    logging.basicConfig()
    _logger.setLevel(logging.DEBUG)


def report(choice: Choice) -> None:
    """Tells of a choice: the logger "jaxsoft", at level DEBUG, and those who collect choices."""
    _logger.debug("%s", choice)
    with _lock:
        for found in _collecting:
            found.append(choice)


@contextlib.contextmanager
def collected() -> Iterator[list[Choice]]:
    """The choices that are made meanwhile."""
    found: list[Choice] = []
    with _lock:
        _collecting.append(found)
    try:
        yield found
    finally:
        with _lock:
            # By identity: two threads may have found the same.
            _collecting[:] = [other for other in _collecting if other is not found]
