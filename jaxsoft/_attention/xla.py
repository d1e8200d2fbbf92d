"""`implementation="xla"`: attention and its gradients in plain JAX, block by block of keys, folded as online attention.
Where limits exclude keys, the queries are taken in parts, each with the keys that are left.

It serves every call on every platform, and can be differentiated to every order. Letters: z the scores, p the weights
exp(z - lse), and dz, dq, dk, dv gradients by what follows the d.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft import fold
from jaxsoft._attention.blocks import Block, Call
from jaxsoft._attention.form import DIMENSIONS, AttentionForm, Extra
from jaxsoft._attention.layouts import AXES_OF_RESULTS, joined
from jaxsoft._attention.pages import PagedCall
from jaxsoft._attention.parts import Part, parts
from jaxsoft._core.operation import Function
from jaxsoft.fold import AttentionState


def forward(form: AttentionForm, platform: str | None = None) -> Function:
    """(query, key, value, *extras) -> the results of a call. The platform, if known, decides the blocks."""

    def of_part(call: Call):
        def step(st: AttentionState | None, block: Block):
            m, s = fold.state(block.z)
            weights = fold.weight(block.z, m[..., None])
            # As in jax.nn, weights are rounded before the product, but on a CPU, where that makes nothing faster.
            weights = weights if call.wide else weights.astype(block.value.dtype)
            of_block = AttentionState(m, s, call.product("bnts,bksd->bntd", weights, block.value))
            return (of_block if st is None else fold.combine(st, of_block)), {}

        st, _ = call.over_keys(step, {})
        return results(call, st)

    def function(*operands):
        if form.paged:
            return of_part(PagedCall(form, operands, platform))
        found = [
            of_part(Call(part.form, part.operands(operands), platform)) for part in parts(form, operands, platform)
        ]
        return _of_parts(form, found)

    return function


def _of_parts(form: AttentionForm, found: Sequence[tuple[jax.Array, ...]]) -> tuple[jax.Array, ...]:
    """The results of a call, given those of its parts."""
    *axes, of_residual = AXES_OF_RESULTS
    combine = [functools.partial(joined, axis=axis) for axis in axes]
    if form.returns_max_logits:
        combine.append(functools.partial(functools.reduce, jnp.maximum))
    combine.append(functools.partial(joined, axis=of_residual))
    return tuple(of_result(v) for of_result, v in zip(combine, zip(*found, strict=True), strict=False))


def results(call: Call, st: AttentionState) -> tuple[jax.Array, ...]:
    """The results of a call, given the state of all keys (B, N, T). Sinks and what came before are combined with it."""
    largest = st.m
    if Extra.VALUE_SCALE in call.extras:
        st = st._replace(o=st.o * call.of_heads(call.extras[Extra.VALUE_SCALE]))
    if Extra.SINKS in call.extras:
        sinks = call.extras[Extra.SINKS].astype(st.m.dtype)[..., None]
        m, s = fold.from_lse(jnp.broadcast_to(sinks, st.m.shape))
        st = fold.combine(st, AttentionState(m, s, jnp.zeros_like(st.o)))
    if call.form.has_state:
        st = fold.combine(before(call.extras[Extra.STATE_OUTPUT], call.extras[Extra.STATE_LSE]), st)
    output, lse, lse_residual, *more = of_state(call.form, call.query.dtype, st)
    if call.form.returns_max_logits:
        more = [_max_logits(call, largest, lse), *more]
    return output, lse, lse_residual, *more


def _max_logits(call: Call, largest: jax.Array, lse: jax.Array) -> jax.Array:
    """The largest score of each head (B, N), given that of each query (B, N, T) without sinks, and the log-sum-exp."""
    found = jnp.max(largest, axis=-1, initial=-jnp.inf)
    if Extra.SINKS in call.extras:
        found = jnp.where(jnp.isposinf(call.extras[Extra.SINKS]), jnp.inf, found)
    # Of numbers one of which is NaN, a CPU's maximum may be another.
    return jax.lax.stop_gradient(jnp.where(jnp.any(jnp.isnan(lse), axis=-1), jnp.nan, found))


def before(output: jax.Array, lse: jax.Array) -> AttentionState:
    """The state (B, N, T) of the keys of an output (B, T, N, D) and a log-sum-exp."""
    return fold.of_output(jnp.moveaxis(output, 2, 1), lse)


def with_residual(st: AttentionState, lse_residual: jax.Array) -> AttentionState:
    """A state made of results, with what their log-sum-exp lost when it was rounded."""
    lost = jnp.exp(lse_residual)
    return st._replace(s=st.s * lost, o=st.o * lost[..., None])


def of_state(form: AttentionForm, dtype: np.dtype, st: AttentionState) -> tuple[jax.Array, ...]:
    """The results of a call whose queries have a dtype, given the state (B, N, T) of all valid scores."""
    lse = fold.lse(st)
    lse_residual = jnp.log(jnp.where(st.s == 0, 1, st.s)) - (fold.reference(lse) - fold.reference(st.m))
    output = jnp.moveaxis(fold.output(st), 1, 2)
    found = output.astype(form.dtype), lse, jax.lax.stop_gradient(fold.reference(lse_residual))
    if not form.rounded:
        return found
    # XLA may take a number that was rounded and widened for the number itself, and then there would be no residual.
    rounded = jax.lax.optimization_barrier(found[0]).astype(output.dtype)
    # Beside an output that overflowed, or that is not a number, there is none.
    output_residual = fold.reference(output - rounded)
    return *found, jax.lax.stop_gradient(output_residual.astype(dtype))


def with_sums(wrt: Sequence[str], sums: Sequence[str], pullback: Function) -> Function:
    """A pullback whose gradients by these operands are added to others, which follow its operands, in their dtype.

    Args:
      wrt: the operands by which it has gradients.
      sums: some of them.
      pullback: the function. It may round its gradients.
    """

    def function(*operands):
        given, others = operands[: len(operands) - len(sums)], operands[len(operands) - len(sums) :]
        found = dict(zip(wrt, pullback(*given), strict=True))
        for name, other in zip(sums, others, strict=True):
            found[name] = other + found[name].astype(other.dtype)
        return tuple(found.values())

    return function


def pullback(form: AttentionForm, wrt: Sequence[str], platform: str | None = None, wide: bool = False) -> Function:
    """The gradients by the differentiated operands, without sums: see `jaxsoft._attention.spec.AttentionPullback`."""

    def of_part(
        call: Call, lse: jax.Array, lse_residual: jax.Array, delta: jax.Array, cotangent: jax.Array
    ) -> dict[str, jax.Array]:
        """The gradients, in the accumulator's dtype."""

        def step(sums, block: Block):
            p = fold.weight(block.z, lse) * jnp.exp(-lse_residual)
            dz = p * (call.product("bntd,bksd->bnts", cotangent, block.value) - delta)
            d_score = (dz if block.slope is None else dz * block.slope) * form.scale
            # The gradients of scores may be too small for f16: of long rows, beside a cotangent that is a mean's.
            wide = call.wide or call.query.dtype == jnp.float16
            key, query = (x.astype(d_score.dtype) if wide else x for x in (block.key, call.query))
            d_score = d_score.astype(key.dtype)
            own, of_keys = {}, {}
            if "query" in wrt:
                own["query"] = call.product("bnts,bksh->bnth", d_score, key)
            if "key" in wrt:
                of_keys["key"] = call.product("bnts,bnth->bksh", d_score, query)
            if "value" in wrt:
                of_keys["value"] = call.product("bnts,bntd->bksd", p.astype(cotangent.dtype), cotangent)
            if "bias" in wrt:
                bias = call.extras[Extra.BIAS]
                once = [axis for axis, size in enumerate(bias.shape) if size == 1]
                (own if 3 in once else of_keys)["bias"] = jnp.sum(dz, axis=once, keepdims=True)
            return own if sums is None else {name: sums[name] + own[name] for name in own}, of_keys

        sums, of_keys = call.over_keys(step, {"bias": 3, "key": 2, "value": 2})
        return {name: x if name == "bias" else jnp.moveaxis(x, 1, 2) for name, x in (sums | of_keys).items()}

    def function(*operands):
        *base, _, lse, lse_residual, delta, cotangent = operands
        cotangent = jnp.moveaxis(cotangent, 2, 1)
        given = dict(zip(form.names, operands, strict=False))
        found = []
        for part in parts(form, operands, platform):
            numbers = [
                part.of(v, "bnt.") for v in (lse[..., None], lse_residual[..., None], delta[..., None], cotangent)
            ]
            found.append((part, of_part(Call(part.form, part.operands(base), platform), *numbers)))
        totals = {name: _total([(part, by[name]) for part, by in found], name, given[name]) for name in wrt}
        return tuple(totals[name] if wide else totals[name].astype(given[name].dtype) for name in wrt)

    return function


def _total(gradients: Sequence[tuple[Part, jax.Array]], name: str, like: jax.Array) -> jax.Array:
    """The gradient by an operand of this name and shape, from those of the parts."""
    if len(gradients) == 1 and gradients[0][1].shape == like.shape:
        return gradients[0][1]
    total = jnp.zeros(like.shape, gradients[0][1].dtype)
    for part, gradient in gradients:
        total = total.at[part.places(like.shape, DIMENSIONS[name])].add(gradient)
    return total
