"""Which tokens of a sequence each device has, and how a sequence gets into such an order and back.

Under a causal rule the last tokens attend to the most keys. Of a sequence that is cut into as many parts as there are
devices ("contiguous"), the last device would do most of the work. The other layouts give each device as much: every
so-many-th token ("striped"), or one part from the front and one from the back of twice as many ("zigzag").
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention.form import Extra, SequenceShards
from jaxsoft._attention.masks import Band
from jaxsoft._core.operation import Function

LAYOUTS = ("contiguous", "striped", "zigzag")

# The dimension of the queries in the output, the log-sum-exp, its residual and the output's residual; and in what the
# gradients are made of beside the operands of a call: output, lse, lse_residual, delta and cotangent.
AXES_OF_RESULTS = (1, 2, 2, 1)
AXES_OF_COTANGENTS = (1, 2, 2, 2, 1)


def order(length: int, devices: int, layout: str) -> np.ndarray:
    """The number in the sequence of each token of a layout, the first device's tokens first."""
    tokens = np.arange(length, dtype=np.int32)
    match layout:
        case "striped":
            return tokens.reshape(-1, devices).T.reshape(-1)
        case "zigzag":
            chunks = tokens.reshape(2 * devices, -1)
            return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)
        case _:
            return tokens


def chunk(x: jax.Array, axis: int, index: int, chunks: int) -> jax.Array:
    """A chunk of a device's tokens, which are cut into `chunks` along this axis."""
    size = x.shape[axis] // chunks
    return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=axis)


def joined(chunks: Sequence[jax.Array], axis: int) -> jax.Array:
    """Chunks of tokens, of a device or of a call, joined along this axis."""
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis)


def in_order(shards: SequenceShards, operands: Sequence[str], results: Sequence[str], function: Function) -> Function:
    """A function of sequences in their order as one of sequences in a layout.

    Args:
      shards: which layout.
      operands, results: the dimensions of each, by letters (see `jaxsoft._attention.form`).
      function: what is computed.
    """
    if shards.layout == "contiguous":
        return function

    def taken(x: jax.Array, dims: str, inverse: bool) -> jax.Array:
        for axis, letter in enumerate(dims):
            if letter in "ts":
                places = order(x.shape[axis], shards.devices, shards.layout)
                x = jnp.take(x, np.argsort(places) if inverse else places, axis=axis)
        return x

    def call(*given: jax.Array) -> tuple[jax.Array, ...]:
        found = function(*(taken(x, dims, inverse=True) for x, dims in zip(given, operands, strict=True)))
        return tuple(taken(y, dims, inverse=False) for y, dims in zip(found, results, strict=True))

    return call


_ALL = Band()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some queries of a device and some keys of a block, with what limits by position are between them.

    Attributes:
      queries, keys: which chunk of the queries and of the block's keys these are, of as many as the layout has.
      band: the limits by position, where that of the first key is 0.
      extras: the first query and the number of keys that count, where not all do.
    """

    queries: int = 0
    keys: int = 0
    band: Band = _ALL
    extras: dict[Extra, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """The work of a device with the block of keys of the device that is `shift` places before it.

    Attributes:
      shift: how many places before.
      pieces: what is computed.
    """

    shift: int
    pieces: tuple[Piece, ...]


def steps(shards: SequenceShards, band: Band, length: int, rank: jax.Array, at_once: bool) -> tuple[int, list[Step]]:
    """Into how many chunks the tokens of a device are cut, and the steps in which it attends to all valid keys.

    The first step is with its own keys. Steps in which no device has a valid key are left out.

    Args:
      shards: which layout.
      band: the limits of the call.
      length: how many tokens a device has.
      rank: which device this is.
      at_once: whether a piece may say which queries and keys count.
    """
    devices, layout = shards.devices, shards.layout
    causal = band == Band(right=0)
    if layout == "zigzag" and band.limits and not (causal and at_once):
        return 2, _of_zigzag(devices, band, length // 2, rank)
    found = []
    for shift in range(devices):
        wraps = rank < shift  # then the keys are those of a later device
        if not band.limits or (shift == 0 and layout != "striped"):
            piece = Piece(band=band)
        elif layout == "contiguous":
            offsets = (shift - devices) * length, shift * length
            if not any(dataclasses.replace(band, offset=offset).meets(length, length) for offset in offsets):
                continue
            piece = Piece(band=dataclasses.replace(band, offset=_either(wraps, *offsets)))
        elif layout == "zigzag":
            # The first chunk of an earlier device is before both chunks, and the second after both. Both chunks of a
            # later device are between these two.
            half = length // 2
            begins, lengths = _either(wraps, half, 0), _either(wraps, length, half)
            piece = Piece(extras={Extra.QUERY_BEGINS: begins, Extra.KEY_LENGTHS: lengths})
        else:
            # Key b of the block has the position b * devices + rank - shift, and `devices` more if the block wraps.
            before = None if band.left is None else (band.left - shift) // devices
            after = None if band.right is None else (band.right + shift) // devices
            ahead = 0 if before is None or before >= 0 else -before
            if after is not None and after < ahead:
                continue
            before = before if before is None else before + ahead
            after = after if after is None else after - ahead
            piece = Piece(band=Band(before, after, _either(wraps, ahead - 1, ahead) if shift else ahead))
        found.append(Step(shift, (piece,)))
    return 1, found


def _of_zigzag(devices: int, band: Band, half: int, rank: jax.Array) -> list[Step]:
    """The steps of a zigzag layout, a piece for each two chunks of which the second may be in reach of the first."""
    found = []
    for shift in range(devices):
        other = (rank - shift) % devices
        mine, theirs = (rank, 2 * devices - 1 - rank), (other, 2 * devices - 1 - other)
        pieces = []
        for queries in range(2):
            for keys in range(2):
                if queries < keys and band.right == 0:
                    continue
                if shift == 0 and queries == keys:
                    offset: jax.Array | int = 0
                else:
                    offset = _numbers((mine[queries] - theirs[keys]) * half)
                pieces.append(Piece(queries, keys, dataclasses.replace(band, offset=offset)))
        found.append(Step(shift, tuple(pieces)))
    return found


def _either(condition: jax.Array, yes: int, no: int) -> jax.Array:
    return _numbers(jnp.where(condition, yes, no))


def _numbers(x: jax.Array) -> jax.Array:
    """A number as an operand of attention has it, the same for all sequences."""
    return x.astype(jnp.int32)[None]
