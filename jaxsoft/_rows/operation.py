"""Row operations as JAX sees them: which kernel serves each, and how it splits over a mesh.

Every implementation offers an operation in the forms that it takes as they are, and else in the plain form, from which
the others are composed. Where only leading dimensions are sharded over a mesh, each device runs the kernel on its rows.
Where the reduced axis is sharded, each has a part of every row: see `shards`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsoft._core.implementations import (
    ALWAYS,
    PREFERENCE,
    REGISTERED,
    Choice,
    Names,
    accepted,
    accepts,
    not_by_default,
    refuse,
)
from jaxsoft._core.mesh import axes_of, if_even, refined
from jaxsoft._core.operation import Function, Served, Types, bdims_at_front
from jaxsoft._rows import forms, plain
from jaxsoft._rows.forms import RowForm, RowKernels, compose, result_types, working_dtype
from jaxsoft._rows.formulas import take
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft._rows.shards import on_shards
from jaxsoft._rows.spec import Reductions, RowKind, RowSpec
from jaxsoft.fold import State, accumulator


@dataclasses.dataclass(frozen=True)
class RowOperation(Served):
    """An operation in some form by some implementation.

    Its operands are those of the spec, and then the extras of the form. Leading dimensions are rows.
    """

    spec: RowSpec
    form: RowForm
    implementation: Names = None
    keeps_shardings = True

    @property
    def name(self) -> str:
        """That of the spec."""
        return self.spec.name

    def types(self, *operands):
        """The types of the results are those of the formula, which over a mesh gives them their shardings."""
        if jax.sharding.get_abstract_mesh().empty and all(v.sharding.mesh.empty for v in operands):
            types = result_types(self.spec, self.form, operands[0])
            return [jax.core.ShapedArray(t.shape, t.dtype) for t in types]
        return jax.make_jaxpr(self.formula())(*operands).out_avals

    def formula(self) -> Function:
        """The operation in plain JAX."""
        return compose(self.spec, self.form, plain.formula(self.spec, self.form))

    def batch(self, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Sequence[jax.Array]:
        """The mapped dimension comes first, and is more rows."""
        return self(*bdims_at_front(operands, dims, len(self.spec.operands)))

    def check(self, operands: Types) -> None:
        """Raises where no implementation that is accepted can take such operands on any platform."""
        if not self._is_taken(operands):
            operands = self._plain_operands(operands)
            reasons = {name: _refusal(name, operands) or "" for name in accepted(self.implementation, ())}
            raise refuse(self.implementation, reasons, _able(operands))

    def _is_taken(self, operands: Types) -> bool:
        """Whether one of those that are accepted takes such operands on some platform, as XLA always does."""
        if self.implementation is None or not operands[0].size:
            return True
        operands = self._plain_operands(operands)
        return any(_refusal(name, operands) is None for name in accepted(self.implementation, ()))

    def choose(self, platform: str, operands: Types) -> Choice:
        """The kernel on a platform. Raises where no implementation that is accepted can serve."""
        spec, form = self.spec, self.form
        if operands[0].size == 0:  # there is nothing to compute: no kernel needs to know about empty rows
            return Choice(self.name, "xla", self.formula())
        plain_operands = self._plain_operands(operands)

        def is_fastest(name: str) -> bool:
            if form.in_place and name != "ffi":  # no other implementation writes in place
                return False
            backend = REGISTERED[name]
            return not backend.unavailable(platform) and backend.rows.is_fastest(spec, form, platform, operands)

        preferred = sorted(PREFERENCE.get(platform, ALWAYS), key=lambda name: not is_fastest(name))
        reasons: dict[str, str] = {}
        for name in accepted(self.implementation, preferred):
            reason = REGISTERED[name].unavailable(platform) or not_by_default(self.implementation, name)
            reason = reason or _refusal(name, plain_operands)
            if reason is None:
                found = self._kernel(REGISTERED[name].rows, platform, operands, plain_operands)
                if not isinstance(found, str):
                    return Choice(self.name, name, *found, reasons)
                reason = found
            reasons[name] = reason
        assert self.implementation is not None, "xla serves everything"
        raise refuse(self.implementation, reasons, _able(plain_operands))

    def _kernel(self, kernels: RowKernels, platform: str, operands: Types, plain: Types) -> tuple[Function, str] | str:
        """An implementation's kernel that takes the form as it is, or else the form composed from its plain kernel.

        The kernel is described in words. If there is none, why.
        """

        def kernel(spec: RowSpec, form: RowForm, operands: Types) -> tuple[Function | str, str]:
            found = kernels.kernel(spec, form, platform, operands)
            return found, "" if isinstance(found, str) else kernels.describe(spec, form, platform, operands)

        spec, form = self.spec, self.form
        native, words = kernel(spec, form, operands)
        if not isinstance(native, str):
            return native, words
        # A form that is composed costs time, so the default choice goes on to the next implementation.
        if self.implementation is None and not kernels.composed:
            return native
        dtype = accumulator(plain[0].dtype) if spec.selects else plain[0].dtype  # probabilities are rounded once
        whole, words = kernel(spec, RowForm(dtype, k=form.k), plain)
        if not isinstance(whole, str):
            return compose(spec, form, whole), words and f"{words}, of scores that XLA writes before"
        if self.implementation is None or not spec.from_state:
            return whole
        # An operation that an implementation does not know, from its kernel for the state of the scores.
        state, words = kernel(STATE, RowForm(plain[0].dtype), plain[:1])
        if isinstance(state, str):
            return state
        reductions = Reductions(lambda x: State(*state(x)), lambda x: jax.numpy.sum(x, axis=-1), take)
        return compose(spec, form, forms.formula(spec, form, reductions)), words

    def _plain_operands(self, operands: Types) -> list[jax.core.ShapedArray]:
        """The operands of a kernel for the plain form, those before the second one of x's shape.

        The others do not decide whether an implementation can take the operands.
        """
        x = operands[0]
        axis = x.ndim - 1 - self.form.trailing
        shape = (*x.shape[:axis], *x.shape[axis + 1 :], x.shape[axis])
        scores = jax.core.ShapedArray(shape, working_dtype(self.spec, self.form, operands))
        others = zip(self.spec.kinds[1:], operands[1:], strict=False)
        return [scores, *(v for _, v in itertools.takewhile(lambda pair: not pair[0].whole_rows, others))]

    def within(self, spec: RowSpec, form: RowForm, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Any operation by the same implementation, within code for one device. XLA serves a part of rows that it does
        not take.
        """
        operation = RowOperation(spec, form, self.implementation)
        taken = operation._is_taken([jax.typeof(x) for x in operands])
        return (operation if taken else dataclasses.replace(operation, implementation="xla")).on_device(*operands)

    def partition(self, mesh, operands, results):
        """Rows stay on their devices, and so do parts of rows."""
        del results
        x, mesh = operands[0], refined(mesh, operands[0])
        dims = self._dims([v.shape for v in operands])
        axes = dict(zip(dims[0], axes_of(x, mesh), strict=True))
        axes["n"] = if_even(axes["n"], x.shape[dims[0].index("n")], mesh)

        def sharding(dims):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) or None for dim in dims)))

        local: Function = functools.partial(self.within, self.spec, self.form)
        if axes["n"]:
            local = on_shards(self.spec, self.form, axes["n"], self.within, accepts(self.implementation, "ffi"))
        return mesh, local, tuple(map(sharding, self._result_dims(dims[0]))), tuple(map(sharding, dims))

    def rule(self, operands: Sequence, results: Sequence) -> str:
        """The dimensions that are x's are sharded alike."""
        del results
        dims = self._dims([t.shape for t in operands])
        return " -> ".join(", ".join(map(" ".join, side)) for side in (dims, self._result_dims(dims[0])))

    def _dims(self, shapes: Sequence[Sequence[int]]) -> list[list[str]]:
        """A name for each dimension of each operand.

        The dimensions that are x's have its names, so that they are sharded alike. One of length 1 where x's is longer
        has a name of its own, and is whole on every device.
        """
        ndim = len(shapes[0])
        x = [f"r{i}" for i in range(ndim)]
        x[ndim - 1 - self.form.trailing] = "n"
        rows = [dim for dim in x if dim != "n"]
        dims = [x if kind.whole_rows else rows for kind in self.spec.kinds]
        length = dict(zip(x, shapes[0], strict=True))
        for extra, shape in zip(self.form.extras, shapes[len(dims) :], strict=True):
            like = zip(x if extra.whole_rows else rows, shape, strict=True)
            dims.append([dim if length[dim] == size else f"{extra.value}{dim}" for dim, size in like])
        return dims

    def _result_dims(self, x: list[str]) -> list[list[str]]:
        rows = [dim for dim in x if dim != "n"]
        chosen = [*rows, "k"]
        return [{RowKind.ROW: x, RowKind.STATISTIC: rows}.get(kind, chosen) for kind in self.spec.result_kinds]


def _refusal(name: str, operands: Types) -> str | None:
    """None, or why an implementation cannot take such operands."""
    kernels = REGISTERED[name].rows
    return kernels.unsupported(operands) if kernels else "it has no kernels for rows"


def _able(operands: Types) -> list[str]:
    return [name for name in REGISTERED if not _refusal(name, operands)]
