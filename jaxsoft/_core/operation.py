"""Operations: what JAX stages, differentiates, maps, partitions and lowers as one thing each, by one primitive.

An operation is a record that says what it computes and by what rules. Two kinds derive from it: a linear map, which has
a transpose (`linear_map`), and an operation that implementations serve: kernels, or a formula in plain JAX (`Served`).
Families derive their operations from these, and say only what differs.

`jax.custom_jvp` would not do, as JAX 0.11 forgets it where the function is in the body of a loop that is
differentiated, and then second derivatives reach what has none, as kernels. A primitive stays what it is.
"""

import abc
import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding

from jaxsoft._core.implementations import Choice, Names, is_opaque, report
from jaxsoft._core.mesh import can_partition, on_one_device

if TYPE_CHECKING:
    from jax.extend.core import Primitive

type Function = Callable[..., tuple[jax.Array, ...]]
type Types = Sequence[jax.core.ShapedArray]
type Tangent = jax.Array | SymbolicZero | ad.Zero


class Operation(abc.ABC):
    """A function of arrays that is one operation to JAX. Hashable."""

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results."""
        # The primitive holds its computation as a jaxpr. JAX searches the jaxprs of a program for operations that need
        # to know the devices when they are lowered, as custom_partitioning does.
        call = jax.make_jaxpr(lambda *operands: self.apply(operands))(*operands)
        return tuple(_operation_p().bind(*operands, operation=self, call=call))

    @abc.abstractmethod
    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The function, made of other operations."""

    @abc.abstractmethod
    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """The tangents of the results, of tangents that may be known to be zero."""

    def jvp(self, primals: Sequence[jax.Array], tangents: Sequence) -> tuple[Sequence[jax.Array], Sequence]:
        """The results and their tangents, for a function that computes something for both at once."""
        return self(*primals), self.tangents(primals, tangents)

    @abc.abstractmethod
    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The results for operands that are mapped along some dimensions, mapped along the first."""

    def cotangents(self, of_results: Sequence, operands: Sequence) -> Sequence:
        """The cotangents of the operands in which the function is linear, where JAX transposes it by these alone.

        Args:
          of_results: those of the results.
          operands: of which those are `ad.UndefinedPrimal`. The cotangents of others are None.
        """
        del of_results, operands
        raise NotImplementedError(f"{self} is not linear in its operands, so it has no transpose")


class Served(Operation):
    """An operation that implementations serve.

    Which one does depends on the platform that a computation is lowered for, so it is chosen then, and not when the
    operation is called.
    """

    # Whether what serves it is traced with the shardings over explicit axes of a mesh, or as code for one device.
    keeps_shardings = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the operation is called where a choice is explained, and in the metadata of programs."""

    # The names of the implementations that the caller accepts; None for all.
    implementation: Names

    @property
    def splits(self) -> bool:
        """Whether it has to say how it splits over a mesh, as XLA's partitioner cannot see into it."""
        return is_opaque(self.implementation) and can_partition()

    @abc.abstractmethod
    def types(self, *operands: jax.core.ShapedArray) -> Types:
        """The types of the results, which over a mesh have shardings."""

    @abc.abstractmethod
    def formula(self) -> Function:
        """The operation in plain JAX, which JAX can differentiate."""

    @abc.abstractmethod
    def choose(self, platform: str, operands: Types) -> Choice:
        """The implementation that serves it on a platform, "cpu", "cuda" or "other". Raises where none does."""

    @abc.abstractmethod
    def partition(
        self, mesh: Mesh, operands: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Mesh, Function, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """How it splits over a mesh: over which one, the function of a device, the shardings of results and operands.

        Args:
          mesh: of the program.
          operands, results: the whole ones, as XLA has sharded them.
        """

    @abc.abstractmethod
    def rule(self, operands: Sequence, results: Sequence) -> str | tuple[str, dict]:
        """The sharding rule: which dimensions of which arrays are sharded alike, as `def_partition` takes it."""

    def check(self, operands: Types) -> None:
        """Raises where no implementation that is accepted can take such operands on any platform."""
        del operands

    def apply(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The operation, which a mesh may partition."""
        return self.split()(*operands)

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results. Raises at once where no implementation that is accepted can take such operands."""
        self.check([jax.typeof(x) for x in operands])
        operation = self if self.implementation is not None or can_partition() else self.by("xla")
        if not operation.splits:
            return operation.on_device(*operands)
        call = jax.make_jaxpr(operation.split())(*operands)
        return tuple(_operation_p().bind(*operands, operation=operation, call=call))

    def split(self) -> Function:
        """The operation, which a mesh may partition."""
        return _partitioned(self)

    def by(self, implementation: Names) -> Self:
        """The operation by another implementation."""
        return dataclasses.replace(self, implementation=implementation)  # type: ignore[type-var]

    def on_device(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """The results, within code for one device, or by an implementation that XLA can partition."""
        return tuple(_operation_p().bind(*operands, operation=self, call=None))

    def tangents(self, primals: Sequence[jax.Array], tangents: Sequence) -> Sequence:
        """Those of the formula, which only forward mode and derivatives of higher order ask for. Integers have none."""
        results, along = jvp_along(self.formula(), primals, tangents)
        return [
            t if jnp.issubdtype(y.dtype, jnp.floating) else zero_tangent(y) for y, t in zip(results, along, strict=True)
        ]


@functools.cache
def _partitioned(operation: Served) -> Function:
    """The operation, which XLA may partition.

    For XLA, a call of such a function is a pointer to the Python code that splits it. In a program it is all that tells
    one call from another with operands of the same types. It is in JAX's keys of the persistent compilation cache, so
    that no process finds the programs of another, unless `jax_remove_custom_partitioning_ptr_from_cache_key` leaves it
    out. So the call also has an attribute that is the same in every process, and another for what is computed in
    another way: a digest of the operation's `repr`, which must tell all that decides what it does, and of the code.
    """

    def partition(mesh, operands, results):
        mesh, local, of_results, of_operands = operation.partition(mesh, operands, results)
        return mesh, on_one_device(local), of_results, of_operands

    def rule(mesh, operands, results):
        del mesh
        return operation.rule(operands, results)

    call = custom_partitioning(operation.on_device)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(operation))

    def partitioned(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Products get their default precision where the call is split, which is when it is compiled.
        parts = (_sources(), str(jax.config.jax_default_matmul_precision), text)
        first, *others = call(*operands)
        return set_xla_metadata(first, jaxsoft=hashlib.sha256("\n".join(parts).encode()).hexdigest()), *others

    return partitioned


@functools.cache
def _sources() -> str:
    """A digest of the package's code, as another version may split the same call in another way."""
    files = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _operation_p() -> "Primitive":
    # Not by jax.extend, which imports Pallas: that is slow, and adds to what JAX's caches compare, so that all programs
    # that were compiled before are compiled once more, and so is the one that is being traced.
    made = type(jax.lax.add_p)("jaxsoft")
    made.multiple_results = True
    made.def_impl(_impl)
    made.def_abstract_eval(_abstract_eval)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.primitive_batchers[made] = _batch
    # A rule for each platform, which lowers for this one alone where there are several: Pallas kernels cannot be
    # lowered for several at once.
    mlir.register_lowering(made, functools.partial(_lower, "other"))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(made, functools.partial(_lower, platform), platform=platform)
    return made


def _impl(*operands, operation, call):
    return _compiled(*operands, operation=operation, on_device=call is None)


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


@functools.partial(compiled, static_argnames=("operation", "on_device"))
def _compiled(*operands, operation, on_device):
    return operation.on_device(*operands) if on_device else operation.apply(operands)


def _abstract_eval(*operands, operation, call):
    return operation.types(*operands) if call is None else call.out_avals


def _jvp(primals, tangents, *, operation, call):
    del call
    results, found = operation.jvp(primals, tangents)
    return results, [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in found]


def _transpose(cotangents, *operands, operation, call):
    del call
    return operation.cotangents(cotangents, operands)


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, operation, call):
    del call
    results = operation.batch(operands, dims)
    return results, [0] * len(results)


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, operation, call):
    if call is not None:
        computed = functools.partial(jax.core.eval_jaxpr, call.jaxpr, call.consts)
        return mlir.lower_fun(computed, multiple_results=True)(ctx, *operands)
    types = cast(Types, ctx.avals_in)
    if not operation.keeps_shardings:
        types = [jax.core.ShapedArray(v.shape, v.dtype) for v in types]
    choice = operation.choose(platform, types)
    report(choice)
    kernel = jax.named_scope(choice.scope)(choice.function)
    kernel = kernel if operation.keeps_shardings else on_one_device(kernel)
    return mlir.lower_fun(kernel, multiple_results=True)(ctx.replace(avals_in=types), *operands)


def bdims_at_front(operands: Sequence[jax.Array], dims: Sequence[int | None], base: int) -> list[jax.Array]:
    """The operands with their mapped dimensions in front, for `Operation.batch` where these are more rows.

    One that is not mapped is repeated along it if it is among the `base` first ones; an extra gets length 1 there.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size if i < base else 1, *x.shape))
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]


def is_perturbed(tangent: Tangent) -> bool:
    """Whether a tangent is an array, and not known to be zero, as that of integers always is."""
    return not isinstance(tangent, SymbolicZero | ad.Zero)


def jvp_along(function: Callable, primals: Sequence[jax.Array], tangents: Sequence) -> Any:
    """`jax.jvp`, along those operands whose tangents are not known to be zero."""
    perturbed = [i for i, t in enumerate(tangents) if is_perturbed(t)]

    def along(*values):
        varied = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            varied[i] = value
        return function(*varied)

    return jax.jvp(along, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])


def zero_tangent(value: jax.Array) -> SymbolicZero:
    """The tangent of a value that is constant, as a rule with symbolic zeros may give it.

    The rule of a function whose results hold integers has to: an array of float0 would not vary over the mesh axes of
    `jax.shard_map` as the result does, which JAX refuses.
    """
    return SymbolicZero(jax.typeof(value).to_tangent_aval())
