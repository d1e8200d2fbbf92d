"""Several processes that compute together, by `jax.distributed`: each is told which one it is, and checks its part.

On a CPU they communicate through gloo, and each process has virtual devices; where there are two GPUs, each takes one.
"""

import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
GPUS = jax.default_backend() == "gpu" and len(jax.devices()) > 1
SECONDS = 300


def free_port() -> int:
    """One on which nothing listens now."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def run_in_two_processes(folder: pathlib.Path, program: str, *arguments: str) -> list[str]:
    """What each of two processes prints that run a program of this repository. All of them end where one fails."""
    address = f"localhost:{free_port()}"
    command = [sys.executable, str(ROOT / program), "--processes=2", f"--address={address}", *arguments]
    # Those of this process, but for the number of virtual devices.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)} | ({} if GPUS else {"JAX_PLATFORMS": "cpu"})
    outputs = [folder / f"process_{i}" for i in range(2)]
    processes = []
    try:
        for i, output in enumerate(outputs):
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, f"--process={i}"], env=environment, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        end = time.monotonic() + SECONDS
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
    finally:
        failed = [p.poll() for p in processes]  # None: of one that waits for ever
        for p in processes:
            p.kill()
            p.wait()
    texts = [output.read_text() for output in outputs]
    assert failed == [0, 0], "\n".join(f"process {i} ({failed[i]}):\n{text}" for i, text in enumerate(texts))
    return texts


@pytest.mark.parametrize("ways", [pytest.param("every", marks=() if GPUS else pytest.mark.slow), "few"])
def test_every_part(tmp_path, ways):
    """Functions of rows, losses, top-k, attention and ring attention over devices of two processes."""
    for text in run_in_two_processes(tmp_path, "tests/distributed_program.py", *(["--few"] if ways == "few" else [])):
        assert "all is right" in text


@pytest.mark.slow  # test_every_part has its ring, and test_examples its model
def test_a_model(tmp_path):
    """The example that trains over a mesh, with sequences over the processes, so that a ring goes through both."""
    for name in ("flax", "matplotlib", "optax", "tqdm"):
        pytest.importorskip(name)
    options = [f"--mesh=sequence={2 if GPUS else 4}", "--steps=3", "--batch=2", "--context=64"]
    for text in run_in_two_processes(tmp_path, "examples/mesh.py", *options):
        assert "in 2 processes" in text
