"""Train the model of decoder.py over a mesh of devices, and on one device, and compare the loss of every step.

The mesh has three axes. The rows of a batch lie over "data", the classes of the head and of the embedding over
"vocabulary", and the tokens of each row over "sequence". What is not one of these is on every device. The model and the
training step say nothing of this: it is in how arrays are placed, and in `order` and `attend`. These give each device a
part from the front of a row and the one as far from its back, so that all have as much work under the causal rule, and
send keys and values from device to device, so that none has those of a whole row. Both copies start from the same
weights and see the same batches, so their losses may differ by rounding only; the exit status is 1 if they differ by
more.

    python examples/mesh.py --mesh data=2,vocabulary=2,sequence=2

takes eight devices, which a CPU pretends to have, and less than a minute on two CPU cores. Without --mesh all devices
share the sequence. Its length, --context, is a multiple of twice the devices that share it. Devices may also belong to
several processes, each of which is told its number:

    for i in 0 1; do python examples/mesh.py --processes 2 --process $i --mesh sequence=2 & done; wait

On GPUs each process takes the one that has its number. With --batch 8 --context 8192 --dtype bfloat16 they have enough
to do.
"""

import argparse
import contextlib
import math
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import optax
from decoder import Decoder, Shape
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import TOLERANCES, differences, exit_status, read_text

import jaxsoft

AXES = ("data", "vocabulary", "sequence")
SHAPE = Shape(vocabulary=128, layers=2, width=128, hidden=256, heads=8, key_heads=4, size=16)
LEARNING_RATE = 4e-3


class Batch(NamedTuple):
    """Windows of text; the places of a window need not have the order of the text."""

    tokens: jax.Array  # (rows, places)
    labels: jax.Array  # (rows, places), what follows each token
    positions: jax.Array  # (places,)


# --8<-- [start:specs]
SPECS = Batch(tokens=P("data", "sequence"), labels=P("data", "sequence"), positions=P("sequence"))
# --8<-- [end:specs]


def order(mesh, length):
    """The position of the token at each place of a window: zigzag, where several devices share a sequence."""
    return np.arange(length) if is_whole(mesh) else jaxsoft.ring_order(length, mesh.shape["sequence"], "zigzag")


# --8<-- [start:attend]
def attend(mesh, query, key, value):
    """Causal attention of tokens in this order.

    The method has its name so that short windows go the way of long ones; None would be the fastest for each length.
    """
    if is_whole(mesh):
        return jaxsoft.dot_product_attention(query, key, value, is_causal=True)
    return jaxsoft.ring_attention(
        query, key, value, axis_name="sequence", layout="zigzag", method="ring", is_causal=True
    )
    # --8<-- [end:attend]


def is_whole(mesh):
    """Whether a device has whole sequences."""
    return mesh is None or mesh.shape["sequence"] == 1


def placed(mesh, spec, x):
    """x, which every process has, over a mesh: each device takes its part. Without a mesh it stays where it is.

    Where a process reads its own part of the data alone, `jax.make_array_from_process_local_data` makes the same array.
    """
    if mesh is None:
        return x
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda part: x[part])


# --8<-- [start:spec_of]
def spec_of(path):
    """How a weight lies over the mesh: the classes of the embedding and of the head in parts, all else whole."""
    name = jax.tree_util.keystr(path)
    return P("vocabulary", None) if "tokens" in name else P(None, "vocabulary") if "readout" in name else P()
    # --8<-- [end:spec_of]


def batch_of(mesh, windows):
    """Windows of text (rows, places + 1) as a batch over the mesh."""
    positions = order(mesh, windows.shape[1] - 1)
    batch = Batch(windows[:, positions], windows[:, positions + 1], positions)
    return Batch(*(placed(mesh, spec, x) for spec, x in zip(SPECS, batch, strict=True)))


@nnx.jit(static_argnames=("mesh", "dtype"))
def train_step(model, optimizer, batch, mesh, dtype):
    """One step of AdamW, with attention in a dtype. Returns the loss before the step, of the tokens of all devices."""

    def attention(layer, *qkv):
        return attend(mesh, *(x.astype(dtype) for x in qkv)).astype("float32")

    def loss_of(model):
        features = model.features(batch.tokens, batch.positions, attention)
        weight = model.readout.kernel[...]
        return jaxsoft.linear_softmax_cross_entropy(features, weight, batch.labels, reduction="mean")

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


class Run:
    """One copy of the model in training, over a mesh or, where that is None, on one device."""

    def __init__(self, mesh, shape=SHAPE, dtype="float32"):
        """Every copy starts from the same weights. What the optimizer keeps of a weight lies where the weight does."""
        self.mesh, self.dtype, self.model = mesh, dtype, Decoder(shape, "float32", nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(LEARNING_RATE, b2=0.98), wrt=nnx.Param)
        for module in (self.model, self.optimizer):
            state = nnx.state(module)
            nnx.update(module, jax.tree_util.tree_map_with_path(lambda path, x: placed(mesh, spec_of(path), x), state))
        self.losses, self.seconds = [], []

    def step(self, windows):
        """Trains on one batch."""
        start = time.perf_counter()
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            loss = train_step(self.model, self.optimizer, batch_of(self.mesh, windows), self.mesh, self.dtype)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)


def train(runs, text, steps, batch, context):
    """Trains all runs on the same random windows of the text."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        starts = rng.integers(0, len(text) - context, size=batch)
        for run in runs.values():
            run.step(text[starts[:, None] + np.arange(context + 1)])
        if jax.process_index() == 0 and (step % max(1, steps // 10) == 0 or step == steps - 1):
            print(f"step {step:4d}  loss: " + "  ".join(f"{name} {run.losses[-1]:.5f}" for name, run in runs.items()))


def sizes_of(text):
    """The sizes of the axes, from "data=2,sequence=4"."""
    sizes = {name: int(size) for name, size in (item.split("=") for item in text.split(","))}
    if unknown := sizes.keys() - {*AXES}:
        raise argparse.ArgumentTypeError(f"the axes are {', '.join(AXES)}; got {', '.join(unknown)}")
    return tuple(sizes.get(axis, 1) for axis in AXES)


def main():
    """Trains and compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=sizes_of, help="sizes of axes, as data=2,vocabulary=2,sequence=2")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="characters of a window (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help="of attention (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="how many there are (default: %(default)s)")
    parser.add_argument("--process", type=int, default=0, help="the number of this one (default: %(default)s)")
    parser.add_argument("--address", default="localhost:12356", help="of process 0 (default: %(default)s)")
    args = parser.parse_args()

    # As in language_model.py: a GPU would round the inputs of products.
    jax.config.update("jax_default_matmul_precision", "float32")
    jax.config.update("jax_num_cpu_devices", max(1, math.prod(args.mesh or (8,)) // args.processes))
    if args.processes > 1:
        jax.distributed.initialize(args.address, args.processes, args.process, local_device_ids=[args.process])
    shape = args.mesh or (1, 1, jax.device_count())
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    text, _ = read_text()

    runs = {"over the mesh": Run(mesh, dtype=args.dtype), "on one device": Run(None, dtype=args.dtype)}
    train(runs, text, args.steps, args.batch, args.context)

    early, all_steps = differences(*(run.losses for run in runs.values()))
    devices = f"{mesh.size} of {jax.devices()[0].device_kind} in {args.processes} processes, {dict(mesh.shape)}"
    seconds = ", ".join(f"{np.median(run.seconds):.4f} s {name}" for name, run in runs.items())
    print(f"{devices}: {seconds}; largest relative difference of losses: {early:.1e}, and {all_steps:.1e} in all steps")
    return exit_status(early, all_steps, args.dtype)


if __name__ == "__main__":
    sys.exit(main())
