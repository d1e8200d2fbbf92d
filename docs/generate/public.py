"""The public names of jaxsoft, read from the `__all__` of its modules without importing them."""

import ast
import functools
import itertools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "jaxsoft"


def modules() -> dict[str, pathlib.Path]:
    """The public modules, by their dotted names: the package, and those of its files and folders without underscore."""
    files = {f"jaxsoft.{path.stem}": path for path in PACKAGE.glob("[!_]*.py")}
    own = (path for path in PACKAGE.glob("[!_]*/__init__.py") if not path.parent.is_symlink())  # no kernels
    folders = {f"jaxsoft.{path.parent.name}": path for path in own}
    return {"jaxsoft": PACKAGE / "__init__.py"} | dict(sorted((files | folders).items()))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(path: pathlib.Path) -> list[str]:
    """The `__all__` of a file."""
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


@functools.cache
def paths() -> dict[str, str]:
    """The full path of each public name, by the name and by the path without the package: `combine`, `fold.combine`."""
    found = {}
    for module, path in modules().items():
        for name in names(path):
            full = f"{module}.{name}"
            found[full.removeprefix("jaxsoft.")] = full
            found.setdefault(name, full)
    return found


def docstring(path: pathlib.Path, name: str) -> str | None:
    """The docstring of what a file has under this name, wherever it is defined; None if there is none."""
    if path == PACKAGE / "__init__.py" and f"jaxsoft.{name}" in modules():
        return ast.get_docstring(_tree(modules()[f"jaxsoft.{name}"]))
    found = None
    # What is imported late is also imported under an `if`, for type checkers.
    nodes = (node.body if isinstance(node, ast.If) else [node] for node in _tree(path).body)
    for node in itertools.chain.from_iterable(nodes):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            found = ast.get_docstring(node)  # of overloads the last one, which is the function
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found = docstring(_file(node.module), alias.name)
    return found


def _file(module: str) -> pathlib.Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
