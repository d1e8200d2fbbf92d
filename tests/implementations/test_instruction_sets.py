"""The CPU kernels for narrower instruction sets than this machine has: accuracy tests in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import on_cpu, slow


@on_cpu
@pytest.mark.parametrize("isa", ["baseline", pytest.param("avx2", marks=slow)])
def test_forward_and_backward(isa):
    rows = Path(__file__).parent.parent / "rows"
    tests = [str(rows / name) for name in ("test_forward.py", "test_grad.py", "test_cross_entropy.py")]
    chosen = "ffi and (short and (float32 or bfloat16) or neighbours and 24 and float32)"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-k", chosen, *tests]
    environment = {**os.environ, "JAXSOFT_CPU_ISA": isa}
    run = subprocess.run(command, env=environment, cwd=rows.parent.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
