"""`implementation="cudnn"`: cuDNN's attention, where it computes exactly what is called for.

Its gradients have not the same bits on every run, so the default choice takes them only where that is asked for.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import BASE
from jaxsoft._attention.spec import AttentionForward, AttentionPullback, AttentionSpec
from jaxsoft._core import cudnn, gpus
from jaxsoft._core.operation import Function

_DTYPES = (jnp.float16, jnp.bfloat16)
_SIZES = 8  # its head sizes are multiples of this
# Where the number of keys is 64 beyond a multiple of 128, and log-sum-exps are below -88, the negative logarithm of
# f32's largest number, the gradient of the query is NaN. Seen on an H100 with cuDNN 9.19, without a causal rule, for
# any number of queries; not for 1, 8, 32, 72, 96 or 104 keys beyond. Nothing is known of the log-sum-exps when a call
# is traced.
_TILE, _HALF = 128, 64


def unsupported(operation: AttentionSpec, operands: Sequence[jax.core.ShapedArray]) -> str | None:
    """None, or why cuDNN cannot serve an operation with such operands."""
    form = operation.form
    query, key, value = operands[:BASE]
    size = query.shape[-1]
    if not all(isinstance(length, int) for operand in (query, key, value) for length in operand.shape):
        return "its calls are made for shapes that are known"
    if query.dtype not in _DTYPES or form.dtype != query.dtype:
        return f"it computes float16 and bfloat16 of operands like these, not {form.dtype.name} of {query.dtype.name}"
    most = 128 if gpus.any_before(gpus.Generation.HOPPER) else 256  # as JAX itself has it
    if size % _SIZES or size > most or value.shape[-1] != size:
        return f"its head sizes are multiples of {_SIZES} up to {most}; got {size} and {value.shape[-1]}"
    if form.extras or form.cap is not None:
        given = [extra.value for extra in form.extras] or ["a cap"]
        return f"it is used for calls without {' and '.join(given)}"
    if form.left is not None or form.right not in (None, 0):
        return "it is used for calls without a window"
    if form.right is not None and query.shape[1] != key.shape[1]:
        return f"under a causal rule it is used for as many queries as keys; got {query.shape[1]} and {key.shape[1]}"
    if form.returns_max_logits:
        return "it does not give the largest scores"
    if form.returns_lse:
        return "its gradients do not take the log-sum-exp's cotangent"
    differentiated = isinstance(operation, AttentionPullback) or (
        isinstance(operation, AttentionForward) and operation.residual
    )
    if differentiated and key.shape[1] % _TILE == _HALF:
        return f"its gradients may be NaN for {_HALF} keys more than a multiple of {_TILE}; got {key.shape[1]} keys"
    return None


def find(operation: AttentionSpec) -> Function:
    """The function for an operation."""
    form = operation.form
    causal = form.right is not None
    if isinstance(operation, AttentionForward):
        residual = operation.residual

        def forward(query, key, value):
            output, lse = cudnn.forward(query, key, value, form.scale, causal, residual)
            return output, lse, jnp.zeros_like(lse)

        return forward
    assert isinstance(operation, AttentionPullback)

    def pullback(query, key, value, output, lse, lse_residual, delta, cotangent):
        del lse_residual, delta
        found = cudnn.gradients(query, key, value, lse, output, cotangent, form.scale, causal)
        return tuple(found[("query", "key", "value").index(name)] for name in operation.wrt)

    return pullback
