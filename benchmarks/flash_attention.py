"""FlashAttention-3 and -4 as peers of benchmarks/attention.py: where they are, which cases they take, and their calls.

  FlashAttention-3  from JAX, by the package dew-flash-attn-cu13, on Hopper alone
  FlashAttention-4  of PyTorch, by the package flash-attn-4: its tensors share the memory of JAX's arrays

Neither has to be installed. Sequences that are packed are one array of all tokens to both, with the sums of their
lengths, which are known before the call.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import CAP, PACKED, WINDOW, Case, cumulative
from records import FLASH_ATTENTION

# The last one is the second with gradients that have the same bits on every run.
IN_JAX, IN_TORCH, SAME_BITS = FLASH_ATTENTION
BY_TORCH = (IN_TORCH, SAME_BITS)
MODULES = {IN_JAX: "dew_flash_attn", IN_TORCH: "flash_attn.cute"}
PACKAGES = {IN_JAX: "dew-flash-attn-cu13", IN_TORCH: "flash-attn-4"}
# The extras of cases that they take.
TAKEN = {IN_JAX: ("", "window", "sinks", *PACKED)}
TAKEN[IN_TORCH] = (*TAKEN[IN_JAX], "cap", "key lengths")
LARGEST = 256  # of the sizes of heads that their kernels for Hopper take


@functools.cache
def why_not(name: str) -> str | None:
    """Why one cannot be called here; None where it can."""
    try:
        importlib.import_module(MODULES[name])
    except Exception as error:  # what it needs may lack, be of another version, or find no GPU
        return f"{PACKAGES[name]} cannot be imported: {type(error).__name__}: {error}"
    generation = getattr(jax.devices()[0], "compute_capability", None)
    if name == IN_JAX and generation != "9.0":
        return f"{PACKAGES[name]} has it for compute capability 9.0, and this device has {generation}"
    return None


def missing() -> dict[str, str]:
    """Which cannot be called here, and why."""
    return {name: reason for name in MODULES if (reason := why_not(name))}


def takes(name: str, case: Case) -> bool:
    """Whether one serves a case."""
    sizes = {case.size, case.value_size}
    known = case.dtype in ("bfloat16", "float16") and case.extra in TAKEN[name] and max(sizes) <= LARGEST
    return known and (name == IN_TORCH or len(sizes) == 1)


def peers(case: Case) -> list[str]:
    """Those that serve a case and can be called here."""
    found = [name for name in MODULES if takes(name, case) and not why_not(name)]
    return found + [SAME_BITS] * (IN_TORCH in found and case.gradients)


def lengths(case: Case) -> tuple[np.ndarray, int]:
    """Of packed sequences the sums of their lengths, and the longest of these."""
    sums = cumulative(case)
    return sums, int(np.diff(sums).max())


def in_jax(case: Case) -> Callable[..., jax.Array]:
    """FlashAttention-3's call, as a function of query, key, value and what is beside them."""
    module = importlib.import_module(MODULES[IN_JAX])
    static: dict[str, Any] = {"is_causal": case.causal}
    if case.extra == "window":
        static["window_size"] = (WINDOW, 0)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict) -> jax.Array:
        if case.extra not in PACKED:
            return module.flash_mha(query, key, value, sinks=extra.get("sinks"), **static)
        packed = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
        return module.flash_mha_varlen(*packed, *lengths(case), **static).reshape(query.shape)

    return attend


@dataclasses.dataclass
class Results:
    """PyTorch's tensors, which `jax.block_until_ready` waits for as for arrays."""

    tensors: tuple[Any, ...]

    def block_until_ready(self) -> "Results":
        """Waits until they are computed."""
        importlib.import_module("torch").cuda.synchronize()
        return self

    def arrays(self, case: Case) -> list[jax.Array]:
        """The same as arrays of a batch."""
        found = [jnp.from_dlpack(tensor.detach().contiguous()) for tensor in self.block_until_ready().tensors]
        return [x.reshape(case.batch, case.length, *x.shape[-2:]) for x in found]


def tensors(case: Case, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The operands of a case as tensors in the same memory, and of packed sequences the sums of their lengths."""
    torch = importlib.import_module("torch")
    packed = {"sums": jnp.asarray(lengths(case)[0])} if case.extra in PACKED else {}
    names = ("query", "key", "value", "cotangent", "sinks", "key_value_seq_lengths")
    given = {name: arrays[name] for name in names if name in arrays} | packed
    found = {name: torch.from_dlpack(array) for name, array in jax.block_until_ready(given).items()}
    for name in names[:4]:
        found[name] = found[name].flatten(0, 1) if packed else found[name]
        found[name].requires_grad_(case.gradients and name != "cotangent")
    return found


def in_torch(case: Case, name: str) -> Callable[[dict[str, Any]], Results]:
    """FlashAttention-4's call with its gradients, if the case has any, as a function of the tensors."""
    torch, module = importlib.import_module("torch"), importlib.import_module(MODULES[IN_TORCH])
    static: dict[str, Any] = {"causal": case.causal, "deterministic": name == SAME_BITS}
    if case.extra == "window":
        static["window_size"] = (WINDOW, 0)
    if case.extra == "cap":
        static["softcap"] = CAP
    longest = lengths(case)[1] if case.extra in PACKED else None

    def run(tensors: dict[str, Any]) -> Results:
        operands = [tensors[name] for name in ("query", "key", "value")]
        if case.extra in PACKED:
            sums = {"cu_seqlens_q": tensors["sums"], "cu_seqlens_k": tensors["sums"]}
            y = module.flash_attn_varlen_func(*operands, **sums, max_seqlen_q=longest, max_seqlen_k=longest, **static)
        elif case.extra == "key lengths":
            y = module.flash_attn_varlen_func(*operands, seqused_k=tensors["key_value_seq_lengths"], **static)
        else:
            y = module.flash_attn_func(*operands, learnable_sink=tensors.get("sinks"), **static)
        y = y[0] if isinstance(y, tuple) else y  # beside which may be its log-sum-exp
        return Results((y, *torch.autograd.grad(y, operands, tensors["cotangent"])) if case.gradients else (y,))

    return run
