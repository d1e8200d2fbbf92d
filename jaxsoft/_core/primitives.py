"""How a primitive of jaxsoft is made, and how it runs outside of `jax.jit`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def primitive(name: str, impl: Callable, abstract_eval: Callable) -> "Primitive":
    """A primitive of several results."""
    # Not by jax.extend, which imports Pallas: that is slow, and adds to what JAX's caches compare, so that all programs
    # that were compiled before are compiled once more, and so is the one that is being traced.
    made = type(jax.lax.add_p)(name)
    made.multiple_results = True
    made.def_impl(impl)
    made.def_abstract_eval(abstract_eval)
    return made


def compiled[**P, T](function: Callable[P, T], static_argnames: str | tuple[str, ...] = ()) -> Callable[P, T]:
    """`function`, compiled even under `jax.disable_jit`, as JAX's own primitives are.

    What a primitive computes binds the primitive, or others, so without compilation it would call itself without end.
    """
    # As of its own primitives: jax.debug_nans and jax.debug_infs then report it, and do not call it once more.
    function._apply_primitive = True  # type: ignore[attr-defined]
    jitted = jax.jit(function, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.disable_jit(False):
            return jitted(*args, **kwargs)

    return call
