"""Ring attention: keys and values go from device to device, and each attends to the block that it has.

The state of the queries is carried from block to block within the kernel, in f32. A block is sent on before it is
attended to, so that it travels while the device computes. Backward, keys and values go the same way again, and the
gradients by them follow one step behind: each device adds its part, in f32, while the next block is computed. No array
is longer than a device's part of the sequence, so a device's memory does not grow with their number.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (arXiv:2310.01889);
Brandon et al., "Striped attention" (arXiv:2311.09431). The loop over the steps is unrolled: XLA overlaps what it sees.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxsoft._attention.form import Extra, Form
from jaxsoft._attention.layouts import Piece, Step, steps
from jaxsoft._core.mesh import Axes
from jaxsoft.fold import accumulator

type Function = Callable[..., tuple[jax.Array, ...]]
# The operands that travel, with the names of their gradients.
_KEYS = ("key", "value")
# A device's work with its own keys is done in two halves: the last queries first, and the others when all else is done,
# while the gradients by its keys come back. Under a causal rule this share of the queries has half of the work.
_CAUSAL_SHARE = 0.7
_TILE = 128  # the part is a multiple of this


@dataclasses.dataclass(frozen=True)
class _Local:
    """What one device has of a call: the operands by name, and which of the devices it is."""

    form: Form
    axes: Axes
    named: dict[str, jax.Array]
    chunks: int
    steps: Sequence[Step]

    @classmethod
    def of(cls, form: Form, axes: Axes, operands: Sequence[jax.Array], at_once: bool) -> "_Local":
        """Of the operands of the part of the sequence that the device has."""
        assert form.shards is not None
        named = dict(zip(form.names, operands, strict=False))
        rank = jax.lax.axis_index(axes).astype(jnp.int32)
        at_once = at_once and Extra.QUERY_SEGMENTS not in form.extras
        length = named["query"].shape[1]
        chunks, found = steps(form.shards, form.left, form.right, length, rank, at_once)
        return cls(form, axes, named, chunks, found)

    @property
    def own(self) -> dict[str, jax.Array]:
        """The device's own block: what goes from device to device."""
        return {name: self.named[name] for name in (*_KEYS, Extra.KEY_SEGMENTS.value) if name in self.named}

    def halves(self) -> tuple[dict[Extra, jax.Array], dict[Extra, jax.Array]]:
        """Two halves of the work with the own block, by the extras that say which queries these are."""
        length = self.named["query"].shape[1]
        share = _CAUSAL_SHARE if self.form.right is not None else 0.5
        border = jnp.full((1,), round(length * share / _TILE) * _TILE, jnp.int32)
        return {Extra.QUERY_BEGINS: border}, {Extra.QUERY_LENGTHS: border}

    def send(self, x: jax.Array, places: int) -> jax.Array:
        """What the device so many places before has of x."""
        devices = self.form.shards.devices  # type: ignore[union-attr]
        if places % devices == 0:
            return x
        return jax.lax.ppermute(x, self.axes, [(i, (i + places) % devices) for i in range(devices)])

    def arriving(self, block: dict[str, jax.Array], places: int) -> dict[str, jax.Array]:
        """The block of the device that is so many places before the one whose block this is."""
        return {name: self.send(x, places) for name, x in block.items()}

    def chunk(self, x: jax.Array, axis: int, index: int) -> jax.Array:
        """One of the chunks into which a sequence along this axis is cut."""
        size = x.shape[axis] // self.chunks
        return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=axis)

    def joined(self, chunks: Sequence[jax.Array], axis: int) -> jax.Array:
        """The sequence of these chunks."""
        return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis)

    def call(
        self, piece: Piece, block: dict[str, jax.Array], more: dict[Extra, jax.Array], **of_form
    ) -> tuple[Form, list[jax.Array]]:
        """The form of a piece of work, and query, key, value and extras.

        Args:
          piece: which queries and keys.
          block: the operands of the block of keys.
          more: other extras.
          of_form: what else is special about the form.
        """
        base = [self.chunk(self.named["query"], 1, piece.queries)]
        base += [self.chunk(block[name], 1, piece.keys) for name in _KEYS]
        extras: dict[Extra, jax.Array] = dict(more)
        if Extra.QUERY_SEGMENTS in self.form.extras:
            extras[Extra.QUERY_SEGMENTS] = self.chunk(self.named["query_segments"], 1, piece.queries)
            extras[Extra.KEY_SEGMENTS] = self.chunk(block["key_segments"], 1, piece.keys)
        if not isinstance(piece.offset, int):
            extras[Extra.OFFSET] = piece.offset
        elif piece.offset:
            extras[Extra.OFFSET] = jnp.full((1,), piece.offset, jnp.int32)
        if piece.query_begins is not None:
            extras[Extra.QUERY_BEGINS] = piece.query_begins
        if piece.key_lengths is not None:
            extras[Extra.KEY_LENGTHS] = piece.key_lengths
        names = [extra for extra in Extra if extra in extras]
        form = dataclasses.replace(self.form.whole, left=piece.left, right=piece.right, extras=tuple(names), **of_form)
        return form, [*base, *(extras[extra] for extra in names)]


def forward(form: Form, axes: Axes, run: Callable[..., tuple[jax.Array, ...]], at_once: bool) -> Function:
    """Attention on one device, of the operands of its part of the sequence.

    Args:
      form: of the call.
      axes: the axes of the mesh over which the sequence is sharded.
      run: (form, *operands) -> the results of a call on one device.
      at_once: whether such a call may say from which query on queries count.
    """

    def function(*operands):
        local = _Local.of(form, axes, operands, at_once)
        wide = jnp.dtype(accumulator(operands[0].dtype))
        last = {piece.queries: (step.shift, i) for step in local.steps for i, piece in enumerate(step.pieces)}
        found: dict[int, Sequence[jax.Array]] = {}
        block = local.own
        for step, following in zip(local.steps, [*local.steps[1:], None], strict=True):
            arriving = local.arriving(block, following.shift - step.shift) if following else {}
            for i, piece in enumerate(step.pieces):
                more: dict[Extra, jax.Array] = {}
                if piece.queries in found:
                    more = dict(zip((Extra.STATE_OUTPUT, Extra.STATE_LSE), found[piece.queries], strict=False))
                elif Extra.SINKS in form.extras:
                    more = {Extra.SINKS: local.named["sinks"]}
                of_form = {} if last[piece.queries] == (step.shift, i) else {"dtype": wide, "rounded": False}
                of_piece, given = local.call(piece, block, more, returns_lse=True, **of_form)
                found[piece.queries] = run(of_piece, *given)
            block, found = _when_done(arriving, found)
        by_result = zip(*(found[i] for i in range(local.chunks)), strict=True)
        return tuple(local.joined(chunks, axis) for chunks, axis in zip(by_result, (1, 2, 2, 1), strict=False))

    return function


def pullback(
    form: Form, moving: Sequence[str], axes: Axes, run: Callable[..., tuple[jax.Array, ...]], at_once: bool
) -> Function:
    """The gradients on one device, of the operands of its part of the sequence.

    Args:
      form: of the call.
      moving: the operands whose gradients are wanted: some of query, key and value.
      axes, at_once: as `forward` has them.
      run: (form, sums, *operands) -> the gradients of a call on one device in the accumulator's dtype, of which those
        named by `sums` are added to the last operands.
    """

    def function(*operands):
        *given, output, lse, rest, delta, cotangent = operands
        local = _Local.of(form, axes, given, at_once)
        of_queries = (output, 1), (lse, 2), (rest, 2), (delta, 2), (cotangent, 1)
        of_query: dict[int, jax.Array] = {}  # the gradient by each chunk of queries, so far

        def gradients(
            step: Step, block: dict[str, jax.Array], before: dict[str, jax.Array], more: dict[Extra, jax.Array]
        ) -> dict[str, jax.Array]:
            """The gradients by the block's keys and values, added to those `before`."""
            of_keys = [{name: local.chunk(x, 1, keys) for name, x in before.items()} for keys in range(local.chunks)]
            for piece in step.pieces:
                sums = dict(of_keys[piece.keys])
                if piece.queries in of_query:
                    sums["query"] = of_query[piece.queries]
                names = tuple(name for name in moving if name in sums)
                of_piece, given = local.call(piece, block, more)
                results = (local.chunk(x, axis, piece.queries) for x, axis in of_queries)
                found = run(of_piece, names, *given, *results, *(sums[name] for name in names))
                of_keys[piece.keys] = dict(zip(moving, found, strict=True))
                if "query" in moving:
                    of_query[piece.queries] = of_keys[piece.keys].pop("query")
            return {name: local.joined([chunk[name] for chunk in of_keys], 1) for name in _KEYS if name in moving}

        own, *others = local.steps
        early, late = local.halves() if others and at_once and local.chunks == 1 else ({}, None)
        arriving = local.arriving(local.own, others[0].shift) if others else {}
        found = gradients(own, local.own, {}, early)
        block, found = _when_done(arriving, found)
        sums: dict[str, jax.Array] = {}
        for step, following in zip(others, [*others[1:], None], strict=True):
            arriving = local.arriving(block, following.shift - step.shift) if following else {}
            of_block = gradients(step, block, {}, {})
            block, of_block = _when_done(arriving, of_block)
            # What the devices before have added arrives while this one computes its part.
            sums = {name: sums[name] + x if sums else x for name, x in of_block.items()}
            sums = local.arriving(sums, (following.shift if following else form.shards.devices) - step.shift)
        if late is not None:
            found = gradients(own, local.own, found, late)
        if sums:
            found = {name: x + sums[name] for name, x in found.items()}
        if "query" in moving:
            found["query"] = local.joined([of_query[i] for i in range(local.chunks)], 1)
        return tuple(found[name].astype(local.named[name].dtype) for name in moving)

    return function


def _when_done[T](arriving: dict[str, jax.Array], found: T) -> tuple[dict[str, jax.Array], T]:
    """A block that is on its way, to be sent on only when the work is done that it arrives beside.

    So a device has two blocks at most. XLA would send all of them on as soon as they arrive.
    """
    return jax.lax.optimization_barrier((arriving, found)) if arriving else (arriving, found)
