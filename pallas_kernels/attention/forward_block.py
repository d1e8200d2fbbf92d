"""A block of the forward kernel: what its warp groups do. forward.py says how they work together."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._attention.form import Extra, Form

from ..rows.memory import store
from . import operands as tiles
from .extra_tiles import ExtraTiles
from .plan import ForwardPlan
from .ranges import Range, borders, key_tiles, within
from .scores import LOG2E, Queries, Scores

# Registers of a thread: those that compute need nearly all, those that copy few. All together fit the hardware's 64K.
_COMPUTE_REGISTERS = {1: 240, 2: 232, 3: 160}
_COPY_REGISTERS = {1: 24, 2: 40, 3: 32}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "queries keys values output lse queries_there keys_there values_there keys_read values_read turns extras"
    ).split(),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory: what is in it, and the barriers. The output takes the place of queries if it is None."""

    queries: Any
    keys: Any
    values: Any
    output: Any
    lse: Any
    queries_there: Any
    keys_there: Any
    values_there: Any
    keys_read: Any
    values_read: Any
    turns: Any
    extras: Any


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a warp group's queries: m and s are (rows,), o is (rows, value head)."""

    m: jax.Array
    s: jax.Array
    o: jax.Array


jax.tree_util.register_dataclass(State, data_fields=("m", "s", "o"), meta_fields=())


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of queries of one head.

    Attributes:
      form, plan: what is asked for.
      scores: how products become scores.
      refs: the references to query, key, value, output and log-sum-exp.
      segments: the reference to the ranges that segments leave, if there are any.
      scratch: shared memory.
      extra_tiles: the rings in it for a bias and mask.
      interpreted: whether Pallas's interpreter runs it.
    """

    form: Form
    plan: ForwardPlan
    scores: Scores
    refs: tuple[Any, Any, Any, Any, Any]
    segments: Any
    scratch: Scratch
    extra_tiles: ExtraTiles
    interpreted: bool

    @property
    def batch(self) -> jax.Array:
        """Its entry of the batch."""
        return lax.axis_index("batch")

    @property
    def head(self) -> jax.Array:
        """Its query head."""
        return lax.axis_index("heads")

    @property
    def index(self) -> jax.Array:
        """The index of the block among those of its head: those with most keys begin first, if there are such."""
        index = lax.axis_index("queries")
        if self.form.right is None:
            return index
        return -(-self.scores.shape.queries // self.plan.block_rows) - 1 - index

    @property
    def begin(self) -> jax.Array:
        """Its first query."""
        return self.index * self.plan.block_rows

    @property
    def tiles(self) -> Range:
        """The tiles of keys that matter to it."""
        scores = self.scores
        limited = key_tiles(self.form, scores.shape, scores.refs, self.batch, self.begin, self.plan.block_rows)
        return limited if self.segments is None else within(limited, self.segments, self.batch, self.index)

    # The warp group that copies.

    def copy(self) -> None:
        """Copies the tiles of keys, of a bias and mask, and of values, as slots become free."""
        plgpu.set_max_registers(_COPY_REGISTERS[self.plan.groups], action="decrease")
        key, value = self.refs[1:3]
        scratch, slots, span = self.scratch, self.plan.slots, self.tiles
        key_head = lax.div(self.head, jnp.int32(self.refs[0].shape[2] // key.shape[2]))

        @pl.loop(0, span.end - span.begin)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, jnp.int32(slots))
            begin = (span.begin + i) * self.plan.key_tile

            def bring(array: Any, ring: Any, there: Any, read: Any) -> None:
                pl.when(i >= slots)(functools.partial(plgpu.barrier_wait, read.at[slot]))
                rows = tiles.rows(array, self.batch, begin, self.plan.key_tile, key_head, ring.shape[2])
                plgpu.copy_gmem_to_smem(rows, ring.at[slot], there.at[slot])

            bring(key, scratch.keys, scratch.keys_there, scratch.keys_read)
            self.extra_tiles.fill(i, self.batch, self.head, self.begin, begin)
            bring(value, scratch.values, scratch.values_there, scratch.values_read)

    # The warp groups that compute.

    def compute(self, group: jax.Array) -> None:
        """Computes the output of a warp group's queries."""
        plgpu.set_max_registers(_COMPUTE_REGISTERS[self.plan.groups], action="increase")
        scratch, scores, span = self.scratch, self.scores, self.tiles
        begin = self.begin + group * self.plan.query_rows
        own = scratch.queries.at[group]
        rows = tiles.rows(self.refs[0], self.batch, begin, self.plan.query_rows, self.head, own.shape[1])
        plgpu.copy_gmem_to_smem(rows, own, scratch.queries_there.at[group])
        self.extra_tiles.open(group)
        queries = scores.queries(self.batch, begin)
        state = self._initial()
        plgpu.barrier_wait(scratch.queries_there.at[group])
        pl.when(span.end > span.begin)(lambda: plgpu.barrier_wait(scratch.keys_there.at[0]))
        pl.when(group == 1)(self._take_turns)
        step = functools.partial(self._step, own, group, begin, queries, span)
        state = lax.fori_loop(span.begin, span.end, step, state)
        pl.when(group == 0)(self._take_turns)
        self._finish(group, begin, state)

    def _take_turns(self) -> None:
        """Waits until the other warp group is where this one is to go on."""
        if self.plan.turns:
            plgpu.barrier_arrive(self.scratch.turns)
            plgpu.barrier_wait(self.scratch.turns)

    def _initial(self) -> State:
        """The state before any key: the identity, or a sink alone."""
        rows, layout = self.plan.query_rows, plgpu.Layout.WGMMA
        m, s = jnp.float32(-jnp.inf), jnp.float32(0)
        if Extra.SINKS in self.scores.refs:
            ref = self.scores.refs[Extra.SINKS]
            m = ref[tuple(index if n > 1 else 0 for index, n in zip((self.batch, self.head), ref.shape, strict=True))]
            m = m.astype(jnp.float32) * LOG2E
            s = jnp.where(m == -jnp.inf, 0.0, 1.0)
        m, s = (plgpu.layout_cast(lax.broadcast_in_dim(v, (rows,), []), layout.reduce(1)) for v in (m, s))
        o = plgpu.layout_cast(jnp.zeros((rows, self.scratch.values.shape[2]), jnp.float32), layout)
        return State(m, s, o)

    def _step(
        self,
        own: Any,
        group: jax.Array,
        begin: jax.Array,
        queries: Queries,
        span: Range,
        tile: jax.Array,
        state: State,
    ) -> State:
        """Takes a tile of keys into the state.

        Tiles that have to be masked take a branch: beside a loop of their own, the compiler makes that of the others
        slower, by 10 % at heads of 256 (H100, 32K causal, JAX 0.11.2).
        """
        masked = span.masked(tile, borders(self.form, self.scores.shape, of_keys=False))
        scratch, shape = self.scratch, (self.plan.query_rows, self.plan.key_tile)
        step = tile - span.begin
        slot = lax.rem(step, jnp.int32(self.plan.slots))

        where: dict[str, Any] = {
            "query_begin": begin,
            "key_begin": tile * self.plan.key_tile,
            "batch": self.batch,
            "head": self.head,
        }
        loaded = self.scores.load(**where, without=self.extra_tiles.rings)

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, own, scratch.keys.at[slot].transpose((1, 0)))
            self._take_turns()
            return accumulator[...]

        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(scratch.keys_read.at[slot])
        # From shared memory only now, for loads are short, and registers are few while products are computed.
        loaded |= self.extra_tiles.load(step, group)
        scores = self.scores.tile(products, **where, queries=queries, masked=masked, loaded=loaded)
        self.extra_tiles.free(step, group)
        m = jnp.maximum(state.m, scores.values.max(axis=1) * scores.unit)
        # Where nothing counts so far, all exponentials are 0 rather than exp2(-inf + inf).
        reference = jnp.where(m == -jnp.inf, 0.0, m)
        rescale = jnp.exp2(state.m - reference)
        p = jnp.exp2(scores.values * scores.unit - lax.broadcast_in_dim(reference, shape, [0]))
        o = state.o * lax.broadcast_in_dim(rescale, state.o.shape, [0])
        s = state.s * rescale
        p16 = p.astype(scratch.values.dtype)
        if state.o.shape[1] <= 128:  # the order is JAX's own kernel's, and matters
            s += p.sum(axis=1)
            m, s, o, p16 = lax.optimization_barrier((m, s, o, p16))
            self._end_turn(slot)
        else:
            self._end_turn(slot)
            s += p.sum(axis=1)

        def accumulate(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, p16, scratch.values.at[slot])
            wait_for_keys()

        def wait_for_keys() -> None:
            following = lax.rem(step + 1, jnp.int32(self.plan.slots))
            pl.when(tile + 1 < span.end)(lambda: plgpu.barrier_wait(scratch.keys_there.at[following]))

        if self.interpreted:  # the interpreter has no wgmma of what is in registers
            o += jnp.dot(p16, scratch.values[slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            wait_for_keys()
        else:
            o = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(o))
        plgpu.barrier_arrive(scratch.values_read.at[slot])
        return State(m, s, o)

    def _end_turn(self, slot: jax.Array) -> None:
        """After the exponentials: waits for the values, and for the other warp group to end its products."""
        if self.plan.turns:
            plgpu.barrier_arrive(self.scratch.turns)
        plgpu.barrier_wait(self.scratch.values_there.at[slot])
        if self.plan.turns:
            plgpu.barrier_wait(self.scratch.turns)

    def _finish(self, group: jax.Array, begin: jax.Array, state: State) -> None:
        """Writes the results of a warp group's queries."""
        output, lse = self.refs[3:]
        scratch, count = self.scratch, self.plan.query_rows
        inverse = jnp.where(state.s == 0.0, 0.0, 1 / state.s)
        result = state.o * lax.broadcast_in_dim(inverse, state.o.shape, [0])
        lse_rows = scratch.lse.at[group]
        lse_rows[...] = (state.m + jnp.log(state.s) * LOG2E) * math.log(2)
        if output.dtype == jnp.float32:
            store(output.at[self.batch, pl.ds(begin, count), self.head], result)
        else:
            staged = (scratch.queries if scratch.output is None else scratch.output).at[group]
            staged[...] = result.astype(output.dtype)
        plgpu.commit_smem()
        if output.dtype != jnp.float32:
            rows = tiles.rows(output, self.batch, begin, count, self.head, staged.shape[1])
            plgpu.copy_smem_to_gmem(staged, rows)
        plgpu.copy_smem_to_gmem(lse_rows, lse.at[self.batch, self.head, pl.ds(begin, count)])
        plgpu.wait_smem_to_gmem(0)
