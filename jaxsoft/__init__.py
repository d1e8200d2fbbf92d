"""jaxsoft: softmax, its losses, attention, top-k and sampling for JAX, by online reduction over (maximum, sum of
exponentials).
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jaxsoft import _registered as _registered
from jaxsoft import fold as fold
from jaxsoft import random as random
from jaxsoft._core import library as _library
from jaxsoft._core.explain import explain
from jaxsoft._core.implementations import implementations
from jaxsoft._ops.cross_entropy import softmax_cross_entropy, softmax_cross_entropy_with_integer_labels
from jaxsoft._ops.entropy import entropy
from jaxsoft._ops.kl_divergence import softmax_kl_divergence
from jaxsoft._ops.logsumexp import logsumexp
from jaxsoft._ops.softmax import log_softmax, softmax
from jaxsoft._ops.top_k import top_k_softmax

if _TYPE_CHECKING:
    from jaxsoft._ops.attention import dot_product_attention
    from jaxsoft._ops.linear_cross_entropy import linear_softmax_cross_entropy
    from jaxsoft._ops.paged_attention import paged_attention
    from jaxsoft._ops.ring_attention import ring_attention, ring_order
    from jaxsoft._ops.write_pages import write_pages

__version__ = "0.1.0"

# What takes longest to import, and where it is. It waits until it is asked for (PEP 562).
_LATE = {
    "dot_product_attention": "jaxsoft._ops.attention",
    "linear_softmax_cross_entropy": "jaxsoft._ops.linear_cross_entropy",
    "paged_attention": "jaxsoft._ops.paged_attention",
    "ring_attention": "jaxsoft._ops.ring_attention",
    "ring_order": "jaxsoft._ops.ring_attention",
    "write_pages": "jaxsoft._ops.write_pages",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(_import_module(_LATE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


# A program that was exported or compiled in another process finds the kernels only if they are registered.
for _platform in _library.PLATFORMS:
    _library.unavailable(_platform)

__all__ = [
    "dot_product_attention",
    "entropy",
    "explain",
    "fold",
    "implementations",
    "linear_softmax_cross_entropy",
    "log_softmax",
    "logsumexp",
    "paged_attention",
    "random",
    "ring_attention",
    "ring_order",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "softmax_kl_divergence",
    "top_k_softmax",
    "write_pages",
]
