"""Ring attention: keys and values go from device to device, and each attends to the block that it has.

The state of the queries is carried from block to block within the kernel, in f32. A block is sent on before it is
attended to, so that it travels while the device computes. The block that arrives last is kept, and backward all begins
with it and goes the other way round: so a device's own block comes last, and with it arrive the gradients by it, to
which the other devices have added their parts, in f32. No array is longer than a device's part of the sequence, so a
device's memory does not grow with their number.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (arXiv:2310.01889);
Brandon et al., "Striped attention" (arXiv:2311.09431). The loop over the steps is unrolled: XLA overlaps what it sees.
By default it lets one message be under way at a time, so keys and values are one array (see `packed`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoft._attention import packed
from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._attention.layouts import AXES_OF_COTANGENTS, AXES_OF_RESULTS, Piece, Step, chunk, joined, steps
from jaxsoft._attention.masks import Band
from jaxsoft._core.implementations import Names
from jaxsoft._core.mesh import Axes
from jaxsoft._core.operation import Function
from jaxsoft.fold import accumulator

_KEYS = ("key", "value")
_SEGMENTS = Extra.KEY_SEGMENTS.value
_WHOLE = ("pallas", "cudnn")  # whose kernels cannot be told from which query on queries count
_OF_BLOCKS = (None, "ffi")  # whose kernels take keys and values as one array; others would cut it into two


@dataclasses.dataclass(frozen=True)
class _Local:
    """What one device has of a call: the operands by name, and the steps in which it attends to all keys."""

    form: AttentionForm
    axes: Axes
    named: dict[str, jax.Array]
    chunks: int
    steps: Sequence[Step]
    takes_blocks: bool

    @classmethod
    def of(cls, form: AttentionForm, axes: Axes, operands: Sequence[jax.Array], implementation: Names) -> "_Local":
        """Of the operands of the part of the sequence that the device has."""
        assert form.shards is not None
        named = dict(zip(form.names, operands, strict=False))
        rank = jax.lax.axis_index(axes).astype(jnp.int32)
        # Segments are for kernels that do not say which queries count.
        at_once = implementation not in _WHOLE and Extra.QUERY_SEGMENTS not in form.extras
        length = named["query"].shape[1]
        chunks, found = steps(form.shards, Band(form.left, form.right), length, rank, at_once)
        alike = named["key"].shape[-1] == named["value"].shape[-1]
        return cls(form, axes, named, chunks, found, chunks == 1 and alike and implementation in _OF_BLOCKS)

    @property
    def own(self) -> dict[str, jax.Array]:
        """The device's own block, as it is sent."""
        block = {"block": packed.pack(self.named["key"], self.named["value"])}
        return block | ({_SEGMENTS: self.named[_SEGMENTS]} if _SEGMENTS in self.named else {})

    def sent[T](self, x: T, places: int) -> T:
        """The arrays of the device that is `places` places before, or after."""
        assert self.form.shards is not None
        devices = self.form.shards.devices
        to = [(i, (i + places) % devices) for i in range(devices)]
        return jax.tree.map(lambda v: jax.lax.ppermute(v, self.axes, to), x)

    @property
    def sizes(self) -> tuple[int, int]:
        """The head sizes of keys and of values."""
        return self.named["key"].shape[-1], self.named["value"].shape[-1]

    def call(
        self,
        piece: Piece,
        block: dict[str, jax.Array] | None,
        more: dict[Extra, jax.Array],
        stack: bool = True,
        **of_form: Any,
    ) -> tuple[AttentionForm, list[jax.Array]]:
        """The form of a piece of work, and query, key, value and extras.

        Args:
          piece: which queries and keys.
          block: that of the keys; None for the device's own.
          more: other extras.
          stack: whether keys and values of a block may be one array.
          of_form: what else is special about the form.
        """
        is_packed = stack and block is not None and self.takes_blocks
        if block is None:
            keys: Sequence[jax.Array] = [self.named[name] for name in _KEYS]
        else:
            keys = [packed.flat(block["block"])] * 2 if is_packed else packed.unpack(block["block"], self.sizes)
        base = [chunk(self.named["query"], 1, piece.queries, self.chunks)]
        base += [chunk(x, 1, piece.keys, self.chunks) for x in keys]
        extras = piece.extras | more
        if Extra.QUERY_SEGMENTS in self.form.extras:
            of_keys = self.named[_SEGMENTS] if block is None else block[_SEGMENTS]
            extras[Extra.QUERY_SEGMENTS] = chunk(self.named["query_segments"], 1, piece.queries, self.chunks)
            extras[Extra.KEY_SEGMENTS] = chunk(of_keys, 1, piece.keys, self.chunks)
        band = piece.band
        if not isinstance(band.offset, int):
            extras[Extra.OFFSET] = band.offset
        elif band.offset:
            extras[Extra.OFFSET] = jnp.full((1,), band.offset, jnp.int32)
        names = tuple(extra for extra in Extra if extra in extras)
        of_form |= {"left": band.left, "right": band.right, "extras": names, "packed": is_packed}
        return dataclasses.replace(self.form.whole, **of_form), [*base, *(extras[extra] for extra in names)]


def forward(form: AttentionForm, axes: Axes, run: Function, implementation: Names) -> Function:
    """Attention on one device, of the operands of its part of the sequence.

    Args:
      form: of the call.
      axes: the axes of the mesh over which the sequence is sharded.
      run: (form, *operands) -> the results of a call on one device.
      implementation: of such a call, if it was named.
    """

    assert form.shards is not None
    keeps_block = form.shards.keeps_block

    def function(*operands):
        local = _Local.of(form, axes, operands, implementation)
        wide = jnp.dtype(accumulator(operands[0].dtype))
        last = {piece.queries: (step.shift, i) for step in local.steps for i, piece in enumerate(step.pieces)}
        found: dict[int, Sequence[jax.Array]] = {}
        block, arriving = None, local.own
        for step, following in itertools.zip_longest(local.steps, local.steps[1:]):
            if following:
                arriving = local.sent(arriving, following.shift - step.shift)
            for i, piece in enumerate(step.pieces):
                more: dict[Extra, jax.Array] = {}
                if piece.queries in found:
                    more = dict(zip((Extra.STATE_OUTPUT, Extra.STATE_LSE), found[piece.queries], strict=False))
                elif Extra.SINKS in form.extras:
                    more = {Extra.SINKS: local.named["sinks"]}
                goes_on = last[piece.queries] != (step.shift, i)
                of_form: dict[str, Any] = {"dtype": wide, "rounded": False} if goes_on else {}
                of_piece, given = local.call(piece, block, more, returns_lse=True, **of_form)
                found[piece.queries] = run(of_piece, *given)
            if following:
                arriving, found = _when_done(arriving, found)
                block = arriving
        by_result = zip(*(found[i] for i in range(local.chunks)), strict=True)
        results = [joined(chunks, axis) for chunks, axis in zip(by_result, AXES_OF_RESULTS, strict=False)]
        return *results, *([arriving["block"]] if keeps_block else [])

    return function


def pullback(
    form: AttentionForm,
    wrt: Sequence[str],
    axes: Axes,
    run: Function,
    implementation: Names,
) -> Function:
    """The gradients on one device, of the operands of its part of the sequence.

    Args:
      form: of the call.
      wrt: the operands whose gradients are wanted: some of query, key and value.
      axes, implementation: as `forward` has them.
      run: (form, sums, *operands) -> the gradients of a call on one device in the accumulator's dtype, of which those
        named by `sums` are added to the last operands.
    """
    of_keys = [name for name in _KEYS if name in wrt]

    def function(*operands):
        count = len(form.names)
        known, kept = operands[count : count + len(AXES_OF_COTANGENTS)], operands[count + len(AXES_OF_COTANGENTS) :]
        local = _Local.of(form, axes, operands[:count], implementation)
        of_queries = [*zip(known, AXES_OF_COTANGENTS, strict=True)]
        of_query: dict[int, jax.Array] = {}  # the gradient by each chunk of queries, so far

        def gradients(step: Step, block: dict[str, jax.Array] | None) -> list[jax.Array]:
            """The gradients by the keys and values of a block, in one array if both are wanted."""
            of_chunks: list[dict[str, jax.Array]] = [{} for _ in range(local.chunks)]
            whole = None
            for piece in step.pieces:
                sums = dict(of_chunks[piece.keys])
                if piece.queries in of_query:
                    sums["query"] = of_query[piece.queries]
                names = tuple(name for name in wrt if name in sums)
                of_piece, given = local.call(piece, block, {}, stack=len(of_keys) == 2)
                results = (chunk(x, axis, piece.queries, local.chunks) for x, axis in of_queries)
                found = [*run(of_piece, names, *given, *results, *(sums[name] for name in names))]
                if "query" in wrt:
                    of_query[piece.queries], *found = found
                if of_piece.packed:
                    (whole,) = found
                else:
                    of_chunks[piece.keys] = dict(zip(of_keys, found, strict=True))
            if whole is not None:
                return [whole.reshape(2, -1, *whole.shape[1:])]
            apart = [joined([part[name] for part in of_chunks], 1) for name in of_keys]
            return [packed.pack(*apart)] if len(apart) == 2 and block is not None else apart

        own, *others = local.steps
        others.reverse()
        block: dict[str, jax.Array] = {}
        if others:  # the block that arrived last, unless there is only the way to send it again
            block = local.own | dict(zip(["block"], kept, strict=False))
            block = {
                name: x if kept and name == "block" else local.sent(x, others[0].shift) for name, x in block.items()
            }
        sums: list[jax.Array] = []
        for step, following in itertools.zip_longest(others, others[1:]):
            places = (following or own).shift - step.shift
            arriving = local.sent(block, places) if following else {}
            found = gradients(step, block)
            # The gradient by queries as well, or XLA may keep the parts of all blocks to add them up at the end.
            block, (found, done) = _when_done(arriving, (found, dict(of_query)))
            of_query.update(done)
            # What the devices before have added arrives while this one computes its part.
            sums = [x + y for x, y in zip(sums, found, strict=True)] if sums else found
            sums = local.sent(sums, places)
        found = gradients(own, None)
        if sums:
            arrived = packed.unpack(sums[0], local.sizes) if len(of_keys) == 2 else sums
            found = [x + y for x, y in zip(arrived, found, strict=True)]
        named = dict(zip(of_keys, found, strict=True))
        if "query" in wrt:
            named["query"] = joined([of_query[i] for i in range(local.chunks)], 1)
        return tuple(named[name].astype(local.named[name].dtype) for name in wrt)

    return function


def _when_done[T](arriving: dict[str, jax.Array], found: T) -> tuple[dict[str, jax.Array], T]:
    """A block that is on its way, to be sent on only when the work is done beside which it arrives.

    So a device has two blocks at most. XLA would send all of them on as soon as they arrive.
    """
    return jax.lax.optimization_barrier((arriving, found)) if arriving else (arriving, found)
