"""Attention over keys and values in pages, as JAX differentiates it: both modes, every order.

Where a call is differentiated, it is attention over the keys and values of its pages, gathered, so that its derivatives
are those of attention. A page's gradient is the sum of those of all sequences that have it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._attention.derivative import attention
from jaxsoft._attention.form import BASE, Extra, Form
from jaxsoft._attention.operation import Paged
from jaxsoft._attention.pages import gathered, which_are_there
from jaxsoft._attention.primitive import attention_operation
from jaxsoft._core.mesh import automatically
from jaxsoft._core.tangents import jvp_along

# What computes derivatives, by the implementation that was named. None for others, which have pages alone.
_OF_GATHERED = {"xla": "xla", "reference": "reference"}


@functools.cache
def paged_attention(form: Form, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """(query, pages of keys, pages of values, *extras) -> the output, the log-sum-exp and its rest, as a differentiable
    function.
    """
    alone = Paged(dataclasses.replace(form, rounded=False))

    @jax.custom_jvp
    def function(*operands):
        return attention_operation(alone, implementation, *operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        attend = functools.partial(_over_gathered, form, _OF_GATHERED.get(implementation or ""))
        return jvp_along(attend, primals, tangents)

    return function


def _over_gathered(form: Form, implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of a paged call, as one of keys and values that lie in one piece."""
    query, *pages = operands[:BASE]
    extras = form.named(operands)
    table, lengths = extras.pop(Extra.PAGE_TABLE), extras[Extra.KEY_LENGTHS]
    scales = {extra: extras.pop(extra) for extra in (Extra.KEY_SCALE, Extra.VALUE_SCALE) if extra in extras}
    # Products with scales would be rounded in the dtype of query.
    dtype = next((scale.dtype for scale in scales.values()), query.dtype)

    def gather(keys, values, table, lengths, *scales_given):
        there = which_are_there(table, lengths, *keys.shape[:2])
        given = dict(zip(scales, scales_given, strict=True))
        found = []
        for x, extra in ((keys, Extra.KEY_SCALE), (values, Extra.VALUE_SCALE)):
            x = gathered(x, table, there).astype(dtype)
            found.append(x * given[extra][None, None, :, None] if extra in given else x)
        return *found, there[:, None, None, :]

    key, value, there = automatically(gather, _shardings(query, *pages), *pages, table, lengths, *scales.values())
    extras[Extra.MASK] = extras[Extra.MASK] & there if Extra.MASK in extras else there
    ordered = {extra: extras[extra] for extra in Extra if extra in extras}
    form = dataclasses.replace(form, extras=tuple(ordered))
    return attention(form, implementation)(query.astype(dtype), key, value, *ordered.values())


def _shardings(query: jax.Array, *pages: jax.Array) -> tuple[Any, ...]:
    """Those of the keys and values, and of which of them are there (B, 1, 1, S), over explicit axes of a mesh."""
    types = [jax.typeof(x).sharding for x in (query, *pages)]
    mesh = next((t.mesh for t in types if not t.mesh.empty), types[0].mesh)
    batch = types[0].spec[0]
    specs = [PartitionSpec(batch, None, t.spec[2]) for t in types[1:]]
    return tuple(NamedSharding(mesh, spec) for spec in (*specs, PartitionSpec(batch)))
