"""Attention as JAX sees it: which kernel serves an operation, and how it splits over a mesh (see `partition`)."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxsoft._attention import partition
from jaxsoft._attention.batching import mapped, paged_mapped
from jaxsoft._attention.choice import check_operands, choose
from jaxsoft._attention.spec import AttentionPullback, AttentionSpec, PagedAttention
from jaxsoft._core.implementations import Choice, Names
from jaxsoft._core.mesh import Axes, can_partition
from jaxsoft._core.operation import Function, Served, Types


@dataclasses.dataclass(frozen=True)
class AttentionOperation(Served):
    """An operation of attention by some implementation."""

    operation: AttentionSpec
    implementation: Names = None

    @property
    def name(self) -> str:
        """What is computed."""
        return self.operation.name

    @property
    def splits(self) -> bool:
        """Whether it has to say how it splits, or has a part of a sequence, which is no kernel's alone."""
        shards = self.operation.form.shards
        return super().splits or (shards is not None and (shards.inside or can_partition()))

    def check(self, operands: Types) -> None:
        """Raises where no implementation that is accepted can take such operands on any platform."""
        check_operands(self.operation, self.implementation, operands)

    def types(self, *operands):
        """Those of the operation."""
        return self.operation.types(*operands)

    def formula(self) -> Function:
        """That of the operation."""
        return self.operation.formula()

    def choose(self, platform: str, operands: Types) -> Choice:
        """The kernel, for operands that may have whole sequences in a layout."""
        choice = choose(self.operation.whole, self.implementation, platform, operands)
        return dataclasses.replace(choice, function=self.operation.on_one_device(choice.function))

    def split(self) -> Function:
        """The operation, which a mesh may partition. Within code for one device, a part of a sequence is computed with
        those of the others.
        """
        shards = self.operation.form.shards
        return self.on_shards((shards.axis,)) if shards is not None and shards.inside else super().split()

    def on_shards(self, axes: Axes, fresh: bool = False) -> Function:
        """The function of a device that has a part of each sequence, over these axes of a mesh."""

        def run(operation: AttentionSpec, *operands: jax.Array) -> tuple[jax.Array, ...]:
            of_part = AttentionOperation(operation, self.implementation)
            of_part.check([jax.typeof(x) for x in operands])
            return of_part.on_device(*operands)

        return self.operation.on_shards(axes, run, self.implementation, fresh)

    def partition(self, mesh, operands, results):
        """Batch and heads stay on their devices, and sequences if asked to."""
        return partition.partition(self.operation, self.on_device, self.on_shards, mesh, operands, results)

    def rule(self, operands: Sequence, results: Sequence) -> tuple[str, dict]:
        """Batch and heads are sharded alike."""
        return partition.rule(self.operation, operands, results)

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """A mapped dimension joins the batch."""
        operation = self.operation
        if isinstance(operation, PagedAttention):
            return paged_mapped(self, operation.operands, operation.results, operands, dims)
        wrt = operation.wrt if isinstance(operation, AttentionPullback) else ()
        return mapped(self, operation.operands, operation.results, operands, dims, wrt)


def attention_operation(operation: AttentionSpec, implementation: Names, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of an operation by an implementation."""
    return AttentionOperation(operation, implementation)(*operands)
