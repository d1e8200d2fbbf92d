"""`ring_attention` of tokens in their order, laid out over a mesh and brought back, beside its definition."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attention_calls import Sizes, case
from cases import Case, nonlinear
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoft

LAYOUTS = ("contiguous", "striped", "zigzag")
METHODS = ("ring", "all_gather", "all_to_all")
_TOKENS = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")
_MOVING = ("sinks", "scale")
_ALONG = P(None, "s", None)


def sizes_of(tokens: int, **others: int) -> Sizes:
    """Few sequences of so many tokens, with heads for all devices to share."""
    return Sizes(**{"b": 2, "t": tokens, "s": tokens, "n": 8, "k": 2, "h": 8, "d": 8} | others)


@dataclasses.dataclass(frozen=True)
class Ring:
    """What calls `ring_attention` as `jaxsoft.dot_product_attention` is called, over the axis "s" of the mesh.

    Attributes:
      layout, method: as `ring_attention` has them.
      spec: how query is sharded, (B, T, N).
      of_keys: how key is.
      manual: the axes of the mesh over which it is called inside shard_map.
      check_vma: whether shard_map checks over which axes values vary.
      around: what is done to `ring_attention` before it is called, inside shard_map.
    """

    layout: str = "contiguous"
    method: str | None = "ring"
    spec: P = _ALONG
    of_keys: P = _ALONG
    manual: Sequence[str] = ()
    check_vma: bool = True
    around: Callable[[Callable], Callable] = lambda f: f

    def __call__(self, query, key, value, **given):
        order = jaxsoft.ring_order(query.shape[1], jax.sharding.get_abstract_mesh().shape["s"], self.layout)
        named = {"query": query, "key": key, "value": value}
        tokens = named | {name: given.pop(name) for name in _TOKENS if name in given}
        moving = {name: given.pop(name) for name in _MOVING if name in given}
        specs = {name: self._spec(name) for name in (*tokens, *moving)}
        of_results = self.spec, self.spec

        def call(named):
            fixed = {**given, "axis_name": "s", "layout": self.layout, "method": self.method}
            return self.around(functools.partial(jaxsoft.ring_attention, **fixed))(**named)

        if self.manual:
            specs_of = {name: self._manual(spec) for name, spec in specs.items()}
            call = jax.shard_map(
                call,
                in_specs=(specs_of,),
                out_specs=tuple(map(self._manual, of_results)),
                axis_names=set(self.manual),
                check_vma=self.check_vma,
            )
        laid = {name: placed(_taken(placed(x, P()), order), specs[name]) for name, x in tokens.items()}
        laid |= {name: placed(x, specs[name]) for name, x in moving.items()}
        results = [placed(y, spec) for y, spec in zip(call(laid), of_results, strict=True)]
        return tuple(_taken(placed(y, P()), np.argsort(order)) for y in results)

    def _spec(self, name: str) -> P:
        match name:
            case "query":
                return self.spec
            case "sinks":
                return P(self.spec[2])
            case "scale":
                return P()
            case _:
                return P(*self.of_keys[: 3 if name in ("key", "value") else 2])

    def _manual(self, spec: P) -> P:
        return P(*(axis if axis in self.manual else None for axis in spec))


def _taken(x, order: np.ndarray):
    """The tokens in this order, in a program that need not see to indices out of range."""
    return jnp.take(x, order, axis=1, unique_indices=True, mode="clip")


def placed(x, spec: P):
    """x with this sharding over the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(jnp.asarray(x), spec)


def compiled(f: Callable) -> Callable:
    """f under jit, of arrays that are on the mesh, as those of a model are."""
    return lambda *operands: jax.jit(f)(*(jax.device_put(x, P()) for x in operands))


def ring_case(
    ring: Ring,
    sizes: Sizes,
    options: Sequence[str] = (),
    dtype=np.float32,
    more: Mapping[str, object] | None = None,
    **of_case,
) -> Case:
    """A call with these options, as a function of its floating-point operands."""
    found = case(options, sizes, dtype, function=ring, more=more or {}, **of_case)
    return dataclasses.replace(found, what=f"{ring}, {found.what}")


def with_results(f: Callable) -> Callable:
    """The gradients of f by all operands, and f's results as they are computed on the way."""

    def total(*operands):
        found = f(*operands)
        return nonlinear(lambda: found)(), found

    return lambda *operands: jax.grad(total, tuple(range(len(operands))), has_aux=True)(*operands)


def check(cases: Sequence[Case], names: Sequence[Sequence[str]] | None = None, run: Callable = compiled) -> None:
    """Compares cases of the same operands in one program: results and gradients, or what is left by transformations.

    Transformations that change the operands belong into a call of their own.
    """
    if names is None:
        found = [dataclasses.replace(x, ours=with_results(x.ours), theirs=with_results(x.theirs)) for x in cases]
    else:
        found = [functools.reduce(Case.through, each, one) for one in cases for each in names]
    Case.together("\n".join(one.what for one in found), found).check(run)
