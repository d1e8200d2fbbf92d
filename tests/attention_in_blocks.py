"""Attention whose keys come block by block, as ring attention calls its operations, beside one call over all keys."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from common import as_usual
from truth import wide

from jaxsoft._attention.form import STATE, AttentionForm, Extra
from jaxsoft._attention.operation import attention_operation
from jaxsoft._attention.spec import AttentionForward, AttentionPullback
from jaxsoft.fold import accumulator

THREE = ("query", "key", "value")
# What each sequence has, of as many queries and keys: in the order of `Extra`.
OPTIONS = {
    "lengths": lambda b, t, s: {
        Extra.QUERY_LENGTHS: np.resize(np.array([t, t // 2], np.int32), b),
        Extra.KEY_LENGTHS: np.resize(np.array([s // 2 + 3, s], np.int32), b),
    },
    "begins": lambda b, t, s: {
        Extra.QUERY_BEGINS: np.resize(np.array([t // 3, 0, t], np.int32), b),
        Extra.KEY_LENGTHS: np.resize(np.array([s, s // 2, 1], np.int32), b),
    },
    "offset": lambda b, t, s: {Extra.OFFSET: np.resize(np.array([s - t, 2], np.int32), b)},
}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A call whose keys come in blocks.

    Attributes:
      form: of the whole call, but for its extras.
      arrays: query, key, value and the cotangent.
      extras: of the whole call.
      borders: where the blocks of keys begin and end.
    """

    form: AttentionForm
    arrays: tuple[np.ndarray, ...]
    extras: dict[Extra, np.ndarray]
    borders: tuple[int, ...]

    @classmethod
    def make(
        cls, sizes: Sequence[int], dtype, options: Sequence[str] = (), borders: Sequence[int] = (), **of_form
    ) -> "Blocks":
        """One of sizes (B, T, S, N, K, D), or with that of values, random arrays, and these options."""
        b, t, s, n, k, d, *of_values = sizes
        rng = np.random.default_rng(0)
        v = of_values[0] if of_values else d
        shapes = (b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)
        arrays = tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)
        given: dict[Extra, np.ndarray] = {}
        for option in options:
            given |= OPTIONS[option](b, t, s)
        extras = {extra: given[extra] for extra in Extra if extra in given}
        return cls(AttentionForm(np.dtype(dtype), d**-0.5, **of_form), arrays, extras, (0, *borders, s))

    @property
    def wide(self) -> np.dtype:
        """The dtype in which blocks are folded."""
        return np.dtype(accumulator(self.arrays[0].dtype))

    def _blocks(self, values):
        """Of each block: where its keys are, and the extras of its own call, given those of the whole one."""
        shifted = Extra.OFFSET, Extra.KEY_LENGTHS
        for begin, end in itertools.pairwise(self.borders):
            named = zip(self.extras, values, strict=True)
            yield slice(begin, end), {extra: x - (begin if extra in shifted else 0) for extra, x in named}

    def forward(self, implementation: str | None, dtype=None) -> Callable[[], tuple[jax.Array, ...]]:
        """A function for the results of the last block, and of those before it in it, in a dtype if it is not that of
        the state.
        """

        def results(query, key, value, _, *values):
            b, t, n, _ = query.shape
            output, lse = jnp.zeros((b, t, n, value.shape[3]), self.wide), jnp.full((b, n, t), -jnp.inf, self.wide)
            found: tuple[jax.Array, ...] = ()
            for keys, extras in self._blocks(values):
                last = dtype if keys.stop == self.borders[-1] and dtype else self.wide
                form = dataclasses.replace(
                    self.form, extras=(*extras, *STATE), dtype=np.dtype(last), rounded=last != self.wide
                )
                given = query, key[:, keys], value[:, keys], *extras.values(), output, lse
                found = attention_operation(AttentionForward(form), implementation, *given)
                output, lse = found[:2]
            return found

        return functools.partial(jax.jit(results), *self.arrays, *self.extras.values())

    def gradients(self, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
        """A function of the log-sum-exp, its rest and delta for the gradients by query, which is added up, and by the
        keys and values of all blocks.
        """

        def of_blocks(query, key, value, cotangent, *values_and_known):
            *values, lse, rest, delta = values_and_known
            output = jnp.zeros_like(cotangent)  # of which delta has what is needed
            of_query, others = jnp.ones(query.shape, self.wide), []
            for keys, extras in self._blocks(values):
                form = dataclasses.replace(self.form, extras=tuple(extras))
                given = query, key[:, keys], value[:, keys], *extras.values(), output, lse, rest, delta, cotangent
                twos = jnp.full(key[:, keys].shape, 2, self.wide)
                of_query, of_key, of_value = attention_operation(
                    AttentionPullback(form, THREE, True, ("query", "key")), implementation, *given, of_query, twos
                )
                others.append((of_key - 2, of_value))
            return of_query - 1, *(jnp.concatenate(parts, axis=1) for parts in zip(*others, strict=True))

        return functools.partial(jax.jit(of_blocks), *self.arrays, *self.extras.values())

    def expected(self, differentiated: bool = True) -> tuple[tuple, np.ndarray | None, tuple]:
        """One call over all keys in float64, on a CPU: its results, and perhaps delta and the gradients."""
        form = dataclasses.replace(self.form, extras=tuple(self.extras), dtype=np.dtype(np.float64), rounded=False)

        def of_all(cotangent, *given):
            results = attention_operation(AttentionForward(form), "xla", *given)
            if not differentiated:
                return results, None, ()
            delta = jnp.moveaxis(jnp.sum(results[0] * cotangent, axis=-1), 2, 1)
            pullback = AttentionPullback(form, THREE)
            return results, delta, attention_operation(pullback, "xla", *given, *results, delta, cotangent)

        with jax.enable_x64(True), as_usual(), jax.default_device(jax.devices("cpu")[0]):
            query, key, value, cotangent = map(wide, self.arrays)
            return jax.tree.map(wide, jax.jit(of_all)(cotangent, query, key, value, *self.extras.values()))


def errors(found: Sequence, expected: Sequence) -> list[float]:
    """The errors of arrays relative to the norm of what they should be; infinite numbers must be the same."""
    of_each = []
    for a, e in zip(map(wide, found), map(wide, expected), strict=True):
        finite = np.isfinite(e)
        np.testing.assert_array_equal(a[~finite], e[~finite])
        a, e = np.where(finite, a, 0), np.where(finite, e, 0)
        of_each.append(float(np.linalg.norm(a - e) / (np.linalg.norm(e) or 1)))
    return of_each
