"""A case as compiled programs: its input, its calls by every implementation, and the copy that it is compared with.

All of a batch of cases is compiled before any of it is timed, on all cores at once, as compiling takes longer than
running, and would disturb it. A program that cannot be made is an error only when it is asked for.
"""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from check import some_rows
from jax.stages import Compiled, Lowered
from row_cases import Case
from shared import compiling

import jaxsoft

# Every input repeats a prime number of random numbers, so that no two rows are the same.
_PERIOD = 2**22 - 3


def random(seed: int, dtype: str) -> jax.Array:
    """The random numbers that inputs repeat: normal, for seed 0 with a standard deviation of 4.

    They are drawn in f32 and rounded. Those that are drawn in 16 bits have so few values that many are the largest.
    """
    return ((1 if seed else 4) * jax.random.normal(jax.random.key(seed), (_PERIOD,), jnp.float32)).astype(dtype)


def fill(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of these numbers, over and over."""
    size = math.prod(shape)
    repeated = jnp.broadcast_to(numbers, (-(-size // numbers.size), numbers.size))
    return repeated.reshape(-1)[:size].reshape(shape)


def operands(case: Case) -> dict[str, jax.Array]:
    """The arrays beside x."""
    found = {}
    if case.where:
        found["where"] = jax.jit(lambda numbers: fill(numbers, case.where) > -3.4)(random(0, "float32"))  # 4 in 5
    if case.bias:
        found["bias"] = jax.jit(lambda numbers: fill(numbers, case.bias))(random(2, case.dtype))
    if isinstance(case.scale, tuple):
        found["scale"] = jax.jit(lambda numbers: jnp.exp(fill(numbers, case.scale) / 4))(random(2, "float32"))
    return found


def result_shape(case: Case) -> tuple[int, ...]:
    """The shape of the forward result, and of its cotangent."""
    axis = case.axis % len(case.shape)
    return case.shape[:axis] + case.shape[axis + 1 :] if case.op == "logsumexp" else case.shape


def function(case: Case, implementation: str) -> Callable[[jax.Array, dict[str, jax.Array]], jax.Array]:
    """The forward function, of x and the operands."""

    def of_jaxsoft(x, extra):
        static: dict[str, Any] = {"is_causal": True} if case.causal else {}
        if isinstance(case.scale, float):
            static["scale"] = case.scale
        if implementation != "jaxsoft":
            static["implementation"] = implementation
        return getattr(jaxsoft, case.op)(x, axis=case.axis, **extra, **static)

    def of_jax(x, extra):
        """In x's dtype throughout, and masked by adding -inf: of the ways to write it, what moves least."""
        scale, counts = extra.get("scale", case.scale), extra.get("where")
        if scale is not None:
            x = x * jnp.asarray(scale, x.dtype)
        if "bias" in extra:
            x = x + extra["bias"]
        if case.causal:
            counts = jnp.tril(jnp.ones(x.shape[-2:], bool))
        if counts is not None:
            x = x + jnp.where(counts, 0, -jnp.inf).astype(x.dtype)
        return getattr(jax.nn, case.op)(x, axis=case.axis)

    return of_jax if implementation == "jax.nn" else of_jaxsoft


def chained(step: Callable[..., jax.Array], length: int) -> Callable[..., jax.Array]:
    """`length` steps, each on the result of the one before. The barrier keeps XLA from fusing two of them."""

    def chain(x, *rest):
        for _ in range(length):
            x = jax.lax.optimization_barrier(step(x, *rest))
        return x

    return chain


def lower_calls(case: Case, implementation: str) -> list[Lowered]:
    """forward: [f]. backward: [from x to the pullback, from the pullback and g to dx]. A chain: [f, the chain]."""
    f = function(case, implementation)
    x, extra = jax.ShapeDtypeStruct(case.shape, case.dtype), jax.eval_shape(lambda: operands(case))
    if case.direction == "backward":
        # A pullback is a pytree: it passes out of one compiled function and into another, with all that it keeps.
        keep = jax.jit(lambda x, extra: jax.vjp(lambda x: f(x, extra), x)[1]).lower(x, extra)
        g = jax.ShapeDtypeStruct(result_shape(case), case.dtype)
        return [keep, jax.jit(lambda pullback, g: pullback(g)[0]).lower(keep.out_info, g)]
    if case.chain:
        return [jax.jit(f).lower(x, extra), jax.jit(chained(f, case.chain), donate_argnums=0).lower(x, extra)]
    return [jax.jit(f).lower(x, extra)]


def copy_shape(case: Case) -> tuple[int, ...]:
    """The array of f32 whose copy moves as many bytes as the case; within 3 %, so that cases share their copies."""
    elements = case.bytes // 8
    unit = 2 ** max(0, elements.bit_length() - 6)
    return (max(1, elements // unit) * unit,)


def lower_copy(shape: tuple[int, ...]) -> list[Lowered]:
    """On a GPU the device's memcpy. A CPU's is -x, which moves as much and cannot be optimized away."""
    step = jnp.negative if jax.default_backend() == "cpu" else jnp.copy
    return [jax.jit(step).lower(jax.ShapeDtypeStruct(shape, jnp.float32))]


def lower_copy_chain(dtype: str, shape: tuple[int, ...], length: int) -> list[Lowered]:
    """A chain of -x, as a compiled function has no copies: XLA drops them."""
    return [jax.jit(chained(jnp.negative, length), donate_argnums=0).lower(jax.ShapeDtypeStruct(shape, dtype))]


def lower_fill(dtype: str, shape: tuple[int, ...]) -> list[Lowered]:
    """From the random numbers to an array of them."""
    return [jax.jit(lambda numbers: fill(numbers, shape)).lower(jax.ShapeDtypeStruct((_PERIOD,), dtype))]


def lower_some_rows(dtype: str, shape: tuple[int, ...], axis: int) -> list[Lowered]:
    """From an array to those of its rows that are checked."""
    indices = some_rows(shape, axis)
    return [jax.jit(lambda x: jnp.stack([x[i] for i in indices])).lower(jax.ShapeDtypeStruct(shape, dtype))]


class Programs:
    """The programs of some cases, compiled. `get` takes one of the functions above that lower, and its arguments."""

    def __init__(self, cases: Iterable[Case], progress: Callable[[str], None]):
        """Compiles. `progress` is told what is being done."""
        self._futures: dict[tuple, Future[list[Compiled]]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as self._pool:
            for case in cases:
                progress(f"compiling {case}")
                for name in case.implementations:
                    self._submit(lower_calls, case, name)
                self._submit(lower_fill, case.dtype, case.shape)
                self._submit(lower_some_rows, case.dtype, case.shape, case.axis)
                if case.direction == "backward":
                    self._submit(lower_fill, case.dtype, result_shape(case))
                if case.chain:
                    self._submit(lower_copy_chain, case.dtype, case.shape, case.chain)
                else:
                    self._submit(lower_copy, copy_shape(case))
                    self._submit(lower_fill, "float32", copy_shape(case))

    def _submit(self, lower: Callable[..., list[Lowered]], *args: Any) -> None:
        if (lower, *args) not in self._futures:
            self._futures[lower, *args] = compiling(self._pool, lambda: lower(*args))

    def get(self, lower: Callable[..., list[Lowered]], *args: Any) -> list[Compiled]:
        """The programs that were compiled. Raises what kept them from being."""
        return self._futures[lower, *args].result()
