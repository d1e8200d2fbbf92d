"""Which sequences a step of the model serves, with which tokens, and which pages their keys and values lie in.

This is the part of continuous batching that runs on the host. A slot is a row of the batch. A request waits until a
slot and all pages that it will need are free, so a sequence that has begun never waits for memory. In each step every
slot that draws takes one token through the model, and what is left of the step's tokens goes to prompts, in chunks. A
sequence that has all its tokens leaves at once, and the next request takes its slot.

Prompts with the same beginning share the pages that it fills. Such a page is never written again: a sequence writes
only behind its prompt's shared pages.
"""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are to follow it."""

    number: int
    arrival: int  # the step before which it comes
    prompt: np.ndarray
    length: int
    temperature: float


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in a slot."""

    request: Request
    pages: list[int]
    cached: int  # tokens whose keys and values are in the pages
    drawn: int = 0

    @property
    def pending(self):
        """Tokens that are known, and that the model has not seen yet."""
        return len(self.request.prompt) + self.drawn - self.cached


# --8<-- [start:batch]
class Batch(NamedTuple):
    """What a step of the model takes.

    First the tokens of all slots, one after the other, then what is known of each slot. An array has one shape for all
    steps with prompts, and one for all without, so each of the two is compiled once.
    """

    tokens: np.ndarray  # -1 for the one that the slot drew last, which the host may not know yet
    slots: np.ndarray  # of each token; the number of slots, which is none of them, where there is no token
    places: np.ndarray  # of each token among those of its slot
    positions: np.ndarray  # of each token in its sequence
    counts: np.ndarray  # tokens of each slot
    lengths: np.ndarray  # of each slot's sequence, these tokens included
    ends: np.ndarray  # which token is the last of each slot
    draws: np.ndarray  # whether a token follows it, and is to be drawn
    numbers: np.ndarray  # of the requests
    temperatures: np.ndarray
    table: np.ndarray  # (slots, pages of a sequence)
    # --8<-- [end:batch]


# --8<-- [start:pool]
class Pool:
    """The pages: which are free, and which prompt each of them holds the end of."""

    def __init__(self, pages, size):
        """pages: how many there are; size: tokens of each."""
        self.pages, self.size = pages, size
        self.free = dict.fromkeys(range(pages))  # in the order in which they are taken
        self.users = collections.Counter()
        self.page_of, self.prompt_of = {}, {}  # the tokens of a prompt up to the end of a page, and back

    def take(self, prompt, length):
        """The pages of a sequence, and how many tokens they hold already; None if there are not enough of them."""
        needed = -(-(len(prompt) + length - 1) // self.size)  # the last token is drawn, and not looked at
        shared = []
        for end in range(self.size, len(prompt), self.size):  # one token at least has to go through the model
            page = self.page_of.get(prompt[:end].tobytes())
            if page is None:
                break
            shared.append(page)
        if needed - len(shared) > len(self.free) - sum(page in self.free for page in shared):
            return None
        for page in shared:
            self.free.pop(page, None)
        pages = shared + [self._fresh() for _ in range(needed - len(shared))]
        self.users.update(pages)
        return pages, len(shared) * self.size

    def _fresh(self):
        """The page that has been free for the longest time, whose content is forgotten."""
        page = next(iter(self.free))
        del self.free[page]
        self.page_of.pop(self.prompt_of.pop(page, None), None)
        return page

    def remember(self, prompt, pages, cached):
        """Notes which pages the first `cached` tokens of the prompt fill, for prompts that begin as this one."""
        for page, end in zip(pages, range(self.size, min(cached, len(prompt)) + 1, self.size), strict=False):
            tokens = prompt[:end].tobytes()
            if page not in self.prompt_of and tokens not in self.page_of:
                self.prompt_of[page], self.page_of[tokens] = tokens, page

    def give_back(self, pages):
        """Frees the pages that no other sequence uses, the last first: the beginnings of prompts stay the longest."""
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None
        # --8<-- [end:pool]


class Scheduler:
    """The slots, and the requests that wait for one."""

    def __init__(self, requests, slots, chunk, budget, pool, pages_of_sequence):
        """chunk: most tokens of a slot in a step; budget: most tokens of a step, at least one for each slot."""
        for request in requests:
            if -(-(len(request.prompt) + request.length - 1) // pool.size) > min(pool.pages, pages_of_sequence):
                raise ValueError(f"request {request.number} needs more pages than there are for a sequence")
        if budget < slots:
            raise ValueError(f"a step must have a token for each of {slots} slots; got a budget of {budget}")
        self.waiting = collections.deque(sorted(requests, key=lambda request: request.arrival))
        self.slots, self.chunk, self.budget, self.pool = [None] * slots, chunk, budget, pool
        self.table = np.zeros((slots, pages_of_sequence), np.int32)
        self.reused = 0  # tokens of prompts that were found in pages

    @property
    def busy(self):
        """Whether there is anything left to do."""
        return bool(self.waiting) or any(self.slots)

    def admit(self, now):
        """Gives free slots to the requests that have come before step `now`, in their order, while pages suffice."""
        for slot, sequence in enumerate(self.slots):
            if sequence is not None or not self.waiting or self.waiting[0].arrival > now:
                continue
            request = self.waiting[0]
            taken = self.pool.take(request.prompt, request.length)
            if taken is None:
                return
            self.waiting.popleft()
            pages, cached = taken
            self.slots[slot] = Sequence(request, pages, cached)
            self.table[slot, : len(pages)] = pages
            self.reused += cached

    # --8<-- [start:plan]
    def plan(self):
        """The batch of the next step, and by slot the requests that a token is drawn for in it."""
        pending = [0 if sequence is None else sequence.pending for sequence in self.slots]
        counts = np.array([min(n, 1) for n in pending], np.int32)
        left = self.budget - counts.sum()
        for slot in sorted(np.flatnonzero(counts), key=lambda slot: self.slots[slot].request.number):
            more = min(pending[slot] - 1, self.chunk - 1, left)
            counts[slot] += more
            left -= more
        batch = self._batch(counts, self.budget if counts.max() > 1 else len(self.slots))
        drawing = {slot: self.slots[slot].request.number for slot in np.flatnonzero(batch.draws)}
        self._advance(counts)
        return batch, drawing
        # --8<-- [end:plan]

    def _batch(self, counts, tokens):
        slots = len(self.slots)
        batch = Batch(
            *(np.zeros(tokens, np.int32) for _ in range(4)),
            counts=counts,
            lengths=np.zeros(slots, np.int32),
            ends=np.zeros(slots, np.int32),
            draws=np.zeros(slots, bool),
            numbers=np.zeros(slots, np.int32),
            temperatures=np.zeros(slots, np.float32),
            table=self.table.copy(),  # JAX may still read it when the next sequence comes
        )
        batch.slots[:] = slots
        begin = 0
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                continue
            count, cached, request = counts[slot], sequence.cached, sequence.request
            here = slice(begin, begin + count)
            known = request.prompt[cached : cached + count]
            batch.tokens[here] = known if len(known) else -1
            batch.slots[here], batch.places[here] = slot, np.arange(count)
            batch.positions[here] = cached + np.arange(count)
            begin += count
            batch.lengths[slot], batch.ends[slot] = cached + count, begin - 1
            batch.draws[slot] = count == sequence.pending
            batch.numbers[slot], batch.temperatures[slot] = request.number, request.temperature
        return batch

    def _advance(self, counts):
        """Takes note of a step. The device works in order, so what it will have written by then may be relied on."""
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                continue
            draws = counts[slot] == sequence.pending
            sequence.cached += int(counts[slot])
            sequence.drawn += int(draws)
            self.pool.remember(sequence.request.prompt, sequence.pages, sequence.cached)
            if sequence.drawn == sequence.request.length:
                self.pool.give_back(sequence.pages)
                self.slots[slot] = None
