"""Attention over keys and values in pages, as JAX differentiates it: both modes, every order.

Where a call is differentiated, it is attention over the keys and values of its pages, gathered, so that its derivatives
are those of attention. A page's gradient is the sum of those of all sequences that have it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._attention.derivative import LinearInValue, attention
from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._attention.pages import contiguous, contiguous_form
from jaxsoft._attention.spec import PagedAttention
from jaxsoft._core.implementations import Names
from jaxsoft._core.mesh import automatically
from jaxsoft._core.operation import Function, jvp_along


@functools.cache
def paged_attention(form: AttentionForm, implementation: Names) -> Function:
    """(query, pages of keys, pages of values, *extras) -> the output, the log-sum-exp and its residual, as a function
    that is differentiable.
    """
    values = PagedAttention(dataclasses.replace(form, rounded=False))

    @jax.custom_jvp
    def function(*operands):
        return _PagedLinearInValue(values, implementation)(*operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        # Others serve pages alone, and derivatives are of what is gathered from these.
        named = implementation if implementation in ("xla", "reference") else None
        return jvp_along(functools.partial(_over_gathered, form, named), primals, tangents)

    return function


@dataclasses.dataclass(frozen=True)
class _PagedLinearInValue(LinearInValue):
    def differentiable(self) -> Function:
        """The operation with derivatives."""
        return paged_attention(self.operation.form, self.implementation)


def _over_gathered(form: AttentionForm, implementation: Names, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of a paged call, as one of keys and values that lie in one piece."""
    flat = contiguous_form(form)
    shardings = _shardings(form, flat, operands)
    return attention(flat, implementation)(*automatically(lambda *v: contiguous(form, v), shardings, *operands))


def _shardings(form: AttentionForm, flat: AttentionForm, operands: Sequence[jax.Array]) -> tuple[Any, ...]:
    """Those of the operands of the call that a paged one becomes, over explicit axes of a mesh."""
    given = {name: jax.typeof(x).sharding for name, x in zip(form.names, operands, strict=True)}
    mesh = next((t.mesh for t in given.values() if not t.mesh.empty), given["query"].mesh)
    batch = given["query"].spec[0]
    specs = {name: t.spec for name, t in given.items()}
    specs |= {name: PartitionSpec(batch, None, given[name].spec[2]) for name in ("key", "value")}
    specs |= {Extra.QUERY_SEGMENTS.value: PartitionSpec(), Extra.KEY_SEGMENTS.value: PartitionSpec(batch)}
    return tuple(NamedSharding(mesh, specs[name]) for name in flat.names)
