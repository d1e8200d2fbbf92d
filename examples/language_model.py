"""Train a small Flax transformer on real text, attention and loss through `jaxsoft`, and on `jax.nn` and optax.

The text is the language reference that every Python installation carries (`pydoc_data.topics`: about half a megabyte
of English), so nothing is downloaded. The model predicts the next character. It takes attention and the cross-entropy
as parameters, so the very same model runs on `jaxsoft`, and on `jax.nn` and optax. Both copies start from the same
weights and see the same batches, so their losses may differ by rounding only; the exit status is 1 if they differ by
more.

    python examples/language_model.py

takes about a minute on two CPU cores. On a GPU, --batch 32 --context 1024 gives it enough to do, and --dtype bfloat16
is what the fast kernels for attention take. It prints both losses, a sample of generated text and the seconds per step,
and draws the loss curves into out/loss.png.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure  # unlike pyplot, it needs neither a screen nor a choice of backend
from tqdm import tqdm

import jaxsoft

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 128, 16, 128, 4, 2
LEARNING_RATE = 4e-3

# What a score loses for each position of distance, by head. It takes the place of position embeddings and is learnt
# faster: nothing has to find out first that neighbours matter. Source: Press et al., "Train short, test long"
# (arXiv:2108.12409).
SLOPES = 4.0 ** -np.arange(HEADS, dtype=np.float32)

# The losses of the two copies may differ by this much, relatively. A float32 is rounded by up to 2^-24 = 6e-8 of its
# size, and a loss is a mean, in which the roundings mostly cancel: while the weights are nearly equal, 1e-5 is far
# above what rounding does. A mistake does more: scores that are wrong by 0.3% make a difference of 2e-4. Training may
# then amplify the difference (AdamW divides each gradient by its own size, so where one is nearly 0, rounding picks
# the step); by how much depends on the machine. What attention takes and gives in bfloat16 is rounded by up to 2^-9.
EARLY_STEPS = 20
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (1e-3, 1e-2)}  # in the first steps, and in all


def jaxsoft_attention(q, k, v, query_offset=0):
    """Causal attention of q (batch, queries, HEADS, size) to k and v, in which scores fall with distance.

    The first query has the position query_offset. Query i adds slope * (j - i) to its score for key j, but slope * j
    will do: softmax does not see what is added to all scores of a query. So neither a mask nor a bias of the size of
    the scores is in memory.
    """
    bias = SLOPES[:, None, None] * jnp.arange(k.shape[1])
    return jaxsoft.dot_product_attention(q, k, v, bias, is_causal=True, query_offset=query_offset)


def jax_nn_attention(q, k, v, implementation=None):
    """The same by jax.nn, of queries that begin where the keys do. cuDNN wants all of the bias, in the dtype of q."""
    bias = SLOPES[:, None, None] * jnp.minimum(jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None], 0)
    bias = bias[None].astype(q.dtype if implementation == "cudnn" else jnp.float32)
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, implementation=implementation)


class Block(nnx.Module):
    """Causal self-attention, then a perceptron, each added to its input."""

    def __init__(self, attention, dtype, rngs):
        """attention: (q, k, v) -> the values that each query takes, causal; dtype: that of the three."""
        self.attention, self.dtype = attention, dtype
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.project = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def attend(self, x, cache, position):
        """Mixes each position of x (batch, time, WIDTH) with those before it, in x and in the cache."""
        q, k, v = jnp.moveaxis(self.qkv(x).astype(self.dtype).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        if cache is None:
            y = self.attention(q, k, v)
        else:  # keys after the last query do not count, so neither does what is not filled yet
            k, v = cache = [
                jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
                for old, new in zip(cache, (k, v), strict=True)
            ]
            y = self.attention(q, k, v, query_offset=position)
        return self.project(y.reshape(x.shape).astype(x.dtype)), cache

    def __call__(self, x, cache=None, position=0):
        """x (batch, time, WIDTH) to the same shape, and the cache with its keys and values in it."""
        mixed, cache = self.attend(self.norm1(x), cache, position)
        x = x + mixed
        return x + self.down(nnx.gelu(self.up(self.norm2(x)))), cache


class LanguageModel(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, vocabulary, attention, cross_entropy, dtype, rngs):
        """attention, dtype: those of Block; cross_entropy: (logits, labels) -> losses."""
        self.cross_entropy, self.dtype = cross_entropy, dtype
        self.tokens = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention, dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.readout = nnx.Linear(WIDTH, vocabulary, use_bias=False, rngs=rngs)

    def empty_cache(self, batch, length):
        """Room for the keys and the values of so many tokens, for each block."""
        empty = jnp.zeros((batch, length, HEADS, WIDTH // HEADS), self.dtype)
        return [(empty, empty)] * LAYERS

    def __call__(self, tokens, caches=(None,) * LAYERS, position=0):
        """Tokens (batch, time) to logits (batch, time, vocabulary) of the token that follows each, and the caches.

        caches: of the tokens before, and with room for these; None where there are none before. position: where these
        tokens begin.
        """
        x, filled = self.tokens(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache, position)
            filled.append(cache)
        return self.readout(self.norm(x)), filled

    def loss(self, windows):
        """Mean cross-entropy of each token of windows (batch, time + 1) given those before it, in nats."""
        return jnp.mean(self.cross_entropy(self(windows[:, :-1])[0], windows[:, 1:]))


@nnx.jit
def train_step(model, optimizer, windows):
    """One step of AdamW on one batch. Returns the loss before the step."""
    loss, gradients = nnx.value_and_grad(lambda model: model.loss(windows))(model)
    optimizer.update(model, gradients)
    return loss


class Run:
    """One copy of the model in training, and what it has recorded."""

    def __init__(self, vocabulary, attention, cross_entropy, steps, dtype="float32"):
        """Every copy starts from the same weights."""
        self.model = LanguageModel(vocabulary, attention, cross_entropy, dtype, nnx.Rngs(0))
        schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, max(1, steps // 10), steps)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
        self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=nnx.Param)
        self.losses, self.seconds = [], []

    def step(self, windows):
        """Trains on one batch."""
        start = time.perf_counter()
        self.losses.append(float(train_step(self.model, self.optimizer, windows)))
        self.seconds.append(time.perf_counter() - start)


def train(runs, text, steps, batch=BATCH, context=CONTEXT):
    """Trains all runs on the same random windows of the text, in turns, so that a busy machine slows all alike."""
    rng = np.random.default_rng(0)
    progress = tqdm(range(steps), unit="step", file=sys.stdout, disable=None)  # None: a bar on a terminal only
    for step in progress:
        starts = rng.integers(0, len(text) - context, size=batch)
        windows = text[starts[:, None] + np.arange(context + 1)]
        for run in runs.values():
            run.step(windows)
        losses = {name: f"{run.losses[-1]:.4f}" for name, run in runs.items()}
        progress.set_postfix(losses)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            tqdm.write(f"step {step:4d}  loss, nats per character: " + "  ".join(f"{n} {l}" for n, l in losses.items()))


@nnx.jit(static_argnames=("length", "sample"))
def generate(model, prompts, key, length, sample):
    """Draws `length` tokens that follow each of the prompts (batch, time).

    The keys and the values of all tokens are kept, so that each step takes a single token through the model.

    sample: (key, logits) -> the tokens, and the probability of each.
    """
    batch, begin = prompts.shape
    logits, caches = model(prompts, model.empty_cache(batch, begin + length))

    def step(state, now):
        (logits, caches), (key, position) = state, now
        token, _ = sample(key, logits)
        logits, caches = model(token[:, None], caches, position)
        return (logits[:, -1], caches), token

    nows = jax.random.split(key, length), begin + jnp.arange(length)
    return jax.lax.scan(step, (logits[:, -1], caches), nows)[1].T


def read_text():
    """The text as tokens, one a character, and the alphabet that they are indices into."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    return np.searchsorted(alphabet, list(text)).astype(np.int32), alphabet


def draw(runs, path):
    """Draws the loss curves of all runs, the later ones dashed over the earlier."""
    fig = Figure(figsize=(7, 4.5), layout="constrained")
    ax = fig.subplots()
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        ax.plot(run.losses, style, label=name)
    ax.set(xlabel="step", ylabel="loss, nats per character", title="The same model on jaxsoft, and on jax.nn and optax")
    ax.grid(alpha=0.3)
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def differences(losses: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """The largest relative difference in the first steps, and in all of them."""
    difference = np.abs(np.array(losses) - expected) / expected
    return difference[:EARLY_STEPS].max(), difference.max()


def exit_status(early: float, all_steps: float, dtype: str) -> int:
    """0 if rounding explains such differences, else 1, which is said."""
    early_tolerance, tolerance = TOLERANCES[dtype]
    if early <= early_tolerance and all_steps <= tolerance:  # not where a loss is NaN
        return 0
    print(f"FAILED: rounding explains {early_tolerance:.0e} and {tolerance:.0e}", file=sys.stderr)
    return 1


def main():
    """Trains, shows and compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows of text in a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=CONTEXT, help="characters of a window (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help="of attention (default: %(default)s)")
    parser.add_argument("--cudnn", action="store_true", help="let jax.nn attend by cuDNN, in 16 bits on a GPU")
    parser.add_argument("--out", type=pathlib.Path, default="out/loss.png", help="picture (default: %(default)s)")
    args = parser.parse_args()

    # A GPU would round the inputs of matrix products to 11 bits, and drown the comparison in that.
    jax.config.update("jax_default_matmul_precision", "float32")

    tokens, alphabet = read_text()
    print(f"{len(tokens)} characters of text, {len(alphabet)} different; {jax.devices()[0].device_kind}")

    theirs = functools.partial(jax_nn_attention, implementation="cudnn" if args.cudnn else None)
    functions = {
        "jaxsoft": (jaxsoft_attention, jaxsoft.softmax_cross_entropy_with_integer_labels),
        "jax.nn": (theirs, optax.softmax_cross_entropy_with_integer_labels),
    }
    runs = {name: Run(len(alphabet), *both, args.steps, args.dtype) for name, both in functions.items()}
    train(runs, tokens, args.steps, args.batch, args.context)
    draw(runs, args.out)

    sample = functools.partial(jaxsoft.random.sample, temperature=0.6)
    drawn = generate(runs["jaxsoft"].model, tokens[None, : args.context], jax.random.key(0), 400, sample)[0]
    print(f"\nThe model's own text:\n{'-' * 80}\n{''.join(alphabet[t] for t in drawn)}\n{'-' * 80}")

    early, all_steps = differences(*(run.losses for run in runs.values()))
    for name, run in runs.items():
        print(f"{name:8s} {np.median(run.seconds):.4f} s per step, last loss {run.losses[-1]:.4f}")
    print(f"largest relative difference: {early:.1e} in the first {EARLY_STEPS} steps, {all_steps:.1e} in all steps")
    print(f"loss curves: {args.out}")
    return exit_status(early, all_steps, args.dtype)


if __name__ == "__main__":
    sys.exit(main())
