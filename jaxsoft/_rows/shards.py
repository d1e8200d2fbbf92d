"""Row operations on one device's part of rows whose reduced axis is sharded over a mesh.

A kernel reduces the part, the devices exchange a few numbers a row once, and a kernel or a loop of XLA's writes the
part of the result from what they make together. What needs no more of a row than that runs on the part as it is.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._core.mesh import Axes, combined, exchanged
from jaxsoft._core.operation import Function
from jaxsoft._rows import formulas
from jaxsoft._rows.forms import Extras, RowForm, compose, formula, scores, split, valid_elements
from jaxsoft._rows.operations.entropy import products_from
from jaxsoft._rows.operations.labels import LABEL_ENTROPY, LABEL_STATE, LABEL_SUMS
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.sharded_top_k import selected_over_shards
from jaxsoft._rows.spec import NO_ROW, Reduction, Reductions, RowExtra, RowKind, RowSpec
from jaxsoft.fold import State, accumulator, combine, reference, weight

# Of the first elements of a part without the label, the first finite score stands in for it: see `_stand_in`.
_SEARCHED = 128


def on_shards(operation: RowSpec, form: RowForm, axes: Axes, run: Function, by_ffi: bool) -> Function:
    """The operation on one device's part of rows that are sharded over mesh axes.

    Args:
      operation, form, axes: which, in which form, and over which axes.
      run: (operation, form, *operands) -> the results of any operation within code for one device.
      by_ffi: whether C++ and CUDA kernels may serve.
    """

    def local(*operands):
        base, extras = split(operation, form, operands)
        x = base[0]
        n = x.shape[-1 - form.trailing]
        begin = jax.lax.axis_index(axes).astype(jnp.int32) * n
        if RowExtra.LIMIT in extras:
            extras[RowExtra.LIMIT] = jnp.clip(extras[RowExtra.LIMIT] - begin, 0, n)
        pairs = zip(operation.kinds, base, strict=True)
        within = [formulas.labels_within(v, begin) if kind is RowKind.LABEL else v for kind, v in pairs]
        given = *within, *extras.values()
        if operation is TOP_K:
            return selected_over_shards(form, axes, run, by_ffi)(*given)
        if operation.of_parts:
            return operation.of_parts(axes, run(operation, form, *given))
        if operation in (LABEL_STATE, LABEL_SUMS, LABEL_ENTROPY):
            return _labelled(operation, form, axes, run, base[1], within, extras)
        if operation.reduces is Reduction.STATE:
            return _from_state(operation, form, axes, run, given)
        if operation.reduces is Reduction.NOTHING:
            return run(operation, form, *given)
        return _formula(operation, form, axes)(*given)

    return local


def _from_state(
    operation: RowSpec, form: RowForm, axes: Axes, run: Function, given: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """An operation that needs the state of the scores, the whole row's, to write its results."""
    before = dataclasses.replace(form, dtype=given[0].dtype, in_place=False)
    st = combined(State(*run(STATE, before, *given)), axes)
    if operation is STATE:
        return tuple(st)
    if operation is SOFTMAX and RowExtra.SCALE not in form.extras:  # the pullback would multiply by the scale
        x, *extras = given
        one = formulas.nan_where(~jnp.isfinite(st.m), jnp.ones_like(st.m))  # a row without a maximum has no softmax
        return run(LOGSUMEXP_VJP, form, x, *st, one, *extras)
    return _formula(operation, form, axes, st)(*given)


def _labelled(
    operation: RowSpec,
    form: RowForm,
    axes: Axes,
    run: Function,
    label: jax.Array,
    within: Sequence[jax.Array],
    extras: Extras,
) -> tuple[jax.Array, ...]:
    """What a loss needs to know of rows with a label, which lies in one of their parts.

    `within` has the scores, and the label as an index into the part.
    """
    x, i = within
    n = x.shape[-1 - form.trailing]
    here, none = (i >= 0) & (i < n), label == NO_ROW
    near = jnp.where(here | none, i, _stand_in(form, x, extras)) if operation is LABEL_SUMS else i
    m, s, t, *sums = run(operation, form, x, near, *extras.values())
    st = State(m, s)
    if operation is LABEL_SUMS:  # what stood in for the label is one of the other scores
        stands = ~here & (near >= 0)
        st = combine(st, State(jnp.where(stands, t, -jnp.inf), stands.astype(s.dtype)))
        sums.append(reference(t))

    def of_maxima(m, s, t, *sums):
        return m, t

    def of_sums(maxima, m, s, t, *sums):
        all_m, all_t = maxima
        found = [s * weight(m, all_m), jnp.where(jnp.isnan(t), t, 0)]
        if operation is LABEL_ENTROPY:
            found.append(products_from(all_m, State(m, s), *sums))
        if operation is LABEL_SUMS:
            distances, count, relative_to = sums
            found += [distances + count * (relative_to - reference(all_t)), count]
        return found

    numbers = *st, jnp.where(here, t, -jnp.inf), *sums
    (m, t), (s, nan, *sums) = exchanged(axes, numbers, of_maxima, of_sums)
    outside = (label < 0) | (label >= n * jax.lax.axis_size(axes))
    return m, s, jnp.where(none, 0, formulas.nan_where(outside, t + nan)), *sums


def _stand_in(form: RowForm, x: jax.Array, extras: Extras) -> jax.Array:
    """An element of each row that can stand in for the label where this is in another part, or -1.

    Distances from the label's score are summed where it is not known yet. Those from 0 would lose their digits where
    all scores are large, and those from any finite score of the part do not: it is valid, and at distance 0. One is
    sought among the first elements alone, so a part that begins with many that are masked may go without.
    """
    axis = x.ndim - 1 - form.trailing
    some = min(_SEARCHED, x.shape[axis])
    first = jnp.moveaxis(jax.lax.slice_in_dim(x, 0, some, axis=axis), axis, -1)
    beside = {name: v[..., :some] if name.whole_rows else v for name, v in extras.items()}
    z = scores(form, first, beside, accumulator(x.dtype), valid_elements(form, first, beside))
    place = jnp.min(jnp.where(jnp.isfinite(z), formulas.positions(z), some), axis=-1, initial=some)
    return jnp.where(place < some, place, -1)


def _formula(operation: RowSpec, form: RowForm, axes: Axes, st: State | None = None) -> Function:
    """The operation in plain JAX, given the state of the whole rows if it takes one."""

    def state(x):
        assert st is not None
        return st

    def total(x):
        return jax.lax.psum(jnp.sum(x, axis=-1, dtype=accumulator(x.dtype)), axes)

    return compose(operation, form, formula(operation, form, Reductions(state, total, formulas.take)))
