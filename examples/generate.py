"""Generate text with top-k and top-p, sampled by `jaxsoft.random.sample` inside the one jitted step of the model.

The model is that of language_model.py, trained for a moment. It then continues prompts, each at a temperature of its
own, and once more with the same filters composed of `jax.nn.softmax`, `jax.lax.top_k` and `jax.random.categorical`.

    python examples/generate.py

takes less than a minute on two CPU cores. It prints the texts, the tokens per second of both, and what a draw alone
takes from the logits of a large vocabulary.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from language_model import CONTEXT, Run, generate, jaxsoft_softmax, read_text, train

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
    """Trains, generates and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: %(default)s)")
    args = parser.parse_args()

    tokens, alphabet = read_text()
    run = Run(len(alphabet), jaxsoft_softmax, jaxsoft.softmax_cross_entropy_with_integer_labels, args.steps)
    train({"jaxsoft": run}, tokens, args.steps)

    key, prompts = jax.random.key(0), np.stack([tokens[:CONTEXT]] * len(TEMPERATURES))
    texts = generate(run.model, prompts, key, LENGTH, ours)
    for temperature, text in zip(TEMPERATURES, texts, strict=True):
        title = f" temperature {temperature:.1f}, top_k {TOP_K}, top_p {TOP_P} "
        print(f"\n{title:-^80}\n{''.join(alphabet[t] for t in text)}")

    samplers = {"jaxsoft.random.sample": ours, "composed of jax.nn": composed}
    generating = [
        functools.partial(generate, run.model, prompts, key, LENGTH, sampler) for sampler in samplers.values()
    ]
    logits = 3 * jax.random.normal(key, (len(TEMPERATURES), VOCABULARY))
    drawing = [functools.partial(jax.jit(sampler), key, logits) for sampler in samplers.values()]
    print("-" * 80)
    for name, per_text, per_draw in zip(samplers, seconds(generating, 3), seconds(drawing), strict=True):
        print(
            f"{name:22s} {len(TEMPERATURES) * LENGTH / per_text:6.0f} tokens per second; a draw alone, "
            f"from {len(TEMPERATURES)} rows of {VOCABULARY} logits: {1e3 * per_draw:.2f} ms"
        )


if __name__ == "__main__":
    main()
