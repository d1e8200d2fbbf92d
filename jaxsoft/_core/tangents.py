"""Tangents that are known to be zero, in the rules for derivatives that jaxsoft gives to JAX."""

from collections.abc import Callable, Sequence

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad


def moves(tangent: jax.Array | SymbolicZero | ad.Zero) -> bool:
    """Whether a tangent is an array, and not known to be zero, as that of integers always is."""
    return not isinstance(tangent, SymbolicZero | ad.Zero)


def jvp_along(function: Callable, primals: Sequence[jax.Array], tangents: Sequence):
    """`jax.jvp`, along those operands that move."""
    moving = [i for i, t in enumerate(tangents) if moves(t)]

    def along(*values):
        varied = list(primals)
        for i, value in zip(moving, values, strict=True):
            varied[i] = value
        return function(*varied)

    return jax.jvp(along, [primals[i] for i in moving], [tangents[i] for i in moving])


def zero_tangent(value: jax.Array) -> SymbolicZero:
    """The tangent of a value that does not move, as a rule with symbolic zeros may give it.

    The rule of a function whose results hold integers has to: an array of float0 would not vary over the mesh axes of
    `jax.shard_map` as the result does, which JAX refuses.
    """
    return SymbolicZero(jax.typeof(value).to_tangent_aval())
