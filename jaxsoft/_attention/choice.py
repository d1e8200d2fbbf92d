"""Which implementation serves a call of attention: what each can do, and the choice among them.

A choice depends on the platform that the computation is lowered for, so it is made when the operation is lowered (see
`operation`), not when it is called.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jaxsoft.pallas_kernels as pallas_kernels
from jaxsoft._attention import adapters, cudnn, ffi, packed, reference
from jaxsoft._attention.form import BASE
from jaxsoft._attention.spec import AttentionForward, AttentionPullback, AttentionSpec, PagedAttention
from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation
from jaxsoft._core.implementations import REGISTERED, Choice, Names, accepted, not_by_default, refuse
from jaxsoft._core.operation import Function

type Operands = Sequence[jax.core.ShapedArray]


@dataclasses.dataclass(frozen=True)
class AttentionKernels:
    """What an implementation has for attention.

    Attributes:
      find: (operation, platform, operands) -> the function of such operands.
      unsupported: (operation, operands) -> None, or why it cannot serve the operation with such operands.
      unavailable: (platform) -> None, or why it has none there, although it has kernels for other operations.
      continues: (operation, operands) -> whether its kernel itself goes on from other blocks of keys (see `adapters`).
      describe: (operation, operands) -> its kernel's name and how it cuts up the work, in words (see `Choice`).
      any_cotangent: whether its gradients take a cotangent in the accumulator's dtype beside narrower queries.
    """

    find: Callable[[AttentionSpec, str, Operands], Function]
    unsupported: Callable[[AttentionSpec, Operands], str | None] = lambda operation, operands: None
    unavailable: Callable[[str], str | None] = lambda platform: None
    continues: Callable[[AttentionSpec, Operands], bool] = lambda operation, operands: False
    describe: Callable[[AttentionSpec, Operands], str] = lambda operation, operands: ""
    any_cotangent: bool = False


def _reference(operation: AttentionSpec, platform: str, operands: Operands) -> Function:
    del platform, operands
    if isinstance(operation, AttentionPullback):
        return reference.pullback(operation.form, operation.wrt)
    return reference.forward(operation.form)


KERNELS = {
    "ffi": AttentionKernels(
        lambda operation, platform, operands: ffi.find(operation, operands),
        ffi.unsupported,
        ffi.unavailable,
        ffi.continues,
        ffi.plan,
    ),
    "pallas": AttentionKernels(
        lambda operation, platform, operands: pallas_kernels.attention_kernels(operation, operands),
        pallas_kernels.attention_unsupported,
        describe=pallas_kernels.describe_attention,
    ),
    "cudnn": AttentionKernels(lambda operation, platform, operands: cudnn.find(operation), cudnn.unsupported),
    "xla": AttentionKernels(
        lambda operation, platform, operands: operation.formula(platform),
        continues=lambda operation, operands: True,
        any_cotangent=True,
    ),
    "reference": AttentionKernels(
        _reference,
        reference.unsupported,
        continues=lambda operation, operands: isinstance(operation, AttentionForward),
        any_cotangent=True,
    ),
}


# Those that serve calls of keys and values in pages.
PAGED = ("ffi", "xla", "reference")


def check_operands(operation: AttentionSpec, names: Names, operands: Operands) -> None:
    """Raises where no implementation that is accepted can take such operands on any platform."""
    if names is not None and not _is_empty(operands):
        reasons = {name: _refusal(name, operation, operands) for name in accepted(names, ())}
        if all(reasons.values()):
            raise refuse(names, {name: reason or "" for name, reason in reasons.items()}, _able(operation, operands))


def choose(operation: AttentionSpec, names: Names, platform: str, operands: Operands) -> Choice:
    """The function for an operation on a platform. Raises where no implementation that is accepted can serve."""
    if _is_empty(operands):  # there is nothing to compute: no kernel needs to know about empty arrays
        return Choice(operation.name, "xla", operation.formula(platform))
    name, reasons = _first(operation, names, platform, operands)
    function = _function(operation, name, names, platform, operands)
    return Choice(operation.name, name, function, KERNELS[name].describe(operation, operands), reasons)


def _first(operation: AttentionSpec, names: Names, platform: str, operands: Operands) -> tuple[str, dict[str, str]]:
    """The first of those that are accepted which serves an operation, and why those before it do not."""
    reasons: dict[str, str] = {}
    for name in accepted(names, preference(operation, platform, operands)):
        reason = _refusal(name, operation, operands) or unavailable(name, platform) or not_by_default(names, name)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise refuse(names, reasons, _able(operation, operands))


def _function(operation: AttentionSpec, name: str, names: Names, platform: str, operands: Operands) -> Function:
    """The function of an implementation that serves an operation.

    Args:
      operation: which.
      name: of the implementation.
      names: of those that are accepted.
      platform: that is lowered for.
      operands: their types.
    """
    narrows = (
        isinstance(operation, AttentionPullback) and _is_wide(operation, operands) and not KERNELS[name].any_cotangent
    )
    if operation.form.packed and (name != "ffi" or narrows):
        batch = operands[0].shape[0]
        halves = [x.update(shape=(batch, *x.shape[1:])) for x in operands[1:BASE]]
        types = [operands[0], *halves, *operands[BASE:]]
        function = choose(operation.separate, name, platform, types).function
        return packed.served(isinstance(operation, AttentionPullback), function)
    if isinstance(operation, AttentionPullback) and narrows:
        narrow, narrower = _narrow(operation, operands)
        return adapters.narrowed(operation, choose(narrow, name, platform, narrower).function)
    if _is_continued_outside(name, operation, operands):
        within, given = _of_block(operation, operands)
        return adapters.continued(operation, KERNELS[name].find(within, platform, given))
    if isinstance(operation, AttentionForward) and operation.form.rounded and not operation.form.has_state:
        gradients_by = name
        if not isinstance(names, str):
            gradients_by, _ = _first(AttentionPullback(operation.form.of_gradients, ()), names, platform, operands)
        if "cudnn" in (name, gradients_by):
            return _without_output_residual(name, operation, platform, operands)
    return KERNELS[name].find(operation, platform, operands)


def unavailable(implementation: str, platform: str) -> str | None:
    """None, or why an implementation cannot be used for attention on a platform."""
    return REGISTERED[implementation].unavailable(platform) or KERNELS[implementation].unavailable(platform)


def _without_output_residual(name: str, operation: AttentionForward, platform: str, operands: Operands) -> Function:
    """The function with zeros for the output's residual: cuDNN's forward has none, and its gradients do not read it."""
    without = dataclasses.replace(operation, form=dataclasses.replace(operation.form, rounded=False))
    forward = KERNELS[name].find(without, platform, operands)

    def with_zeros(*operands: jax.Array) -> tuple[jax.Array, ...]:
        output, *others = forward(*operands)
        return output, *others, jnp.zeros_like(output, operands[0].dtype)

    return with_zeros


_ALL = math.inf  # as the last length


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Lengths of sequences at which another implementation becomes the fastest, without a causal rule and with one.

    Attributes:
      forward: alone.
      gradients: likewise.
    """

    forward: tuple[float, float]
    gradients: tuple[float, float]


# The lengths up to which Pallas is at least as fast as cuDNN, by the GPU's generation and the larger head size up to
# which an entry holds, with gradients that need not have the same bits on every run. By measurement, with as many
# queries as keys (`benchmarks/results/h200_attention.jsonl`, from 512 on); within 3 %, either may come first, and an
# H100 may differ from an H200.
_PALLAS_UP_TO = {
    Generation.HOPPER: {
        64: _Lengths((_ALL, _ALL), (1024, 2048)),
        96: _Lengths((_ALL, _ALL), (_ALL, _ALL)),
        128: _Lengths((1024, _ALL), (1024, 2048)),
        256: _Lengths((512, 8192), (_ALL, 4096)),
    }
}

# The lengths from which on the CUDA kernels are the fastest, by the generation and the sizes of heads, of keys and of
# values, with as many queries as keys, whether gradients have the same bits on every run or not. Where these say so,
# the CUDA kernels are 1.13 to 1.27 times as fast as cuDNN forward in the same record's cases of lengths, and 1.14 to
# 1.44 times with gradients, and nowhere more than 1 % behind Pallas. cuDNN does not take values of another size.
_FFI_FROM = {
    Generation.HOPPER: {
        (64, 64): _Lengths((512, 2048), (512, 512)),
        (96, 96): _Lengths((2048, 2048), (512, 1024)),
        (128, 128): _Lengths((512, 512), (512, 512)),
        (192, 128): _Lengths((512, 512), (512, 512)),
        (256, 256): _Lengths((512, 2048), (512, 512)),
    }
}


def preference(operation: AttentionSpec, platform: str, operands: Operands) -> tuple[str, ...]:
    """What `implementation=None` tries, in this order. XLA serves everything, everywhere."""
    if platform != "cuda":
        return ("xla",)
    *others, last = _without_ffi(operation, operands)
    return ("ffi", *others, last) if _ffi_leads(operation, operands) else (*others, "ffi", last)


def _of_gpu[Sizes](table: dict[Generation, dict[Sizes, _Lengths]]) -> dict[Sizes, _Lengths]:
    """The entries for the GPU that is lowered for. One without any has those of Hopper."""
    return table.get(gpus.assumed().generation, table[Generation.HOPPER])


def _ffi_leads(operation: AttentionSpec, operands: Operands) -> bool:
    """Whether the CUDA kernels are the fastest where they serve an operation."""
    form, (query, key, value) = operation.form, operands[:BASE]
    if isinstance(operation, AttentionForward) and ffi.leads(operation, operands):
        return True
    queries, keys = query.shape[1], key.shape[1]
    known = isinstance(queries, int) and isinstance(keys, int)
    shortest = _of_gpu(_FFI_FROM).get((query.shape[3], value.shape[3]))
    if not known or queries != keys or shortest is None:
        return False
    of_rule = shortest.gradients if isinstance(operation, AttentionPullback) else shortest.forward
    return queries >= of_rule[form.right is not None]


def _without_ffi(operation: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """The order of the other implementations on a GPU.

    cuDNN's gradients have not the same bits on every run, so it computes them only where that is allowed, and only then
    its forward, which has no residual of the output, comes before them. Where the numbers of queries and keys differ,
    as when decoding, cuDNN comes first.
    """
    if isinstance(operation, PagedAttention):
        return ("xla",)
    form, query, value = operation.form, operands[0], operands[2]
    residual = isinstance(operation, AttentionForward) and operation.residual
    if form.deterministic and (residual or isinstance(operation, AttentionPullback)):
        return "pallas", "xla"
    length, *sizes = (n if isinstance(n, int) else math.inf for n in (query.shape[1], query.shape[3], value.shape[3]))
    table = _of_gpu(_PALLAS_UP_TO)
    longest = table[min((size for size in table if max(sizes) <= size), default=max(table))]
    forward, gradients = (of_rule[form.right is not None] for of_rule in (longest.forward, longest.gradients))
    last = gradients if isinstance(operation, AttentionPullback) else forward
    if residual:  # before its own gradients Pallas comes first
        last = max(forward, gradients)
    by_pallas = length <= last and query.shape[1] == value.shape[1]
    return ("pallas", "cudnn", "xla") if by_pallas else ("cudnn", "pallas", "xla")


def _refusal(implementation: str, operation: AttentionSpec, operands: Operands) -> str | None:
    """None, or why an implementation cannot serve an operation with such operands."""
    if implementation not in KERNELS:
        return "it has no kernels for attention"
    if isinstance(operation, PagedAttention) and implementation not in PAGED:
        return "it has no kernels for keys and values in pages"
    if _is_continued_outside(implementation, operation, operands):
        operation, operands = _of_block(operation, operands)
    return KERNELS[implementation].unsupported(operation, operands)


def _is_continued_outside(implementation: str, operation: AttentionSpec, operands: Operands) -> bool:
    """Whether an operation goes on from other blocks of keys, and a kernel does not."""
    return adapters.continues(operation) and not KERNELS[implementation].continues(operation, operands)


def _is_wide(operation: AttentionPullback, operands: Operands) -> bool:
    """Whether the cotangent is in another dtype than the queries, as it may be out of their range."""
    return operands[operation.operands.index("cotangent")].dtype != operands[0].dtype


def _narrow(operation: AttentionPullback, operands: Operands) -> tuple[AttentionPullback, Operands]:
    """The pullback with wide gradients and no sums, and its operands with a cotangent in the dtype of the queries."""
    found = dataclasses.replace(operation, wide=True, sums=())
    dtypes = {"cotangent": operands[0].dtype}
    named = zip(found.operands, operands, strict=False)
    return found, [x.update(dtype=dtypes.get(name, x.dtype)) for name, x in named]


def _of_block(operation: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The operation of a block of keys alone, and its operands."""
    found = adapters.without_state(operation, operands[0].dtype)
    return found, operands[: len(found.operands)]


def _is_empty(operands: Operands) -> bool:
    return any(size == 0 for v in operands for size in v.shape)


def _able(operation: AttentionSpec, operands: Operands) -> list[str]:
    return [name for name in KERNELS if not _refusal(name, operation, operands)]
