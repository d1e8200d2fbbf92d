"""What is said in several places, the version and the oldest Python and JAX, is the same in all of them."""

import pathlib
import re
import subprocess
import tomllib

import jaxsoft

ROOT = pathlib.Path(__file__).parents[1]


def found(pattern: str, name: str) -> str:
    """The first group of a pattern, where a file first has it."""
    match = re.search(pattern, (ROOT / name).read_text(), re.M)
    assert match, f"{name} has no {pattern}"
    return match[1]


def test_version():
    assert found(r"^version: (\S+)$", "CITATION.cff") == jaxsoft.__version__
    assert found(r"^## ([\d.]+)", "CHANGELOG.md") == jaxsoft.__version__


def test_oldest_python_and_jax():
    """The public tests name the oldest Python, and read the oldest JAX from pyproject.toml by a command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    workflow = ".github/workflows/ci.yml"
    assert project["project"]["requires-python"] == ">=" + found(r'python: "([\d.]+)", jax: oldest', workflow)
    command = found(r'make test JAX="\$\((.*)\)"$', workflow)
    jax = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert f"jaxlib=={jax}" in project["build-system"]["requires"]
