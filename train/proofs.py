"""Which of a system's six proofs exist, computed from the tree: modules, marked tests, kernels, committed results. Nothing is typed in."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import papyrax.methods
from papyrax.methods.catalog import System

KINDS = ("core", "proof", "run", "kernel", "scale", "bench")


@dataclasses.dataclass(frozen=True)
class Proof:
    """One proof of one system: `state` is "holds", "partly", "fails" or "missing"; `why` says what was found."""

    kind: str
    state: str
    why: str


def checkout() -> Path | None:
    """The root of the checkout that papyrax is imported from; None when it is installed as a wheel."""
    root = Path(papyrax.methods.__file__).parent.parent
    return root if (root / "tests").is_dir() and (root / "pyproject.toml").is_file() else None


def results_folder() -> Path:
    """results/ of the checkout, or of the working folder outside one."""
    return (checkout() or Path.cwd()) / "results"


def _marks(node: ast.expr) -> list[tuple[str, str]]:
    found = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "proof":
            values = [a.value for a in call.args if isinstance(a, ast.Constant)]
            if len(values) == 2:
                found.append((str(values[0]), str(values[1])))
    return found


def marked_tests(root: Path) -> dict[tuple[str, str], list[str]]:
    """{(system, kind): [test id…]} by reading the test modules, without importing them."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        module = [
            m
            for s in tree.body
            if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "pytestmark"
            for m in _marks(s.value)
        ]
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_"):
                own = [m for d in statement.decorator_list for m in _marks(d)]
                for mark in {*own, *module}:
                    found.setdefault(mark, []).append(f"{path.relative_to(root)}::{statement.name}")
    return found


def last_outcomes(root: Path) -> dict[str, str]:
    """{test id: passed | failed | skipped} of the last test run here, as the test session wrote it."""
    path = root / ".proofs.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return {}


def _module_exists(root: Path, dotted: str) -> bool:
    path = root.joinpath(*dotted.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def read_results(name: str) -> dict:
    """The committed results of a system; {} when there are none."""
    path = results_folder() / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def proofs(
    system: System, root: Path, tests: dict[tuple[str, str], list[str]], outcomes: dict[str, str]
) -> list[Proof]:
    """The six proofs of one system."""

    def tested(kind: str) -> tuple[str, str]:
        ids = tests.get((system.name, kind), [])
        if not ids:
            return "missing", "no tests"
        failed = [i for i in ids if outcomes.get(i) == "failed"]
        if failed:
            return "fails", f"{len(failed)} of {len(ids)} tests failed: {failed[0]}"
        unrun = sum(i not in outcomes for i in ids)
        return "holds", f"{len(ids)} tests" + (f", {unrun} not run here yet" if unrun else "")

    results = read_results(system.name)
    out = []
    for kind in ("core", "proof"):
        state, why = tested(kind)
        if not _module_exists(root, system.method):
            state, why = "missing", "planned"
        elif kind == "core" and state == "holds" and not _module_exists(root, system.recipe):
            state, why = "partly", f"{why}; no recipe yet"
        out.append(Proof(kind, state, why))

    runs = sorted(results.get("runs", {}))
    wanted = ("cpu", "study")
    state = "holds" if all(w in runs for w in wanted) else "partly" if runs else "missing"
    out.append(Proof("run", state, ", ".join(runs) if runs else "no results"))

    if system.no_kernel:
        out.append(Proof("kernel", "holds", f"none: {system.no_kernel}"))
    elif not system.ops:
        out.append(Proof("kernel", "missing", "planned"))
    else:
        lacking = [
            f"{op}/{part}.py"
            for op in system.ops
            for part in ("reference", "tpu", "gpu")
            if not (root / "jaxlib_ext" / op / f"{part}.py").is_file()
        ]
        state, why = tested("kernel")
        if lacking:
            state, why = (
                ("missing", "planned") if len(lacking) == 3 * len(system.ops) else ("partly", f"no {lacking[0]}")
            )
        out.append(Proof("kernel", state, why))

    state, why = tested("scale")
    if state == "holds" and not results.get("compile"):
        state, why = "partly", f"{why}; no compile result"
    out.append(Proof("scale", state, why))

    bench = results.get("bench")
    out.append(
        Proof("bench", "holds" if bench else "missing", f"{len(bench['tables'])} tables" if bench else "no results")
    )
    return out


def all_proofs(systems: tuple[System, ...]) -> dict[str, list[Proof]]:
    """{system: six proofs}. Outside a checkout every proof is missing, and says why."""
    root = checkout()
    if root is None:
        return {s.name: [Proof(k, "missing", "shown only in a checkout") for k in KINDS] for s in systems}
    tests, outcomes = marked_tests(root), last_outcomes(root)
    return {s.name: proofs(s, root, tests, outcomes) for s in systems}
