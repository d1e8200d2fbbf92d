"""Functions that a mesh may partition, and how a program says which they are.

For XLA, a call of such a function is a pointer to the Python code that splits it. In a program it is all that tells one
call from another with operands of the same types. It is in JAX's keys of the persistent compilation cache, so that no
process finds the programs of another, unless `jax_remove_custom_partitioning_ptr_from_cache_key` leaves it out. So the
call also has an attribute that is the same in every process, and another for what is computed in another way.
"""

import functools
import hashlib
import pathlib
import re
from collections.abc import Callable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata


def partitionable(
    function: Callable[..., tuple[jax.Array, ...]], partition: Callable, rule: Callable, *what: object
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function, which XLA may partition.

    Args:
      function: on one device.
      partition, rule: as `def_partition` takes them.
      what: all that decides what these three do, which their `repr` must tell.
    """
    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(what))

    def partitioned(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Products get their default precision where the call is split, which is when it is compiled.
        parts = (_sources(), str(jax.config.jax_default_matmul_precision), text)
        first, *others = call(*operands)
        return set_xla_metadata(first, jaxsoft=hashlib.sha256("\n".join(parts).encode()).hexdigest()), *others

    return partitioned


@functools.cache
def _sources() -> str:
    """A digest of the package's code, as another version may split the same call in another way."""
    files = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
