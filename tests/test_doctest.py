"""The examples in the docstrings give what they say, in the 32 bits that are JAX's default."""

import doctest
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxsoft
import jaxsoft.flax

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
    public = [(jaxsoft, jaxsoft.__all__), (jaxsoft.fold, jaxsoft.fold.__all__)]
    names = {"jax": jax, "jnp": jnp, **{n: getattr(m, n) for m, all_ in public for n in all_}}
    with jax.enable_x64(False):
        assert doctest.testmod(module, extraglobs=names).failed == 0


def test_every_public_function_has_an_example():
    for module in (jaxsoft, jaxsoft.fold, jaxsoft.random, jaxsoft.flax):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                assert ">>>" in function.__doc__, name


def test_the_command(capsys):
    """python -m jaxsoft lists what can be used."""
    from jaxsoft.__main__ import main

    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"jaxsoft {jaxsoft.__version__}, jax {jax.__version__}, on ")
    for line, (name, reason) in zip(lines[1:], jaxsoft.implementations().items(), strict=True):
        assert line.split()[0] == name
        assert line.endswith("available" if reason is None else reason)
