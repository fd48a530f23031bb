"""Finding a recipe and running it: what the command line, tests and launch scripts share.

A recipe is a module with `Config`, `PRESETS`, `run(config, run) -> Report`, and, where the system has them, `bench(config, bench)`,
`compile_targets(config, mesh)` and `DATA`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from papyrax.methods.catalog import System, find
from papyrax.train import report as report_lib
from papyrax.train.errors import UserError
from papyrax.train.run import Run

PRESETS = ("smoke", "cpu", "study", "paper")


def system(name: str) -> System:
    """The catalogue row. Raises UserError with the nearest names."""
    try:
        return find(name)
    except KeyError as error:
        raise UserError(error.args[0]) from None


def load(row: System) -> ModuleType:
    """The recipe's module. Raises UserError when it is planned but not built, or when a package of its extra is absent."""
    try:
        exists = importlib.util.find_spec(row.recipe) is not None
    except ModuleNotFoundError:
        exists = False
    if not exists:
        raise UserError(f"{row.name} is planned but not built yet; `papyrax list` shows what can be run")
    try:
        return importlib.import_module(row.recipe)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("papyrax"):
            raise
        raise UserError(
            f"{row.name} needs the package {error.name!r}, which is not installed: pip install 'papyrax[{row.field}]'"
        ) from error


def preset(recipe: ModuleType, row: System, name: str) -> Any:
    """The config of a preset. Raises UserError with the presets that exist."""
    if name not in recipe.PRESETS:
        raise UserError(f"{row.name} has no preset {name!r}; it has {', '.join(recipe.PRESETS)}")
    return recipe.PRESETS[name]


def check(recipe: ModuleType, config: Any) -> None:
    """Lets the recipe refuse a configuration before anything is made (its `check(config)`, where it has one). Raises UserError."""
    if hasattr(recipe, "check"):
        try:
            recipe.check(config)
        except (ValueError, ImportError) as error:
            raise UserError(str(error).rstrip(".")) from error


def execute(run: Run, recipe: ModuleType) -> tuple[report_lib.Report, dict[str, Any]]:
    """Runs the recipe inside an open Run and writes report.md and report.json there; returns the report and its meta."""
    result = recipe.run(run.config, run)
    listed = {str(figure.path) for figure in result.figures}
    result = dataclasses.replace(
        result, figures=(*result.figures, *(figure for figure in run.figures if str(figure.path) not in listed))
    )
    meta = {
        "system": run.system,
        "preset": run.preset,
        "seed": run.config.seed,
        "wall_s": round(run.wall_seconds(), 1),
        "versions": report_lib.environment(),
    }
    if run.leads:
        report_lib.write(result, run.dir, meta)
    return result, meta
