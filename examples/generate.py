"""Generate text with a cache of keys and values, and with top-k and top-p by `jaxsoft.random.sample`, all in one jit.

The model is that of language_model.py, trained for a moment. It then continues prompts, each at a temperature of its
own, and once more with the same filters composed of `jax.nn.softmax`, `jax.lax.top_k` and `jax.random.categorical`.
Without chance it writes the same text with the cache and without, where each step takes all tokens through the model
again; the exit status is 1 if it does not.

    python examples/generate.py

takes less than a minute on two CPU cores. It prints the texts, the tokens per second of each way, and what a draw alone
takes from the logits of a large vocabulary.
"""

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from language_model import CONTEXT, Run, generate, jaxsoft_attention, read_text, train

import jaxsoft

LENGTH, TOP_K, TOP_P = 200, 20, 0.95
TEMPERATURES = np.array([0.3, 0.6, 0.9], np.float32)  # of the prompts
VOCABULARY = 128256  # of a larger model


def composed(key, logits):
    """top-k, then top-p of what it leaves, in plain JAX."""
    p, tokens = jax.lax.top_k(jax.nn.softmax(logits / TEMPERATURES[:, None]), TOP_K)
    p /= jnp.sum(p, axis=-1, keepdims=True)
    p = jnp.where(jnp.cumsum(p, axis=-1) - p < TOP_P, p, 0)
    drawn = jax.random.categorical(key, jnp.log(p))[:, None]
    token, probability = (jnp.take_along_axis(v, drawn, axis=-1)[:, 0] for v in (tokens, p))
    return token, probability / jnp.sum(p, axis=-1)


def ours(key, logits):
    """The same by jaxsoft."""
    return jaxsoft.random.sample(key, logits, temperature=TEMPERATURES, top_k=TOP_K, top_p=TOP_P)


def most_probable(key, logits):
    """The most probable token, and its probability."""
    return jaxsoft.random.sample(key, logits, temperature=0)


@nnx.jit(static_argnames="length")
def recompute(model, prompts, length):
    """The `length` most probable tokens after the prompts, without a cache."""
    begin = prompts.shape[1]

    def step(position, text):
        logits, _ = model(text)  # what is not written yet comes after, so no token attends to it
        return text.at[:, position].set(jnp.argmax(logits[:, position - 1], axis=-1))

    text = jnp.pad(prompts, ((0, 0), (0, length)))
    return jax.lax.fori_loop(begin, begin + length, step, text)[:, begin:]


def seconds(functions, repeats=5):
    """The median time of each function, which take turns; the first call of each compiles."""
    times = np.empty((repeats + 1, len(functions)))
    for row in times:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function())
            row[i] = time.perf_counter() - start
    return np.median(times[1:], axis=0)


def main():
    """Trains, generates and compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: %(default)s)")
    args = parser.parse_args()

    # As in language_model.py: otherwise a GPU rounds products so much that another token may become the most probable.
    jax.config.update("jax_default_matmul_precision", "float32")

    tokens, alphabet = read_text()
    run = Run(len(alphabet), jaxsoft_attention, jaxsoft.softmax_cross_entropy_with_integer_labels, args.steps)
    train({"jaxsoft": run}, tokens, args.steps)

    key, prompts = jax.random.key(0), np.stack([tokens[:CONTEXT]] * len(TEMPERATURES))
    texts = generate(run.model, prompts, key, LENGTH, ours)
    for temperature, text in zip(TEMPERATURES, texts, strict=True):
        title = f" temperature {temperature:.1f}, top_k {TOP_K}, top_p {TOP_P} "
        print(f"\n{title:-^80}\n{''.join(alphabet[t] for t in text)}")

    ways = {
        "jaxsoft.random.sample": functools.partial(generate, run.model, prompts, key, LENGTH, ours),
        "composed of jax.nn": functools.partial(generate, run.model, prompts, key, LENGTH, composed),
        "the most probable": functools.partial(generate, run.model, prompts, key, LENGTH, most_probable),
        "that without a cache": functools.partial(recompute, run.model, prompts, LENGTH),
    }
    print("-" * 80)
    for name, per_text in zip(ways, seconds(ways.values(), 3), strict=True):
        print(f"{name:22s} {len(TEMPERATURES) * LENGTH / per_text:6.0f} tokens per second")
    logits = 3 * jax.random.normal(key, (len(TEMPERATURES), VOCABULARY))
    drawing = [functools.partial(jax.jit(sampler), key, logits) for sampler in (ours, composed)]
    per_draw = " and ".join(f"{1e3 * t:.2f}" for t in seconds(drawing))
    print(f"a draw alone, from {len(TEMPERATURES)} rows of {VOCABULARY} logits, by the first two: {per_draw} ms")

    with_cache, without = ways["the most probable"](), ways["that without a cache"]()
    if not np.array_equal(with_cache, without):
        print("FAILED: with the cache, other tokens are the most probable ones", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
