"""What benchmarks/mesh.py measures: functions of rows over several devices, as data.

Several calls follow one another within one compiled function, each of other logits: launching a call on several devices
takes about as long as running it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoft

AXIS = "model"
PROGRAM_BYTES = 2**31  # of the logits of all calls of a program on one device: more than its caches hold
FEWEST, MOST = 2, 8  # calls of a program
K = 64
SMOOTHING, BONUS = 0.1, 0.01  # how much of the loss is that of all classes, and the weight of the entropy
UNSTABLE = "lax.top_k(is_stable=False)"
PEERS = ("optax", "jax.nn", "lax.top_k", UNSTABLE)
ROWS = "rows sharded"
PART = "one part"

integers = optax.softmax_cross_entropy_with_integer_labels
ours = jaxsoft.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of logits, whose classes are sharded.

    Attributes:
      group: one of GROUPS.
      what: one of FUNCTIONS.
      rows, classes: the shape of the logits.
      dtype: of the logits.
    """

    group: str
    what: str
    rows: int
    classes: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """The case in words."""
        return f"{self.what} {self.rows}x{self.classes} {self.dtype}"

    def part_bytes(self) -> int:
        """Of the logits of one device."""
        return self.rows * self.classes * jnp.dtype(self.dtype).itemsize // jax.device_count()

    def bytes(self) -> int:
        """What a device must move in a call."""
        return FUNCTIONS[self.what].passes * self.part_bytes()

    def calls(self) -> int:
        """How many calls a program has."""
        return min(MOST, max(FEWEST, PROGRAM_BYTES // self.part_bytes()))

    def record(self) -> dict:
        """What is written of the case."""
        return {
            "group": self.group,
            "what": self.what,
            "shape": [self.rows, self.classes],
            "dtype": self.dtype,
        }

    def implementations(self) -> dict[str, Callable]:
        """The programs that are compared, by name: functions of the operands.

        Beside the peers and jaxsoft there is jaxsoft where rows are sharded instead, whose devices need not talk; and
        the k largest are also found on one device, in rows as long as its part.
        """
        function = FUNCTIONS[self.what]
        found = {**function.peers, "jaxsoft": function.jaxsoft, ROWS: function.jaxsoft}
        if self.what == "top_k":
            found[PART] = function.jaxsoft
        return {name: chain(f) for name, f in found.items()}

    def operands(self, name: str) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
        """The logits of each call, and the labels, weights and cotangents of all."""
        classes = self.classes // jax.device_count() if name == PART else self.classes
        spec = P(AXIS) if name == ROWS else P(None, AXIS)
        wide = by_row = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if name != PART:
            wide, by_row = NamedSharding(mesh(), spec), NamedSharding(mesh(), P(spec[0]))
        shape = (self.rows, classes)
        xs = [_normal(wide, shape, self.dtype, seed) for seed in range(self.calls())]
        labels = jax.random.randint(jax.random.key(1), shape[:1], 0, classes)
        weights = 0.5 + jnp.arange(self.rows) % 128 / 128  # exact in bf16
        labels, weights = jax.device_put(labels, by_row), jax.device_put(weights, by_row)
        return xs, labels, weights, _normal(wide, shape, self.dtype, 100) if "pullback" in self.what else weights

    def error(self, given: Sequence, results: Sequence[Sequence[jax.Array]]) -> float:
        """The largest error of the first call in some rows against float64, in units of what is allowed."""
        xs, labels, weights, g = given
        rows = np.unique([0, self.rows // 3, self.rows - 1])
        x, i, w, *found = (np.asarray(_some(v, rows)) for v in (xs[0], labels, weights, *results[0]))
        cotangents = np.asarray(_some(g, rows)).astype(np.float64) if "pullback" in self.what else np.zeros((1, 1))
        expected = FUNCTIONS[self.what].expected(x.astype(np.float64), i, w.astype(np.float64), cotangents)
        errors = []
        for actual, (value, size) in zip(found, expected, strict=True):
            unit = 2.0**-8 if actual.dtype == jnp.bfloat16 else 1e-5 if actual.shape == x.shape else 2e-6
            errors.append(np.max(np.abs(actual.astype(np.float64) - value) / (unit * size + 1e-30)))
        return float(np.max(errors))  # NaN if one is


@dataclasses.dataclass(frozen=True)
class Function:
    """What is computed of logits x, labels i, a weight of each row w, and a cotangent g of the logits' shape.

    Attributes:
      passes: how often as many bytes as the logits have must be read or written.
      peers: (x, i, w, g) -> results, by name.
      jaxsoft: likewise.
      expected: (x, i, w, g) of some rows in float64 -> for each result its value and the size of what it is a sum of.
    """

    passes: int
    peers: dict[str, Callable]
    jaxsoft: Callable
    expected: Callable[..., list[tuple[np.ndarray, np.ndarray]]]


def _forward(f: Callable) -> Callable:
    return lambda x, i, w, g: f(x, i)


def _gradient(f: Callable, *weights: float) -> Callable:
    """The results and the gradient by the logits of their sum over rows with these weights, each row's times w."""

    def both(x, i, w, g):
        results, pull = jax.vjp(lambda x: f(x, i), x)
        cotangents = [(weight * w).astype(v.dtype) for weight, v in zip(weights, results, strict=True)]
        return *results, pull(tuple(cotangents))[0]

    return both


def _pulled_back(f: Callable) -> Callable:
    def both(x, i, w, g):
        y, pull = jax.vjp(lambda x: f(x, i)[0], x)
        return y, pull(g)[0]

    return both


def _loss(cross_entropy: Callable) -> Callable:
    return lambda x, i: (cross_entropy(x, i),)


def _smoothed(x, i):
    targets = optax.smooth_labels(jax.nn.one_hot(i, x.shape[-1], dtype=x.dtype), SMOOTHING)
    return (optax.softmax_cross_entropy(x, targets),)


def _with_entropy(x, i):
    log_p = jax.nn.log_softmax(x, axis=-1)
    return integers(x, i), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _largest(x, i, is_stable=True):
    values, places = jax.lax.top_k(x, K, is_stable=is_stable)
    wide = values.astype(jnp.float32)
    return values, jnp.exp(wide - jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)[:, None]), places


def _of_rows(x):
    """log(p), p and the logsumexp."""
    m = x.max(axis=-1, keepdims=True)
    lse = m + np.log(np.sum(np.exp(x - m), axis=-1, keepdims=True))
    return x - lse, np.exp(x - lse), lse[:, 0]


def _expected_loss(x, i, w, g, smoothing=0.0, entropy=False, gradient=False):
    log_p, p, _ = _of_rows(x)
    q = np.full_like(p, smoothing / x.shape[-1])
    q[np.arange(len(i)), i] += 1 - smoothing
    loss = -np.sum(q * log_p, axis=-1)
    h = -np.sum(p * log_p, axis=-1)
    found = [(loss, 4 + loss)] + [(h, 4 + h)] * entropy
    if gradient:
        along = p * (log_p + h[:, None]) if entropy else np.zeros_like(p)
        size = p + q + (BONUS * p * (np.abs(log_p) + h[:, None]) if entropy else 0)
        found.append((w[:, None] * (p - q + BONUS * along), w[:, None] * size))
    return found


def _expected_softmax(x, i, w, g, pulled_back=False):
    _, p, _ = _of_rows(x)
    inner = np.sum(p * g, axis=-1, keepdims=True)
    size = p * (np.abs(g) + np.sum(p * np.abs(g), axis=-1, keepdims=True))
    return [(p, p)] + [(p * (g - inner), 4 * size)] * pulled_back  # from p that was rounded


def _expected_log_softmax(x, i, w, g, pulled_back=False):
    log_p, p, _ = _of_rows(x)
    total = np.sum(g, axis=-1, keepdims=True)
    size = np.abs(g) + p * (np.abs(total) + np.sum(np.abs(g), axis=-1, keepdims=True) * 2.0**-16)
    return [(log_p, 1 + np.abs(log_p))] + [(g - p * total, size)] * pulled_back


def _expected_logsumexp(x, i, w, g, gradient=False):
    _, p, lse = _of_rows(x)
    return [(lse, 4 + np.abs(lse))] + [(w[:, None] * p, w[:, None] * p)] * gradient


def _expected_top_k(x, i, w, g):
    _, p, _ = _of_rows(x)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :K]
    values, chosen = np.take_along_axis(x, order, axis=-1), np.take_along_axis(p, order, axis=-1)
    return [(values, np.abs(values) * 1e-3), (chosen, chosen), (order, np.full(order.shape, 1e-3))]


def _functions() -> Iterator[tuple[str, Function]]:
    partial = functools.partial
    smoothed = partial(ours, label_smoothing=SMOOTHING)
    of_jax, of_jaxsoft = (lambda x, i, f=module.logsumexp: (f(x, axis=-1),) for module in (jax.nn, jaxsoft))
    reductions = {
        "cross_entropy": ("optax", _loss(integers), _loss(ours), _expected_loss),
        "smoothing": ("optax", _smoothed, _loss(smoothed), partial(_expected_loss, smoothing=SMOOTHING)),
        "entropy": ("optax", _with_entropy, partial(ours, return_entropy=True), partial(_expected_loss, entropy=True)),
        "logsumexp": ("jax.nn", of_jax, of_jaxsoft, _expected_logsumexp),
    }
    for name, (peer, theirs, own, expected) in reductions.items():
        weights = (1.0, -BONUS) if name == "entropy" else (1.0,)
        yield name, Function(1, {peer: _forward(theirs)}, _forward(own), expected)
        both = {peer: _gradient(theirs, *weights)}
        expected = partial(expected, gradient=True)
        yield f"{name} with gradient", Function(3, both, _gradient(own, *weights), expected)
    rows = {"softmax": _expected_softmax, "log_softmax": _expected_log_softmax}
    for name, expected in rows.items():
        theirs, own = (lambda x, i, f=getattr(module, name): (f(x, axis=-1),) for module in (jax.nn, jaxsoft))
        yield name, Function(2, {"jax.nn": _forward(theirs)}, _forward(own), expected)
        both = {"jax.nn": _pulled_back(theirs)}
        yield f"{name} and pullback", Function(5, both, _pulled_back(own), partial(expected, pulled_back=True))
    largest = {"lax.top_k": _forward(_largest), UNSTABLE: _forward(partial(_largest, is_stable=False))}
    yield "top_k", Function(1, largest, _forward(lambda x, i: jaxsoft.top_k_softmax(x, K)), _expected_top_k)


FUNCTIONS = dict(_functions())


def mesh() -> jax.sharding.Mesh:
    """All devices."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def _normal(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Random numbers of standard deviation 4, made where they lie."""
    return _filler(sharding, shape, dtype)(jax.random.key(seed))


@functools.cache
def _filler(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: str) -> Callable[[jax.Array], jax.Array]:
    def fill(key):
        return (4 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(fill, out_shardings=sharding)


@jax.jit
def _some(v: jax.Array, rows: np.ndarray) -> jax.Array:
    return v[rows]


def chain(function: Callable) -> Callable:
    """Calls one after another, each of logits of its own."""

    def run(xs, labels, weights, g):
        found, before = [], labels
        for x in xs:
            x, labels, g, before = jax.lax.optimization_barrier((x, labels, g, before))
            found.append(function(x, labels, weights, g))
            before = found[-1][0]
        return found

    return run


# On two GPUs a device has as much of these as of a call on one GPU in the other benchmarks.
LARGE = ((4096, 131072), (8192, 262144))
SMALL = ((16, 4096),)  # on a CPU


def _group(group: str, *functions: str, both: bool = False) -> Callable[[bool], list[Case]]:
    """The cases of a group, of both dtypes or of bf16 alone."""

    def cases(quick: bool) -> list[Case]:
        cpu = jax.default_backend() == "cpu"
        shapes = SMALL if cpu else LARGE[:1] if quick else LARGE
        dtypes = ("bfloat16", "float32") if both and not quick else ("bfloat16",)
        return [Case(group, what, *shape, dtype) for what in functions for dtype in dtypes for shape in shapes]

    return cases


def _top_k(quick: bool) -> list[Case]:
    rows, classes = SMALL[0] if jax.default_backend() == "cpu" else (2048, 131072)
    return [Case("top_k", "top_k", rows, classes, dtype) for dtype in ("float32",) + ("bfloat16",) * (not quick)]


@dataclasses.dataclass(frozen=True)
class Linear:
    """The mean loss of a linear layer whose weight is sharded by classes, with the gradients of both operands."""

    rows: int
    depth: int
    classes: int

    def __str__(self) -> str:
        """The case in words."""
        return f"linear {self.rows}x{self.depth} -> {self.classes} bfloat16"

    def calls(self) -> int:
        """How many calls a program has."""
        return 1

    def record(self) -> dict:
        """What is written of the case."""
        shape = [self.rows, self.depth, self.classes]
        return {"group": "linear", "what": "linear", "shape": shape, "dtype": "bfloat16"}

    def operands(self, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden states, the weight and labels, for all implementations."""
        whole, by_class = (NamedSharding(mesh(), spec) for spec in (P(), P(None, AXIS)))
        h = _normal(whole, (self.rows, self.depth), "bfloat16", 0) / 4
        w = _normal(by_class, (self.depth, self.classes), "bfloat16", 1) / self.depth**0.5
        labels = jax.random.randint(jax.random.key(2), (self.rows,), 0, self.classes)
        return h, w.astype(jnp.bfloat16), jax.device_put(labels, whole)

    def implementations(self) -> dict[str, Callable]:
        """What is compared: (h, w, labels) -> the loss, and both gradients."""

        def stored(h, w, labels):
            return integers(h @ w, labels).astype(jnp.float32).mean()

        def own(h, w, labels):
            return jaxsoft.linear_softmax_cross_entropy(h, w, labels, reduction="mean")

        def products(h, w, labels):
            z = h @ w
            return z[0, 0], (z @ w.T, h.T @ z)

        losses = {"optax": stored, "jaxsoft": own}
        return {name: jax.value_and_grad(f, (0, 1)) for name, f in losses.items()} | {"products": products}

    def error(self, given: Sequence[jax.Array], result: tuple) -> float:
        """The error of the loss, and the norms of those of the gradients, in units of what is allowed.

        The logits do not fit the host, so all this is computed on the devices, in f32.
        """

        @jax.jit
        def errors(h, w, labels, loss, gradients):
            h, w = h.astype(jnp.float32), w.astype(jnp.float32)

            def true(h, w):
                return integers(jnp.dot(h, w, precision="highest"), labels).mean()

            want, of = jax.value_and_grad(true, (0, 1))(h, w)
            norms = [
                jnp.linalg.norm(a.astype(jnp.float32) - b) / (2e-2 * jnp.linalg.norm(b))
                for a, b in zip(gradients, of, strict=True)
            ]
            return jnp.stack([jnp.abs(loss - want) / (1e-2 * want), *norms])

        return float(np.max(np.asarray(errors(*given, *result))))


def _linear(quick: bool) -> list[Linear]:
    """The one case, which is quick."""
    return [Linear(64, 128, 4096) if jax.default_backend() == "cpu" else Linear(4096, 4096, 131072)]


GROUPS = {
    "cross_entropy": _group("cross_entropy", "cross_entropy", "cross_entropy with gradient", both=True),
    "smoothing": _group("smoothing", "smoothing", "smoothing with gradient"),
    "entropy": _group("entropy", "entropy", "entropy with gradient"),
    "softmax": _group("softmax", "softmax", "softmax and pullback", both=True),
    "log_softmax": _group("log_softmax", "log_softmax", "log_softmax and pullback"),
    "logsumexp": _group("logsumexp", "logsumexp", "logsumexp with gradient"),
    "top_k": _top_k,
    "linear": _linear,
}
