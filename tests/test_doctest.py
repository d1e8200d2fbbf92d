"""The examples in the docstrings give what they say, in the 32 bits that are JAX's default."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxsoft

MODULES = [
    "jaxsoft",
    *(
        name
        for _, name, _ in pkgutil.walk_packages(jaxsoft.__path__, "jaxsoft.")
        if "_kernels" not in name and "__main__" not in name
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    names = {"jax": jax, "jnp": jnp, **{n: getattr(jaxsoft, n) for n in jaxsoft.__all__}}
    with jax.enable_x64(False):
        assert doctest.testmod(module, extraglobs=names).failed == 0


def test_every_public_function_has_an_example():
    for name in jaxsoft.__all__:
        if name != "State":
            assert ">>>" in getattr(jaxsoft, name).__doc__, name


def test_the_command(capsys):
    """python -m jaxsoft lists what can be used."""
    from jaxsoft.__main__ import main

    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"jaxsoft {jaxsoft.__version__}, jax {jax.__version__}, on ")
    for line, (name, reason) in zip(lines[1:], jaxsoft.implementations().items(), strict=True):
        assert line.split()[0] == name
        assert line.endswith("available" if reason is None else reason)
