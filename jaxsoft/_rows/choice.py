"""Which implementation serves a row operation: the list of them, what each can do, and the choice.

A row operation has a name, and every implementation offers it under that name: in the forms that it takes as they are,
and else in the plain form, from which the others are composed. A choice depends on the platform that the computation
is lowered for, so it is made when the operation is lowered (`primitive`), not when it is called.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax

import jaxsoft.pallas_kernels as pallas_kernels
import jaxsoft.triton_kernels as triton_kernels
from jaxsoft._rows import ffi, reference, xla
from jaxsoft._rows.forms import OPERATIONS, Form, Operation, bind, compose, is_plain, is_wide, working_dtype
from jaxsoft._rows.formulas import row_operations, take
from jaxsoft.fold import State

# What `implementation=None` tries, in this order, but for what leads. XLA always works.
_PREFERENCE = {"cpu": ("ffi", "xla"), "cuda": ("ffi", "pallas", "triton", "xla")}
_ALWAYS = ("xla",)


type Operands = Sequence[jax.core.ShapedArray]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of the row operations.

    Attributes:
      kernel: (operation, form, platform, operands) -> the kernel that takes the form as it is, or None. It takes the
        plain form of every operation, but for top_k and those with labels, for which a kernel of "state" will do.
      unavailable: (platform) -> None, or why it cannot be used there.
      unsupported: (operands) -> None, or why it cannot take operands of these shapes and dtypes.
      opaque: whether XLA's partitioner cannot see into it, as into a custom call.
      composed: whether the default choice takes it for forms that have to be composed, too. Before its plain kernel XLA
        then writes the scores anew, which only the fastest kernel makes up for.
      leads: (operation, form, platform, operands) -> whether the default choice tries it before all others.
    """

    kernel: Callable[[str, Form, str, Operands], Operation | None]
    unavailable: Callable[[str], str | None] = lambda platform: None
    unsupported: Callable[[Operands], str | None] = lambda operands: None
    opaque: bool = False
    composed: bool = False
    leads: Callable[[str, Form, str, Operands], bool] = lambda operation, form, platform, operands: False


def _plain(operations: dict[str, Operation]) -> Callable[[str, Form, str, Operands], Operation | None]:
    """The `kernel` of an implementation whose kernels take nothing but the plain form."""

    def kernel(operation, form, platform, operands):
        found = operations.get(operation) if is_plain(operation, form, operands) else None
        return bind(found, form) if found else None

    return kernel


def _xla_leads(operation: str, form: Form, platform: str, operands: Operands) -> bool:
    """Whether XLA's loops are faster than all kernels: by measurement on a GPU, pullbacks that reduce nothing and have
    another dtype than the scores."""
    names = ("logsumexp_vjp", "label_state_vjp", "label_sums_vjp")
    return platform == "cuda" and operation in names and form.dtype != operands[0].dtype


IMPLEMENTATIONS = {
    "ffi": Implementation(ffi.kernel, ffi.unavailable, ffi.unsupported, opaque=True, composed=True),
    "pallas": Implementation(
        pallas_kernels.kernel,
        pallas_kernels.unavailable,
        pallas_kernels.unsupported,
        opaque=True,
        leads=pallas_kernels.leads,
    ),
    "triton": Implementation(
        _plain(triton_kernels.OPERATIONS), triton_kernels.unavailable, triton_kernels.unsupported, opaque=True
    ),
    "xla": Implementation(_plain(xla.OPERATIONS), composed=True, leads=_xla_leads),
    "reference": Implementation(_plain(reference.OPERATIONS), unsupported=reference.unsupported),
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


def check_operands(operation: str, form: Form, implementation: str | None, operands: Operands) -> None:
    """Raises where a named implementation cannot take such operands on any platform."""
    if implementation is not None and operands[0].size:
        operands = _plain_operands(operation, form, operands)
        _raise_for(implementation, IMPLEMENTATIONS[implementation].unsupported(operands), operands)


def choose(operation: str, form: Form, implementation: str | None, platform: str, operands: Operands) -> Operation:
    """The kernel for a row operation on a platform. Raises where a named implementation cannot serve."""
    if operands[0].size == 0:  # nothing to compute: no kernel needs to know about empty rows
        return compose(operation, form, bind(xla.OPERATIONS[operation], form))
    plain = _plain_operands(operation, form, operands)

    def kernel(impl: Implementation) -> Operation | None:
        if native := impl.kernel(operation, form, platform, operands):
            return native
        whole = impl.kernel(operation, Form(plain[0].dtype, k=form.k), platform, plain)
        return compose(operation, form, whole) if whole else None

    def from_state(impl: Implementation) -> Operation | None:
        """An operation on scores with labels, or with the largest of them, from a kernel that knows of neither."""
        if "i" not in OPERATIONS[operation] and operation != "top_k":
            return None
        state = impl.kernel("state", Form(plain[0].dtype), platform, plain[:1])
        operations = row_operations(lambda x: State(*state(x)), xla.total, take) if state else {}
        return compose(operation, form, bind(operations[operation], form)) if state else None

    if implementation is not None:
        named = IMPLEMENTATIONS[implementation]
        _raise_for(implementation, named.unavailable(platform) or named.unsupported(plain), plain)
        found = kernel(named) or from_state(named)
        assert found, "unsupported() says so"
        return found
    preference = [IMPLEMENTATIONS[name] for name in _PREFERENCE.get(platform, _ALWAYS)]
    for impl in sorted(preference, key=lambda impl: not impl.leads(operation, form, platform, operands)):
        if impl.unavailable(platform) or impl.unsupported(plain):
            continue
        if found := kernel(impl) if impl.composed else impl.kernel(operation, form, platform, operands):
            return found
    raise AssertionError("xla serves everything")


def _plain_operands(operation: str, form: Form, operands: Operands) -> Operands:
    """What a kernel for the plain form is given, as far as it matters to what it can take."""
    x = operands[0]
    axis = x.ndim - 1 - form.trailing
    shape = (*x.shape[:axis], *x.shape[axis + 1 :], x.shape[axis])
    scores = jax.core.ShapedArray(shape, working_dtype(operation, form, operands))
    kinds = zip(OPERATIONS[operation][1:], operands[1:], strict=False)
    return [scores, *(v for _, v in itertools.takewhile(lambda pair: not is_wide(pair[0]), kinds))]


def _raise_for(implementation: str, reason: str | None, operands: Operands) -> None:
    if reason is None:
        return
    able = [name for name, impl in IMPLEMENTATIONS.items() if not impl.unsupported(operands)]
    others = ", ".join(repr(name) for name in able if name != implementation)
    raise ValueError(
        f"implementation={implementation!r} cannot serve this call: {reason}. implementation=None always works; by "
        f"name, these take such operands where they are available: {others}"
    )
