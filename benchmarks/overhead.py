"""What calls take beside their computation, against `jax.nn` and optax: of small arrays, and while they are compiled.

    python benchmarks/overhead.py [--losses N]

A line is one call. The two take turns, many short samples each, as what is measured is short and a machine is rarely
idle: a ratio of the quickest samples says most, and that of medians what a busy machine makes of it.

  quickest, median  microseconds of a call of an array of (8, 128) in f32, without jax.jit, and their ratios
  trace, lower, compile, all  seconds of a jitted function that computes the sum of N losses of arrays of different
                              shapes and its gradients
"""

import argparse
import functools
import gc
import itertools
import pathlib
import statistics
import sys
import time
import timeit
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import numpy as np
import optax
from shared import header

import jaxsoft

_RNG = np.random.default_rng(0)
X = jnp.asarray(_RNG.standard_normal((8, 128)).astype(np.float32))
LABELS, PROBABILITIES = jnp.asarray(_RNG.integers(0, 128, 8)), jax.nn.softmax(-X)

# Ours, and the other.
CALLS = {
    "softmax": (lambda: jaxsoft.softmax(X), lambda: jax.nn.softmax(X)),
    "log_softmax": (lambda: jaxsoft.log_softmax(X), lambda: jax.nn.log_softmax(X)),
    "logsumexp": (lambda: jaxsoft.logsumexp(X, axis=-1), lambda: jax.nn.logsumexp(X, axis=-1)),
    "entropy, log_softmax": (lambda: jaxsoft.entropy(X), lambda: jax.nn.log_softmax(X)),
    "top_k_softmax, lax.top_k": (lambda: jaxsoft.top_k_softmax(X, 4), lambda: jax.lax.top_k(X, 4)),
}
LOSSES = {
    "cross_entropy": (jaxsoft.softmax_cross_entropy, optax.losses.softmax_cross_entropy),
    "cross_entropy, integers": (
        jaxsoft.softmax_cross_entropy_with_integer_labels,
        optax.losses.softmax_cross_entropy_with_integer_labels,
    ),
}


def compiling(loss: Callable[..., jax.Array], many: int, integers: bool) -> list[float]:
    """The seconds that it takes to trace, to lower and to compile so many losses, and all of this."""
    logits = [jax.ShapeDtypeStruct((32, 100 + i), jnp.float32) for i in range(many)]
    labels = [jax.ShapeDtypeStruct((32,), jnp.int32) if integers else x for x in logits]

    def total(logits, labels):
        return sum(jnp.mean(loss(x, q)) for x, q in zip(logits, labels, strict=True))

    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(jax.value_and_grad(total)).trace(logits, labels)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return [*(b - a for a, b in itertools.pairwise(times)), times[-1] - times[0]]


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=50, help="how many losses are compiled")
    args = parser.parse_args()
    print(header(None))
    print(f"{'us a call':26s} {'quickest':>16s} {'':6s} {'median':>16s}")
    calls_of_losses = {
        name: tuple(functools.partial(loss, X, LABELS if "integers" in name else PROBABILITIES) for loss in losses)
        for name, losses in LOSSES.items()
    }
    for name, calls in (CALLS | calls_of_losses).items():
        samples = [[timeit.timeit(call, gc.enable, number=15) / 15 * 1e6 for call in calls] for _ in range(400)][20:]
        ours, other = zip(*samples, strict=True)
        cells = [(of(ours), of(other)) for of in (min, statistics.median)]
        print(f"{name:26s} " + " ".join(f"{a:8.1f} {b:7.1f} {a / b:6.2f}" for a, b in cells), flush=True)
    print(f"{'s to compile ' + str(args.losses):34s} {'trace':>7s} {'lower':>7s} {'compile':>7s} {'all':>7s}")
    for name, losses in LOSSES.items():
        for whose, loss in zip(("jaxsoft", "optax"), losses, strict=True):
            best = [
                min(v) for v in zip(*(compiling(loss, args.losses, "integers" in name) for _ in range(2)), strict=True)
            ]
            print(f"{name + ', ' + whose:34s} " + " ".join(f"{v:7.2f}" for v in best), flush=True)


if __name__ == "__main__":
    main()
