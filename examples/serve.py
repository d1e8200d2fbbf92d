"""Serve a model to many requests at once: continuous batching over a paged cache, by `jaxsoft.paged_attention`.

The requests have prompts and lengths of their own, come one after the other, and share the beginning of their prompts.
scheduler.py decides what each step of the model takes; a step is one call of a jitted function, which writes the new
keys and values into the donated cache in place, attends, and draws. The same model and scheduler also run on `jax.nn`,
with a cache that has a row for each slot, as long as the longest sequence may become.

    python examples/serve.py

takes less than a minute on two CPU cores. It trains the model of decoder.py for a moment, and prints some of the texts,
the tokens per second and the memory of both caches. On a GPU, --setting 1b serves random weights of the shape of a
model of 1.2 billion parameters in bfloat16; --cudnn lets jax.nn attend by cuDNN there.

Every text is checked against the model without cache and batch, as it is defined: attention of `jax.nn` over one whole
sequence. In float32 the model, given a text so far, must draw the very token that was drawn when it was served, at each
position. Then it would also draw the same text alone, token by token. In bfloat16 kernels round differently, so a
different token may win; there the probability of each token, given those before it, must be that of the model. The
exit status is 1 if a text fails.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import Decoder, Shape
from flax import nnx
from language_model import read_text, train_step
from scheduler import Pool, Request, Scheduler

import jaxsoft


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is served, how, and to whom."""

    shape: Shape
    dtype: str
    steps: int  # of training
    slots: int
    chunk: int  # most tokens of a slot in a step
    budget: int  # most tokens of a step
    page_size: int
    pages: int
    requests: int
    per_step: float  # requests that come in a step, on average
    shared: int  # tokens that all prompts begin with
    prompts: tuple[int, int]  # fewest and most tokens that follow these
    lengths: tuple[int, int]  # fewest and most tokens to draw
    checked: int  # requests whose text is checked; it takes the logits of a whole sequence

    @property
    def longest(self):
        """Tokens of the longest sequence, in whole pages."""
        tokens = self.shared + self.prompts[1] + self.lengths[1]
        return -(-tokens // self.page_size) * self.page_size


SETTINGS = {
    "small": Setting(
        Shape(vocabulary=128, layers=2, width=128, hidden=256, heads=8, key_heads=2, size=16), "float32",
        steps=100, slots=8, chunk=16, budget=32, page_size=16, pages=48,
        requests=24, per_step=0.4, shared=40, prompts=(4, 60), lengths=(8, 60), checked=24,
    ),
    # The shape of Llama 3.2 1B, with a readout of its own. The pages hold half of what the rows of the slots hold.
    "1b": Setting(
        Shape(vocabulary=128256, layers=16, width=2048, hidden=8192, heads=32, key_heads=8, size=64), "bfloat16",
        steps=0, slots=64, chunk=32, budget=512, page_size=64, pages=2176,
        requests=96, per_step=1.0, shared=1024, prompts=(256, 3072), lengths=(64, 256), checked=4,
    ),
}  # fmt: skip

RUNS = 3  # over all requests, of each way

# By how much the logarithm of a token's probability may differ from the model's own. Of 8 layers in bfloat16 on an H100
# it did so by up to 0.06, whichever kernel attended.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25}


def in_slots(x, batch, chunk):
    """x (tokens, heads, size) as (slots, chunk, heads, size): the tokens of each slot, and zeros behind them."""
    empty = jnp.zeros((len(batch.counts), chunk, *x.shape[1:]), x.dtype)
    return empty.at[batch.slots, batch.places].set(x, mode="drop")


# --8<-- [start:paged]
@dataclasses.dataclass(frozen=True)
class Paged:
    """Keys and values in pages that belong to no slot, and attention of jaxsoft."""

    pages: int
    size: int

    @property
    def shape(self):
        """Of a layer's keys, less heads and their size."""
        return self.pages, self.size

    def attend(self, q, k, v, cache, batch, chunk):
        """q, k, v (tokens, heads, size) of new tokens: the values that each takes, and the cache with k and v in it."""
        where = {"page_table": batch.table, "key_value_seq_lengths": batch.lengths, "query_seq_lengths": batch.counts}
        q, k, v = (in_slots(x, batch, chunk) for x in (q, k, v))
        cache = jaxsoft.write_pages(*cache, k, v, **where)
        y = jaxsoft.paged_attention(q, *cache, **where, is_causal=True)
        return y[batch.slots, batch.places], cache
        # --8<-- [end:paged]


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """A row of keys and values for each slot, and attention of jax.nn."""

    slots: int
    longest: int
    implementation: str | None = None

    @property
    def shape(self):
        """As that of Paged: a row is one page, which the scheduler gives to the slot."""
        return self.slots, self.longest

    def attend(self, q, k, v, cache, batch, chunk):
        """As that of Paged."""
        cache = tuple(
            old.at[batch.slots, batch.positions].set(new, mode="drop") for old, new in zip(cache, (k, v), strict=True)
        )
        if chunk == 1:
            which = {"key_value_seq_lengths": batch.lengths}
        else:
            positions = (batch.lengths - batch.counts)[:, None] + jnp.arange(chunk)
            which = {"mask": (jnp.arange(self.longest) <= positions[..., None])[:, None]}
        y = jax.nn.dot_product_attention(in_slots(q, batch, chunk), *cache, **which, implementation=self.implementation)
        return y[batch.slots, batch.places], cache


# --8<-- [start:serve_step]
def serve_step(model, way, cache, last, batch, chunk):
    """One step of continuous batching.

    cache: of each layer, keys and values. last: the token that each slot drew last. chunk: most tokens of a slot in
    this batch.

    Returns the cache, the tokens last drawn, and log p of those drawn now.
    """
    cache = list(cache)
    tokens = jnp.where(batch.tokens < 0, last[batch.slots], batch.tokens)

    def attend(layer, q, k, v):
        y, cache[layer] = way.attend(q, k, v, cache[layer], batch, chunk)
        return y

    logits = model.readout(model.features(tokens, batch.positions, attend)[batch.ends])
    token = drawn_from(logits, batch.numbers, batch.lengths, batch.temperatures)
    return cache, jnp.where(batch.draws, token, last), log_probability(logits, token)
    # --8<-- [end:serve_step]


# --8<-- [start:drawn_from]
def drawn_from(logits, numbers, positions, temperatures):
    """A token from each row of logits, by keys that depend on the number of the request and the position alone."""

    def draw(logits, number, position, temperature):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), position)
        return jaxsoft.random.sample(key, logits, temperature=temperature)[0]

    return jax.vmap(draw)(logits, numbers, positions, temperatures)
    # --8<-- [end:drawn_from]


def log_probability(logits, tokens):
    """log p of each token, at a temperature of 1."""
    return -jaxsoft.softmax_cross_entropy_with_integer_labels(logits, tokens)


class Served(NamedTuple):
    """What a run over all requests gave."""

    texts: dict[int, np.ndarray]  # the tokens drawn for each request, by its number
    log_p: dict[int, np.ndarray]  # the logarithms of their probabilities
    scheduler: Scheduler
    steps: int
    seconds: float


class Server:
    """A model with a cache, which is Paged or Contiguous."""

    def __init__(self, model, way, setting):
        """A jitted step, and an empty cache."""
        graph, weights = nnx.split(model)
        self.weights, tree = jax.tree.flatten(weights)  # a call takes a list sooner than what Flax keeps weights in
        self.way, self.setting = way, setting
        shape = *way.shape, setting.shape.key_heads, setting.shape.size
        self.cache = [tuple(jnp.zeros(shape, setting.dtype) for _ in range(2)) for _ in range(setting.shape.layers)]

        # The cache is donated, so that it is written in place.
        @functools.partial(jax.jit, static_argnames="chunk", donate_argnames="cache")
        def step(weights, cache, last, batch, chunk):
            return serve_step(nnx.merge(graph, jax.tree.unflatten(tree, weights)), way, cache, last, batch, chunk)

        self.step = step

    def serve(self, requests):
        """Serves the requests. What an earlier run left in the cache is forgotten, and harms nothing."""
        setting, (pages, page_size) = self.setting, self.way.shape
        scheduler = Scheduler(
            requests, setting.slots, setting.chunk, setting.budget, Pool(pages, page_size), setting.longest // page_size
        )
        last = jnp.zeros(setting.slots, jnp.int32)
        texts, logs = ({request.number: [] for request in requests} for _ in range(2))

        def read(drawing, *arrays):
            for found, array in zip((texts, logs), map(np.asarray, arrays), strict=True):
                for slot, number in drawing.items():
                    found[number].append(array[slot])

        before, steps, start = None, 0, time.perf_counter()
        for now in itertools.count():
            scheduler.admit(now)
            if not scheduler.busy:
                break
            batch, drawing = scheduler.plan()
            if not batch.counts.any():  # nobody is there yet
                continue
            chunk = setting.chunk if batch.counts.max() > 1 else 1
            self.cache, last, log_p = self.step(self.weights, self.cache, last, batch, chunk)
            if before:  # a step late: the next step needs no token on the host, so the device need not wait for it
                read(*before)
            before, steps = (drawing, last, log_p), steps + 1
        read(*before)
        seconds = time.perf_counter() - start
        texts, logs = ({number: np.array(values) for number, values in found.items()} for found in (texts, logs))
        return Served(texts, logs, scheduler, steps, seconds)


# --8<-- [start:alone]
@functools.partial(jax.jit, static_argnames="graph")
def alone(graph, weights, tokens, number, temperature):
    """What the model draws after each token of one sequence (time,), without a cache, and log p of what does follow."""
    logits = nnx.merge(graph, weights).whole(tokens[None], jax.nn.dot_product_attention)[0]
    positions = jnp.arange(1, len(tokens) + 1)
    each = jnp.full_like(tokens, number), positions, jnp.full(tokens.shape, temperature)
    return drawn_from(logits, *each), log_probability(logits, jnp.roll(tokens, -1))
    # --8<-- [end:alone]


def mistakes(model, setting, requests, served):
    """What is wrong with the texts of these requests, in words."""
    graph, weights = nnx.split(model)
    for request in requests:
        text, log_p = served.texts[request.number], served.log_p[request.number]
        tokens = np.concatenate([request.prompt, text])
        padded = np.pad(tokens, (0, setting.longest - len(tokens)))  # of one length, and without influence
        drawn, right = alone(graph, weights, padded, request.number, request.temperature)
        here = slice(len(request.prompt) - 1, len(tokens) - 1)
        differences = np.abs(log_p - np.asarray(right)[here])
        if len(text) != request.length:
            yield f"request {request.number} has {len(text)} tokens instead of {request.length}"
        elif not differences.max() <= TOLERANCES[setting.dtype]:
            yield f"request {request.number}: log-probabilities are wrong by up to {differences.max():.1e}"
        elif setting.dtype == "float32" and not np.array_equal(text, np.asarray(drawn)[here]):
            first = np.flatnonzero(text != np.asarray(drawn)[here])[0]
            yield f"request {request.number}: alone, another token is drawn at {first}"


def requests_of(setting, text):
    """Prompts cut out of the text, each after the same beginning. Every other one is continued without chance."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / setting.per_step, setting.requests)).astype(int)
    requests = []
    for number, arrival in enumerate(arrivals - arrivals[0]):
        size, length = (int(rng.integers(a, b, endpoint=True)) for a, b in (setting.prompts, setting.lengths))
        start = rng.integers(0, len(text) - size)
        prompt = np.concatenate([text[: setting.shared], text[start : start + size]])
        requests.append(Request(number, int(arrival), prompt, length, temperature=0.6 * (number % 2)))
    return requests


def trained(setting, text):
    """A model, after a moment of training."""
    model = Decoder(setting.shape, setting.dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(4e-3), wrt=nnx.Param) if setting.steps else None
    rng = np.random.default_rng(0)
    for _ in range(setting.steps):
        starts = rng.integers(0, len(text) - 128, size=16)
        train_step(model, optimizer, text[starts[:, None] + np.arange(129)])
    return model


def main():
    """Trains, serves and compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="small", help="what to serve (default: %(default)s)")
    parser.add_argument("--cudnn", action="store_true", help="let jax.nn attend by cuDNN, in 16 bits on a GPU")
    args = parser.parse_args()
    setting = SETTINGS[args.setting]

    # As in language_model.py: otherwise a GPU rounds products so much that another token may become the most probable.
    jax.config.update("jax_default_matmul_precision", "float32")

    text, alphabet = read_text()
    alphabet += ["?"] * (setting.shape.vocabulary - len(alphabet))  # which a model must first learn not to write
    model, requests = trained(setting, text), requests_of(setting, text)
    ways = {
        "jaxsoft, pages": Paged(setting.pages, setting.page_size),
        "jax.nn, rows": Contiguous(setting.slots, setting.longest, "cudnn" if args.cudnn else None),
    }
    prompted, drawn = (sum(sizes) for sizes in zip(*((len(r.prompt), r.length) for r in requests), strict=True))
    print(
        f"{len(requests)} requests with {prompted} tokens of prompts and {drawn} to draw, in {setting.slots} slots; "
        f"{jax.devices()[0].device_kind}"
    )

    servers = {name: Server(model, way, setting) for name, way in ways.items()}
    for server in servers.values():
        server.serve(requests[:1])  # compiles both shapes of a step
    # They take turns, so that a busy machine slows all alike.
    runs = [{name: server.serve(requests) for name, server in servers.items()} for _ in range(RUNS)]
    wrong = []
    for name, served in runs[-1].items():
        seconds = np.median([run[name].seconds for run in runs])
        size = sum(x.nbytes for x in jax.tree.leaves(servers[name].cache)) / 2**20
        print(
            f"{name:14s} {drawn / seconds:6.0f} tokens per second, {served.steps} steps of "
            f"{1e3 * seconds / served.steps:.2f} ms, a cache of {np.prod(ways[name].shape)} tokens or "
            f"{size:.1f} MiB, where {served.scheduler.reused} tokens of prompts were found"
        )
        wrong += [f"{name}: {mistake}" for mistake in mistakes(model, setting, requests[: setting.checked], served)]

    texts = next(iter(runs[-1].values())).texts
    for request in requests[:2] if setting.steps else ():
        parts = request.prompt[setting.shared :], texts[request.number]
        print(f"{'-' * 80}\n{'|'.join(''.join(alphabet[t] for t in part) for part in parts)}")
    if wrong:
        print("FAILED:", *wrong, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
