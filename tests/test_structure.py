"""The shape of the package: what imports what, one name for one thing, and how many layers a call goes through."""

import ast
import os
import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest

import jaxsoft
from jaxsoft._core import operation

PACKAGE = pathlib.Path(jaxsoft.__file__).parent


def files() -> list[pathlib.Path]:
    """The package's files, wherever its folders are links, as in a clone."""
    walk = os.walk(PACKAGE, followlinks=True)
    return sorted(pathlib.Path(folder, name) for folder, _, names in walk for name in names if name.endswith(".py"))


def modules() -> dict[str, ast.Module]:
    """The package's modules by name, those of the kernels included."""
    found = {}
    for path in files():
        name = ".".join(("jaxsoft", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def nodes_of(tree: ast.AST):
    """All nodes, but for those that are for type checkers alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from nodes_of(child)


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, wherever it does."""
    package = name if (PACKAGE / "/".join(name.split(".")[1:])).is_dir() else name.rpartition(".")[0]
    found = set()
    for node in nodes_of(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            named = {f"{module}.{alias.name}" for alias in node.names}
            found |= named if named <= MODULES.keys() else named | {module}  # modules alone, or what a module has
    return {module for module in found if module in MODULES and module != name}


def test_modules_are_found():
    assert {"jaxsoft._core.operation", "jaxsoft.pallas_kernels.rows.tiled", "jaxsoft.triton_kernels"} <= {*MODULES}
    assert "jaxsoft._core.operation" in imports_of("jaxsoft._rows.operation")
    assert "jaxsoft._rows.forms" in imports_of("jaxsoft.pallas_kernels")


def test_no_two_classes_of_one_name():
    places: dict[str, list[str]] = {}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_import_circle():
    graph = {name: imports_of(name) - {"jaxsoft"} for name in MODULES if name != "jaxsoft"}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_core_knows_no_family():
    for name in MODULES:
        if name.startswith("jaxsoft._core"):
            others = {m for m in imports_of(name) if not m.startswith(("jaxsoft._core", "jaxsoft.fold"))} - {"jaxsoft"}
            assert others == set(), name


def test_numbers_of_multiprocessors_are_in_one_table():
    """Those of Hopper's GPUs, and of the blocks that they run at once where it is two or four each."""
    numbers = {132, 114, 78, 264, 528}
    places = [
        f"{name}, line {node.lineno}: {node.value}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in numbers
    ]
    assert [place for place in places if not place.startswith("jaxsoft._core.gpus,")] == []


def own_frames(stack) -> list[str]:
    """The functions of the package on a stack."""
    return [frame.name for frame in stack if "/jaxsoft/" in frame.filename]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_layers(name, monkeypatch):
    """A call has few frames of ours until an operation is bound, and until a kernel is lowered."""
    found: dict[str, list[str]] = {}
    primitive, lower = operation._operation_p(), operation.report

    def bind(*args, **kwargs):
        found.setdefault("bound", own_frames(traceback.extract_stack()))
        return bound(*args, **kwargs)

    def report(choice):
        found.setdefault("lowered", own_frames(traceback.extract_stack()))
        lower(choice)

    bound = primitive.bind
    monkeypatch.setattr(primitive, "bind", bind)
    monkeypatch.setattr(operation, "report", report)
    jax.clear_caches()
    getattr(jaxsoft, name)(jnp.ones((3, 5)))
    assert 0 < len(found["bound"]) <= 6, found["bound"]
    assert 0 < len(found["lowered"]) <= 10, found["lowered"]


def test_an_operation_is_in_as_many_files_as_the_page_says():
    """The files that know of an operation are those in the table of the page that adds it."""
    root = pathlib.Path(__file__).parents[1]
    page = (root / "docs/developing/adding_an_operation.md").read_text()
    found = set()
    for folder in ("jaxsoft", "pallas_kernels", "triton_kernels", "ffi"):
        for path in (root / folder).rglob("*"):
            if path.suffix in {".py", ".h", ".cc", ".cu", ".cuh"} and "divergence" in path.read_text().lower():
                found.add(path.relative_to(root))
    assert len(found) == 8
    table = page[page.index("## What is touched") :]
    for path in found:
        assert path.name in table and (f"{path}" in table or f"`{path.name}` beside it" in table), path
