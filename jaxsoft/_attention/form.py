"""What a call of attention is, apart from its arrays: the record that every implementation reads.

The operands of every implementation are query (B, T, N, H), key (B, S, K, H) and value (B, S, K, D), and then the
extras that the form names, in the order of `Extra`. N is a multiple of K: query head n attends with key head
n // (N // K). The results are the output (B, T, N, D), in the form's dtype, and the log-sum-exp of every query's
scores (B, N, T), in the accumulator's dtype, with its residual: what it lost when it was rounded. Where all scores of a
query are -1e9, the log-sum-exp in f32 does not tell one key from a thousand, and the residual does. An output that is
rounded to fewer digits has a residual as well, for the gradients: where one key has nearly all the weight, they are
differences of the output and that key's value.

The score of a query i and a key j is z = cap * tanh(scale * <q_i, k_j> / cap) + bias, without the tanh if there is no
cap. It is valid where all of these hold, in which the query's position is p = offset + i and the key's is j:

* p - left <= j <= p + right, as far as the form has these limits;
* query_begins <= i < query_lengths and j < key_lengths;
* query_segments[i] == key_segments[j];
* mask.

A query without a valid key has the output 0 and the log-sum-exp -inf. A sink is one more score, whose value is 0.

The largest valid score of each head (B, N), in the accumulator's dtype and without a gradient, is one more result where
the form asks for it; -inf where there is none. Sinks are not among these scores. But it is NaN where a log-sum-exp of
the head is, be it by a score or by the sink, and inf beside a sink of inf: both make the output NaN.

A state is what attention over other keys gave, its output and log-sum-exp, and the results are then over these keys as
well: so keys may come block by block. Where its log-sum-exp is -inf, there were none, whatever its output is. A state
has no gradient: what folds blocks is differentiated as a whole.

Where there is a page table, key and value are pages (P, page size, K, H) and (P, page size, K, D), in the dtype of
query or in 8-bit floats. Key j of sequence b is number j % page size of page table[b, j // page size], and S is the
number of pages of a sequence times the page size. There are key lengths, from 0 to S. Entries of the table for pages
that begin at a sequence's length or after it are not used, whatever they hold; keys of other entries that are negative
or not less than P are masked. What pages hold of masked keys for one of these reasons is not used either.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import numpy as np

BASE = 3  # query, key and value


class Extra(enum.Enum):
    """An operand that may follow query, key and value. Each of its dimensions may have length 1, but for T and S of
    segments, and those of what belongs to pages and of a state; it is then the same for all.
    """

    PAGE_TABLE = "page_table"  # (B, pages of a sequence), int32: where the pages of each sequence are
    BIAS = "bias"  # (B, N, T, S), a real dtype: is added to the scores
    MASK = "mask"  # (B, N, T, S), bool: scores where it is True count
    QUERY_SEGMENTS = "query_segments"  # (B, T), int32
    KEY_SEGMENTS = "key_segments"  # (B, S), int32
    QUERY_BEGINS = "query_begins"  # (B,), int32
    QUERY_LENGTHS = "query_lengths"  # (B,), int32
    KEY_LENGTHS = "key_lengths"  # (B,), int32
    OFFSET = "offset"  # (B,), int32: the position of the first query
    SINKS = "sinks"  # (B, N), in the accumulator's dtype
    KEY_SCALE = "key_scale"  # (K,), in the accumulator's dtype: keys in pages are multiplied by it
    VALUE_SCALE = "value_scale"  # (K,), likewise
    STATE_OUTPUT = "state_output"  # (B, T, N, D), in the accumulator's dtype; there are both or neither, without pages
    STATE_LSE = "state_lse"  # (B, N, T), in the accumulator's dtype


STATE = (Extra.STATE_OUTPUT, Extra.STATE_LSE)
SEGMENTS = (Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS)

# Extras that are indices of queries, and of keys, by the letters of these in DIMENSIONS.
INDICES = {"query_begins": "t", "query_lengths": "t", "key_lengths": "s"}

# The dimensions of each operand and result, by name: a letter each. The first one is
# always the batch, but for what all sequences have in common: pages and their scales. "n" are the heads of queries, and
# "k" those of keys.
DIMENSIONS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "mask": "bnts",
    "query_segments": "bt",
    "key_segments": "bs",
    "query_begins": "b",
    "query_lengths": "b",
    "key_lengths": "b",
    "offset": "b",
    "sinks": "bn",
    "key_pages": "pikh",
    "value_pages": "pikd",
    "page_table": "bl",
    "key_scale": "k",
    "value_scale": "k",
    "state_output": "btnd",
    "state_lse": "bnt",
    "output": "btnd",
    "lse": "bnt",
    "lse_residual": "bnt",
    "max_logits": "bn",
    "output_residual": "btnd",
    "block": "ebskx",
    "delta": "bnt",
    "cotangent": "btnd",
    "query_sum": "btnh",
    "key_sum": "bskh",
    "value_sum": "bskd",
}


@dataclasses.dataclass(frozen=True)
class SequenceShards:
    """How a sequence of queries, keys and values lies over the devices of a mesh (see `layouts`).

    Attributes:
      devices: how many there are. Each has a part of the same length.
      layout: which of the tokens each device has.
      method: how devices get at the keys of others: "ring", "all_gather" or "all_to_all".
      axis: the axis of the mesh.
      inside: whether this is code for one device, which has its part of the operands.
      keeps_block: whether the results have the last block of keys and values that arrived, for gradients.
    """

    devices: int
    layout: str
    method: str
    axis: str
    inside: bool
    keeps_block: bool = False


# --8<-- [start:form]
@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """A call of attention.

    Attributes:
      dtype: that of the output.
      scale: the products of queries and keys are multiplied by it.
      left: how many keys before its own position a query attends to; None for all.
      right: how many keys after its own position; 0 is the causal rule, None is all.
      cap: the scores stay between -cap and cap, by a tanh; None for no such limit.
      extras: which operands follow query, key and value.
      returns_lse: whether the caller gets the log-sum-exp. Else its cotangent is 0.
      returns_max_logits: whether the largest score of each head is a result.
      deterministic: whether the gradients must have the same bits on every run.
      precision: of the products of f32 and f64 operands, as `jax.default_matmul_precision` has it; None for XLA's own.
      rounded: whether the output's dtype has fewer digits than the accumulator's, and for gradients it has a residual.
      shards: how the sequence lies over devices; None for one that is whole on each.
      packed: key and value are one array (2 B, S, K, H), given twice, with the keys first. So are the gradients by
        them, given once.
      own_key_counts: whether segments are known to leave each query of the whole call the key at its own position.
    """

    dtype: np.dtype
    scale: float
    left: int | None = None
    right: int | None = None
    cap: float | None = None
    extras: tuple[Extra, ...] = ()
    returns_lse: bool = True
    returns_max_logits: bool = False
    deterministic: bool = True
    precision: str | None = None
    rounded: bool = False
    shards: SequenceShards | None = None
    packed: bool = False
    own_key_counts: bool = False

    @property
    def without_block(self) -> "AttentionForm":
        """The form without the block of keys and values that is kept."""
        return dataclasses.replace(self, shards=self.shards and dataclasses.replace(self.shards, keeps_block=False))

    @property
    def of_gradients(self) -> "AttentionForm":
        """The form without what has no gradient."""
        return dataclasses.replace(self, returns_max_logits=False)

    @property
    def whole(self) -> "AttentionForm":
        """The form of the same call for a sequence that is whole and in order."""
        return dataclasses.replace(self, shards=None)

    def named[T](self, operands: Sequence[T]) -> dict[Extra, T]:
        """The extras among the operands of a call, by name."""
        return dict(zip(self.extras, operands[BASE:], strict=False))

    @property
    def has_state(self) -> bool:
        """Whether other keys came before."""
        return Extra.STATE_LSE in self.extras

    @property
    def paged(self) -> bool:
        """Whether keys and values are in pages."""
        return Extra.PAGE_TABLE in self.extras

    def keys(self, operands: Sequence[jax.Array | jax.core.ShapedArray]) -> int:
        """How many keys of a sequence there are at most."""
        if not self.paged:
            return operands[1].shape[1]
        return operands[self.place(Extra.PAGE_TABLE.value)].shape[1] * operands[1].shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands of a call."""
        return ("query", "key", "value", *(extra.value for extra in self.extras))

    def place(self, name: str) -> int:
        """The index of an operand of a call."""
        return self.names.index(name)
        # --8<-- [end:form]
