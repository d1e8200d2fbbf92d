"""cuDNN's kernels for attention, as JAX has them. All that is touched of JAX's private modules for them is here.

jax.nn.dot_product_attention(implementation="cudnn") gives the log-sum-exp in 16 bits only, and its gradients only
together with its own forward pass. The primitives behind it take and give the log-sum-exp in f32, so that either pass
may be followed or preceded by another implementation's.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxsoft._core import gpus

_PRIMITIVES = ("_dot_product_attention_fwd", "_dot_product_attention_bwd")


def unavailable(platform: str) -> str | None:
    """None, or why cuDNN cannot be used on a platform."""
    if platform != "cuda":
        return "cuDNN runs on NVIDIA GPUs only"
    if gpus.elsewhere() or not gpus.present():
        return "there is no NVIDIA GPU here"
    if gpus.any_before(gpus.Generation.AMPERE):
        return "its kernels for attention need Ampere (compute capability 8.0) or newer"
    return _missing()


@functools.cache
def _missing() -> str | None:
    """None, or why JAX has no attention of cuDNN's."""
    try:
        module = _module()
        for name in _PRIMITIVES:
            getattr(module, f"{name}_p"), getattr(module, f"{name}_cuda_lowering")
        module.check_cudnn_version()
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"JAX cannot use cuDNN here: {error}"
    return None


def _module() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, causal: bool, residual: bool
) -> tuple[jax.Array, jax.Array]:
    """The output (B, T, N, D) and the log-sum-exp (B, N, T), which is NaN without `residual`: that is faster."""
    module = _module()
    unused = jnp.zeros(0, query.dtype)
    parameters = _parameters(module, module._dot_product_attention_fwd_cuda_lowering, scale, causal, residual)
    output, *lse = module._dot_product_attention_fwd_p.bind(query, key, value, *(unused,) * 7, **parameters)
    batch, length, heads, _ = query.shape
    return output, lse[0] if lse else jnp.full((batch, heads, length), jnp.nan, jnp.float32)


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lse: jax.Array,
    output: jax.Array,
    cotangent: jax.Array,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients by query, key and value."""
    module = _module()
    unused = jnp.zeros(0, query.dtype)
    parameters = _parameters(module, module._dot_product_attention_bwd_cuda_lowering, scale, causal)
    operands = query, key, value, *(unused,) * 7, lse, output, cotangent
    return module._dot_product_attention_bwd_p.bind(*operands, **parameters)


def _parameters(
    module: ModuleType, lowering: Callable, scale: float, causal: bool, residual: bool = True
) -> dict[str, object]:
    """The parameters of a primitive with this lowering, as far as the installed version of JAX has them."""
    parameters = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        "score_mod_name": None,
        "score_mod_jaxpr": None,
        "is_training": residual,
    }
    known = inspect.signature(lowering).parameters
    return {name: value for name, value in parameters.items() if name in known}
