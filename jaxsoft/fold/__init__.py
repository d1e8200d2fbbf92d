"""The fold that every operation here is: the monoid of states (m, s).

A *state* summarises a set of scores x by its maximum m and s = sum(exp(x - m)). States of two sets combine to the
state of their union, so a row can be reduced in any order and in any parts: tiles of a kernel, splits of a long row,
shards of a mesh, blocks of keys in attention. This module is that fold in plain JAX: differentiable in both modes,
to every order, and the definition that the kernels are tested against.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), for the state and its
combination; Rabe and Staats, "Self-attention does not need O(n^2) memory" (arXiv:2112.05682), and Dao et al.,
"FlashAttention" (arXiv:2205.14135), for merging blocks; Liu et al., "Ring attention" (arXiv:2310.01889), for the
running update.
"""

from jaxsoft.fold.attention import attention_identity, attention_state, output
from jaxsoft.fold.attention import of_output as of_output
from jaxsoft.fold.merging import merge_softmax, merge_softmax_lse, update_output
from jaxsoft.fold.states import (
    AttentionState,
    State,
    combine,
    cumlogsumexp,
    from_lse,
    identity,
    lse,
    running_states,
    state,
    weight,
)
from jaxsoft.fold.states import accumulator as accumulator
from jaxsoft.fold.states import reference as reference
from jaxsoft.fold.states import scaled as scaled

__all__ = [
    "AttentionState",
    "State",
    "attention_identity",
    "attention_state",
    "combine",
    "cumlogsumexp",
    "from_lse",
    "identity",
    "lse",
    "merge_softmax",
    "merge_softmax_lse",
    "output",
    "running_states",
    "state",
    "update_output",
    "weight",
]
