"""The process that the tests run in: eight virtual devices on a CPU, memory by need, and hypothesis without deadlines.

A first call compiles, so a deadline would measure XLA; and examples are drawn the same way in every run, so that a
failure can be run again.
"""

import os

# Read when JAX first looks for devices; it means nothing to a GPU.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Several workers of pytest-xdist may share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis

hypothesis.settings.register_profile("jaxsoft", deadline=None, max_examples=25, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxsoft")
