"""Which implementation serves a row operation: what each can do, and the choice among them.

Every implementation offers an operation in the forms that it takes as they are, and else in the plain form, from which
the others are composed. A choice depends on the platform that the computation is lowered for, so it is made when the
operation is lowered (see `primitive`), not when it is called.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax

import jaxsoft.pallas_kernels as pallas_kernels
import jaxsoft.triton_kernels as triton_kernels
from jaxsoft._core.carriers import ALWAYS, CARRIERS, PREFERENCE
from jaxsoft._rows import ffi, forms, reference, xla
from jaxsoft._rows.forms import Form, compose, is_plain, working_dtype
from jaxsoft._rows.formulas import take
from jaxsoft._rows.operation import Operation, Reduction, Reductions, RowFunction
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft.fold import State, accumulator

type Operands = Sequence[jax.core.ShapedArray]
type Finder = Callable[[Operation, Form, str, Operands], RowFunction | None]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels for rows that an implementation has.

    Attributes:
      kernel: (operation, form, platform, operands) -> the kernel that takes the form as it is, or None. There is one
        for the plain form of every operation, but for those that can be made of the state (`Operation.from_state`).
      unsupported: (operands) -> None, or why it cannot take operands of these shapes and dtypes.
      composed: whether the default choice takes it for forms that have to be composed, too. Before its plain kernel XLA
        then writes the scores anew, which only the fastest kernel makes up for.
      leads: (operation, form, platform, operands) -> whether the default choice tries it before all others.
    """

    kernel: Finder
    unsupported: Callable[[Operands], str | None] = lambda operands: None
    composed: bool = False
    leads: Callable[[Operation, Form, str, Operands], bool] = lambda operation, form, platform, operands: False


def _plain(formula: Callable[[Operation, Form], RowFunction]) -> Finder:
    """The `kernel` of an implementation that has nothing but formulas for the plain form."""

    def kernel(operation, form, platform, operands):
        return formula(operation, form) if is_plain(operation, form, operands) else None

    return kernel


def _xla_leads(operation: Operation, form: Form, platform: str, operands: Operands) -> bool:
    """Whether XLA's loops are faster than all kernels.

    By measurement on an H200 they are for pullbacks that reduce nothing and write another dtype than that of the
    scores.
    """
    elementwise = operation.is_pullback and operation.reduces is Reduction.NOTHING
    return platform == "cuda" and elementwise and form.dtype != operands[0].dtype


KERNELS = {
    "ffi": Kernels(ffi.kernel, ffi.unsupported, composed=True),
    "pallas": Kernels(pallas_kernels.kernel, pallas_kernels.unsupported, leads=pallas_kernels.leads),
    "triton": Kernels(triton_kernels.kernel, triton_kernels.unsupported),
    "xla": Kernels(_plain(xla.formula), composed=True, leads=_xla_leads),
    "reference": Kernels(_plain(reference.formula), reference.unsupported),
}


def check_operands(operation: Operation, form: Form, implementation: str | None, operands: Operands) -> None:
    """Raises where a named implementation cannot take such operands on any platform."""
    if implementation is not None and operands[0].size:
        operands = _plain_operands(operation, form, operands)
        _raise_for(implementation, _refusal(implementation, operands), operands)


def takes(operation: Operation, form: Form, implementation: str | None, operands: Operands) -> bool:
    """Whether a named implementation can take such operands on some platform, as the default choice always can."""
    if implementation is None or not operands[0].size:
        return True
    return _refusal(implementation, _plain_operands(operation, form, operands)) is None


def choose(
    operation: Operation, form: Form, implementation: str | None, platform: str, operands: Operands
) -> RowFunction:
    """The kernel for a row operation on a platform. Raises where a named implementation cannot serve."""
    if operands[0].size == 0:  # there is nothing to compute: no kernel needs to know about empty rows
        return compose(operation, form, xla.formula(operation, form))
    plain = _plain_operands(operation, form, operands)
    if implementation is not None:
        reason = CARRIERS[implementation].unavailable(platform) or _refusal(implementation, plain)
        _raise_for(implementation, reason, plain)
        named = KERNELS[implementation]
        found = _kernel(named, operation, form, platform, operands, plain)
        found = found or _from_state(named, operation, form, platform, plain)
        assert found, "unsupported() says so"
        return found

    def leads(name: str) -> bool:
        if form.in_place and name != "ffi":  # no other implementation writes in place
            return False
        return KERNELS[name].leads(operation, form, platform, operands)

    for name in sorted(PREFERENCE.get(platform, ALWAYS), key=lambda name: not leads(name)):
        kernels = KERNELS[name]
        if CARRIERS[name].unavailable(platform) or kernels.unsupported(plain):
            continue
        if kernels.composed:
            found = _kernel(kernels, operation, form, platform, operands, plain)
        else:
            found = kernels.kernel(operation, form, platform, operands)
        if found:
            return found
    raise AssertionError("xla serves everything")


def _kernel(
    kernels: Kernels, operation: Operation, form: Form, platform: str, operands: Operands, plain: Operands
) -> RowFunction | None:
    """An implementation's kernel that takes the form as it is, or else the form composed from its plain kernel."""
    if native := kernels.kernel(operation, form, platform, operands):
        return native
    dtype = accumulator(plain[0].dtype) if operation.selects else plain[0].dtype  # probabilities are rounded once
    whole = kernels.kernel(operation, Form(dtype, k=form.k), platform, plain)
    return compose(operation, form, whole) if whole else None


def _from_state(
    kernels: Kernels, operation: Operation, form: Form, platform: str, plain: Operands
) -> RowFunction | None:
    """An operation that an implementation does not know, from its kernel for the state of the scores."""
    if not operation.from_state:
        return None
    state = kernels.kernel(STATE, Form(plain[0].dtype), platform, plain[:1])
    if state is None:
        return None
    reductions = Reductions(lambda x: State(*state(x)), xla.REDUCTIONS.total, take)
    return compose(operation, form, forms.formula(operation, form, reductions))


def _plain_operands(operation: Operation, form: Form, operands: Operands) -> Operands:
    """The operands of a kernel for the plain form, those before the second one of x's shape.

    The others do not decide whether an implementation can take the operands.
    """
    x = operands[0]
    axis = x.ndim - 1 - form.trailing
    shape = (*x.shape[:axis], *x.shape[axis + 1 :], x.shape[axis])
    scores = jax.core.ShapedArray(shape, working_dtype(operation, form, operands))
    others = zip(operation.kinds[1:], operands[1:], strict=False)
    return [scores, *(v for _, v in itertools.takewhile(lambda pair: not pair[0].whole_rows, others))]


def _refusal(implementation: str, operands: Operands) -> str | None:
    """None, or why an implementation cannot take such operands."""
    if implementation not in KERNELS:
        return "it has no kernels for rows"
    return KERNELS[implementation].unsupported(operands)


def _raise_for(implementation: str, reason: str | None, operands: Operands) -> None:
    if reason is None:
        return
    able = [name for name, kernels in KERNELS.items() if not kernels.unsupported(operands)]
    others = ", ".join(repr(name) for name in able if name != implementation)
    raise ValueError(
        f"implementation={implementation!r} cannot serve this call: {reason}. implementation=None always works; by "
        f"name, these take such operands where they are available: {others}"
    )
