"""Calls of the public functions as functions of their floating-point operands, beside their definitions in float64.

A `Case` is taken through any transformations of JAX, one after the other, jaxsoft's function and the definition alike,
and the two are compared. `nonlinear` sees to it that no derivative of any order vanishes: a rule that is wrong only
where the result enters a non-linear function shows.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from truth import in_float64, wide

type Function = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
      what: the call, for messages.
      ours: jaxsoft's function of the operands.
      theirs: its definition.
      operands: arrays of floating-point numbers.
    """

    what: str
    ours: Function
    theirs: Function
    operands: Sequence[np.ndarray]

    def through(self, name: str) -> "Case":
        """The case after a transformation, which may change the operands."""
        change = TRANSFORMATIONS[name]
        ours, operands = change(self.ours, self.operands)
        theirs, _ = change(self.theirs, self.operands)
        return Case(f"{name} of {self.what}", ours, theirs, operands)

    @staticmethod
    def together(what: str, cases: Sequence["Case"]) -> "Case":
        """Cases of the same operands as one, which is compiled once."""
        return Case(
            what,
            lambda *v: tuple(case.ours(*v) for case in cases),
            lambda *v: tuple(case.theirs(*v) for case in cases),
            cases[0].operands,
        )

    def check(self, run: Callable[[Function], Function] = jax.jit) -> None:
        """Compares the two. `run` says how jaxsoft's function is called."""
        actual = jax.tree.leaves(run(self.ours)(*self.operands))
        expected = jax.tree.leaves(in_float64(self.theirs, *self.operands))
        tolerance = max(TOLERANCES[v.dtype.itemsize] for v in (*self.operands, *actual))
        assert len(actual) == len(expected), self.what
        for a, e in zip(actual, expected, strict=True):
            assert a.shape == e.shape, (self.what, a.shape, e.shape)
            e = np.where(np.abs(e) > float(jnp.finfo(a.dtype).max), np.copysign(np.inf, e), wide(e))
            a = wide(a)
            size = 1 + np.abs(e, where=np.isfinite(e), out=np.zeros(e.shape)).max(initial=0)
            with np.errstate(invalid="ignore"):
                wrong = ~((np.abs(a - e) <= tolerance * size) | (a == e) | (np.isnan(a) & np.isnan(e)))
            assert not wrong.any(), (
                f"{self.what}: {wrong.sum()} of {wrong.size} numbers are off by more than {tolerance * size}; "
                f"{a[wrong][:3]} should be {e[wrong][:3]}"
            )


# By the bytes of a number, relative to the largest number of an array. They allow for terms of up to 100 under two
# derivatives. A formula that is wrong shows in float64.
TOLERANCES = {2: 0.3, 4: 2e-3, 8: 1e-9}


def nonlinear(f: Function) -> Callable[..., jax.Array]:
    """A scalar of all of f's finite results: no derivative vanishes, and large results count as their logarithms do."""

    def total(*operands):
        terms = []
        for y in jax.tree.leaves(f(*operands)):
            y = y.astype(jnp.float32) if y.dtype.itemsize < 4 else y
            y = jnp.where(jnp.isfinite(y), y, 0)
            weight = 1 + (jnp.arange(y.size, dtype=jnp.int32) % 7).astype(y.dtype)
            terms.append(jnp.sum(jnp.arcsinh(y) * weight.reshape(y.shape)))
        return sum(terms[1:], terms[0])

    return total


def _grad(f, operands):
    return lambda *v: jax.grad(nonlinear(f), tuple(range(len(operands))))(*v), operands


def _jvp(f, operands):
    def tangent(v):  # made of v, so that it is sharded as v
        return jnp.cos(jnp.where(jnp.isfinite(v), v, 0))

    return lambda *v: jax.jvp(f, v, tuple(map(tangent, v))), operands


def _vmap(which: Callable[[int], bool], axis: int):
    def change(f, operands):
        mapped = [which(i) for i in range(len(operands))]
        axes = [axis if m else None for m in mapped]
        more = [np.stack([v, v[..., ::-1] if v.ndim else v], axis) if m else v for v, m in zip(operands, mapped)]  # noqa: B905
        return jax.vmap(f, axes), more

    return change


TRANSFORMATIONS = {
    "grad": _grad,
    "jvp": _jvp,
    "vmap": _vmap(lambda i: True, 0),
    "vmap of the last axis": _vmap(lambda i: True, -1),
    "vmap of the first operand": _vmap(lambda i: i == 0, 0),
    "map": lambda f, operands: (
        lambda *v: jax.lax.map(lambda one: f(*one), v),
        [np.stack([v, v[..., ::-1] if v.ndim else v]) for v in operands],
    ),
    "checkpoint": lambda f, operands: (jax.checkpoint(f), operands),
    "jit": lambda f, operands: (jax.jit(f), operands),
}
