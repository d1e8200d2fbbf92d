"""Attention over a sequence that lies on several devices: what a device sends, and a model of the time that this takes.

The model knows two numbers of a device, its rate of operations forward and backward, and of a link the time of a
message by its size. Nothing else takes time in it: neither the launch of a kernel nor the rounding up to tiles. It says
when a ring hides its messages behind its kernels, and which method waits the least.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from collectives import sent

type Sent = dict[str, float]  # bytes by the kind of operation

ELEMENT, WIDE = 2, 4  # bytes of an array's numbers, and of a row's and of sums
METHODS = ("ring", "all_gather", "all_to_all")
# Backward, keys and values go from device to device as often as forward, less so many times: 1 if that begins with the
# block that arrived last, and 0 if not.
KEPT_BLOCKS = 1
KEPT_NUMBERS = 2  # of a query, for its gradients: the log-sum-exp, and what rounding took from the output


@dataclasses.dataclass(frozen=True)
class Call:
    """Attention over a sequence, under a causal rule and in a layout that gives each device as much work.

    Attributes:
      devices: how many.
      tokens: of each device.
      heads, key_heads: of queries and of keys.
      size: of a head.
    """

    devices: int
    tokens: int
    heads: int
    key_heads: int
    size: int = 128

    def block(self) -> int:
        """How many numbers a device's keys and values have."""
        return 2 * self.tokens * self.key_heads * self.size

    def operations(self, backward: bool) -> float:
        """Of one device with one block of keys, of whose scores half count: of two products, or of five."""
        return (5 if backward else 2) * self.heads * self.size * float(self.tokens) ** 2

    def exchanged(self, method: str, backward: bool) -> Sent:
        """The bytes that a device sends, forward or for the gradients alone."""
        block, others = self.block(), self.devices - 1
        of_query = self.tokens * self.heads
        match method:
            case "ring":
                if not backward:
                    return {"collective-permute": others * block * ELEMENT}
                again = max(others - KEPT_BLOCKS, 0)
                return {"collective-permute": again * block * ELEMENT + others * block * WIDE}
            case "all_gather":
                found = {"all-gather": sent("all-gather", self.devices * block * ELEMENT, self.devices)}
                if backward:
                    found["reduce-scatter"] = sent("reduce-scatter", block * WIDE, self.devices)
                return found
            case "all_to_all":
                if backward:  # query, key, value, output, cotangent and numbers there, and three gradients back
                    given = (4 * of_query * self.size + 2 * block) * ELEMENT + 3 * of_query * WIDE
                else:  # query, key and value there, and the output back
                    given = (2 * of_query * self.size + block) * ELEMENT
                return {"all-to-all": sent("all-to-all", given, self.devices)}
        raise ValueError(f"no such method: {method}")

    def sent(self, method: str, gradients: bool) -> Sent:
        """The bytes that a device sends in a call, forward or with gradients."""
        found = self.exchanged(method, False)
        if gradients:
            for kind, value in self.exchanged(method, True).items():
                found[kind] = found.get(kind, 0) + value
            if method == "all_to_all":  # what is kept comes back with the output
                kept = KEPT_NUMBERS * self.tokens * self.heads * WIDE
                found["all-to-all"] += sent("all-to-all", kept, self.devices)
        return found


@dataclasses.dataclass(frozen=True)
class Rates:
    """Operations a second of a device, over the scores that count."""

    forward: float
    backward: float

    def seconds(self, call: Call, backward: bool) -> float:
        """Of the work of a device with one block of keys."""
        return call.operations(backward) / (self.backward if backward else self.forward)


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins a device to the others.

    Attributes:
      latency: seconds of the smallest message.
      rates: (bytes, bytes a second) of messages of some sizes, the smallest first. Between two sizes the time grows in
        proportion, and beyond the last one at its rate.
    """

    latency: float
    rates: Sequence[tuple[float, float]]

    def seconds(self, size: float) -> float:
        """Of a message of so many bytes; none takes no time."""
        if not size:
            return 0.0
        points = [(0.0, self.latency), *((some, some / rate) for some, rate in self.rates)]
        for (less, before), (more, after) in itertools.pairwise(points):
            if size <= more:
                return before + (after - before) * (size - less) / (more - less)
        return size / self.rates[-1][1]


MIB = 2**20
# One way between two H200s, measured. The smallest collective operations between them take 20 to 25 us.
NVLINK = Link(22.5e-6, ((16 * MIB, 151e9), (64 * MIB, 251e9), (256 * MIB, 295e9), (1024 * MIB, 355e9)))
# An assumption, not a measurement: 400 Gbit/s for each GPU are 50 GB/s, of which large messages get 45.
INFINIBAND = Link(22.5e-6, ((1024 * MIB, 45e9),))
LINKS = {"NVLink": NVLINK, "InfiniBand": INFINIBAND}


def step(call: Call, rates: Rates, link: Link, backward: bool) -> tuple[float, float]:
    """The seconds of a step of the ring: those of its work, and those of the messages that travel meanwhile."""
    block = call.block()
    messages = link.seconds(block * ELEMENT) + (link.seconds(block * WIDE) if backward else 0)
    return rates.seconds(call, backward), messages


def seconds(call: Call, method: str, rates: Rates, link: Link, backward: bool) -> float:
    """The time of a pass: the larger one of work and messages in each step of a ring, and the sum for other methods."""
    work, messages = step(call, rates, link, backward)
    if method == "ring":
        return work + (call.devices - 1) * max(work, messages)
    return call.devices * work + sum(link.seconds(size) for size in call.exchanged(method, backward).values())


def share(call: Call, method: str, rates: Rates, link: Link, gradients: bool) -> float:
    """The fraction of a call's time, forward or with gradients, in which the device computes."""
    passes = (False, True) if gradients else (False,)
    work = sum(call.devices * rates.seconds(call, backward) for backward in passes)
    return work / sum(seconds(call, method, rates, link, backward) for backward in passes)


def hidden_from(heads: int, key_heads: int, rates: Rates, link: Link, backward: bool, unit: int = 128) -> int:
    """From how many tokens of a device on, in multiples of the unit, a ring waits for no message."""
    tokens = unit
    while True:
        work, messages = step(Call(2, tokens, heads, key_heads), rates, link, backward)
        if work >= messages:
            return tokens
        tokens += unit
