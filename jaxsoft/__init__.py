"""jaxsoft: softmax, its losses, top-k and sampling for JAX, by online reduction over (maximum, sum of exponentials)."""

from importlib.metadata import version as _version

from jaxsoft import random as random
from jaxsoft._ops.cross_entropy import softmax_cross_entropy, softmax_cross_entropy_with_integer_labels
from jaxsoft._ops.linear_cross_entropy import linear_softmax_cross_entropy
from jaxsoft._ops.log_softmax import log_softmax
from jaxsoft._ops.logsumexp import logsumexp
from jaxsoft._ops.softmax import softmax
from jaxsoft._ops.top_k import top_k_softmax
from jaxsoft._rows import ffi as _ffi
from jaxsoft._rows.choice import implementations
from jaxsoft.fold import (
    State,
    combine,
    cumlogsumexp,
    identity,
    lse,
    merge_softmax,
    merge_softmax_lse,
    running_states,
    state,
    update_output,
)

__version__ = _version("jaxsoft")

_ffi.register()

__all__ = [
    "State",
    "combine",
    "cumlogsumexp",
    "identity",
    "implementations",
    "linear_softmax_cross_entropy",
    "log_softmax",
    "logsumexp",
    "lse",
    "merge_softmax",
    "merge_softmax_lse",
    "running_states",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "state",
    "top_k_softmax",
    "update_output",
]
