"""This machine's speed of jaxsoft's losses, top-k and sampling, against optax, `jax.lax.top_k` and plain compositions.

    python benchmarks/losses.py [--only GROUP ...] [--record FILE] [--commit HASH]

A line is one call. Every result is first checked on a few rows against float64, and a wrong one of jaxsoft's ends the
run. The times are medians, and whatever is compared takes turns in each repeat.

  floor   the time that a copy takes which moves as many bytes as the call must (it reads half of them and writes half)
and for each implementation ("jaxsoft" is its own choice of a kernel)
  ms      milliseconds a call
  floor   the fraction of the floor's speed: the floor over this time
  faster  how many times faster than the first one named

  cross_entropy  integer labels: forward, which must read the logits once, and the loss with its gradient, which must
                 read them twice and write once
  entropy        the loss and the entropy, as policy gradients take them, with as many reads and writes as the loss
                 alone; beside it jaxsoft's two functions one after the other, and the loss alone
  top_k          values, softmax and indices of the k largest, which must read the scores once
  few            the same of few rows, or of short ones: microseconds of one call of many in one compiled function,
                 each of which needs the one before; the floor is here what a step of them takes without the call
                 ("nothing")
  sample         a token a row, in a chain as those of few, random numbers included; "composed" is
                 jax.random.categorical, after jax.lax.top_k of k elements, or of all where there is top_p alone
  linear         the loss of hidden @ weight with both gradients, and with that of a frozen weight's hidden states: the
                 floor is here the time of the matrix products that logits in memory take ("products", three and two;
                 without them the logits are computed twice, but for the mean), and the memory beyond the results is
                 printed, too
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where the modules beside this one are, under python -P too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import timing
from columns import line
from scipy.special import logsumexp, softmax
from shared import begin, compare, parser_of_cases

import jaxsoft
import jaxsoft.random

CPU = jax.default_backend() == "cpu"
UNSTABLE = "lax.top_k(is_stable=False)"


@dataclasses.dataclass(frozen=True)
class Call:
    """One line of the table.

    Attributes:
      shape, dtype: of the logits; of a linear layer, (rows, depth, classes).
      what: what else there is, in words.
      arguments: makes a new list of arguments.
      functions: what is compared, by name, the peer first.
      bytes: that must move.
      check: of arguments and a result: the largest error, in units of what is allowed.
      chain: how many calls follow one another in one compiled function; 0 where Python makes every call.
    """

    shape: tuple[int, ...]
    dtype: str
    what: str
    arguments: Callable[[], tuple]
    functions: dict[str, Callable]
    bytes: int
    check: Callable[[tuple, object], float]
    chain: int = 0

    def __str__(self) -> str:
        """In one line."""
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.what}".strip()


def logits(shape: tuple[int, int], dtype: str) -> jax.Array:
    """Random numbers of standard deviation 4."""
    return jax.jit(lambda numbers: programs.fill(numbers, shape))(programs.random(0, dtype))


def available(*names: str) -> list[str]:
    """Those implementations that can be used here."""
    reasons = jaxsoft.implementations()
    return [name for name in names if reasons[name] is None]


SHAPES = [(8192, 128256), (4096, 262144), (16384, 50257), (8192, 32000)]
if CPU:
    SHAPES = [(128, 128256), (256, 50257), (512, 32000), (50_000, 100), (500_000, 10)]


def _losses(losses: dict[str, Callable], objective: Callable, *checks: Callable) -> Iterator[Call]:
    """The calls of losses with integer labels, forward and with the gradient of an objective; and their two checks."""
    gradients = {name: jax.value_and_grad(functools.partial(objective, f)) for name, f in losses.items()}
    for shape in SHAPES:
        labels = jax.random.randint(jax.random.key(1), shape[:1], 0, shape[1])
        for dtype in ("bfloat16", "float32"):
            size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
            arguments = lambda shape=shape, dtype=dtype, labels=labels: (logits(shape, dtype), labels)  # noqa: E731
            yield Call(shape, dtype, "forward", arguments, losses, size, checks[0])
            yield Call(shape, dtype, "with gradient", arguments, gradients, 3 * size, checks[1])


def cross_entropy() -> Iterator[Call]:
    """Integer labels."""
    own = jaxsoft.softmax_cross_entropy_with_integer_labels
    losses = {"optax": optax.softmax_cross_entropy_with_integer_labels, "jaxsoft": own}
    losses |= {name: functools.partial(own, implementation=name) for name in available("ffi", "pallas", "xla")}

    def mean(f, x, y):
        return f(x, y).astype(jnp.float32).mean()

    yield from _losses(losses, mean, _check_losses, _check_gradients)


def _some(x: jax.Array, labels: jax.Array) -> tuple[np.ndarray, ...]:
    """A few rows, the gradients of their losses, and the losses, in float64."""
    rows = np.unique([0, len(labels) // 3, len(labels) - 1])
    z, y = np.asarray(x[rows]).astype(np.float64), np.asarray(labels)[rows]
    p, every = softmax(z, axis=-1), np.arange(len(rows))
    loss = -np.log(p[every, y])
    p[every, y] -= 1
    return rows, p, loss


def _check_losses(arguments: tuple, result) -> float:
    rows, _, loss = _some(*arguments)
    return float(np.max(np.abs(np.asarray(result)[rows] - loss) / (2e-6 * (4 + loss))))


def _check_gradients(arguments: tuple, result) -> float:
    rows, dx, _ = _some(*arguments)
    actual = np.asarray(result[1][rows]).astype(np.float64) * len(arguments[1])
    unit = 2.0**-8 if arguments[0].dtype == jnp.bfloat16 else 1e-5
    return float(np.max(np.abs(actual - dx) / (unit * np.abs(dx) + 1e-30)))


BONUS = 0.01  # the weight of the entropy


def entropy() -> Iterator[Call]:
    """Integer labels, and the entropy."""

    def composed(x, y):
        log_p = jax.nn.log_softmax(x.astype(jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(x, y), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def ours(implementation=None):
        return functools.partial(
            jaxsoft.softmax_cross_entropy_with_integer_labels, return_entropy=True, implementation=implementation
        )

    def apart(x, y):
        return jaxsoft.softmax_cross_entropy_with_integer_labels(x, y), jaxsoft.entropy(x)

    def alone(x, y):
        return jaxsoft.softmax_cross_entropy_with_integer_labels(x, y), jnp.zeros(y.shape)

    functions = {"optax, composed": composed, "jaxsoft": ours(), "two functions": apart, "loss alone": alone}
    functions |= {name: ours(name) for name in available("ffi", "xla")}

    def mean(f, x, y):
        loss, entropy = f(x, y)
        return jnp.mean(loss.astype(jnp.float32) - BONUS * entropy)

    yield from _losses(functions, mean, _check_entropies, _check_policy_gradients)


def _entropies(arguments: tuple) -> tuple[np.ndarray, ...]:
    """The entropies of the rows of `_some`, and their gradients."""
    x, labels = arguments
    z = np.asarray(x[_some(x, labels)[0]]).astype(np.float64)
    log_p = z - logsumexp(z, axis=-1, keepdims=True)
    h = -np.sum(np.exp(log_p) * log_p, axis=-1)
    return h, -np.exp(log_p) * (log_p + h[:, None])


def _check_entropies(arguments: tuple, result) -> float:
    rows, (h, _) = _some(*arguments)[0], _entropies(arguments)
    error = np.max(np.abs(np.asarray(result[1])[rows] - h) / (2e-6 * (1 + h)))
    return max(float(error), _check_losses(arguments, result[0]))


def _check_policy_gradients(arguments: tuple, result) -> float:
    (rows, dx, _), (_, dh) = _some(*arguments), _entropies(arguments)
    actual = np.asarray(result[1][rows]).astype(np.float64) * len(arguments[1])
    unit = 2.0**-8 if arguments[0].dtype == jnp.bfloat16 else 1e-5
    bound = unit * np.abs(dx - BONUS * dh) + 1e-6 * (np.abs(dx) + BONUS * np.abs(dh)) + 1e-30
    return float(np.max(np.abs(actual - (dx - BONUS * dh)) / bound))


def top_k() -> Iterator[Call]:
    """The k most probable elements."""
    cases = [((2048, 131072), 5), ((2048, 131072), 64), ((4000, 32000), 64), ((16384, 8192), 64), ((65536, 4096), 32)]
    if CPU:
        cases = [((64, 32000), 5), ((64, 32000), 64), ((8, 128256), 5), ((8, 128256), 64)]
    for (shape, k), dtype in itertools.product(cases, ("float32", "bfloat16")):
        yield _top_k(shape, dtype, k)


def few() -> Iterator[Call]:
    """Next-token candidates, and the experts that a router chooses."""
    for rows, n, dtype, k in itertools.product((1, 32), (128256,), ("float32", "bfloat16"), (5, 64)):
        yield dataclasses.replace(_top_k((rows, n), dtype, k), chain=4 if CPU else 32)
    for rows, n in ((1024, 256),) if CPU else ((65536, 256), (32768, 128)):
        for dtype in ("float32", "bfloat16"):
            yield dataclasses.replace(_top_k((rows, n), dtype, 8), chain=4 if CPU else 32)


def _top_k(shape: tuple[int, int], dtype: str, k: int) -> Call:
    def composed(x, is_stable=True):
        p, i = jax.lax.top_k(jax.nn.softmax(x), k, is_stable=is_stable)
        return jnp.take_along_axis(x, i, axis=-1), p, i

    def check(arguments, result):
        """The values and indices of some thousand rows, and the probabilities of a few."""
        step = -(-shape[0] // 4000)
        x = np.asarray(arguments[0][::step]).astype(np.float32)
        values, p, i = (np.asarray(v[::step]) for v in result)
        largest = -np.sort(-np.take_along_axis(x, np.argpartition(-x, k - 1, axis=-1)[:, :k], axis=-1), axis=-1)
        wrong = np.sum(values.astype(np.float32) != largest)
        wrong += np.sum(np.take_along_axis(x, i, axis=-1) != largest)
        wrong += np.sum((np.diff(largest, axis=-1) == 0) & (np.diff(i, axis=-1) <= 0))  # ties: by index
        rows = np.unique([0, len(x) // 3, len(x) - 1])
        z = x[rows].astype(np.float64)
        want = np.take_along_axis(softmax(z, axis=-1), i[rows], axis=-1)
        unit = 2.0**-8 if dtype == "bfloat16" else 1e-5
        return float(wrong + np.max(np.abs(p[rows].astype(np.float64) - want) / (unit * want)))

    functions = {
        "lax.top_k": composed,
        UNSTABLE: functools.partial(composed, is_stable=False),
        "jaxsoft": lambda x: jaxsoft.top_k_softmax(x, k),
    }
    size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    return Call(shape, dtype, f"k={k}", lambda: (logits(shape, dtype),), functions, size, check)


def sample() -> Iterator[Call]:
    """The next token, of flat logits and of peaked ones."""
    rows, n = ((1, 8), 32000) if CPU else ((1, 32, 256), 128256)
    for count, (k, p), deviation in itertools.product(rows, ((None, 0.9), (50, 0.9), (None, None)), (1, 6)):
        yield _sample((count, n), k, p, deviation)


def _sample(shape: tuple[int, int], k: int | None, p: float | None, deviation: float) -> Call:
    def key_of(x):  # made of x, so that no call of a chain draws its random numbers before the last call has ended
        word = jax.lax.bitcast_convert_type(x[0, 0].astype(jnp.float32), jnp.uint32)
        return jax.random.wrap_key_data(jnp.stack([word, jnp.uint32(0)]))

    def composed(x):
        if k is None and p is None:
            token = jax.random.categorical(key_of(x), x.astype(jnp.float32))
            return token, jnp.take_along_axis(jax.nn.softmax(x.astype(jnp.float32)), token[:, None], axis=-1)[:, 0]
        z, index = jax.lax.top_k(x.astype(jnp.float32), k or x.shape[-1])
        weights = jax.nn.softmax(z)
        before = jnp.cumsum(weights, axis=-1) - weights
        z = z if p is None else jnp.where(before < p, z, -jnp.inf)
        place = jax.random.categorical(key_of(x), z)[:, None]
        at = lambda v: jnp.take_along_axis(v, place, axis=-1)[:, 0]  # noqa: E731
        return at(index), at(jax.nn.softmax(z))

    def check(arguments, result):
        """Whether the tokens of a few rows are among those that the filters leave, and their probabilities."""
        x, token, probability = (np.asarray(v) for v in (*arguments, *result))
        worst = 0.0
        for row in np.unique([0, len(x) // 3, len(x) - 1]):
            z = x[row].astype(np.float64)
            order = np.argsort(-z, kind="stable")[: k or len(z)]
            weights = softmax(z[order])
            before = np.cumsum(weights) - weights
            left = before < (1 if p is None else p + 1e-6)  # rounding may decide about a token at the border
            place = np.flatnonzero(order == token[row])
            if len(place) == 0 or not left[place[0]]:
                return float("inf")
            want = weights[place[0]] / weights[left].sum()
            worst = max(worst, abs(float(probability[row]) - want) / (1e-4 * want))
        return worst

    def logits_of_case():
        return ((logits(shape, "float32") * (deviation / 4)).astype(jnp.bfloat16),)

    functions = {"composed": composed, "jaxsoft": lambda x: jaxsoft.random.sample(key_of(x), x, top_k=k, top_p=p)}
    options = [f"{name}={v}" for name, v in (("top_k", k), ("top_p", p)) if v is not None]
    what = " ".join([*options, "deviation", str(deviation)])
    chain = 4 if CPU or shape[0] > 32 else 32
    return Call(shape, "bfloat16", what, logits_of_case, functions, shape[0] * shape[1] * 2, check, chain)


def linear() -> Iterator[Call]:
    """From hidden states to the loss and its gradients: both of them, and that of the hidden states alone."""
    rows, depth, classes = (256, 256, 32000) if CPU else (4096, 4096, 128256)
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (rows, depth), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (depth, classes), jnp.bfloat16) * 4 / depth**0.5).astype(jnp.bfloat16)
    y = jax.random.randint(keys[2], (rows,), 0, classes)

    def stored(cross_entropy):
        return lambda h, w, y: cross_entropy(h @ w, y).astype(jnp.float32).mean()

    def ours(**options):
        return lambda h, w, y: jaxsoft.linear_softmax_cross_entropy(h, w, y, **options).mean()

    def products(h, w, y, again=False, frozen=False):
        z = h @ w
        z_again = h[::-1] @ w if again else z  # reversed, or XLA would know it
        return z[0, 0], (z @ w.T, None if frozen else h.T @ z_again)

    some, columns = np.arange(0, rows, rows // 16), np.unique([*np.asarray(y)[:16], *range(0, classes, classes // 16)])

    @functools.cache
    def expected():
        """The loss, the gradients of some hidden states, and of some columns of the weight."""
        hidden, weight, labels = np.asarray(h).astype(np.float32), np.asarray(w).astype(np.float32), np.asarray(y)
        every = np.concatenate([logsumexp(hidden[i : i + 256] @ weight, axis=-1) for i in range(0, rows, 256)])
        loss = np.mean(every - np.sum(hidden * weight[:, labels].T, axis=-1))
        dz = softmax((hidden[some] @ weight).astype(np.float64), axis=-1)
        dz[np.arange(len(some)), labels[some]] -= 1
        dz_of_columns = np.exp(hidden @ weight[:, columns] - every[:, None]) - (columns == labels[:, None])
        return loss, dz.astype(np.float32) @ weight.T / rows, hidden.T @ dz_of_columns / rows

    def check(arguments, result):
        """The error of the loss, and those of gradients in the norm."""
        del arguments
        loss, gradients = result
        loss_want, *want = expected()
        found = [np.asarray(gradients[0])[some], *(np.asarray(v)[:, columns] for v in gradients[1:])]
        errors = [
            np.linalg.norm(a.astype(np.float32) - b) / (2e-2 * np.linalg.norm(b))
            for a, b in zip(found, want, strict=False)
        ]
        return float(max(abs(float(loss) - loss_want) / (1e-2 * loss_want), *errors))

    losses = {
        "optax": stored(optax.softmax_cross_entropy_with_integer_labels),
        "jaxsoft": ours(),
        "mean": ours(reduction="mean"),
        "recompute=False": ours(recompute=False),
        "chunk_size=8192": ours(chunk_size=8192),
        "stored": stored(jaxsoft.softmax_cross_entropy_with_integer_labels),
    }
    functions = {name: jax.value_and_grad(f, (0, 1)) for name, f in losses.items()} | {
        "products": products,
        "products, logits twice": functools.partial(products, again=True),
    }
    shape = (rows, depth, classes)
    yield Call(shape, "bfloat16", "", lambda: (h, w, y), functions, 0, check)

    functions = {name: jax.value_and_grad(losses[name], (0,)) for name in ("optax", "jaxsoft", "mean", "stored")}
    functions["products"] = functools.partial(products, frozen=True)
    yield Call(shape, "bfloat16", "frozen", lambda: (h, w, y), functions, 0, check)


GROUPS = {
    "cross_entropy": cross_entropy,
    "entropy": entropy,
    "top_k": top_k,
    "few": few,
    "sample": sample,
    "linear": linear,
}
# What is not checked: what is something else, rounds a gradient twice, or takes equal elements in any order.
PLAIN = ("products", "products, logits twice", "loss alone", "two functions", UNSTABLE, "nothing")


def run(call: Call, repeats: int) -> dict:
    """Checks, then times a call: what is written of it."""
    first, memory, peer = call.arguments(), {}, next(iter(call.functions))
    functions = call.functions | ({"nothing": lambda x: x[0, 0]} if call.chain else {})

    def prepare(name):
        program = jax.jit(functions[name]).lower(*first).compile()
        memory[name] = program.memory_analysis().temp_size_in_bytes
        error = None if name in PLAIN else call.check(first, program(*first))
        return _chain(functions[name], call.chain) if call.chain else program, error

    def measure(calls):
        if call.chain:
            return timing.measure_chains(calls, lambda: call.arguments()[0], call.chain, repeats)
        size = sum(v.nbytes for v in jax.tree.leaves(first))
        moved = call.bytes or 3 * size
        every = [first, *(call.arguments() for _ in range(1, timing.buffers(size, moved, repeats)))]
        of_each: dict[str, timing.Call] = {name: (program, every) for name, program in calls.items()}
        if call.bytes:
            shape = (call.bytes // 8,)
            (copy,) = (program.compile() for program in programs.lower_copy(shape))
            count = timing.buffers(call.bytes // 2, call.bytes, repeats)
            of_each["copy"] = copy, [(jnp.full(shape, k, jnp.float32),) for k in range(count)]
        return timing.measure(of_each, moved, repeats)

    found = compare(call, list(functions), (peer, *PLAIN), prepare, measure)
    return {"shape": call.shape, "dtype": call.dtype, "what": call.what, "memory": memory} | found


def _chain(function: Callable, length: int) -> Callable[[jax.Array], jax.Array]:
    """Calls one after another, each of an x of which the last call's result has changed one element, in place.

    They are written out, as a loop of XLA's takes longer for a step than a kernel for a row.
    """

    def step(x):
        results = jax.tree.leaves(function(x))
        change = sum(jnp.ravel(v)[0].astype(jnp.float32) * 0 for v in results)
        return x.at[0, 0].add(change.astype(x.dtype))

    return jax.jit(programs.chained(step, length), donate_argnums=0)


def main() -> None:
    """Measures what is asked for."""
    args = parser_of_cases(__doc__, GROUPS, quick=None).parse_args()
    record = begin(args)
    for group in args.only or GROUPS:
        unit = "µs" if group in ("few", "sample") else "ms"
        quantities = (unit, "fraction", "faster", *["MB"] * (group == "linear"))
        print(f"\n{group}: floor, {unit}; implementation, {', '.join(quantities)}", flush=True)
        for call in GROUPS[group]():
            found = run(call, 5 if CPU else 7)
            print(line(call, found, quantities), flush=True)
            record.add({"group": group} | found)


if __name__ == "__main__":
    main()
