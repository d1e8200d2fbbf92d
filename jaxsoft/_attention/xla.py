"""`implementation="xla"`: attention and its gradients in plain JAX, block by block of keys, folded as online attention.

It serves every call on every platform, and can be differentiated to every order. Letters: z the scores, p the weights
exp(z - lse), and dz, dq, dk, dv gradients by what follows the d.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxsoft import fold
from jaxsoft._attention.blocks import Block, Call
from jaxsoft._attention.form import Extra, Form
from jaxsoft.fold import AttentionState

type Function = Callable[..., tuple[jax.Array, ...]]


def forward(form: Form, platform: str | None = None) -> Function:
    """(query, key, value, *extras) -> the output and the log-sum-exp. The platform, if known, decides the blocks."""

    def function(*operands):
        call = Call(form, operands, platform)

        def step(st: AttentionState | None, block: Block):
            part = _state_of(call, block)
            return (part if st is None else fold.combine(st, part)), ()

        st, _ = call.over_keys(step)
        return results(call, st)

    return function


def _state_of(call: Call, block: Block) -> AttentionState:
    """The state of a block's keys. As in jax.nn, weights are rounded to the values' dtype before the product."""
    m, s = fold.state(block.z)
    weights = fold.weight(block.z, m[..., None]).astype(block.value.dtype)
    return AttentionState(m, s, call.product("bnts,bksd->bntd", weights, block.value))


def results(call: Call, st: AttentionState) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, given the state of all keys (B, N, T), with which the sinks are combined."""
    if Extra.SINKS in call.extras:
        sinks = call.extras[Extra.SINKS].astype(st.m.dtype)[..., None]
        m, s = fold.from_lse(jnp.broadcast_to(sinks, st.m.shape))
        st = fold.combine(st, AttentionState(m, s, jnp.zeros_like(st.o)))
    return jnp.moveaxis(fold.output(st, call.form.dtype), 1, 2), fold.lse(st)


def pullback(form: Form, moving: Sequence[str], platform: str | None = None) -> Function:
    """The gradients by the operands that move: some of query, key, value and bias.

    (query, key, value, *extras, output, lse, delta, cotangent) -> gradients like the operands. The cotangent is that of
    the output, in the dtype of query, and delta the sum of its products with the output, less the cotangent of lse.
    """

    def function(*operands):
        call = Call(form, operands, platform)
        lse, delta = (v[..., None] for v in operands[-3:-1])
        cotangent = jnp.moveaxis(operands[-1], 2, 1)

        def step(sums, block: Block):
            p = fold.weight(block.z, lse)
            dz = p * (call.product("bntd,bksd->bnts", cotangent, block.value) - delta)
            d_bias, d_score = dz, (dz if block.slope is None else dz * block.slope) * form.scale
            d_score = d_score.astype(call.query.dtype)
            own, of_keys = {}, {}
            if "query" in moving:
                own["query"] = call.product("bnts,bksh->bnth", d_score, block.key)
            if "key" in moving:
                of_keys["key"] = call.product("bnts,bnth->bksh", d_score, call.query)
            if "value" in moving:
                of_keys["value"] = call.product("bnts,bntd->bksd", p.astype(cotangent.dtype), cotangent)
            if "bias" in moving:
                whole = call.extras[Extra.BIAS].shape[3] == 1
                (own if whole else of_keys)["bias"] = _like_bias(call, d_bias)
            sums = own if sums is None else {name: sums[name] + own[name] for name in own}
            return sums, tuple(of_keys[name] for name in sorted(of_keys))

        axes = {"bias": 3, "key": 2, "value": 2}
        if "bias" in moving and call.extras[Extra.BIAS].shape[3] == 1:
            del axes["bias"]
        names = sorted(name for name in axes if name in moving)
        sums, of_keys = call.over_keys(step, [axes[name] for name in names])
        given = {"query": operands[0], "key": operands[1], "value": operands[2], "bias": call.extras.get(Extra.BIAS)}
        found = {**sums, **dict(zip(names, of_keys, strict=True))}
        found |= {name: jnp.moveaxis(found[name], 1, 2) for name in found if name != "bias"}
        return tuple(found[name].reshape(given[name].shape).astype(given[name].dtype) for name in moving)

    return function


def _like_bias(call: Call, dz: jax.Array) -> jax.Array:
    """A gradient of scores (B, N, T, keys) summed over the dimensions along which the bias has length 1."""
    bias = call.extras[Extra.BIAS]
    once = [axis for axis, size in enumerate(bias.shape) if size == 1]
    return jnp.sum(dz, axis=once, keepdims=True)
