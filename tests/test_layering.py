"""The floors: each file imports only from below, nothing imports in a circle, and no system imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from papyrax.methods.catalog import CATALOG, FIELDS

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxlib_ext", "methods", "envs", "train", "scripts")
SHARED = ("nets", "geometry", "diffusion", "objectives", "search", "metrics", "text")
SYSTEMS = {system.name for system in CATALOG}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("papyrax", *(parts[:-1] if parts[-1] == "__init__" else parts)))


FILES = {_module(p): p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py")) if "peers" not in p.parts}


def _imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Modules of papyrax that a file imports; `top_only` leaves out what is imported inside functions or for types alone."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(a.name for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path} has a relative import; imports are written papyrax.…"
                base = child.module or ""
                found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in child.names)
            elif top_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            elif top_only and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            else:
                visit(child)

    visit(tree)
    return {name for name in found if name.split(".")[0] == "papyrax"}


def _floor(module: str) -> int:
    parts = module.split(".")
    if parts[1] == "jaxlib_ext":
        return 0
    if parts[1] == "methods":
        if len(parts) == 2 or parts[2] == "catalog" or parts[2] in SHARED:
            return 1
        return 3
    return {"envs": 2, "train": 4, "scripts": 5}[parts[1]]


def _system(module: str) -> str | None:
    parts = module.split(".")
    return parts[3] if parts[1] == "methods" and len(parts) > 3 and parts[3] in SYSTEMS else None


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    for name in _imports(FILES[module]):
        assert name.split(".")[1:2] != [] and name.split(".")[1] in FOLDERS, f"{module} imports {name}"
        assert _floor(name) <= _floor(module), (
            f"{module} (floor {_floor(module)}) imports {name} (floor {_floor(name)})"
        )
        if _system(module) or _system(name):
            same = _system(name) in (None, _system(module))
            assert same or _floor(module) >= 4, f"{module} imports another system: {name}"


def test_nothing_bare_is_imported():
    for path in [*FILES.values(), *sorted((ROOT / "tests").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.split(".")[0] not in FOLDERS, (
                    f"{path.relative_to(ROOT)} imports {name}; write papyrax.{name}"
                )


def test_no_circles():
    graph = {
        module: {n for n in _imports(path, top_only=True) if n in FILES and n != module}
        for module, path in FILES.items()
    }
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for name in graph[module]:
            if not module.startswith(name + "."):  # a package's own __init__ is above its modules only in name
                walk(name, (*trail, module))
        done.add(module)

    for module in graph:
        walk(module, ())


def test_the_catalogue_is_whole():
    assert len(CATALOG) == 38 and len(SYSTEMS) == 38
    assert {s.field for s in CATALOG} == set(FIELDS)
    for system in CATALOG:
        assert system.says.endswith(".") and system.title and system.paper.split()[0] in ("arXiv", "OpenReview")


def test_methods_live_where_the_catalogue_says():
    for field in FIELDS:
        rows = {s.name for s in CATALOG if s.field == field}
        for path in (ROOT / "methods" / field).iterdir():
            name = path.stem
            if name in SYSTEMS:
                assert name in rows, f"{path.relative_to(ROOT)} is not in the field that the catalogue gives"


def test_folders_are_described():
    for folder in {p.parent for p in FILES.values()}:
        init = folder / "__init__.py"
        assert init.is_file() and ast.get_docstring(ast.parse(init.read_text())), (
            f"{folder.relative_to(ROOT)} has no described __init__.py"
        )


def test_mirror():
    """Every test module stands where its subject stands, or in the folder of that subject."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        assert folder == Path(".") or (ROOT / folder).is_dir(), f"{path.relative_to(ROOT)} mirrors no folder"
