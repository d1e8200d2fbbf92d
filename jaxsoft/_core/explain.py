"""`explain`: which implementation and kernel serves each operation of a program, and why not the ones before it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxsoft._core import gpus
from jaxsoft._core.implementations import Choice, collected


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves the operations of a program. As a string it is a table.

    Attributes:
      choices: one for each operation, in the order in which they are lowered: what has it been called, the name of the
        implementation, the kernel and how it cuts up its work, as far as that is known before it runs, and for each
        implementation that was tried before, why it does not serve. What a program does several times by the same
        function is here once.
    """

    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        """A line for each operation, followed by the reasons."""
        if not self.choices:
            return "no operation of jaxsoft"
        names = max(len(choice.operation) for choice in self.choices)
        by = max(len(choice.implementation) for choice in self.choices)
        lines = []
        for choice in self.choices:
            lines.append(f"{choice.operation:{names}}  {choice.implementation:{by}}  {choice.kernel}".rstrip())
            lines += [f"  not {name}: {reason}" for name, reason in choice.reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says which implementation and kernel serves each operation of a function, and why those before it do not.

    The function is traced and lowered for the default device, or for the one that `jax.sharding.use_abstract_mesh`
    names, which need not be here. Nothing is run. If its operands lie over several devices it is compiled as well,
    since how an operation splits is known only then.

    Args:
      function: any function of arrays, as `jax.jit` takes it: a training step, for example, or one that is compiled
        already.
      args, kwargs: what it is called with. Arrays may be `jax.ShapeDtypeStruct`. What is no array, as a number or a
        name, is a constant.

    Returns:
      An `Explanation`, which prints as a table, and whose `choices` are the lines.

    The same is told while programs are compiled by the logger "jaxsoft" at level DEBUG, to stderr if the environment
    has JAXSOFT_LOG=choice. A kernel's line is in the metadata of the compiled program, where profilers show it.

    >>> explain(jax.grad(lambda x: softmax(x, implementation="xla")[0]), jnp.ones(4))
    softmax      xla
    softmax_vjp  xla
    """
    # Names, axes and other options stay as they are, as a function that is compiled already may have them static.
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, v in enumerate(leaves) if hasattr(v, "shape") and hasattr(v, "dtype")]

    # A new function each time, as JAX keeps what it has lowered.
    def called(*arrays: jax.Array) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, v) for i, v in enumerate(leaves)])
        return function(*args, **kwargs)

    elsewhere = gpus.elsewhere() is not None
    with collected() as found:
        traced = jax.jit(called).trace(*(leaves[i] for i in places))
        lowered = traced.lower(lowering_platforms=("cuda",)) if elsewhere else traced.lower()
        if not elsewhere and "CustomSPMDPartitioning" in lowered.as_text():
            lowered.compile()
    return Explanation(tuple(found))
